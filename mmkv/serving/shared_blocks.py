"""The kept pairs of many requests, in blocks that they share.

Rows of similar length lie in one padded block of a layer, whoever they belong to: attention is one
call a block, and the new tokens of all its rows are one indexed copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.padded_blocks import attend
from mmkv.parts.slots import send
from mmkv.serving.behind import part

# Widths are multiples of it, as fused kernels want of a bias.
STEP = 16


def capacity(slots: int, step: int | None = None) -> int:
    """Slots that are promised to a row of at most `slots`: up to a quarter more, or 31.

    Few different capacities mean few blocks a layer. With a `step` it is the next multiple of that.
    """
    step = step or max(2 * STEP, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // step) * step


class SharedBlock:
    """Rows of many requests that hold about as much at the most.

    Attributes:
        capacity: slots of a row at the most.
        behind: whether they attend to a shared prefix before what they hold.
        stored: keys [C, S, D], values [C, S, Dv] and bias [C, S, 1], of which the first rows are in
            use. The bias is added to the logits: -inf where a slot is empty, elsewhere the
            logarithm of what its pair weighs.
        rows: int64 [n], the rows of the batch that lie here.
        used: int64 [n], slots of each that are in use.
    """

    def __init__(self, like: Any, capacity: int, behind: bool = False) -> None:
        self.capacity, self.behind = capacity, behind
        widths = (like.keys.shape[-1], like.values.shape[-1], 1)
        self.stored = [like.keys.new_empty(0, 0, width) for width in widths]
        self.rows = self.used = np.empty(0, dtype=np.int64)

    @property
    def slot_bytes(self) -> int:
        """Of a slot's key and value."""
        return sum(x.shape[-1] * x.element_size() for x in self.stored[:2])

    @property
    def held(self) -> int:
        """Bytes held, rows that are nobody's included."""
        C, S, _ = self.stored[0].shape
        return C * S * self.slot_bytes

    @property
    def promised(self) -> int:
        """Bytes that the rows come to at the most."""
        return len(self.rows) * self.capacity * self.slot_bytes

    def add(self, rows: np.ndarray, block: Any) -> None:
        """Copy the pairs of a request's block into rows of this one."""
        width = min(block.schedule.width, block.keys.shape[1])
        first, n = len(self.rows), len(self.rows) + len(rows)
        C, S, _ = self.stored[0].shape
        if n > C or width > S:
            self.resize(n, max(width, self.used.max(initial=0)))
        given = (block.keys, block.values, block.slot_bias().mT)
        for x, new, empty in zip(self.stored, given, (0, 0, -torch.inf), strict=True):
            x[first:n, :width] = new[:, :width]
            x[first:n, width:] = empty  # what others left there may not even be numbers
        self.rows = np.append(self.rows, rows)
        self.used = np.append(self.used, np.full(len(rows), width))

    def remove(self, gone: np.ndarray) -> None:
        """Give back the rows where `gone`, bool [n], is true; the last ones move there."""
        n = len(gone) - int(gone.sum())
        free, moved = np.flatnonzero(gone[:n]), n + np.flatnonzero(~gone[n:])
        if len(moved):
            device = self.stored[0].device
            target, source = send(free, device), send(moved, device)
            for x in self.stored:
                x[target] = x[source]
            self.rows[free], self.used[free] = self.rows[moved], self.used[moved]
        self.rows, self.used = self.rows[:n], self.used[:n]
        if 0 < 2 * n < len(self.stored[0]):
            self.resize(n, self.used.max())

    def resize(self, rows: int, width: int) -> None:
        """Move to memory of so many rows and slots, with an eighth more slots to grow into."""
        slots = min(self.capacity, -(-(width + width // 8) // STEP) * STEP)
        made: list[Tensor] = []
        for x, empty in zip(self.stored, (0, 0, -torch.inf), strict=True):
            kept = x[: len(self.rows), :slots]
            made.append(new := x.new_full((rows, slots, x.shape[-1]), empty))
            new[: kept.shape[0], : kept.shape[1]] = kept
        self.stored = made

    def advance(self, slots: np.ndarray) -> np.ndarray:
        """Have the slots [n] of the next tokens; where they lie, counted over all rows."""
        self.used = np.maximum(self.used, slots + 1)
        if (width := int(self.used.max())) > self.stored[0].shape[1]:
            self.resize(len(self.rows), width)
        return np.arange(len(slots)) * self.stored[0].shape[1] + slots

    def attend(
        self, at: Tensor, query: Tensor, key: Tensor, value: Tensor, *before: Tensor, **options: Any
    ) -> Tensor:
        """Write new pairs [n, D] `at` the places of `advance`; what queries [n, G, D] then find.

        Before it they found in shared prefixes, if the pool has any, what `part` gives.
        """
        keys, values, bias = self.stored
        keys.flatten(0, 1).index_copy_(0, at, key)
        values.flatten(0, 1).index_copy_(0, at, value)
        bias.flatten().index_fill_(0, at, 0.0)
        width = -(-int(self.used.max()) // STEP) * STEP
        keys, values, bias = (x[: len(at), :width] for x in self.stored)
        if not self.behind:
            return attend(query, keys, values, bias.mT, **options)
        out, total = part(query, keys, values, bias.mT, **options)
        mine = torch.sigmoid(total - before[1])[..., None]
        return torch.lerp(before[0], out, mine).to(query.dtype)


class SharedLayer:
    """One layer's blocks, by their capacity and whether they are behind shared prefixes.

    Attributes:
        rows: int64 [R], the rows of the batch as they lie in the blocks; None: to be found.
        order: the same on the device, and `back` the way back; None where it is the batch's order.
        at: int64 [n] for each block, where the next tokens go.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bool], SharedBlock] = {}
        self.rows: np.ndarray | None = None
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        self.at: list[Tensor] = []

    def __iter__(self) -> Iterator[SharedBlock]:
        return iter(self.blocks.values())

    @property
    def device(self) -> torch.device:
        """Where its pairs are."""
        return next(iter(self)).stored[0].device

    @property
    def sizes(self) -> list[int]:
        """Rows of each block."""
        return [len(x.rows) for x in self]

    def remove(self, member: int, last: int, heads: int) -> None:
        """Give back the rows of a member of the batch, whose place the last one takes."""
        for block in list(self):
            block.remove(block.rows // heads == member)
            block.rows[block.rows // heads == last] -= (last - member) * heads
            if not len(block.rows):
                del self.blocks[block.capacity, block.behind]
        self.rows = None

    def advance(self, slots: np.ndarray) -> np.ndarray:
        """Have the slots [R] of the next tokens; where they lie, block by block."""
        if self.rows is None:
            self.rows = np.concatenate([x.rows for x in self])
            self.order = self.back = None
            if (self.rows[1:] < self.rows[:-1]).any():
                self.order = send(self.rows, self.device)
                self.back = send(self.rows.argsort(), self.device)
        split = np.split(slots[self.rows], np.cumsum(self.sizes)[:-1])
        return np.concatenate([x.advance(mine) for x, mine in zip(self, split, strict=True)])

    def attend(self, *given: Tensor, **options: Any) -> Tensor:
        """As `SharedBlock.attend` where `at` says, with all rows of the layer."""
        if self.order is not None:
            given = tuple(x.index_select(0, self.order) for x in given)
        parts = zip(self, self.at, *(x.split(self.sizes) for x in given), strict=True)
        out = torch.cat([block.attend(*mine, **options) for block, *mine in parts])
        return out if self.back is None else out.index_select(0, self.back)
