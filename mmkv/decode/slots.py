"""The slot that each generated token takes.

Stored keys are rotated already, so the order of slots does not matter to attention. A new token
takes the slot of the token that the last step dropped, if it dropped one. So shapes are constant
and no pair is moved. Slots depend on the sizes after the prefill alone, except where attention
decides which token is dropped (`victims`). The host plans them some steps ahead, so that no step
waits for the device.

A schedule holds arrays with one entry for each row of its block ([R], a row being a key-value head
of a sequence), or for each group of rows with equal sizes ([U]). If all rows use the same slots,
there is one entry ([1]), and a step writes one slice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmkv.option_types import NonNegativeInt, PositiveInt
from mmkv.parts import Decode, RowSizes, register_part
from mmkv.tensors import send

if TYPE_CHECKING:
    from mmkv.policy import Policy

S = TypeVar("S", bound="SlotSchedule")

# Steps planned, and sent to the device, at a time.
AHEAD = 64


class SlotSchedule:
    """Chooses the slots of a block's next tokens.

    `slots` and `width` are those of the next step, until `advance` counts it.

    Attributes:
        gapless: no slot below `width` is empty during a step, in any row.
        shared: all rows use the same slots.
        drops: each step drops at most one token of a row.
        needs_decode_attention: the token that is dropped depends on the attention that slots get.
    """

    drops = True
    needs_decode_attention = False
    joins_equal_rows = False  # rows with equal sizes use the same slots, which are planned once

    # The names of the arrays with an entry for each row, or for each group of rows, or for all.
    per_row: tuple[str, ...] = ("counts",)
    counts: np.ndarray
    table: Tensor | None = None
    # `slots` and `width` of the step that runs now, set by `set_now`.
    now: tuple[int | Tensor, int] | None = None
    # [R], the entry of each row, on the host and, once needed, on the device; None: one a row.
    entries: np.ndarray | None = None
    entries_on_device: Tensor | None = None

    def __init__(self, **arrays: np.ndarray) -> None:
        self.gapless = all(bool((a == a[0]).all()) for a in arrays.values())
        self.shared = self.gapless
        first = slice(1) if self.gapless else slice(None)
        if self.joins_equal_rows and not self.gapless:
            first = self._join(np.stack(list(arrays.values())))
        for name, a in arrays.items():
            setattr(self, name, a[first].copy())
        self.at = AHEAD
        self.used_after_plan = int(self.counts.max())  # slots in use after the last planned step

    def _join(self, columns: np.ndarray) -> Any:
        """Give rows with equal columns [n, R] one entry; return the index of a row of each."""
        entries: dict[tuple[float, ...], int] = {}
        of_row = [entries.setdefault(x, len(entries)) for x in zip(*columns.tolist(), strict=True)]
        if len(entries) == len(of_row):
            return slice(None)
        self.entries = np.array(of_row)
        return np.unique(self.entries, return_index=True)[1]

    def plan_steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """Plan n more steps: slots [n, U], and how many slots are in use in each step."""
        raise NotImplementedError

    @property
    def filling(self) -> bool:
        """Whether some row has not dropped a token yet, and takes new slots until then."""
        return False

    def drop(self, attention: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Choose the token that a step drops, if that depends on the slots' attention."""

    def slots_needed(self, steps: int) -> int:
        """Return the largest number of slots in use within the next `steps` steps."""
        return min(int(self.slots_bound(steps).max()), self.used + steps)

    def slots_bound(self, steps: int) -> np.ndarray:
        """Return a bound of each row's slots in use within the next `steps` steps: [R] or [1]."""
        raise NotImplementedError

    @property
    def pending(self) -> int:
        """Number of planned steps that have not run yet."""
        return AHEAD - self.at

    @property
    def used(self) -> int:
        """Number of slots in use before the next step; a freed one may count or not."""
        return self.used_after_plan if self.at == AHEAD else self.width - 1

    @property
    def width(self) -> int:
        """Number of slots in use during the next step, the new token's included."""
        return self._planned()[1][self.at]

    def slots(self, device: torch.device) -> int | Tensor:
        """Return the next token's slot: an int for all rows, or int64 [R]."""
        slots, _ = self._planned()
        if self.shared:
            return int(slots[self.at, 0])
        return self._expand_on_device(self._on_device(device)[self.at])

    def set_now(self, device: torch.device) -> None:
        """Set `now`, for a step that is not replayed from a graph."""
        self.now = self.slots(device), self.width

    def prepare(self) -> None:
        """Plan the next steps, so that the next one sends nothing to the device."""
        self._planned()

    def slots_at(self, row: Tensor) -> Tensor:
        """Return the slots at `row` [1] of the table, int64 [R or 1], for a replayed step."""
        return self._expand_on_device(self._on_device(row.device).index_select(0, row)[0])

    def _on_device(self, device: torch.device) -> Tensor:
        """Return the slots of all planned steps, int64 [AHEAD, U]; this step's are at `at`."""
        if self.table is None:
            self.table = send(self._planned()[0], device)
        return self.table

    def _expand_on_device(self, slots: Tensor) -> Tensor:
        """Expand slots of entries [U] to rows [R]."""
        if self.entries is None:
            return slots
        if self.entries_on_device is None:
            self.entries_on_device = send(self.entries, slots.device)
        return slots[self.entries_on_device]

    def advance(self, steps: int = 1) -> None:
        """Count `steps` steps; the slots that they free are taken next."""
        for _ in range(steps):
            self._planned()
            self.at += 1

    def select(self: S, rows: np.ndarray) -> S:
        """Return this schedule for a choice of rows, which may repeat (beam search)."""
        self._planned()
        new = copy.copy(self)
        chosen = slice(None) if self.shared or self.entries is not None else rows
        if self.entries is not None:
            new.entries, new.entries_on_device = self.entries[rows], None
        for name in self.per_row:
            setattr(new, name, getattr(self, name)[chosen].copy())
        new.planned = self.planned[:, chosen]
        if self.table is not None:
            at = chosen if isinstance(chosen, slice) else send(rows, self.table.device)
            new.table = self.table[:, at].clone()
        return new

    def _expand(self, x: np.ndarray) -> np.ndarray:
        return x if self.entries is None else x[self.entries]

    def _planned(self) -> tuple[np.ndarray, list[int]]:
        if self.at == AHEAD:
            self._begin(*self.plan_steps(AHEAD))
        return self.planned, self.widths

    def _begin(self, slots: np.ndarray, widths: list[int]) -> None:
        self.planned, self.widths = slots.astype(np.int64), widths
        self.used_after_plan, self.at = widths[-1], 0
        if self.table is not None:  # in place: a captured graph reads it
            self.table.copy_(torch.from_numpy(self.planned), non_blocking=True)


