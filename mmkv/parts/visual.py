"""Head sizes over the whole model from a profile of visual heads (SparseMM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv.parts import Heads, register_part
from mmkv.parts.checks import Share
from mmkv.parts.profiled import Weights, by_weight
from mmkv.parts.sizing import UniformLayers

if TYPE_CHECKING:
    from mmkv.policy import Policy

WITHOUT_PROFILE = (
    "{policy} has no profile of visual heads and gives all heads the same size: measure one with "
    "mmkv.calibrate(model, samples, policy='sparsemm') and pass it as profile="
)


@register_part("visual")
@dataclass(frozen=True, kw_only=True)
class VisualHeads(Heads):
    """Sizes over the whole model by how visual each head is (SparseMM, arXiv 2506.05344).

    The visual scores are of a profile of `mmkv.calibrate`; without one all heads keep as much.

    Options:
        rho: the share of the mean size that every head keeps, in [0, 1]; the rest is shared out in
            proportion to visual scores.
    """

    rho: Share = 0.1
    equal = True

    def check(self, policy: Policy) -> None:
        """Layers follow from their heads, and each head has a ranking."""
        if policy.layers.name and not isinstance(policy.layers, UniformLayers):
            raise ValueError(
                f"heads='visual' sizes the heads of all layers and leaves layers="
                f"{policy.layers.name!r} nothing to decide: use layers='uniform'"
            )
        if policy.score.shared_ranking:
            raise ValueError(
                "heads='visual' gives heads of a layer different sizes; average_heads=True and "
                "score='recency' rank tokens once for all of them"
            )


def sized(policy: Policy, scores: Weights, layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of visual scores [L][H], of the compressed `layers`.

    A head's size is `rho * b + (1 - rho) * b * L * H * s`, with b the mean and s the head's share
    of all scores. What must be kept anyway, the observation window too, comes on top, and b is the
    mean of what is left of the budget.

    Raises:
        ValueError: its layer sizes, or its score, leave heads no sizes of their own.
    """
    chosen = policy.heads if isinstance(policy.heads, VisualHeads) else VisualHeads()
    chosen.check(policy)
    total = sum(map(sum, scores))
    number = sum(map(len, scores))
    weights = tuple(
        tuple(chosen.rho + (1 - chosen.rho) * number * s / total for s in layer) for layer in scores
    )
    return by_weight(policy, weights, layers)
