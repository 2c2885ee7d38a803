"""Where kept keys and values lie on a GPU: all rows of a layer in one flat store, without padding.

One kernel writes a step's pairs and attends to all rows, whatever they hold (`mmkv.kernels`); on a
CPU rectangles are faster (`mmkv.cache.head_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmkv import kernels
from mmkv.cache.clock import GraphInputs
from mmkv.cache.head_groups import HeadGroup, spare
from mmkv.kernels.ragged import Lightest, RaggedStore, StepInputs
from mmkv.kernels.twins import free_lightest
from mmkv.parts.slots import SlotSchedule, send
from mmkv.parts.victims import HeavyHitterSlots, LeastAttended

# More tokens than any model sees.
_EVER = 2**40


@dataclass(eq=False)
class RaggedRows:
    """All R = B * H rows of a layer, each with slots of its own, in place of `HeadGroup`s.

    Attributes:
        store: the slots of all rows.
        capacity: [R], slots that each row has room for.
        until: tokens seen from which on slots may run out.
        schedule: which slot is next.
        lightest: what a step drops where that depends on attention; None elsewhere.
        rows: None: all of them, in order.
        frozen: memory stays where it is, since a graph replays the steps.
    """

    store: RaggedStore
    capacity: np.ndarray
    until: int
    schedule: SlotSchedule
    lightest: Lightest | None
    rows: None = None
    frozen: bool = False

    @classmethod
    def of(
        cls, store: RaggedStore, capacity: np.ndarray, schedule: SlotSchedule, until: int
    ) -> RaggedRows:
        """Take over a store of R rows with room for the steps to come until `until` are seen."""
        lightest = None
        if isinstance(schedule, HeavyHitterSlots):
            R, device = len(capacity), store.keys.device

            def column(x: np.ndarray) -> Tensor:
                return send(np.broadcast_to(x, (R,)).astype(np.int32), device)

            lightest = Lightest(
                store.lengths.long(),
                column(schedule.protected),
                column(schedule.recent),
                column(schedule.capacity),
                schedule.places,
                schedule.end,
                schedule.heads if isinstance(schedule, LeastAttended) else 1,
            )
        return cls(store, capacity, _until(schedule, capacity, until), schedule, lightest)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys, values and weights, empty slots included."""
        held = (self.store.keys, self.store.values, self.store.log_weights)
        return sum(x.untyped_storage().nbytes() for x in held if x is not None)

    @property
    def taken(self) -> tuple[int, int]:
        """Slots in use, and the rows."""
        rows = self.capacity.shape
        return int(np.broadcast_to(self.schedule.reach(0), rows).sum()), len(self.capacity)

    @property
    def slots(self) -> int:
        """How many slots there are, empty ones included."""
        return len(self.store.keys)

    @property
    def keys(self) -> Tensor:
        """[R, S, D], a copy; what lies behind a row's slots does not matter, here and below."""
        return self.store.keys[self._places]

    @property
    def values(self) -> Tensor:
        """[R, S, Dv], a copy."""
        return self.store.values[self._places]

    @property
    def positions(self) -> Tensor:
        """int32 [R, S], -1 where a slot is empty; a copy."""
        slot = torch.arange(int(self.capacity.max()), device=self.store.keys.device)
        positions = self.store.positions[self._places]
        return positions.masked_fill(slot >= self.store.lengths[:, None], -1)

    @property
    def mass(self) -> Tensor | None:
        """float32 [R, S], a copy."""
        return None if self.store.mass is None else self.store.mass[self._places]

    @property
    def log_weights(self) -> Tensor | None:
        """float32 [R, S], a copy."""
        return None if self.store.log_weights is None else self.store.log_weights[self._places]

    @property
    def held(self) -> Tensor:
        """Positions [R, S], -1 where empty: where the next token goes, nothing is held any more."""
        positions = self.positions
        own = self._slots(None)[:, None]
        inside = own.clamp(max=positions.shape[1] - 1)
        kept = positions.gather(1, inside).masked_fill(own == inside, -1)
        return positions.scatter(1, inside, kept)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: int,
        clock: GraphInputs | None,
        *,
        hidden: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Write, attend, drop; see `HeadGroup.step`. The clock says which step this is."""
        assert clock is not None
        q = key.shape[1]
        if not self.frozen:
            self.reserve(first, q)
        alike = {x.dtype for x in (query, key, value)} == {self.store.keys.dtype}
        if q > 1 or hidden is not None or query.requires_grad or not alike:
            out = self._step_in_torch(query, key, value, first, clock, hidden, scale, softcap)
        else:
            out = kernels.decode_attention(
                query,
                key[:, 0],
                value[:, 0],
                self.store,
                self._inputs(clock),
                scale=scale,
                softcap=softcap,
                lightest=self.lightest,
            )
        self.schedule.advance(q)
        return out

    def reserve(self, seen: int, steps: int, ahead: int | None = None) -> None:
        """Have slots for `steps` more tokens behind `seen`; where that means to move, for more.

        Args:
            seen: tokens seen.
            steps: of which the slots are needed.
            ahead: how many more to set slots aside for; None: few.
        """
        if seen + steps <= self.until:
            return
        if ahead is None:
            ahead = spare(self.schedule.used, seen)
        capacity = np.broadcast_to(self.schedule.reach(steps + ahead), self.capacity.shape)
        self.until = _until(self.schedule, capacity, seen + steps + ahead)
        if (capacity > self.capacity).any():
            capacity = np.maximum(capacity, self.capacity)
            self.store, self.capacity = self._moved(None, capacity), capacity

    def freeze(self, seen: int, steps: int) -> None:
        """Let a graph replay up to `steps` steps."""
        self.reserve(seen, steps, 0)
        self.frozen = True

    def thaw(self) -> None:
        """Memory may move again."""
        self.frozen = False

    def fits(self, seen: int) -> bool:
        """Whether a graph can replay the next step."""
        return self.frozen and seen < self.until

    @property
    def filling(self) -> bool:
        """False: the device finds the slots of dropped tokens and fresh ones alike."""
        return False

    @property
    def mutable(self) -> list[Tensor]:
        """What a step adds to; all else that it writes, the same step writes again."""
        found = [self.store.lengths, self.store.mass]
        return [x for x in (*found, self.lightest and self.lightest.freed) if x is not None]

    def select(self, chosen: np.ndarray, rows: Tensor | None = None) -> RaggedRows:
        """A copy holding the rows `chosen`, which may repeat; `rows` is None, as for all rows."""
        index = torch.from_numpy(chosen).to(self.store.keys.device)
        capacity, lightest = self.capacity[chosen], self.lightest
        if lightest is not None:
            of_rows = {k: getattr(lightest, k) for k in Lightest._fields}
            moved = {k: x[index] for k, x in of_rows.items() if isinstance(x, Tensor)}
            lightest = lightest._replace(**moved)
        return replace(
            self,
            store=self._moved(index, capacity),
            capacity=capacity,
            schedule=self.schedule.select(chosen),
            lightest=lightest,
            frozen=False,
        )

    @property
    def _places(self) -> Tensor:
        """Where the slots of each row lie, int64 [R, S]; the row's last one where it has fewer."""
        device = self.store.keys.device
        slot = torch.arange(int(self.capacity.max()), device=device)
        last = send(self.capacity - 1, device)[:, None]
        return self.store.starts[:, None] + torch.minimum(slot, last)

    def _slots(self, clock: GraphInputs | None) -> Tensor:
        """The next token's slot of each row, int64 [R]."""
        if self.lightest is not None:
            return self.lightest.freed
        device = self.store.keys.device
        if clock is not None:
            slots = self.schedule.slots_at(clock.row)
        else:
            slots = self.schedule.slots(device)
        if isinstance(slots, int):
            return torch.full(self.capacity.shape, slots, device=device)
        return slots.expand(len(self.capacity))

    def _inputs(self, clock: GraphInputs) -> StepInputs:
        """What the kernel reads of a step."""
        most = int(self.capacity.max())
        if self.lightest is not None:
            freed = self.lightest.freed.expand(1, -1)
            return StepInputs(freed, None, clock.row, clock.position, most)
        table = self.schedule.on_device(self.store.keys.device)
        entries = self.schedule.entries(table.device)
        return StepInputs(table, entries, clock.row, clock.position, most)

    def _step_in_torch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: int,
        clock: GraphInputs,
        hidden: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """`step` for what the kernel does not do, by way of a rectangle."""
        store, R, q = self.store, len(self.capacity), key.shape[1]
        new = torch.arange(q, device=key.device)
        slots = self._slots(clock)[:, None] + new
        own = store.starts[:, None] + slots
        store.keys[own] = key.to(store.keys.dtype)
        store.values[own] = value.to(store.values.dtype)
        store.positions[own] = (clock.position + new).int().expand(R, q)
        store.lengths.copy_(torch.maximum(store.lengths, (slots[:, -1] + 1).int()))
        for x in (store.mass, store.log_weights):
            if x is not None:
                x[own] = 0.0
        whole = HeadGroup.of(
            self.keys,
            self.values,
            self.positions,
            self.mass,
            self.schedule,
            log_weights=self.log_weights,
        )
        whole.freeze(first, 0)
        out = whole.attend(query, q, first, scale=scale, softcap=softcap, hidden=hidden)
        if self.lightest is not None:
            assert store.mass is not None
            assert whole.mass is not None
            if self.lightest.heads == 1:
                slot = torch.arange(whole.mass.shape[1], device=key.device)
                used = slot < store.lengths[:, None]
                store.mass[self._places] = whole.mass.where(used, store.mass[self._places])
            free_lightest(store, self._inputs(clock), self.lightest, whole.mass)
        return out

    def _moved(self, rows: Tensor | None, capacity: np.ndarray) -> RaggedStore:
        """The slots of `rows`, or of all, in fresh memory with room for `capacity` [R]."""
        old, device = self.store, self.store.keys.device
        ends = send(np.cumsum(capacity), device)
        starts = ends - send(capacity, device)
        row, slot = rows_and_slots(starts, int(capacity.sum()))
        source = torch.arange(len(self.capacity), device=device) if rows is None else rows
        last = send(self.capacity - 1, device)[source][row]
        at = old.starts[source][row] + torch.minimum(slot, last)
        lengths, mass = old.lengths[source], None
        if old.mass is not None:  # a new token has received nothing
            mass = old.mass[at].masked_fill_(slot >= lengths[row], 0.0)
        log_weights = None if old.log_weights is None else old.log_weights[at]
        return RaggedStore(
            old.keys[at],
            old.values[at],
            old.positions[at],
            log_weights,
            mass,
            starts,
            lengths,
        )


def _until(schedule: SlotSchedule, capacity: np.ndarray, until: int) -> int:
    """`until`, or for ever where the rows never need more than their `capacity`."""
    return _EVER if (schedule.reach(_EVER) <= capacity).all() else until


def rows_and_slots(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of each of `total` places in flat memory, its row and its slot there: int64 [total]."""
    place = torch.arange(total, device=starts.device)
    row = torch.searchsorted(starts, place, right=True) - 1
    return row, place - starts[row]
