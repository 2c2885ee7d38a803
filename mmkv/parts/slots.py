"""Which slot a generated token takes.

Attention does not care in which order keys lie once they carry their rotation, so the slot of the
token that a step drops is taken by the next one: no concatenation, constant shapes, and nothing is
written for a drop. Except where attention decides (`victims`), the slots follow from the
sizes after the prefill: they are worked out on the host some steps ahead, and a step that needs
them on the device finds them there, without a synchronisation.

A schedule holds one entry per row of its block ([R]: a batch row and key-value head), one for all
rows that are alike ([U]), or a single entry ([1]) when all rows use the same slots, so that a step
writes one slice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmkv.parts import Decode, NonNegativeInt, PositiveInt, RowSizes, register_part

if TYPE_CHECKING:
    from mmkv.policy import Policy

S = TypeVar("S", bound="SlotSchedule")

# Steps worked out, and sent to the device, at a time.
AHEAD = 64


class SlotSchedule:
    """`slots` of the next token, `width` slots in use with it, `advance` after the step.

    Attributes:
        gapless: no slot below `width` is empty during a step, in any row.
        shared: all rows use the same slots.
        drops: tokens are dropped, one a step at the most.
        needs_decode_attention: which one depends on the attention that slots accumulate.
    """

    drops = True
    needs_decode_attention = False
    alike = False  # rows with equal arrays use the same slots, so that they are worked out once

    # Per-row arrays, [R] or [1], in the order of the block's rows.
    rows: tuple[str, ...] = ("counts",)
    counts: np.ndarray
    table: Tensor | None = None
    # The next token's `slots` and `width`, once they were looked up for the step.
    now: tuple[int | Tensor, int] | None = None
    # [R], the entry of each row, on the host and, once asked for, on the device; None: its own.
    which: np.ndarray | None = None
    which_there: Tensor | None = None

    def __init__(self, **arrays: np.ndarray) -> None:
        self.gapless = all(bool((a == a[0]).all()) for a in arrays.values())
        self.shared = self.gapless
        first = slice(1) if self.gapless else slice(None)
        if self.alike and not self.gapless:
            first = self._join(np.stack(list(arrays.values())))
        for name, a in arrays.items():
            setattr(self, name, a[first].copy())
        self.at = AHEAD
        self.last = int(self.counts.max())  # slots in use with the last step planned

    def _join(self, columns: np.ndarray) -> Any:
        """Give equal columns of [n, R] one entry: which of them to keep."""
        entries: dict[tuple[float, ...], int] = {}
        which = [entries.setdefault(x, len(entries)) for x in zip(*columns.tolist(), strict=True)]
        if len(entries) == len(which):
            return slice(None)
        self.which = np.array(which)
        return np.unique(self.which, return_index=True)[1]

    def steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """Work out n steps more: slots [n, U], and how many are in use in each."""
        raise NotImplementedError

    @property
    def filling(self) -> bool:
        """Whether some row has still to drop its first token: its slots then follow otherwise."""
        return False

    def drop(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Find what a step drops, where that depends on the attention that slots accumulate."""

    def most(self, steps: int) -> int:
        """Slots in use at the most within the next `steps` steps."""
        return min(int(self.reach(steps).max()), self.used + steps)

    def reach(self, steps: int) -> np.ndarray:
        """As `most`, of each row by itself: [R], or [1] for all."""
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Steps that are worked out and not yet made."""
        return AHEAD - self.at

    @property
    def used(self) -> int:
        """Slots in use before the next step, or one less."""
        return self.last if self.at == AHEAD else self.width - 1

    @property
    def width(self) -> int:
        """Slots in use during the next step, the new token's included."""
        return self._planned()[1][self.at]

    def slots(self, device: torch.device) -> int | Tensor:
        """The next token's slot: an int for all rows, or int64 [R]."""
        slots, _ = self._planned()
        if self.shared:
            return int(slots[self.at, 0])
        return self._of_rows(self._on_device(device)[self.at])

    def look_up(self, device: torch.device) -> None:
        """Set `now`, for a step that the host drives."""
        self.now = self.slots(device), self.width

    def prepare(self) -> None:
        """Work out the steps to come, so that the next one has nothing to send to the device."""
        self._planned()

    def slots_at(self, row: Tensor) -> Tensor:
        """The slots at `row` [1] of the table, int64 [R or 1], for a step that the host forgets."""
        return self._of_rows(self._on_device(row.device).index_select(0, row)[0])

    def _on_device(self, device: torch.device) -> Tensor:
        """The slots of this and the next steps, int64 [AHEAD, U], this step's at `at`."""
        if self.table is None:
            self.table = send(self._planned()[0], device)
        return self.table

    def _of_rows(self, slots: Tensor) -> Tensor:
        """Of each row, what [U] says of entries."""
        if self.which is None:
            return slots
        if self.which_there is None:
            self.which_there = send(self.which, slots.device)
        return slots[self.which_there]

    def advance(self, steps: int = 1) -> None:
        """Count `steps` steps; the slots they free are the next ones to be taken."""
        for _ in range(steps):
            self._planned()
            self.at += 1

    def ahead(self) -> np.ndarray:
        """Count all the steps that are worked out, of which there are some: their slots [n, U]."""
        slots = self._planned()[0][self.at :]
        self.at = AHEAD
        return slots

    def own_columns(self, rows: int) -> np.ndarray:
        """Which of the U slots of a step is each row's, int64 [rows]."""
        if self.shared:
            return np.zeros(rows, dtype=np.int64)
        return np.arange(rows) if self.which is None else self.which

    def select(self: S, rows: np.ndarray) -> S:
        """The same schedule for a choice of rows, which may repeat (beam search)."""
        self._planned()
        new = copy.copy(self)
        chosen = slice(None) if self.shared or self.which is not None else rows
        if self.which is not None:
            new.which, new.which_there = self.which[rows], None
        for name in self.rows:
            setattr(new, name, getattr(self, name)[chosen].copy())
        new.planned = self.planned[:, chosen]
        if self.table is not None:
            at = chosen if isinstance(chosen, slice) else send(rows, self.table.device)
            new.table = self.table[:, at].clone()
        return new

    def _spread(self, x: np.ndarray) -> np.ndarray:
        return x if self.which is None else x[self.which]

    def _planned(self) -> tuple[np.ndarray, list[int]]:
        if self.at == AHEAD:
            self._begin(*self.steps(AHEAD))
        return self.planned, self.widths

    def _begin(self, slots: np.ndarray, widths: list[int]) -> None:
        self.planned, self.widths = slots.astype(np.int64), widths
        self.last, self.at = widths[-1], 0
        if self.table is not None:  # in place: a captured graph reads it
            self.table.copy_(torch.from_numpy(self.planned), non_blocking=True)


