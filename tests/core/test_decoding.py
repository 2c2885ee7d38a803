"""Slot schedules against loops: a list of tokens, from which one is dropped after each step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mmkv.parts.slots import AHEAD, Distance, GrowingSlots, Ring
from mmkv.parts.victims import HeavyHitterSlots
from mmkv.policy import Policy

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


def arrays(given: dict) -> dict[str, np.ndarray]:
    return {k: np.array(v) for k, v in given.items() if k != "distance"}


def ring(given: dict) -> tuple[Ring, list[Row]]:
    rows = [
        Row(n, oldest(p, c))
        for n, p, c in zip(given["counts"], given["protected"], given["capacity"], strict=True)
    ]
    return Ring(**arrays(given)), rows


def by_share(given: dict) -> tuple[Distance, list[Row]]:
    """Each row keeps its share of all tokens seen."""
    share = np.array(given["counts"]) / np.array(given["lengths"])
    rows = [
        Row(n, behind(given["distance"], n, lambda t, n=n, N=N: n / N * (N + t)))
        for n, N in zip(given["counts"], given["lengths"], strict=True)
    ]
    known = {**arrays(given), "base": np.zeros(len(rows)), "share": share}
    return Distance(given["distance"], **known), rows


def by_number(given: dict) -> tuple[Distance, list[Row]]:
    """Each row keeps a number of tokens, which it may have still to reach."""
    base = np.array(given["counts"]) + 8
    rows = [
        Row(n, behind(given["distance"], n, lambda t, b=b: b))
        for n, b in zip(given["counts"], base.tolist(), strict=True)
    ]
    known = {**arrays(given), "base": base, "share": np.zeros(len(rows))}
    return Distance(given["distance"], **known), rows


def by_both(given: dict) -> tuple[Distance, list[Row]]:
    """Each row keeps a number of tokens, and its share of all seen once that is more."""
    base, share = np.array(given["counts"]) + 3, np.array(given["counts"]) / given["lengths"]
    rows = [
        Row(n, behind(given["distance"], n, lambda t, b=b, s=s, N=N: max(b, s * (N + t))))
        for n, b, s, N in zip(given["counts"], base, share, given["lengths"], strict=True)
    ]
    known = {**arrays(given), "base": base, "share": share}
    return Distance(given["distance"], **known), rows


PLANNED = [
    *((ring, given) for given in RINGS),
    *((by_share, given) for given in RATIOS),
    *((by_number, given) for given in RATIOS),
    *((by_both, given) for given in RATIOS),
]
named = pytest.mark.parametrize(
    ("make", "given"), PLANNED, ids=[f"{make.__name__}-{given}" for make, given in PLANNED]
)


def check(schedule, rows: list[Row], steps: int = STEPS) -> None:
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
def test_each_token_takes_the_slot_that_was_freed(make, given) -> None:
    schedule, rows = make(given)
    alike = all(len(set(x)) == 1 for x in given.values() if isinstance(x, list))
    assert schedule.gapless == schedule.shared == alike
    check(schedule, rows)


@named
def test_slots_are_sent_once_and_changed_in_place(make, given) -> None:
    """A captured step reads them where they were."""
    schedule, _ = make(given)
    table = schedule.on_device(CPU)
    assert table.shape == (AHEAD, 1 if schedule.shared else len(given["counts"]))
    assert table.dtype == torch.int64
    for step in range(2 * AHEAD):
        if step == AHEAD:
            before = table.clone()
        schedule.prepare()
        assert schedule.at == step % AHEAD
        assert schedule.on_device(CPU) is table
        assert table[schedule.at].tolist() == np.ravel(schedule.slots(CPU)).tolist()
        schedule.advance()
    assert not torch.equal(table, before) or make is ring


@named
@pytest.mark.parametrize(
    ("begun", "sent"), [(0, False), (3, True), (AHEAD, False), (AHEAD + 9, True)]
)
def test_chosen_rows_go_on(make, given, begun, sent) -> None:
    """Rows move with their slots, may repeat, and leave the others as they were."""
    schedule, rows = make(given)
    check(schedule, rows, begun)
    if sent:
        schedule.on_device(CPU)
    choice = np.array([len(rows) - 1, 0, 0])
    mine = [copy.deepcopy(rows[r]) for r in choice]
    chosen = schedule.select(choice)
    # Only the longest of them count, so the others' width is more than they need.
    widest = max(row.fresh for row in rows) - max(row.fresh for row in mine)
    for _ in range(STEPS):
        wanted = [row.next_slot() for row in mine]
        got = chosen.slots(CPU)
        assert got == wanted[0] if chosen.shared else got.tolist() == wanted
        if chosen.table is not None:
            assert chosen.table[chosen.at].tolist() == np.ravel(got).tolist()
        for row in mine:
            row.step()
        assert chosen.width >= max(row.fresh for row in mine)
        assert widest or chosen.width == max(row.fresh for row in mine)
        chosen.advance()
    check(schedule, rows)


@named
@pytest.mark.parametrize("begun", [0, 1, AHEAD - 1, AHEAD, AHEAD + 3])
def test_no_step_needs_more_slots_than_were_said(make, given, begun) -> None:
    """`most` bounds the slots of the steps to come, closely at first, where all rows are alike."""
    schedule, rows = make(given)
    check(schedule, rows, begun)
    in_use = max(row.fresh for row in rows)
    for steps in (1, 2, 7, 30, 90):
        ahead = copy.deepcopy(rows)
        for _ in range(steps):
            for row in ahead:
                row.step()
        needed = max(row.fresh for row in ahead)
        most = schedule.most(steps)
        assert needed <= most <= in_use + steps
        if schedule.shared and (make is ring or not begun):
            assert most - needed <= (0 if make is ring else 2)


def test_growing_takes_a_slot_behind_everything() -> None:
    schedule = GrowingSlots(counts=np.array([5, 9, 2]))
    assert schedule.shared
    assert not schedule.gapless
    assert GrowingSlots(counts=np.array([4, 4])).gapless
    for t in range(STEPS):
        assert schedule.slots(CPU) == 9 + t
        assert schedule.used == 9 + t
        assert schedule.width == 10 + t
        assert schedule.most(6) == 15 + t
        if t == 7:
            other = schedule.select(np.array([2, 2]))
            assert [other.slots(CPU), other.width] == [16, 17]
            other.advance()
            assert other.slots(CPU) == 17
        schedule.advance()
    schedule.advance(3)
    assert schedule.slots(CPU) == 9 + STEPS + 3


def test_before_the_first_step_the_slots_in_use_are_those_kept() -> None:
    schedule = Ring(
        counts=np.array([9, 4]), protected=np.array([1, 1]), capacity=np.array([12, 12])
    )
    assert schedule.used == 9
    assert schedule.at == AHEAD  # nothing worked out, nothing sent
    assert schedule.table is None
    assert schedule.width == 10
    assert schedule.used == 9


# H2O


class Heavy:
    """H2O over rows of slots, by lists: mass, age and slot of what each row holds."""

    def __init__(self, given: dict, S: int, seed: int = 0) -> None:
        self.given, self.S, self.rng = given, S, np.random.default_rng(seed)
        self.rows = [
            {j: [j, float(self.rng.exponential())] for j in range(n)} for n in given["counts"]
        ]
        self.next = list(given["counts"])
        # Tokens count on behind the longest prompt.
        self.newest = max(given["counts"]) - 1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        mass = torch.full((len(self.rows), self.S), torch.inf)
        positions = torch.full((len(self.rows), self.S), -1, dtype=torch.int32)
        for r, row in enumerate(self.rows):
            for position, (slot, m) in row.items():
                mass[r, slot], positions[r, slot] = m, position
        return mass, positions

    def write(self) -> None:
        """A token comes to each row, and every token held receives some attention."""
        self.newest += 1
        for r, row in enumerate(self.rows):
            assert self.next[r] not in {slot for slot, _ in row.values()}
            row[self.newest] = [self.next[r], 0.0]
            for entry in row.values():
                entry[1] += float(self.rng.exponential())

    def drop(self) -> list[int | None]:
        """Each row's victim, by position."""
        gone: list[int | None] = []
        for r, row in enumerate(self.rows):
            protected, capacity, recent = (
                self.given[k][r] for k in ("protected", "capacity", "recent")
            )
            if len(row) <= capacity:
                self.next[r] = len(row)
                gone.append(None)
                continue
            mine = {p: m for p, (slot, m) in row.items() if slot >= protected}
            light = {p: m for p, m in mine.items() if p <= self.newest - max(recent, 1)}
            victim = min(light, key=light.__getitem__) if light else min(mine)
            self.next[r] = row.pop(victim)[0]
            gone.append(victim)
        return gone