class GrowingSlots(SlotSchedule):
    """All generated tokens are kept: each takes a new slot after all slots in use."""

    per_row = ("end",)
    drops = False

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.shared = True
        self.end = self.counts.max(keepdims=True)

    def plan_steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """Plan one new slot a step."""
        slots = self.end + np.arange(n)[:, None]
        self.end = self.end + n
        return slots, (slots.max(1) + 1).tolist()

    def slots_bound(self, steps: int) -> np.ndarray:
        """Return the slots in use, one more a step."""
        return self.end - self.pending + steps


@register_part("grow")
@dataclass(frozen=True, kw_only=True)
class Grow(Decode):
    """Generated tokens are kept, on top of the budget."""

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Return a schedule in which every token takes a new slot."""
        return GrowingSlots(counts=rows.counts)


@register_part("rounds")
@dataclass(frozen=True, kw_only=True)
class Rounds(Grow):
    """Generated tokens compete in rounds, so that the budget applies to all tokens seen.

    A float budget is the share of them that a layer may keep, an int their number. In a round
    tokens are scored, evicted and merged as in a new turn, with the queries of the generated ones
    as observers. Between rounds every token takes a new slot.

    Options:
        every: number of generated tokens between two rounds; 1 or more.
        latest: how many of the last tokens do not compete in a round; 0 or more.
    """

    every: PositiveInt = 64
    latest: NonNegativeInt = 64

    def check(self, policy: Policy) -> None:
        """Check that layers can be sized again, without their prompt."""
        if policy.layers.needs == "similarity":
            raise ValueError(
                f"decode='rounds' sizes layers anew, and layers={policy.layers.name!r} measures "
                "them on prompts alone: use other layer sizes, or decode='grow'"
            )


class Ring(SlotSchedule):
    """Constant size: the oldest unprotected token is dropped (Local, StreamingLLM).

    Protected tokens lie in the first slots. The slots after them, one more than there are other
    tokens, are a ring in order of age.
    """

    per_row = ("counts", "protected", "capacity", "n_tokens")
    joins_equal_rows = True
    protected: np.ndarray
    capacity: np.ndarray

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.n_tokens = self.counts.copy()  # tokens before the step, dropped ones included

    def plan_steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """Plan the next slots of the ring; once it is full these hold the oldest tokens."""
        n_tokens = self.n_tokens + np.arange(n)[:, None]
        slots = self.protected + (n_tokens - self.protected) % (self.capacity - self.protected + 1)
        self.n_tokens = self.n_tokens + n
        return slots, np.minimum(n_tokens + 1, self.capacity + 1).max(1).tolist()

    def slots_bound(self, steps: int) -> np.ndarray:
        """Return the slots in use: at most the capacity and one more."""
        n_tokens = self.n_tokens - self.pending + steps
        return self._expand(np.minimum(n_tokens, self.capacity + 1))


class Distance(SlotSchedule):
    """The token `distance` before the newest is dropped while a layer holds more than its size.

    PrefixKV and ElasticCache. The size is the larger of `base` and `share` times all tokens seen.
    The prompt's kept tokens and the `distance` most recent ones are never dropped, even where they
    are more than the size.
    """

    per_row = ("counts", "lengths", "base", "share", "n_kept", "first_unused", "recent_slots")
    joins_equal_rows = True
    lengths: np.ndarray
    base: np.ndarray
    share: np.ndarray

    def __init__(self, distance: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.distance, self.generated = distance, 0
        self.n_kept = self.counts.copy()  # number of kept tokens
        self.first_unused = self.counts.copy()  # the first slot never used
        # Slots of the last `distance` + 1 tokens, at index step % (distance + 1); -1: no token, or
        # one that is never dropped. The next step's entry is the slot that the last drop freed.
        self.recent_slots = np.full((len(self.counts), distance + 1), -1)

    def plan_steps(self, n: int) -> tuple[np.ndarray, list[int]]:
        """Plan n steps: take the slot freed last, or a new one; then drop if over the size."""
        slots, first_unused = self._queue(n)
        return slots, first_unused.max(1).tolist()

    def _queue(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Plan n steps: slots, and the first slot that a row has not used yet, both [n, U]."""
        seen = self.lengths + self.generated + np.arange(1, n + 1)[:, None]
        size = np.round(np.maximum(self.base, self.share * seen))
        slots = np.empty(size.shape, dtype=np.int64)
        unused_after = np.empty_like(slots)
        recent, n_kept, unused = self.recent_slots.T.copy(), self.n_kept.copy(), self.first_unused
        for step_slots, step_unused, step_size in zip(slots, unused_after, size, strict=True):
            reused = recent[self.generated % len(recent)]
            np.copyto(step_slots, np.where(reused >= 0, reused, unused))
            unused = np.maximum(unused, step_slots + 1, out=step_unused)
            reused[:] = step_slots
            self.generated += 1
            n_kept += 1
            # A token that is not dropped at this distance is never dropped.
            oldest = recent[self.generated % len(recent)]
            oldest[n_kept <= step_size] = -1
            n_kept -= oldest >= 0
        self.recent_slots = np.ascontiguousarray(recent.T)
        self.n_kept, self.first_unused = n_kept, unused.copy()
        return slots, unused_after

    def slots_bound(self, steps: int) -> np.ndarray:
        """Return a bound: the larger of the size then and the tokens that are never dropped."""
        seen = self.lengths + self.generated + steps
        size = np.ceil(np.maximum(self.base, self.share * seen))
        bound = np.maximum(self.counts + self.distance, size).astype(int) + 2
        return self._expand(np.minimum(bound, self.first_unused + max(0, steps - self.pending)))

    @staticmethod
    def plan_jointly(schedules: Sequence[Distance]) -> None:
        """Plan the next steps of several schedules at the same step, in one loop."""
        first = schedules[0]
        joined = copy.copy(first)
        for name in first.per_row:
            setattr(joined, name, np.concatenate([getattr(x, name) for x in schedules]))
        ends = np.cumsum([len(x.counts) for x in schedules])
        slots, first_unused = joined._queue(AHEAD)
        widths = np.maximum.reduceat(first_unused, np.r_[0, ends[:-1]], axis=1)
        for i, (x, end) in enumerate(zip(schedules, ends, strict=True)):
            columns = slice(end - len(x.counts), end)
            for name in ("n_kept", "first_unused", "recent_slots"):
                setattr(x, name, getattr(joined, name)[columns].copy())
            x.generated = joined.generated
            x._begin(slots[:, columns], widths[:, i].tolist())


