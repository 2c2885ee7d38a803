"""Slot schedules against loops: a list of tokens, from which one is dropped after each step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmkv.decode.slots import AHEAD, Distance, Ring

STEPS = 2 * AHEAD + 5
CPU = torch.device("cpu")


class Row:
    """The slots of one row, written to read like the rule: a drop frees a slot, and the next token
    takes it; where nothing was dropped it takes the first that was never used.

    Tokens are numbered by age; `victim` chooses the one to drop from them, or None.
    """

    def __init__(self, count: int, victim: Callable[[Row], int | None]) -> None:
        self.slot_of = {token: token for token in range(count)}  # by age
        self.fresh, self.freed, self.victim = count, None, victim
        self.newest = count - 1

    def next_slot(self) -> int:
        return self.fresh if self.freed is None else self.freed

    def step(self) -> None:
        """A token comes; one may go."""
        slot = self.next_slot()
        self.newest += 1
        assert slot not in self.slot_of.values()
        self.slot_of[self.newest] = slot
        self.fresh = max(self.fresh, slot + 1)
        gone = self.victim(self)
        self.freed = None if gone is None else self.slot_of.pop(gone)


def oldest(protected: int, capacity: int) -> Callable[[Row], int | None]:
    """Local and StreamingLLM."""

    def victim(row: Row) -> int | None:
        if len(row.slot_of) <= capacity:
            return None
        return min(token for token in row.slot_of if token >= protected)

    return victim


def behind(distance: int, count: int, size: Callable[[int], float]) -> Callable[[Row], int | None]:
    """PrefixKV and ElasticCache; `size` of the layer after so many generated tokens."""

    def victim(row: Row) -> int | None:
        over = len(row.slot_of) > round(size(row.newest - count + 1))
        token = row.newest - distance
        return token if over and token >= count and token in row.slot_of else None

    return victim


RINGS = [
    {"counts": [9], "protected": [0], "capacity": [9]},
    {"counts": [9], "protected": [4], "capacity": [9]},
    {"counts": [5], "protected": [2], "capacity": [11]},
    {"counts": [4], "protected": [4], "capacity": [4]},
    {"counts": [9, 7, 3], "protected": [4, 0, 3], "capacity": [9, 8, 12]},
    {"counts": [6, 6], "protected": [1, 1], "capacity": [6, 70]},
]
RATIOS = [
    {"distance": 0, "counts": [20], "lengths": [40]},
    {"distance": 3, "counts": [20], "lengths": [40]},
    {"distance": 25, "counts": [9], "lengths": [40]},
    {"distance": 2, "counts": [31, 12, 4], "lengths": [40, 17, 40]},
]


def ring(given: dict) -> tuple[Ring, list[Row]]:
    rows = [
        Row(n, oldest(p, c))
        for n, p, c in zip(given["counts"], given["protected"], given["capacity"], strict=True)
    ]
    return Ring(**{k: np.array(v) for k, v in given.items()}), rows


def ratio(given: dict) -> tuple[Distance, list[Row]]:
    """Each row keeps `more` tokens beside those of its prompt, its share of all seen, or both."""
    counts, lengths = np.array(given["counts"]), np.array(given["lengths"])
    base = counts + given["more"] if given["more"] else np.zeros(len(counts))
    share = counts / lengths if given["shares"] else np.zeros(len(counts))
    rows = [
        Row(n, behind(given["distance"], n, lambda t, b=b, s=s, N=N: max(b, s * (N + t))))
        for n, b, s, N in zip(given["counts"], base, share, given["lengths"], strict=True)
    ]
    known = {"counts": counts, "lengths": lengths, "base": base, "share": share}
    return Distance(given["distance"], **known), rows


PLANNED = [
    *((ring, given) for given in RINGS),
    *(
        (ratio, {**given, "more": more, "shares": shares})
        for given in RATIOS
        for more, shares in ((0, True), (8, False), (3, True))
    ),
]
named = pytest.mark.parametrize(
    ("make", "given"), PLANNED, ids=[f"{make.__name__}-{given}" for make, given in PLANNED]
)


def check(schedule, rows: list[Row], steps: int) -> None:
    """Play both; the schedule says where each token goes, and how many slots are looked at."""
    for _ in range(steps):
        wanted = [row.next_slot() for row in rows]
        got = schedule.slots(CPU)
        if schedule.shared:
            assert isinstance(got, int)
            assert set(wanted) == {got}
        else:
            assert got.dtype == torch.int64
            assert got.tolist() == wanted
        at = torch.tensor([schedule.at])
        assert schedule.slots_at(at).tolist() == ([got] if schedule.shared else wanted)
        for row in rows:
            row.step()
        assert schedule.width == max(row.fresh for row in rows)
        schedule.advance()


@named
@pytest.mark.parametrize("begun", [0, 1, AHEAD - 1, AHEAD, STEPS])
def test_each_token_takes_the_freed_slot(make, given, begun) -> None:
    """`slots_needed` bounds the slots of later steps, closely at first, if all rows are alike."""
    schedule, rows = make(given)
    alike = all(len(set(x)) == 1 for x in given.values() if isinstance(x, list))
    assert schedule.gapless == schedule.shared == alike
    check(schedule, rows, begun)
    in_use = max(row.fresh for row in rows)
    for steps in (1, 2, 7, 30, 90):
        ahead = copy.deepcopy(rows)
        for _ in range(steps):
            for row in ahead:
                row.step()
        needed = max(row.fresh for row in ahead)
        most = schedule.slots_needed(steps)
        assert needed <= most <= in_use + steps
        if schedule.shared and (make is ring or not begun):
            assert most - needed <= (0 if make is ring else 2)