HEAVY = [
    {"counts": [8, 8], "protected": [0, 0], "capacity": [8, 8], "recent": [4, 4]},
    {"counts": [8, 8], "protected": [3, 3], "capacity": [8, 8], "recent": [2, 2]},
    {"counts": [5, 5], "protected": [0, 0], "capacity": [9, 9], "recent": [0, 0]},
    {"counts": [8, 8], "protected": [4, 4], "capacity": [8, 8], "recent": [6, 6]},
    {"counts": [8], "protected": [8], "capacity": [8], "recent": [2]},
    {"counts": [8, 5, 3], "protected": [2, 0, 3], "capacity": [8, 6, 9], "recent": [4, 3, 8]},
    {"counts": [6, 6], "protected": [1, 1], "capacity": [6, 40], "recent": [3, 20]},
    {"counts": [6, 6], "protected": [0, 2], "capacity": [6, 6], "recent": [3, 3]},
]
heavy = pytest.mark.parametrize("given", HEAVY, ids=str)


@heavy
@pytest.mark.parametrize("begun", [None, 2, 20])
def test_h2o_drops_the_lightest_that_is_not_recent(given, begun) -> None:
    """... nor protected; the newest never, and the oldest where nothing else is left."""
    twin, schedule = Heavy(given, S=50), HeavyHitterSlots(**arrays(given))
    alike = all(len(set(x)) == 1 for x in given.values())
    assert schedule.gapless == schedule.shared == alike
    at = None
    for t in range(45):
        if t == begun:
            choice = [len(given["counts"]) - 1, 0, 0]
            schedule = schedule.select(np.array(choice))
            given = {k: [v[r] for r in choice] for k, v in given.items()}
            twin = copy.deepcopy(twin)
            twin.given = given
            twin.rows = [copy.deepcopy(twin.rows[r]) for r in choice]
            twin.next = [twin.next[r] for r in choice]
            at = None
        got = schedule.slots(CPU)
        assert [got] * len(twin.next) == twin.next if isinstance(got, int) else True
        assert isinstance(got, int) or got.tolist() == twin.next
        if not isinstance(got, int):
            assert got.dtype == torch.int64
            assert schedule.slots_at(torch.tensor([0])) is got
        held = [len(row) for row in twin.rows]
        full = all(n >= c for n, c in zip(held, given["capacity"], strict=True))
        assert schedule.full == full
        twin.write()
        assert schedule.width == max(len(row) for row in twin.rows)
        assert schedule.used == schedule.width - 1
        bound = max(c + 1 for c in given["capacity"])
        assert schedule.most(7) == min(schedule.used + 7, bound)
        mass, positions = twin.tensors()
        schedule.drop(mass, positions, torch.tensor(twin.newest) if t % 2 else twin.newest)
        twin.drop()
        schedule.advance()
        schedule.prepare()
        if full and at is not None:  # a captured step reads it where it was
            assert schedule.slots(CPU).data_ptr() == at
        at = schedule.slots(CPU).data_ptr() if full else None