class GrowingSlots(SlotSchedule):
    """Generated tokens are kept: one new slot a step, behind everything."""

    rows = ("end",)
    drops = False
    alike = True

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.shared, self.which = True, None
        self.end, self.given = self.counts.max(keepdims=True), arrays

    def steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """Behind everything."""
        slots = self.end + np.arange(n)[:, None]
        self.end = self.end + n
        return slots, (slots.max(1) + 1).tolist()

    def reach(self, steps: int) -> np.ndarray:
        """One slot a step."""
        return self._spread(self.end - self.pending + steps)


@register_part("grow")
@dataclass(frozen=True, kw_only=True)
class Grow(Decode):
    """Generated tokens are kept, on top of the budget."""

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Every token takes a new slot."""
        return GrowingSlots(counts=rows.counts)


@register_part("rounds")
@dataclass(frozen=True, kw_only=True)
class Rounds(Grow):
    """Generated tokens compete in rounds, so that the budget holds for all tokens seen.

    A float budget is the share of them that a layer may hold, an int their number. In a round
    tokens are scored, evicted and merged as in a new turn; their own queries observe. Between
    rounds every token takes a new slot.

    Options:
        every: a round takes place after so many generated tokens; 1 or more.
        latest: how many of the last tokens stay as they are; 0 or more.
    """

    every: PositiveInt = 64
    latest: NonNegativeInt = 64

    def check(self, policy: Policy) -> None:
        """Sizes must follow from what a layer holds."""
        if policy.layers.needs == "similarity":
            raise ValueError(
                f"decode='rounds' sizes layers anew, and layers={policy.layers.name!r} measures "
                "them on prompts alone: use other layer sizes, or decode='grow'"
            )


class Ring(SlotSchedule):
    """Constant size: the oldest unprotected token is dropped (Local, StreamingLLM).

    Protected tokens lie in the first slots, the others behind them by age, with one spare slot: the
    slots behind the protected ones are a ring.
    """

    rows = ("counts", "protected", "capacity", "held")
    alike = True
    protected: np.ndarray
    capacity: np.ndarray

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.held = self.counts.copy()  # tokens held before the step, if none had been dropped

    def steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """The next slots of the ring; the oldest token lies there once it is full."""
        held = self.held + np.arange(n)[:, None]
        slots = self.protected + (held - self.protected) % (self.capacity - self.protected + 1)
        self.held = self.held + n
        return slots, np.minimum(held + 1, self.capacity + 1).max(1).tolist()

    def reach(self, steps: int) -> np.ndarray:
        """The constant size, and one spare slot, once they are reached."""
        held = self.held - self.pending + steps
        return self._spread(np.minimum(held, self.capacity + 1))


class Distance(SlotSchedule):
    """The token `distance` behind the newest is dropped while a layer holds more than its size.

    PrefixKV and ElasticCache. The size is `base`, or the `share` of all tokens seen where that is
    more. The prompt's kept tokens and the `distance` most recent ones are never dropped, so a layer
    may hold those where they are more than its size.
    """

    rows = ("counts", "lengths", "base", "share", "held", "fresh", "recent")
    alike = True
    lengths: np.ndarray
    base: np.ndarray
    share: np.ndarray

    def __init__(self, distance: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.distance, self.generated = distance, 0
        self.held = self.counts.copy()  # tokens held now
        self.fresh = self.counts.copy()  # the first slot never used
        # Slot of each of the last `distance` + 1 tokens, by step modulo their number; -1: none yet
        # or kept for good. The entry of the step to come is the slot that the last drop freed.
        self.recent = np.full((len(self.counts), distance + 1), -1)

    def steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """The slot freed by the last drop, or the next fresh one; then drop where too many."""
        slots, fresh = self._queue(n)
        return slots, fresh.max(1).tolist()

    def _queue(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """`steps`, with the first slot of each row that was never used: [n, U] both."""
        seen = self.lengths + self.generated + np.arange(1, n + 1)[:, None]
        size = np.round(np.maximum(self.base, self.share * seen))
        taken = np.empty(size.shape, dtype=np.int64)
        unused = np.empty_like(taken)
        recent, held, fresh = self.recent.T.copy(), self.held.copy(), self.fresh
        for slots, after, most in zip(taken, unused, size, strict=True):
            mine = recent[self.generated % len(recent)]
            np.copyto(slots, np.where(mine >= 0, mine, fresh))
            fresh = np.maximum(fresh, slots + 1, out=after)
            mine[:] = slots
            self.generated += 1
            held += 1
            # A token that survives its turn is never a victim again.
            oldest = recent[self.generated % len(recent)]
            oldest[held <= most] = -1
            held -= oldest >= 0
        self.recent, self.held, self.fresh = np.ascontiguousarray(recent.T), held, fresh.copy()
        return taken, unused

    def reach(self, steps: int) -> np.ndarray:
        """The recent tokens beyond what is kept, or the size once all of these are seen."""
        seen = self.lengths + self.generated + steps
        size = np.ceil(np.maximum(self.base, self.share * seen))
        held = np.maximum(self.counts + self.distance, size).astype(int) + 2
        return self._spread(np.minimum(held, self.fresh + max(0, steps - self.pending)))

    @staticmethod
    def together(schedules: Sequence[Distance]) -> None:
        """Work out the next steps of several that are at the same step, as one."""
        first = schedules[0]
        whole = copy.copy(first)
        for name in first.rows:
            setattr(whole, name, np.concatenate([getattr(x, name) for x in schedules]))
        ends = np.cumsum([len(x.counts) for x in schedules])
        slots, fresh = whole._queue(AHEAD)
        widths = np.maximum.reduceat(fresh, np.r_[0, ends[:-1]], axis=1)
        for i, (x, end) in enumerate(zip(schedules, ends, strict=True)):
            mine = slice(end - len(x.counts), end)
            for name in ("held", "fresh", "recent"):
                setattr(x, name, getattr(whole, name)[mine].copy())
            x.generated = whole.generated
            x._begin(slots[:, mine], widths[:, i].tolist())


@register_part("ratio")
@dataclass(frozen=True, kw_only=True)
class Ratio(Decode):
    """A float budget is the share of all tokens seen that a layer may hold, an int their number.

    The token `distance` behind the newest is dropped while it holds more; the prompt's kept tokens
    and the `distance` most recent ones never are (PrefixKV, ElasticCache).

    Options:
        distance: how far behind the newest token the one lies that is dropped; 0 or more.
    """

    distance: NonNegativeInt = 25

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """A queue: the slots are known in advance."""
        counts, lengths, base = rows.counts, rows.lengths, rows.capacity
        share = 0.0 * counts if rows.share is None else rows.share
        return Distance(self.distance, counts=counts, lengths=lengths, base=base, share=share)


def plan(schedules: Sequence[SlotSchedule]) -> None:
    """Work out the steps to come of all that have none left: those that can, as one."""
    alike: dict[tuple[int, int], list[Distance]] = {}
    for x in schedules:
        if isinstance(x, Distance) and x.at == AHEAD:
            alike.setdefault((x.distance, x.generated), []).append(x)
    for found in alike.values():
        Distance.together(found)


def spare(width: int, seen: int) -> int:
    """Slots to set aside, at least 16, behind `width` slots in use, once `seen` tokens were seen.

    An eighth of those in use, so that growing seldom copies, but no more than tokens were dropped:
    the cache must not outgrow the full one.
    """
    return max(16, min(width // 8, seen - width))


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for what the device has still to do."""
    return torch.from_numpy(array.copy()).to(device, non_blocking=True)
