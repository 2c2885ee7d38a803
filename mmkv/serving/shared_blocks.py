"""The kept pairs of many requests, in blocks that they share; and prefixes that they share.

Rows of similar length lie in one padded block of a layer, whoever they belong to: attention is one
call a block, and the new tokens of all its rows are one indexed copy. The kept pairs of a shared
prefix are attended to where they lie, and not copied: attention over two sets of pairs is that over
each, weighed by the sums of their exponentials. With `out` and `total`, the logarithm of such a
sum, of both, the second set's share is sigmoid(total2 - total1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.padded_blocks import PaddedBlock, attend, masked_logits
from mmkv.contexts import Context
from mmkv.parts.slots import GrowingSlots, send

# Widths are multiples of it, as fused kernels want of a bias.
STEP = 16


def capacity(slots: int, step: int | None = None) -> int:
    """Slots that are promised to a row of at most `slots`: up to a quarter more, or 31.

    Few different capacities mean few blocks a layer. With a `step` it is the next multiple of that.
    """
    step = step or max(2 * STEP, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // step) * step


class SharedBlock:
    """Rows of many requests that hold about as much, at most `capacity` slots.

    Where they are `behind`, they attend to a shared prefix before what they hold.
    """

    def __init__(self, like: Any, capacity: int, behind: bool = False) -> None:
        self.capacity, self.behind = capacity, behind
        # Keys [C, S, D], values [C, S, Dv] and bias [C, S, 1], of which the first rows are in use.
        # The bias is added to the logits: -inf where a slot is empty, elsewhere the logarithm of
        # what its pair weighs.
        widths = (like.keys.shape[-1], like.values.shape[-1], 1)
        self.stored = [like.keys.new_empty(0, 0, width) for width in widths]
        # The rows of the batch that lie here, int64 [n], and how many slots of each are in use.
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
    """One layer's blocks, by their capacity and whether they are behind shared prefixes."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bool], SharedBlock] = {}
        # The rows of the batch as they lie in the blocks, int64 [R]; None: to be found.
        self.rows: np.ndarray | None = None
        # The same on the device, and the way back; None where it is the batch's order.
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        self.at: list[Tensor] = []  # where the next tokens go, int64 [n] for each block

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


class SharedPrefix:
    """The kept pairs of a context, which stays as it is, that members of a pool attend to."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # Places in the batch, int64 [m] on each device.
        self.members: dict[torch.device, Tensor] = {}
        self._layers = [
            [_in_use(x) for x in layer.keeping().blocks if x.schedule.used]
            for layer in context.cache.compressed
        ]

    def attend(
        self, layer: int, query: Tensor, width: int, *, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """What queries [m, H, G, D] find: out [m, H, G, width] and total [m, H, G], see `part`."""
        m, H, G, D = query.shape
        rows = query.transpose(0, 1).reshape(H, m * G, D)
        exact = torch.promote_types(query.dtype, torch.float32)
        out = rows.new_zeros(H, m * G, width, dtype=exact)
        total = out.new_full((H, m * G), -torch.inf)
        for at, *pairs in self._layers[layer]:
            out[at], total[at] = part(rows[at], *pairs, scale=scale, softcap=softcap)
        return out.view(H, m, G, -1).transpose(0, 1), total.view(H, m, G).transpose(0, 1)


def _in_use(block: Any) -> tuple[Any, ...]:
    """Rows, and the keys, values and bias of the slots in use; a row may have none of them."""
    n = block.schedule.used
    bias = None if block.bias is None else block.bias[:, :, :n]
    return block.rows, block.keys[:, :n], block.values[:, :n], bias


def part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention to some of the pairs, and what it weighs beside attention to others.

    Takes what `padded_blocks.attend` does: query [R, n, D], keys and values [R, U, D], bias
    [R, 1, U]. Returns out, float32 [R, n, Dv], and total, float32 [R, n], the logarithm of the sum
    of the logits' exponentials.
    """
    exact = torch.promote_types(query.dtype, torch.float32)  # rounded logits would move weights
    query, keys, values = (x.to(exact) for x in (query, keys, values))
    logits = masked_logits(query, keys, bias, scale, softcap)
    logits.clamp_(min=torch.finfo(torch.float32).min)  # a row of empty slots weighs nothing
    weights = logits.softmax(-1)
    # The largest weight is that of the largest logit, and not below 1 / U.
    return weights @ values, logits.amax(-1) - weights.amax(-1).log()


def tails(
    context: Context, kept: Sequence[Sequence[PaddedBlock]]
) -> list[Sequence[PaddedBlock]] | None:
    """What lies behind a context's pairs in each layer's blocks of a cache that began as its copy.

    None where the cache may drop the context's pairs, or has dropped some of its own, so that rows
    hold differently many.
    """
    seen, found = context.cache.get_seq_length(), list[Sequence[PaddedBlock]]()
    for blocks in kept:
        found.append(mine := list[PaddedBlock]())
        for block in blocks:
            behind = block.held >= seen
            numbers = behind.sum(-1).cpu().numpy()
            if block.schedule.drops or (numbers != numbers[0]).any():
                return None
            at = behind.nonzero()[:, 1].view(len(numbers), -1)
            keys: Any = block.keys
            values: Any = block.values
            tail = replace(
                block,
                keys=keys.gather(1, at[..., None].expand(*at.shape, keys.shape[-1])),
                values=values.gather(1, at[..., None].expand(*at.shape, values.shape[-1])),
                positions=block.positions.gather(1, at),
                bias=None,
                mass=None,
                log_weights=None,
                schedule=GrowingSlots(counts=numbers),
                dated=(0, 0),
            )
            mine.append(tail)
    return found
