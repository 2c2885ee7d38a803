"""Which slot a generated token takes, and which token is dropped after its step.

Attention does not care in which order keys lie once they carry their rotation, so a dropped token's
slot is overwritten by the next one: no concatenation, constant shapes. Except for H2O, whose victim
depends on the attention, the whole schedule follows from the sizes after the prefill; it is kept on
the host and costs no synchronisation.

A schedule holds one entry per row of its block ([R]: a batch row and key-value head), or a single
entry ([1]) when all rows agree, so that a step writes one slice.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mmkv.policy import Policy

Slots = int | Tensor
S = TypeVar("S", bound="Schedule")


class Schedule:
    """`slots` for the next token, `width` slots in use with it, `advance` after the step.

    Attributes:
        steps: tokens generated so far.
        agree: all rows use the same slots, and no slot below `width` is empty during a step.
    """

    # Per-row arrays, [R] or [1], in the order of the block's rows.
    rows: tuple[str, ...] = ("counts",)
    counts: np.ndarray

    def __init__(self, **arrays: np.ndarray) -> None:
        self.steps = 0
        self.agree = all(len(np.unique(a)) == 1 for a in arrays.values())
        for name, a in arrays.items():
            setattr(self, name, a[:1].copy() if self.agree else a.copy())

    @property
    def width(self) -> int:
        """Slots in use during the next step, the new token's included."""
        raise NotImplementedError

    def slots(self) -> Slots:
        """The next token's slot: an int for all rows, or int64 [R]."""
        raise NotImplementedError

    def advance(self) -> Slots | None:
        """Count a step; the slots whose tokens are dropped after it, -1 for none."""
        raise NotImplementedError

    def room(self, expected: int) -> int:
        """Slots to set aside behind the longest row, when `expected` tokens will be generated."""
        raise NotImplementedError

    def select(self: S, rows: np.ndarray) -> S:
        """The same schedule for a choice of rows, which may repeat (beam search)."""
        new = copy.copy(self)
        for name in self.rows:
            a = getattr(self, name)
            setattr(new, name, a.copy() if self.agree else a[rows])
        return new

    def _plain(self, slots: np.ndarray) -> Slots:
        return int(slots[0]) if self.agree else torch.from_numpy(slots.astype(np.int64))


class Grow(Schedule):
    """Generated tokens are kept: one new slot a step, behind everything."""

    def slots(self) -> int:
        """Behind everything."""
        return int(self.counts.max()) + self.steps

    @property
    def width(self) -> int:
        """Grows by one a step."""
        return self.slots() + 1

    def room(self, expected: int) -> int:
        """Every token stays."""
        return expected

    def advance(self) -> None:
        """Nothing is dropped."""
        self.steps += 1

    def extend(self, n: int) -> None:
        """Count n tokens at once."""
        self.steps += n

    def select(self, rows: np.ndarray) -> Grow:
        """The first new slot stays where it is, whatever rows remain."""
        new = copy.copy(self)
        new.counts = self.counts.copy()
        return new


class Ring(Schedule):
    """Constant size: the oldest unprotected token is dropped (Local, StreamingLLM).

    Protected tokens lie in the first slots, the others behind them by age, with one spare slot: the
    slots behind the protected ones are a ring.
    """

    rows = ("counts", "protected", "capacity")
    protected: np.ndarray
    capacity: np.ndarray

    def _slots(self) -> np.ndarray:
        ring = self.capacity - self.protected + 1
        return self.protected + (self.counts - self.protected + self.steps) % ring

    def slots(self) -> Slots:
        """The next slot of the ring."""
        return self._plain(self._slots())

    @property
    def width(self) -> int:
        """Constant once the ring is full."""
        return int(np.minimum(self.counts + self.steps + 1, self.capacity + 1).max())

    def room(self, expected: int) -> int:
        """What is missing to the constant size, and one spare slot."""
        return int((self.capacity + 1).max() - self.counts.max())

    def advance(self) -> Slots | None:
        """The oldest token lies where the next one will be written."""
        self.steps += 1
        over = self.counts + self.steps > self.capacity
        return self._plain(np.where(over, self._slots(), -1)) if over.any() else None


