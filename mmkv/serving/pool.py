"""The kept pairs of many requests in pages of one store, so that a step attends to all at once.

Each layer's keys and values lie in pages of a few slots, and a table says which pages are a row's,
a row being one key-value head of one request (PagedAttention, Kwon et al., arXiv 2309.06180). A
step writes the new pairs of all rows at once, attends page by page, and adds up each row's pages;
what it costs the host depends on the layers alone. Which slot a token takes is what each request's
own schedules say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.layer import KeptKV
from mmkv.cache.modes import outside_inference_mode, refuse_gradient
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.cache.phases import Decoding
from mmkv.parts.slots import SlotSchedule, send
from mmkv.parts.slots import plan as plan_slots

# Slots of a page.
PAGE = 16


class Pages:
    """One layer's pages; all that are in use lie before those that are not.

    Attributes:
        keys, values: [C, PAGE, D].
        bias: [C, 1, PAGE], added to the logits: -inf where a slot is empty, elsewhere the logarithm
            of what its pair weighs.
        used: pages in use.
        row: int64 [used], the row of each page.
        order: int64 [used], the pages row by row.
        starts: int64 [R], where each row begins in `order`.
        stale: whether these three do not say what the table says.
    """

    row: Tensor
    order: Tensor
    starts: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys.new_empty(0, PAGE, keys.shape[-1])
        self.values = values.new_empty(0, PAGE, values.shape[-1])
        self.bias = keys.new_empty(0, 1, PAGE)
        self.used, self.stale = 0, True

    @property
    def page_bytes(self) -> int:
        """Of one page's keys and values."""
        return sum(PAGE * x.shape[-1] * x.element_size() for x in (self.keys, self.values))

    def add(self, n: int, most: int) -> np.ndarray:
        """The numbers of n pages more, of which the layer will need `most` in all."""
        used = self.used + n
        if used > len(self.keys):
            self.resize(max(used, min(used + used // 8, most)))
        new = np.arange(self.used, used)
        self.used, self.stale = used, True
        return new

    def clear(self, first: int) -> None:
        """Empty the pages from `first` on: what others left there may not even be numbers."""
        self.keys[first : self.used] = 0.0
        self.values[first : self.used] = 0.0
        self.bias[first : self.used] = -torch.inf

    def remove(self, gone: np.ndarray) -> np.ndarray:
        """Give back pages; the last ones move to where they were.

        Returns:
            int32 [pages in use before], the new number of each.
        """
        numbers = np.arange(self.used, dtype=np.int32)
        self.used -= len(gone)
        stays = np.ones(len(numbers), dtype=bool)
        stays[gone] = False
        moved = self.used + np.flatnonzero(stays[self.used :])
        free = np.flatnonzero(~stays[: self.used])
        if len(moved):
            source, target = send(moved, self.keys.device), send(free, self.keys.device)
            for x in (self.keys, self.values, self.bias):
                x[target] = x[source]
        numbers[moved] = free
        self.stale = True
        return numbers

    def resize(self, capacity: int) -> None:
        """Move to memory for `capacity` pages, one tensor after another."""
        for name in ("keys", "values", "bias"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(capacity, *old.shape[1:])
            new[: self.used] = old[: self.used]
            setattr(self, name, new)

    def index(self, table: np.ndarray) -> None:
        """Take in which pages are whose: table [R, M], -1 where a row has none."""
        here, device = table >= 0, self.keys.device
        order, counts = table[here].astype(np.int64), here.sum(1)
        row = np.empty_like(order)
        row[order] = np.repeat(np.arange(len(table)), counts)
        self.row, self.order = send(row, device), send(order, device)
        self.starts, self.stale = send(np.cumsum(counts) - counts, device), False

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, at: Tensor, scale: float, softcap: Any
    ) -> Tensor:
        """Write the new pair of each row into its slot, and attend to all that the row holds.

        Args:
            query: [R, G, D].
            key, value: [R, D].
            at: int64 [R], the slot, counted over all pages.
            scale: factor of the query-key products.
            softcap: bound of the logits, or None.

        Returns:
            [R, G, Dv].
        """
        self.keys.flatten(0, 1).index_copy_(0, at, key)
        self.values.flatten(0, 1).index_copy_(0, at, value)
        self.bias.flatten().index_fill_(0, at, 0.0)
        keys, values, bias = (x[: self.used] for x in (self.keys, self.values, self.bias))
        asked = query.index_select(0, self.row)
        if softcap is None:
            logits = torch.baddbmm(bias, asked, keys.mT, alpha=scale)
        else:
            logits = softcap * torch.tanh((asked * scale) @ keys.mT / softcap) + bias
        highest = embedding_bag(self.order, logits.amax(-1), self.starts, mode="max")
        weights = logits.sub_(highest.index_select(0, self.row)[..., None]).exp_()
        total = embedding_bag(self.order, weights.sum(-1), self.starts, mode="sum")
        found = (weights @ values).flatten(1)
        out = embedding_bag(self.order, found, self.starts, mode="sum")
        return out.view(*total.shape, -1) / total[..., None]


@dataclass(eq=False)
class Member:
    """A request in the pool.

    Attributes:
        owner: who brought it.
        cache: what it was read into; its layers hold nothing any more.
        schedules: of all its blocks.
        columns: [L, H], where the slots of each layer's heads lie in those of `schedules`.
        most: [L], pages that it takes at the most.
        slots: [n, L, H], the slots of the next steps, from `at` on.
    """

    owner: Any
    cache: CompressedCache
    schedules: list[SlotSchedule]
    columns: np.ndarray
    most: np.ndarray
    slots: np.ndarray
    at: int = 0

    @classmethod
    def of(cls, owner: Any, cache: CompressedCache, new: int) -> Member:
        """A cache whose pairs are going into the pool, where `new` more tokens will come."""
        schedules = [x.schedule for layer in cache.compressed for x in layer.keeping().blocks]
        plan_slots(schedules)
        columns, most, end = list[np.ndarray](), list[int](), 0
        for layer in cache.compressed:
            kept = layer.keeping()
            mine, pages = np.empty(kept.heads, dtype=np.int64), 0
            for block in kept.blocks:
                rows, schedule = _rows(block), block.schedule
                schedule.prepare()
                mine[rows] = end + schedule.own_columns(len(rows))
                end += schedule.planned.shape[1]
                pages += len(rows) * -(-schedule.most(new) // PAGE)
            columns.append(mine)
            most.append(pages)
        slots = np.empty((0, len(columns), len(columns[0])), dtype=np.int64)
        return cls(owner, cache, schedules, np.stack(columns), np.array(most), slots)

    @property
    def due(self) -> bool:
        """Whether the steps to come are to be worked out."""
        return self.at == len(self.slots)

    def next(self) -> np.ndarray:
        """The next token's slots [L, H]."""
        if self.due:
            found = np.concatenate([x.ahead() for x in self.schedules], axis=1)
            self.slots, self.at = found[:, self.columns], 0
        self.at += 1
        return self.slots[self.at - 1]


class Pool:
    """Requests whose kept pairs lie together.

    Attributes:
        members: in the order of the batch's rows.
        layers: the pages of each.
        table: int32 [L, B * H, M], the pages of each row, by slot; -1 where it has none.
        most: bytes that the members may come to.
        spare: bytes held beyond those, which `trim` gives back.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.layers: list[Pages] = []
        self.table = np.empty((0, 0, 0), dtype=np.int32)
        self.at: list[Tensor] = []
        self.most = self.spare = 0
        # Pages of each layer that the members may come to.
        self._most: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values, pages that are nobody's included."""
        return sum(len(x.keys) * x.page_bytes for x in self.layers)

    def _count(self) -> None:
        """Who is here has changed."""
        none = np.zeros(len(self.layers), dtype=int)
        self._most = sum((x.most for x in self.members), none).tolist()
        pages = list(zip(self.layers, self._most, strict=True))
        self.most = sum(n * x.page_bytes for x, n in pages)
        self.spare = sum(max(0, len(x.keys) - n) * x.page_bytes for x, n in pages)

    def takes(self, cache: CompressedCache) -> bool:
        """Whether a cache can join: one that attends to what it holds, and does no more."""
        if not isinstance(cache.phase, Decoding) or cache.observes_replies:
            return False
        kept = [x.state for x in cache.compressed if isinstance(x.state, KeptKV)]
        return (
            len(kept) == len(cache.layers)
            and {x.batch for x in kept} == {1}
            and len({x.heads for x in kept}) == 1
            and all(_plain(block) for x in kept for block in x.blocks)
        )

    def join(self, owner: Any, cache: CompressedCache, new: int) -> Member:
        """Move what a cache of one row keeps into the pool, layer by layer.

        Args:
            owner: whose it is.
            cache: one that the pool `takes`; it holds nothing any more afterwards.
            new: tokens that will be generated, at the most.
        """
        member = Member.of(owner, cache, new)
        states = [x.keeping() for x in cache.compressed]
        H, B = states[0].heads, len(self.members)
        with outside_inference_mode(), torch.no_grad():
            if not self.members:
                pairs: list[Any] = [x.blocks[0] for x in states]
                self.layers = [Pages(x.keys, x.values) for x in pairs]
                self.table = np.empty((len(states), 0, 1), dtype=np.int32)
            self.members.append(member)
            self.table = np.pad(self.table, ((0, 0), (0, H), (0, 0)), constant_values=-1)
            self._count()
            try:
                for i, layer in enumerate(cache.compressed):
                    kept, layer.state = states.pop(0), None
                    for block in kept.blocks:
                        self._take_in(i, B * H + _rows(block), block)
            except Exception:
                self.leave(member)
                raise
        return member

    def _take_in(self, layer: int, rows: np.ndarray, block: Any) -> None:
        """Copy what a block holds into pages of these rows."""
        filled = block.positions >= 0
        missing = -filled.shape[1] % PAGE
        filled = pad(filled, (0, missing)).unflatten(1, (-1, PAGE))
        used = filled.any(-1)
        row, number = (x.cpu().numpy() for x in used.nonzero(as_tuple=True))
        pages = self.layers[layer]
        new = pages.add(len(row), self._most[layer])
        self._widen(filled.shape[1])
        self.table[layer, rows[row], number] = new
        empty = ~filled[used]

        def taken(x: Tensor) -> Tensor:
            x = pad(x, (0,) * (2 * x.ndim - 3) + (missing,))
            return x.unflatten(1, (-1, PAGE))[used]

        here = slice(pages.used - len(new), pages.used)
        pages.keys[here] = taken(block.keys).masked_fill_(empty[..., None], 0.0)
        pages.values[here] = taken(block.values).masked_fill_(empty[..., None], 0.0)
        weights = block.log_weights
        pages.bias[here, 0] = 0.0 if weights is None else taken(weights).to(pages.bias.dtype)
        pages.bias[here, 0] = pages.bias[here, 0].masked_fill(empty, -torch.inf)

    def leave(self, member: Member) -> None:
        """Give back what a member holds; the others' pages may move."""
        H = member.columns.shape[1]
        first = self.members.index(member) * H
        rows = slice(first, first + H)
        for i, pages in enumerate(self.layers):
            gone = self.table[i, rows]
            numbers = np.append(pages.remove(gone[gone >= 0]), np.int32(-1))
            self.table[i] = numbers[self.table[i]]
        self.table = np.delete(self.table, rows, axis=1)
        wide = np.flatnonzero((self.table >= 0).any((0, 1)))
        self.table = self.table[..., : wide.max(initial=0) + 1]
        self.members.remove(member)
        for pages in self.layers:
            if len(pages.keys) > 2 * pages.used:
                pages.resize(pages.used)
        self._count()

    def trim(self) -> None:
        """Give back the pages that no member will need."""
        for pages, most in zip(self.layers, self._most, strict=True):
            if len(pages.keys) > most:
                pages.resize(most)
        self._count()

    def bytes_of(self, member: Member) -> int:
        """Of a member's pages."""
        H = member.columns.shape[1]
        first = self.members.index(member) * H
        taken = (self.table[:, first : first + H] >= 0).sum((1, 2))
        return sum(int(n) * x.page_bytes for n, x in zip(taken, self.layers, strict=True))

    def step(self) -> None:
        """Before one token of each member: the slots they take, and pages where these are new."""
        plan_slots([x for member in self.members if member.due for x in member.schedules])
        slots = np.concatenate([x.next() for x in self.members], axis=1)  # [L, R]
        page, inside = np.divmod(slots, PAGE)
        self._widen(int(page.max()) + 1)
        found = np.take_along_axis(self.table, page[..., None], axis=2)[..., 0]
        for i in np.flatnonzero((found < 0).any(1)).tolist():
            rows, pages = np.flatnonzero(found[i] < 0), self.layers[i]
            new = pages.add(len(rows), self._most[i])
            pages.clear(int(new[0]))
            self.table[i, rows, page[i, rows]] = found[i, rows] = new
        for pages, table in zip(self.layers, self.table, strict=True):
            if pages.stale:
                pages.index(table)
        places = found.astype(np.int64) * PAGE + inside
        self.at = [send(x, y.keys.device) for x, y in zip(places, self.layers, strict=True)]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        softcap: float | None,
    ) -> Tensor:
        """One layer's attention of a step: query [B, Hq, 1, D] -> [B, 1, Hq, Dv].

        The other arguments are those of `CompressedCache.attend`.
        """
        (B, Hq, _, D), R = query.shape, self.table.shape[1]
        factor = D**-0.5 if scale is None else scale
        rows, pages = query.reshape(R, -1, D), self.layers[layer]
        key, value = (x.detach().reshape(R, -1).to(pages.keys.dtype) for x in (key, value))
        with outside_inference_mode():
            out = pages.attend(rows, key, value, self.at[layer], factor, softcap)
        return refuse_gradient(out.view(B, 1, Hq, -1))

    def _widen(self, pages: int) -> None:
        """Have room in the table for so many pages a row."""
        if (more := pages - self.table.shape[2]) > 0:
            self.table = np.pad(self.table, ((0, 0), (0, 0), (0, more)), constant_values=-1)


def _rows(block: Any) -> np.ndarray:
    """The heads of a block."""
    return np.arange(len(block.positions)) if block.rows is None else block.rows.cpu().numpy()


def _plain(block: Any) -> bool:
    """Whether a block's attention is that of its pairs with a bias, in the type they lie in."""
    return (
        isinstance(block, PaddedBlock)
        and isinstance(block.keys, Tensor)
        and block.keys.dtype == torch.float32
        and block.inv_freq is None
        and not block.schedule.needs_decode_attention
        and not block.frozen
    )
