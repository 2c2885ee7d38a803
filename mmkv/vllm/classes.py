"""The classes of heads: few sizes for many heads, as each size is a KV cache group of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# The most classes. Six lose nothing next to sizes of each head's own (docs/serving.md).
CLASSES = 6
# A class whose heads should keep this share on average keeps the whole prompt.
_WHOLE = 0.75
# The heads are cut into at least so many parts of equal size, of which classes are made.
_PARTS = 15
# The squared differences of some classes from their means, and where each class ends.
_Cut = tuple[float, tuple[int, ...]]


@dataclass(frozen=True)
class HeadClass:
    """Heads that keep the same share of a prompt.

    Attributes:
        share: the share of a prompt's tokens, in (0, 1]; 1: these heads are not compressed.
        heads: pairs of layer and KV head.
    """

    share: float
    heads: tuple[tuple[int, int], ...]


def equal_class(layers: Sequence[int], heads: int, budget: float) -> list[HeadClass]:
    """Return one class of all heads, or none of them compressed."""
    return [HeadClass(budget, tuple((i, h) for i in layers for h in range(heads)))]


def classes_of(targets: dict[tuple[int, int], float], budget: float) -> list[HeadClass]:
    """Return at most `CLASSES` classes, largest share first, of mean share `budget`.

    The heads, ordered by their target share, are cut into parts of equal size; neighbouring parts
    form classes such that targets differ least from their class's mean. All classes are multiples
    of one size, which vLLM takes as the number of layers in a KV cache group.

    Args:
        targets: the share of a prompt that each head should keep, by layer and head.
        budget: their mean.
    """
    ordered = sorted(targets, key=lambda x: (-targets[x], x))
    n = len(ordered)
    size = max(g for g in range(1, n + 1) if n % g == 0 and (n // g >= _PARTS or g == 1))
    values = [targets[x] for x in ordered]
    ends = [size * i for i in _cut([values[i : i + size] for i in range(0, n, size)])]
    parts = [ordered[a:b] for a, b in pairwise([0, *ends])]
    shares = [sum(targets[x] for x in part) / len(part) for part in parts]
    raised = _raised(shares, [len(x) for x in parts], budget * n)
    return [
        HeadClass(share, tuple(sorted(part))) for share, part in zip(raised, parts, strict=True)
    ]


def _cut(parts: list[list[float]]) -> tuple[int, ...]:
    """Return after which of the parts each class ends, with the least squared differences.

    vLLM cuts classes into groups as large as the smallest class, so all are multiples of it.
    """
    n = len(parts)
    sums, squares = (
        [0.0, *accumulate(sum(x**power for x in part) for part in parts)] for power in (1, 2)
    )

    def cost(first: int, end: int) -> float:
        count = (end - first) * len(parts[0])
        return squares[end] - squares[first] - (sums[end] - sums[first]) ** 2 / count

    found: list[_Cut] = []
    for size in (x for x in range(1, n + 1) if n % x == 0):  # of the smallest class
        # The best cut of the first parts, by their number and whether a class has this size.
        best: dict[tuple[int, bool], _Cut] = {(0, False): (0.0, ())}
        for _ in range(CLASSES):
            longer: dict[tuple[int, bool], _Cut] = {}
            for (first, has), (total, ends) in best.items():
                for end in range(first + size, n + 1, size):
                    key = end, has or end == first + size
                    cut = round(total + cost(first, end), 9), (*ends, end)
                    longer[key] = min(longer.get(key, cut), cut)
            best = longer
            if (n, True) in best:
                found.append(best[n, True])
    return min(found, key=lambda x: (x[0], len(x[1])))[1]


def _raised(shares: list[float], counts: list[int], total: float) -> list[float]:
    """Return shares of which the first is 1 if it nearly was, and the others smaller instead.

    Their mean over heads stays the same.
    """
    rest = sum(s * n for s, n in zip(shares[1:], counts[1:], strict=True))
    left = total - counts[0]
    if len(shares) == 1 or shares[0] < _WHOLE or left < rest / 2:
        return shares
    return [1.0, *(s * left / rest for s in shares[1:])]
