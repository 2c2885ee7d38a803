"""Parts that know which tokens are of pictures; what they compute is in `mmkv.post_vision`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.parts import Layers, register_part
from mmkv.parts.checks import PositiveShare
from mmkv.parts.scoring import PerHead

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs
    from mmkv.policy import Policy


@register_part("post-vision")
@dataclass(frozen=True, kw_only=True)
class PostVision(PerHead):
    """Attention from the prompt's text behind its last picture, added up (VL-Cache, section 4.2).

    Without such text all queries observe.

    Options:
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    def of_heads(self, layer: LayerInputs) -> Tensor:
        """In a later turn its own queries decide."""
        from mmkv.post_vision import post_vision_attention

        return post_vision_attention(layer)


@register_part("sparsity")
@dataclass(frozen=True, kw_only=True)
class SparsityLayers(Layers):
    """Layers whose text attends to few tokens keep few (VL-Cache, arXiv 2410.23317, section 4.1).

    Options:
        threshold: attention below this share of a row's largest is none, in (0, 1).
    """

    threshold: PositiveShare = 0.01
    needs = "measure"

    def check(self, policy: Policy) -> None:
        """The queries must be there."""
        if policy.score.queries is not None:
            raise ValueError(
                "layers='sparsity' looks at the queries of all text behind a picture, and with "
                f"score={policy.score.name!r} they are not kept: use score='post-vision'"
            )

    def sizes(
        self, total: int, *, length: int, measured: Tensor | None = None, **known: Any
    ) -> Sequence[float]:
        """In proportion to what is not sparse; at least a hundredth of the tokens."""
        assert measured is not None
        dense = measured.double().clamp(min=1e-6)
        return (dense / dense.sum() * total).clamp(0.01 * length, length).tolist()

    def measure(self, layer: LayerInputs) -> Tensor:
        """1 - sparsity."""
        from mmkv.post_vision import density

        return density(layer, self.threshold)
