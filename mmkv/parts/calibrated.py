"""Layer and head sizes from cost curves that were measured before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmkv.curves import Curves
from mmkv.parts import Heads, Layers, register_part
from mmkv.parts.profiled import ProfiledHeads
from mmkv.parts.retrieval import RetrievalHeads
from mmkv.parts.sizing import UniformLayers

if TYPE_CHECKING:
    from mmkv.policy import Policy


@register_part("calibrated")
@dataclass(frozen=True, kw_only=True)
class CalibratedHeads(Heads):
    """Sizes by what each head costs, from a profile of `mmkv.calibrate`; equal without one."""

    equal = True


@dataclass(frozen=True, kw_only=True)
class HeadsByCost(ProfiledHeads):
    """A layer's size is split so that its heads lose least, by `curves`."""

    curves: Curves
    least = 1

    def wished(self, place: int, spare: int, most: int) -> Sequence[float]:
        """By the layer's own curves."""
        (shares,) = self.curves.shares(spare / most, [place])
        return [most * share for share in shares]


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
    takes = isinstance(policy.heads, CalibratedHeads | RetrievalHeads)
    return takes and isinstance(policy.layers, UniformLayers)


def sized(policy: Policy, curves: Curves, layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of cost curves, of the compressed `layers`.

    Heads that share one ranking of tokens keep as many each; only layers are sized then.
    """
    heads = (
        policy.heads if policy.score.shared_ranking else HeadsByCost(curves=curves, layers=layers)
    )
    return replace(policy, layers=LayersByCost(curves), heads=heads)