@register_part("ratio")
@dataclass(frozen=True, kw_only=True)
class Ratio(Decode):
    """A float budget is the share of all tokens seen that a layer may keep, an int their number.

    While it keeps more, the token `distance` before the newest is dropped; the prompt's kept tokens
    and the `distance` most recent ones never are (PrefixKV, ElasticCache).

    Options:
        distance: how many tokens before the newest one the dropped token lies; 0 or more.
    """

    distance: NonNegativeInt = 25

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Return a `Distance` schedule with each row's size."""
        counts, lengths, base = rows.counts, rows.lengths, rows.capacity
        share = 0.0 * counts if rows.share is None else rows.share
        return Distance(self.distance, counts=counts, lengths=lengths, base=base, share=share)


def plan_together(schedules: Sequence[SlotSchedule]) -> None:
    """Plan the next steps of all `Distance` schedules that have none left, together if possible."""
    groups: dict[tuple[int, int], list[Distance]] = {}
    for schedule in schedules:
        if isinstance(schedule, Distance) and schedule.at == AHEAD:
            groups.setdefault((schedule.distance, schedule.generated), []).append(schedule)
    for group in groups.values():
        Distance.plan_jointly(group)


def spare(width: int, seen: int) -> int:
    """Return how many slots to allocate beyond `width` slots in use, after `seen` tokens.

    An eighth of those in use, so that blocks are seldom copied to grow, but not more than tokens
    were dropped, so that the cache stays smaller than the full one; at least 16.
    """
    return max(16, min(width // 8, seen - width))
