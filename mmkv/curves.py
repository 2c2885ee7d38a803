"""What shrinking each head costs, and the head sizes that follow for any budget.

A head's curve is the divergence of the next-token distribution, in nats a token, when that head
alone keeps a share of the prompt's tokens. `mmkv.calibrate` measures them, a profile holds them.

Related: head budgets measured offline (SparseMM, arXiv 2506.05344; LU-KV).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple


class Raise(NamedTuple):
    """One head grows by a share `width` of the prompt, and costs `-slope * width` less.

    `source` is the level that it grows from, and `head` is (layer, head).
    """

    slope: float
    source: float
    head: tuple[int, int]
    width: float


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
        rising = all(a < b for a, b in pairwise(levels))
        if not levels or not rising or not levels[0] > 0 or not levels[-1] <= 1:
            raise ValueError(f"levels must rise in (0, 1], got {list(levels)[:9]}")
        heads = len(self.costs[0]) if self.costs else 0
        if not heads or any(len(layer) != heads for layer in self.costs):
            raise ValueError("costs need as many heads in every layer, at least one")
        for place, curve in self._each():
            if len(curve) != len(levels):
                raise ValueError(f"head {place}: {len(curve)} costs for {len(levels)} levels")
            if not all(0 <= c < math.inf for c in curve):
                raise ValueError(f"head {place}: costs must be 0 or more, got {list(curve)[:9]}")

    def _each(self) -> list[tuple[tuple[int, int], tuple[float, ...]]]:
        return [
            ((i, h), curve) for i, layer in enumerate(self.costs) for h, curve in enumerate(layer)
        ]

    def shares(self, budget: float, layers: Sequence[int]) -> list[list[float]]:
        """The share of the prompt that each head of some layers keeps, so that least is lost.

        Every head starts at the lowest level; the head and higher level with the largest drop of
        cost per slot is raised, while the budget lasts. What no curve asks for is spread evenly.

        Args:
            budget: mean share over these heads, in [0, 1].
            layers: which of the L.

        Returns:
            `[len(layers)][H]`, in [0, 1], of mean `budget`.
        """
        heads = len(self.costs[0])
        low, number = min(budget, self.levels[0]), len(layers) * heads
        found = {layer: [low] * heads for layer in layers}
        left = number * (budget - low)
        for step in self._raises:
            layer, head = step.head
            if layer in found and left > 0:
                found[layer][head] += min(step.width, left)
                left -= min(step.width, left)
        if left > 0:
            _lift(list(found.values()), left)
        return [found[layer] for layer in layers]

    def by_layer(self, budget: float) -> list[float]:
        """The mean share of each layer's heads, `[L]`, of mean `budget`."""
        shares = self.shares(budget, range(len(self.costs)))
        return [sum(heads) / len(heads) for heads in shares]

    @cached_property
    def _raises(self) -> list[Raise]:
        """All raises that lower a cost, steepest first: each head's lower hull, in order."""
        levels, found = self.levels, list[Raise]()
        for head, curve in self._each():
            falling = list(accumulate(curve, min))  # noise that rises is levelled
            at = 0
            while falling[at] > falling[-1]:
                slope, to = min(
                    ((falling[i] - falling[at]) / (levels[i] - levels[at]), -i)
                    for i in range(at + 1, len(levels))
                )
                found.append(Raise(slope, levels[at], head, levels[-to] - levels[at]))
                at = -to
        return sorted(found)


def _lift(rows: list[list[float]], left: float) -> None:
    """Spread a share evenly over heads that have room, in place."""
    room = sorted(1 - share for row in rows for share in row)
    level, number = 0.0, len(room)
    for i, most in enumerate(room):
        step = min(most - level, left / (number - i))
        level, left = level + step, left - step * (number - i)
    for row in rows:
        row[:] = [min(1.0, share + level) for share in row]