class Distance(Schedule):
    """A share of all tokens seen: the token `distance` behind the newest is dropped while over.

    PrefixKV and ElasticCache. The prompt's kept tokens and the `distance` most recent ones are
    never dropped, so a layer may hold up to `distance` tokens more than its share.
    """

    rows = ("counts", "lengths", "held", "fresh", "recent")
    lengths: np.ndarray
    held: np.ndarray
    fresh: np.ndarray
    recent: np.ndarray

    def __init__(self, distance: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.distance = distance
        self.held = self.counts.copy()  # tokens held now
        self.fresh = self.counts.copy()  # the first slot never used
        # Slot of each of the last `distance` + 1 tokens, by step modulo their number; -1: none yet
        # or kept for good.
        self.recent = np.full((len(self.counts), distance + 1), -1)

    def _slots(self) -> np.ndarray:
        freed = self.recent[:, self.steps % (self.distance + 1)]
        return np.where(freed >= 0, freed, self.fresh)

    def slots(self) -> Slots:
        """The slot freed by the last drop, or the next fresh one."""
        return self._plain(self._slots())

    @property
    def width(self) -> int:
        """One more than the highest slot in use."""
        return int(np.maximum(self.fresh, self._slots() + 1).max())

    def room(self, expected: int) -> int:
        """The recent tokens, which are never dropped."""
        return min(expected, self.distance + 1)

    def advance(self) -> Slots | None:
        """Drop the token `distance` behind the one just written, where the layer holds too many."""
        slots = self._slots()
        self.fresh = np.maximum(self.fresh, slots + 1)
        self.recent[:, self.steps % (self.distance + 1)] = slots
        self.steps += 1
        self.held = self.held + 1
        share = self.counts / self.lengths
        over = self.held > np.round(share * (self.lengths + self.steps))
        oldest = self.recent[:, self.steps % (self.distance + 1)]
        victims = np.where(over, oldest, -1)
        self.held = self.held - (victims >= 0)
        # A token that survives its turn is never a victim again.
        self.recent[:, self.steps % (self.distance + 1)] = victims
        return self._plain(victims) if (victims >= 0).any() else None


class Lightest(Schedule):
    """Constant size: the token with the lowest accumulated attention outside the recent ones (H2O).

    The victim depends on the attention, so it stays on the device: `drop` finds it without
    synchronising, and the next token takes its slot.
    """

    rows = ("counts", "protected", "capacity", "recent")
    protected: np.ndarray
    capacity: np.ndarray
    recent: np.ndarray
    freed: Tensor | None = None

    def slots(self) -> Slots:
        """The slot freed by the last victim; before the first, the next fresh one."""
        return self._plain(self.counts + self.steps) if self.freed is None else self.freed

    @property
    def width(self) -> int:
        """Constant once the capacity is reached."""
        return int(np.minimum(self.counts + self.steps + 1, self.capacity + 1).max())

    def room(self, expected: int) -> int:
        """What is missing to the constant size, and one spare slot."""
        return int((self.capacity + 1).max() - self.counts.max())

    def advance(self) -> None:
        """Count a step; `drop` finds the victims."""
        self.steps += 1

    def drop(self, mass: Tensor, positions: Tensor, newest: int) -> Tensor | None:
        """The slots whose tokens are dropped after this step, int64 [R], -1 for none.

        Args:
            mass: float32 [R, S], attention accumulated by each slot.
            positions: [R, S], -1 where a slot is empty.
            newest: position of the token just written.
        """
        held = self.counts + self.steps
        over = held > self.capacity
        if not over.any():
            return None

        def column(a: np.ndarray) -> Tensor:
            return torch.from_numpy(a).to(mass.device)[:, None]

        slot = torch.arange(mass.shape[1], device=mass.device)
        out_of_play = (
            (positions < 0)
            | (slot < column(self.protected))
            | ((positions > newest - column(self.recent)) & (positions < newest))
            | (positions == newest)
        )
        # Where the recent ones fill the whole capacity, the oldest of them has to go.
        lightest = mass.masked_fill(out_of_play, float("inf"))
        none_left = out_of_play.all(-1, keepdim=True)
        oldest = positions.masked_fill((positions < 0) | (slot < column(self.protected)), 2**31 - 1)
        victim = torch.where(none_left, oldest.float(), lightest).argmin(-1)
        if over.all():
            self.freed = victim
            return victim
        fresh = torch.from_numpy(held).to(mass.device)
        late = torch.from_numpy(over).to(mass.device)
        self.freed = torch.where(late, victim, fresh)
        return torch.where(late, victim, -1)

    def select(self, rows: np.ndarray) -> Lightest:
        """The freed slot moves with its row."""
        new = super().select(rows)
        if self.freed is not None:
            new.freed = self.freed[torch.from_numpy(rows).to(self.freed.device)]
        return new


def make_schedule(
    policy: Policy,
    *,
    counts: np.ndarray,
    lengths: np.ndarray,
    protected: np.ndarray,
    capacity: np.ndarray | None,
) -> Schedule:
    """The schedule of a block of rows, from each row's sizes after the prefill.

    Args:
        policy: its `decode` part decides.
        counts: [R], tokens kept.
        lengths: [R], tokens of the prompt.
        protected: [R], kept tokens that may never be dropped; they lie in the first slots.
        capacity: [R], the constant size of decode="fixed"; None: nothing is ever dropped.
    """
    if policy.decode == "grow" or capacity is None:
        return Grow(counts=counts)
    if policy.decode == "ratio":
        return Distance(policy.distance, counts=counts, lengths=lengths)
    protected = np.minimum(protected, capacity)
    if policy.score == "recency":
        return Ring(counts=counts, protected=protected, capacity=capacity)
    recent = (policy.recent * capacity).astype(np.int64)
    return Lightest(counts=counts, protected=protected, capacity=capacity, recent=recent)
