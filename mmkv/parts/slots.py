"""Which slot a generated token takes.

Attention does not care in which order keys lie once they carry their rotation, so the slot of the
token that a step drops is taken by the next one: no concatenation, constant shapes, and nothing is
written for a drop. Except for H2O, whose victim depends on the attention, the slots follow from the
sizes after the prefill: they are worked out on the host some steps ahead, and a step that needs
them on the device finds them there, without a synchronisation.

A schedule holds one entry per row of its block ([R]: a batch row and key-value head), or a single
entry ([1]) when all rows use the same slots, so that a step writes one slice.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

S = TypeVar("S", bound="SlotSchedule")

# Steps worked out, and sent to the device, at a time.
AHEAD = 64


class SlotSchedule:
    """`slots` of the next token, `width` slots in use with it, `advance` after the step.

    Attributes:
        gapless: no slot below `width` is empty during a step, in any row.
        shared: all rows use the same slots.
        drops: tokens are dropped, one a step at the most.
        weighs: which one depends on the attention that slots accumulate.
    """

    drops = True
    weighs = False

    # Per-row arrays, [R] or [1], in the order of the block's rows.
    rows: tuple[str, ...] = ("counts",)
    counts: np.ndarray
    table: Tensor | None = None

    def __init__(self, **arrays: np.ndarray) -> None:
        self.gapless = all(len(np.unique(a)) == 1 for a in arrays.values())
        self.shared = self.gapless
        for name, a in arrays.items():
            setattr(self, name, a[:1].copy() if self.gapless else a.copy())
        self.at = AHEAD
        self.last = int(self.counts.max())  # slots in use with the last step planned

    def step(self) -> tuple[np.ndarray, int]:
        """Work out one step more: the next token's slots, and how many are in use with it."""
        raise NotImplementedError

    @property
    def filling(self) -> bool:
        """Whether some row has still to drop its first token: its slots then follow otherwise."""
        return False

    def drop(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Find what a step drops, where that depends on the attention that slots accumulate."""

    def most(self, steps: int) -> int:
        """Slots in use at the most within the next `steps` steps."""
        return self.used + steps

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
        return self.on_device(device)[self.at]

    def prepare(self) -> None:
        """Work out the steps to come, so that the next one has nothing to send to the device."""
        self._planned()

    def slots_at(self, row: Tensor) -> Tensor:
        """The slots at `row` [1] of the table, int64 [R or 1], for a step that the host forgets."""
        return self.on_device(row.device).index_select(0, row)[0]

    def on_device(self, device: torch.device) -> Tensor:
        """The slots of this and the next steps, int64 [AHEAD, R or 1], this step's at `at`."""
        if self.table is None:
            self.table = send(self._planned()[0], device)
        return self.table

    def advance(self, steps: int = 1) -> None:
        """Count `steps` steps; the slots they free are the next ones to be taken."""
        for _ in range(steps):
            self._planned()
            self.at += 1

    def select(self: S, rows: np.ndarray) -> S:
        """The same schedule for a choice of rows, which may repeat (beam search)."""
        self._planned()
        new = copy.copy(self)
        chosen = slice(None) if self.shared else rows
        for name in self.rows:
            setattr(new, name, getattr(self, name)[chosen].copy())
        new.planned = self.planned[:, chosen]
        if self.table is not None:
            at = chosen if self.shared else send(rows, self.table.device)
            new.table = self.table[:, at].clone()
        return new

    def _planned(self) -> tuple[np.ndarray, list[int]]:
        if self.at == AHEAD:
            steps = [self.step() for _ in range(AHEAD)]
            self.planned = np.stack([slots for slots, _ in steps]).astype(np.int64)
            self.widths = [width for _, width in steps]
            self.last = self.widths[-1]
            self.at = 0
            if self.table is not None:  # in place: a captured graph reads it
                self.table.copy_(torch.from_numpy(self.planned), non_blocking=True)
        return self.planned, self.widths


class GrowingSlots(SlotSchedule):
    """Generated tokens are kept: one new slot a step, behind everything."""

    rows = ()
    drops = False

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.shared = True
        self.end = self.counts.max(keepdims=True)

    def step(self) -> tuple[np.ndarray, int]:
        """Behind everything."""
        slots, self.end = self.end, self.end + 1
        return slots, int(self.end[0])


class Ring(SlotSchedule):
    """Constant size: the oldest unprotected token is dropped (Local, StreamingLLM).

    Protected tokens lie in the first slots, the others behind them by age, with one spare slot: the
    slots behind the protected ones are a ring.
    """

    rows = ("counts", "protected", "capacity", "held")
    protected: np.ndarray
    capacity: np.ndarray
    held: np.ndarray

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.held = self.counts.copy()  # tokens held before the step, if none had been dropped

    def step(self) -> tuple[np.ndarray, int]:
        """The next slot of the ring; the oldest token lies there once it is full."""
        slots = self.protected + (self.held - self.protected) % (self.capacity - self.protected + 1)
        self.held = self.held + 1
        return slots, int(np.minimum(self.held, self.capacity + 1).max())

    def most(self, steps: int) -> int:
        """The constant size, and one spare slot, once they are reached."""
        return min(self.used + steps, int((self.capacity + 1).max()))


class Distance(SlotSchedule):
    """The token `distance` behind the newest is dropped while a layer holds more than its size.

    PrefixKV and ElasticCache. The size is `base` and the `share` of all tokens seen. The prompt's
    kept tokens and the `distance` most recent ones are never dropped, so a layer may hold those
    where they are more than its size.
    """

    rows = ("counts", "lengths", "base", "share", "held", "fresh", "recent")
    lengths: np.ndarray
    base: np.ndarray
    share: np.ndarray
    held: np.ndarray
    fresh: np.ndarray
    recent: np.ndarray

    def __init__(self, distance: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.distance, self.generated = distance, 0
        self.held = self.counts.copy()  # tokens held now
        self.fresh = self.counts.copy()  # the first slot never used
        # Slot of each of the last `distance` + 1 tokens, by step modulo their number; -1: none yet
        # or kept for good. The entry of the step to come is the slot that the last drop freed.
        self.recent = np.full((len(self.counts), distance + 1), -1)

    def step(self) -> tuple[np.ndarray, int]:
        """The slot freed by the last drop, or the next fresh one; then drop where too many."""
        now = self.generated % (self.distance + 1)
        slots = np.where(self.recent[:, now] >= 0, self.recent[:, now], self.fresh)
        self.fresh = np.maximum(self.fresh, slots + 1)
        self.recent[:, now] = slots
        self.generated += 1
        self.held = self.held + 1
        size = self.base + self.share * (self.lengths + self.generated)
        over = self.held > np.round(size)
        oldest = self.generated % (self.distance + 1)
        # A token that survives its turn is never a victim again.
        self.recent[:, oldest] = np.where(over, self.recent[:, oldest], -1)
        self.held = self.held - (self.recent[:, oldest] >= 0)
        return slots, int(self.fresh.max())

    def most(self, steps: int) -> int:
        """The recent tokens beyond what is kept, or the size once all of these are seen."""
        size = np.ceil(self.base + self.share * (self.lengths + self.generated + steps))
        held = np.maximum(self.counts + self.distance, size) + 2
        return int(min(held.max(), self.used + steps))


class HeavyHitterSlots(SlotSchedule):
    """Constant size: the token with the lowest accumulated attention outside the recent ones (H2O).

    The victim depends on the attention, so it stays on the device: `drop` finds it without
    synchronising, and the next token takes its slot.
    """

    rows = ("counts", "protected", "capacity", "recent", "held")
    weighs = True
    protected: np.ndarray
    capacity: np.ndarray
    recent: np.ndarray
    held: np.ndarray
    freed: Tensor | None = None
    guarded: Tensor

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.held = self.counts.copy()  # tokens held, if none had been dropped
        self.recent = np.maximum(self.recent, 1)  # the newest is never the victim
        # Whether a row may have nothing but protected and recent tokens to choose from.
        # Where padding lies between turns: places [R, n] of the prompt's last tokens, and its end.
        self.places: Tensor | None = None
        self.end = 0
        self.crowded = bool((self.capacity < self.protected + self.recent).any())
        self.columns: dict[str, int | Tensor] = {}
        self.scratch: tuple[Tensor, Tensor] | None = None

    @property
    def width(self) -> int:
        """Constant once the capacity is reached."""
        return int(np.minimum(self.held + 1, self.capacity + 1).max())

    @property
    def used(self) -> int:
        """One less than with the next token, whose slot is never known ahead."""
        return self.width - 1

    @property
    def full(self) -> bool:
        """Whether every row drops a token each step from now on."""
        return bool((self.held >= self.capacity).all())

    @property
    def filling(self) -> bool:
        """From the first drop on slots are victims'."""
        return self.freed is None or not self.full

    def slots(self, device: torch.device) -> int | Tensor:
        """The slot freed by the last victim; before the first, the next fresh one."""
        if self.freed is None:
            if self.shared:
                return int(self.held[0])
            self.freed = send(self.held, device)
        return self.freed

    def prepare(self) -> None:
        """Nothing: the victims are found on the device."""

    def slots_at(self, row: Tensor) -> Tensor:
        """The slots that the last step freed."""
        assert self.freed is not None
        return self.freed

    def most(self, steps: int) -> int:
        """The constant size, and one spare slot, once they are reached."""
        return min(self.used + steps, int((self.capacity + 1).max()))

    def advance(self, steps: int = 1) -> None:
        """Count a step; `drop` has found the victims."""
        self.held = self.held + steps

    def drop(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Find the tokens that are dropped after this step: the next ones take their slots.

        Args:
            mass: float32 [R, S], attention accumulated by each slot, inf where nothing lies.
            positions: [R, S], -1 where a slot is empty.
            newest: position of the token just written.
        """
        over = self.held >= self.capacity
        if not over.any():
            self.freed = None if self.shared else send(self.held + 1, mass.device)
            return
        victim = self._victim(mass, positions, newest)
        if not over.all():
            fresh, late = (send(a, mass.device) for a in (self.held + 1, over))
            victim = torch.where(late, victim, fresh)
        if self.freed is None:
            self.freed = victim
        else:  # in place: a captured graph reads it
            self.freed.copy_(victim)

    def select(self, rows: np.ndarray) -> HeavyHitterSlots:
        """The freed slot moves with its row."""
        new = copy.copy(self)
        new.columns, new.scratch = {}, None
        for name in self.rows:
            setattr(new, name, getattr(self, name)[slice(None) if self.shared else rows].copy())
        if self.freed is not None:
            new.freed = self.freed[send(rows, self.freed.device)]
        if self.places is not None:
            new.places = self.places[send(rows, self.places.device)]
        return new

    @property
    def most_recent(self) -> int:
        """The most recent tokens that any row keeps."""
        return int(self.recent.max())

    def behind(self, places: Tensor, end: int) -> None:
        """Count recent tokens over padding: the prompt's last ones [R, n] lie at `places`.

        Args:
            places: int64, ascending, n at least `most_recent`.
            end: T, where the prompt ends.
        """
        self.places, self.end = places, end

    def _newer_than(self, newest: int | Tensor, device: torch.device) -> int | Tensor:
        """The position behind which tokens are recent: an int, or [R, 1]."""
        recent = self._column("recent", device)
        if self.places is None:
            return newest - recent
        generated = newest - self.end + 1
        wide = torch.as_tensor(recent - generated, device=device).expand(len(self.places), 1)
        n = self.places.shape[1]
        of_prompt = self.places.gather(1, (n - wide).clamp(0, n - 1).long()) - 1
        return torch.where(wide > 0, of_prompt, newest - recent)

    def _victim(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> Tensor:
        # Into memory of their own: nothing as large as the cache is allocated in a step.
        if self.scratch is None or self.scratch[0].shape != mass.shape:
            self.scratch = torch.empty_like(mass), torch.empty_like(mass, dtype=torch.bool)
            slot = torch.arange(mass.shape[1], device=mass.device)
            self.guarded = slot < self._column("protected", mass.device)
        lightest, kept = self.scratch
        torch.gt(positions, self._newer_than(newest, mass.device), out=kept)
        if self.protected.any():
            kept.logical_or_(self.guarded)
        torch.where(kept, mass.new_full((), torch.inf), mass, out=lightest)
        if not self.crowded:
            return lightest.argmin(-1)
        # Where the recent ones fill the whole capacity, the oldest of them has to go.
        barred = (positions < 0) | self.guarded
        oldest = positions.masked_fill(barred, 2**31 - 1)
        none_left = (kept | barred).all(-1, keepdim=True)
        return torch.where(none_left, oldest.float(), lightest).argmin(-1)

    def _column(self, name: str, device: torch.device) -> int | Tensor:
        """A per-row array as [R, 1] on the device, or as an int where all rows have the same."""
        if name not in self.columns:
            a = getattr(self, name)
            same = len(np.unique(a)) == 1
            self.columns[name] = int(a[0]) if same else send(a, device)[:, None]
        return self.columns[name]


class LeastAttended(HeavyHitterSlots):
    """Constant size: the token that the newest query attends to least, over all heads (TOVA).

    The heads of a layer hold the same tokens in the same slots.
    """

    def __init__(self, heads: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.heads = heads

    def drop(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """The mean over a layer's heads decides; then nothing of this step is left."""
        of_layer = mass.unflatten(0, (-1, self.heads)).mean(1, keepdim=True)
        mean = of_layer.expand(-1, self.heads, -1).flatten(0, 1)
        super().drop(mean, positions, newest)
        mass.masked_fill_(mass < torch.inf, 0.0)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for what the device has still to do."""
    return torch.from_numpy(array.copy()).to(device, non_blocking=True)