def test_h2o_allocates_nothing_in_a_step_but_once() -> None:
    given = HEAVY[1]
    twin, schedule = Heavy(given, S=12), HeavyHitterSlots(**arrays(given))
    kept = None
    for _ in range(4):
        twin.write()
        mass, positions = twin.tensors()
        schedule.drop(mass, positions, twin.newest)
        twin.drop()
        schedule.advance()
        assert schedule.scratch is not None
        assert kept is None or all(a is b for a, b in zip(schedule.scratch, kept, strict=True))
        kept = schedule.scratch
    # The storage grew: what was made for the old shape is too short.
    twin.S = 20
    twin.write()
    schedule.drop(*twin.tensors(), twin.newest)
    twin.drop()
    assert schedule.slots(CPU).tolist() == twin.next


# Which schedule a policy has


def made(policy: Policy, **given):
    known = {
        "counts": np.array([9, 6]),
        "lengths": np.array([30, 20]),
        "protected": np.array([4, 12]),
        "capacity": np.array([10, 7]),
        "share": np.array([0.3, 0.35]),
        "heads": 1,
    }
    return policy.decode.schedule(policy, **{**known, **given})


def test_policies_that_grow_drop_nothing() -> None:
    assert isinstance(made(Policy.of()), GrowingSlots)
    assert made(Policy.of()).slots(CPU) == 9


def test_a_ratio_is_of_the_tokens_seen_or_a_number() -> None:
    policy = Policy.of(decode="ratio", score="accumulated", distance=3)
    found = made(policy)
    assert isinstance(found, Distance)
    assert found.distance == 3
    assert found.share.tolist() == [0.3, 0.35]
    assert found.base.tolist() == [10, 7]  # of a prompt that was kept whole, at the least
    assert found.lengths.tolist() == [30, 20]
    found = made(policy, share=None)
    assert isinstance(found, Distance)
    assert found.base.tolist() == [10, 7]
    assert found.share.tolist() == [0, 0]


def test_a_fixed_size_drops_by_age_or_by_weight() -> None:
    found = made(Policy.of(decode="fixed", score="recency"))
    assert isinstance(found, Ring)
    assert found.capacity.tolist() == [10, 7]
    assert found.protected.tolist() == [4, 7]  # more cannot lie there
    found = made(Policy.of(decode="fixed", score="accumulated", recent=0.35))
    assert isinstance(found, HeavyHitterSlots)
    assert found.recent.tolist() == [3, 2]
    assert found.protected.tolist() == [4, 7]
    assert found.capacity.tolist() == [10, 7]
