"""What shrinking each head costs, and the head sizes that follow for any budget.

A head's curve is the divergence of the next-token distribution, in nats a token, when that head
alone keeps a share of the prompt's tokens. `mmkv.calibrate` measures them, a profile holds them.
Related: head budgets measured offline (SparseMM, arXiv 2506.05344; LU-KV).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from mmkv.parts import Heads, Layers, SizeInputs, register_part
from mmkv.sizes.profiled import FILE, ProfiledHeads

if TYPE_CHECKING:
    from mmkv.policy import Policy


@register_part("calibrated")
@dataclass(frozen=True, kw_only=True)
class CalibratedHeads(Heads):
    """Sizes by what each head costs, from a profile of `mmkv.calibrate`; equal without one."""

    equal = True
    profile = FILE


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

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """The mean of each layer's heads, of what is not kept anyway."""
        found = list[list[float]]()
        for total, length, floor in zip(rows.totals, rows.lengths, rows.floors, strict=True):
            budget = (total / rows.n_layers - floor) / (length - floor)
            found.append([floor + (length - floor) * x for x in self.curves.by_layer(budget)])
        return found


def sized(policy: Policy, curves: Curves, layers: tuple[int, ...]) -> Policy:
    """A policy with the sizes of cost curves, of the compressed `layers`.

    Heads that share one ranking of tokens keep as many each; only layers are sized then.
    """
    heads = (
        policy.heads if policy.score.average_heads else HeadsByCost(curves=curves, layers=layers)
    )
    return replace(policy, layers=LayersByCost(curves), heads=heads)


@dataclass(frozen=True)
class Curves:
    """Cost curves of L compressed layers and H key-value heads at R levels.

    Attributes:
        levels: `[R]`, shares of the prompt's tokens, rising, in (0, 1].
        costs: `[L, H, R]`, nats a token, not negative.

    Raises:
        ValueError: they are not such numbers.
    """

    levels: tuple[float, ...]
    costs: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        """Check shapes and numbers."""
        levels = self.levels
        rising = all(a < b for a, b in pairwise((0, *levels)))
        if not levels or not rising or not levels[-1] <= 1:
            raise ValueError(f"levels must rise in (0, 1], got {list(levels)[:9]}")
        heads = {len(layer) for layer in self.costs}
        if len(heads) != 1 or 0 in heads:
            raise ValueError("costs need as many heads in every layer, at least one")
        for i, layer in enumerate(self.costs):
            for h, curve in enumerate(layer):
                if len(curve) != len(levels):
                    raise ValueError(f"head {i, h}: {len(curve)} costs for {len(levels)} levels")
                if not all(0 <= c < math.inf for c in curve):
                    raise ValueError(f"head {i, h}: costs must be 0 or more, got {list(curve)[:9]}")

    def shares(self, budget: float, layers: Sequence[int]) -> list[list[float]]:
        """The share of the prompt that each head of some layers keeps, so that least is lost.

        Every head starts at the lowest level; the head and higher level with the largest drop of
        cost per slot is raised, while the budget lasts.

        Args:
            budget: mean share over these heads, in [0, 1].
            layers: which of the L.

        Returns:
            `[len(layers)][H]`, in [0, 1], of mean `budget`, or less where no curve asks for more.
        """
        heads = len(self.costs[0])
        low = min(budget, self.levels[0])
        found = {layer: [low] * heads for layer in layers}
        left = len(layers) * heads * (budget - low)
        for _, _, width, layer, head in self._raises:
            if layer in found and left > 0:
                found[layer][head] += min(width, left)
                left -= width
        return [found[layer] for layer in layers]

    def by_layer(self, budget: float) -> list[float]:
        """The mean share of each layer's heads, `[L]`."""
        shares = self.shares(budget, range(len(self.costs)))
        return [sum(heads) / len(heads) for heads in shares]

    @cached_property
    def _raises(self) -> list[tuple[float, float, float, int, int]]:
        """What lowers a cost, steepest first: slope, level, by which share, layer and head.

        Those of a head are its curve's lower hull, in order.
        """
        levels, found = self.levels, list[tuple[float, float, float, int, int]]()
        for i, layer in enumerate(self.costs):
            for h, curve in enumerate(layer):
                falling = list(accumulate(curve, min))  # noise that rises is levelled
                at = 0
                while falling[at] > falling[-1]:
                    slope, to = min(
                        ((falling[k] - falling[at]) / (levels[k] - levels[at]), -k)
                        for k in range(at + 1, len(levels))
                    )
                    found.append((slope, levels[at], levels[-to] - levels[at], i, h))
                    at = -to
        return sorted(found)
