"""Layer and head sizes from cost curves that were measured before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmkv.curves import Curves
from mmkv.parts import Heads, Layers, register_part
from mmkv.parts.sizing import UniformLayers

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.policy import Policy


@register_part("calibrated")
@dataclass(frozen=True, kw_only=True)
class CalibratedHeads(Heads):
    """Sizes by what each head costs, from a profile of `mmkv.calibrate`; equal without one."""

    equal = True


@dataclass(frozen=True)
class HeadsByCost(Heads):
    """A layer's size is split so that its heads lose least; `layers`: numbers of those measured."""

    curves: Curves
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        """Nothing to check: `mmkv.wrap` makes it."""

    def split(self, scores: Tensor, spare: int, *, layer_idx: int) -> Tensor:
        """By the layer's own curves; each head keeps a token where there is one to have.

        Raises:
            ValueError: the profile is of another number of heads.
        """
        import torch

        from mmkv import allocation

        H, C = scores.shape
        (shares,) = self.curves.shares(spare / C, [self.layers.index(layer_idx)])
        if len(shares) != H:
            raise ValueError(f"profile: it has {len(shares)} heads a layer, this model {H}")
        wished = [C * share for share in shares]
        return torch.tensor(allocation.fit(wished, H * spare, floor=min(1, spare), max_size=C))


@dataclass(frozen=True)
class LayersByCost(Layers):
    """The total is shared so that all heads together lose least."""

    curves: Curves

    def sizes(
        self, total: int, *, n_layers: int, length: int, floor: int, **known: Any
    ) -> Sequence[float]:
        """The mean of each layer's heads, of what is not kept anyway."""
        most = length - floor
        return [floor + most * x for x in self.curves.by_layer((total / n_layers - floor) / most)]


def wants_profile(policy: Policy) -> bool:
    """Whether a policy takes the profile that a model comes with: its sizes are not chosen."""
    return isinstance(policy.heads, CalibratedHeads) and isinstance(policy.layers, UniformLayers)


def sized(policy: Policy, curves: Curves, layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of cost curves, of the compressed `layers`.

    Heads that share one ranking of tokens keep as many each; only layers are sized then.
    """
    heads = policy.heads if policy.score.ranks_once else HeadsByCost(curves, layers)
    return replace(policy, layers=LayersByCost(curves), heads=heads)
