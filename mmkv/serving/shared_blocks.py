"""Padded blocks with the kept pairs of many requests, and prefixes that requests share.

Rows of similar length lie in one padded block of a layer, whichever request they belong to: a block
takes one attention call, and one indexed copy for the new tokens of all its rows. The pairs of a
shared prefix are not copied: attention over two sets of pairs is the mean of attention over each,
weighted by their sums of exponentials. With the logarithms of these sums, log_sum1 and log_sum2,
the second set's weight is sigmoid(log_sum2 - log_sum1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.padded_blocks import PaddedBlock, attend, masked_logits
from mmkv.cache.plain import PlainKV
from mmkv.contexts import Context
from mmkv.parts.slots import GrowingSlots, send

# Widths are multiples of it, as fused kernels require of a bias.
STEP = 16


def capacity(slots: int, step: int | None = None) -> int:
    """Return the slots that a row of at most `slots` is promised: up to a quarter more, or 31.

    Few different capacities mean few blocks per layer. With `step`, it is the next multiple of it.
    """
    step = step or max(2 * STEP, 1 << max(0, slots.bit_length() - 3))
    return -(-slots // step) * step


class SharedBlock:
    """Rows of similar length, at most `capacity` slots each, `behind` a shared prefix or not."""

    def __init__(self, like: Any, capacity: int, behind: bool = False) -> None:
        self.capacity, self.behind = capacity, behind
        # Keys [C, S, D], values [C, S, Dv] and bias [C, S, 1], of which the first rows are in use.
        # The bias is added to the logits: -inf in empty slots, elsewhere the logarithm of the
        # pair's weight.
        keys, values = like.stored.keys, like.stored.values
        widths = (keys.shape[-1], values.shape[-1], 1)
        self.stored = [keys.new_empty(0, 0, width) for width in widths]
        # Which rows of the batch lie here, int64 [n], and the slots in use of each.
        self.rows = self.used = np.empty(0, dtype=np.int64)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a key and a value."""
        return sum(x.shape[-1] * x.element_size() for x in self.stored[:2])

    @property
    def held(self) -> int:
        """Bytes of keys and values, unused rows included."""
        C, S, _ = self.stored[0].shape
        return C * S * self.slot_bytes

    @property
    def promised(self) -> int:
        """The most bytes that the rows in use may take."""
        return len(self.rows) * self.capacity * self.slot_bytes

    def add(self, rows: np.ndarray, block: Any) -> None:
        """Copy the pairs of a request's block into rows of this one."""
        width = min(block.schedule.width, block.stored.slots)
        first, n = len(self.rows), len(self.rows) + len(rows)
        C, S, _ = self.stored[0].shape
        if n > C or width > S:
            self.resize(n, max(width, self.used.max(initial=0)))
        tensors = (block.stored.keys, block.stored.values, block.slot_bias().mT)
        for x, new, empty in zip(self.stored, tensors, (0, 0, -torch.inf), strict=True):
            x[first:n, :width] = new[:, :width]
            x[first:n, width:] = empty  # earlier rows may have left NaN there
        self.rows = np.append(self.rows, rows)
        self.used = np.append(self.used, np.full(len(rows), width))

    def remove(self, gone: np.ndarray) -> None:
        """Free the rows where `gone`, bool [n], is true; the last rows move there."""
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
        """Move to memory of `rows` rows, and of `width` slots and an eighth more."""
        slots = min(self.capacity, -(-(width + width // 8) // STEP) * STEP)
        resized: list[Tensor] = []
        for x, empty in zip(self.stored, (0, 0, -torch.inf), strict=True):
            kept = x[: len(self.rows), :slots]
            resized.append(new := x.new_full((rows, slots, x.shape[-1]), empty))
            new[: kept.shape[0], : kept.shape[1]] = kept
        self.stored = resized

    def advance(self, slots: np.ndarray) -> np.ndarray:
        """Use the slots [n] for the next tokens; return their indices in the flattened block."""
        self.used = np.maximum(self.used, slots + 1)
        if (width := int(self.used.max())) > self.stored[0].shape[1]:
            self.resize(len(self.rows), width)
        return np.arange(len(slots)) * self.stored[0].shape[1] + slots

    def attend(
        self, at: Tensor, query: Tensor, key: Tensor, value: Tensor, *prefix: Tensor, **options: Any
    ) -> Tensor:
        """Write new pairs [n, D] `at` the indices of `advance`; attend from queries [n, G, D].

        `prefix` is what `part` returned for shared prefixes, if the pool has any.
        """
        keys, values, bias = self.stored
        keys.flatten(0, 1).index_copy_(0, at, key)
        values.flatten(0, 1).index_copy_(0, at, value)
        bias.flatten().index_fill_(0, at, 0.0)
        width = -(-int(self.used.max()) // STEP) * STEP
        keys, values, bias = (x[: len(at), :width] for x in self.stored)
        if not self.behind:
            return attend(query, keys, values, bias.mT, **options)
        out, log_sums = part(query, keys, values, bias.mT, **options)
        share = torch.sigmoid(log_sums - prefix[1])[..., None]
        return torch.lerp(prefix[0], out, share).to(query.dtype)


class SharedLayer:
    """One layer's blocks, by their capacity and whether their rows have a shared prefix."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bool], SharedBlock] = {}
        # The batch's rows in the order of the blocks, int64 [R]; None: not known yet.
        self.rows: np.ndarray | None = None
        # `rows` on the device, and its inverse; None if it is the order of the batch.
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        self.at: list[Tensor] = []  # indices of the next tokens, int64 [n] for each block

    def __iter__(self) -> Iterator[SharedBlock]:
        return iter(self.blocks.values())

    @property
    def device(self) -> torch.device:
        """The device of its pairs."""
        return next(iter(self)).stored[0].device

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each block."""
        return [len(x.rows) for x in self]

    def remove(self, member: int, last: int, heads: int) -> None:
        """Free the rows of a member of the batch; the last member takes its place."""
        for block in list(self):
            block.remove(block.rows // heads == member)
            block.rows[block.rows // heads == last] -= (last - member) * heads
            if not len(block.rows):
                del self.blocks[block.capacity, block.behind]
        self.rows = None

    def advance(self, slots: np.ndarray) -> np.ndarray:
        """Use the slots [R] for the next tokens; return their indices, block by block."""
        if self.rows is None:
            self.rows = np.concatenate([x.rows for x in self])
            self.order = self.back = None
            if (self.rows[1:] < self.rows[:-1]).any():
                self.order = send(self.rows, self.device)
                self.back = send(self.rows.argsort(), self.device)
        by_block = np.split(slots[self.rows], np.cumsum(self.sizes)[:-1])
        return np.concatenate([x.advance(y) for x, y in zip(self, by_block, strict=True)])

    def attend(self, *tensors: Tensor, **options: Any) -> Tensor:
        """Call `SharedBlock.attend` for each block, with the rows of the whole batch."""
        if self.order is not None:
            tensors = tuple(x.index_select(0, self.order) for x in tensors)
        parts = zip(self, self.at, *(x.split(self.sizes) for x in tensors), strict=True)
        out = torch.cat([block.attend(*inputs, **options) for block, *inputs in parts])
        return out if self.back is None else out.index_select(0, self.back)


class SharedPrefix:
    """The kept pairs of a context that members of a pool attend to, and which do not change."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # Indices of the members in the batch, int64 [m] on each device.
        self.members: dict[torch.device, Tensor] = {}
        # Of each layer's blocks: heads, int64 [h], and what `part` takes of the slots in use.
        self._layers = [
            [_in_use(x) for x in layer.keeping().blocks if x.schedule.used]
            for layer in context.cache.compressed
        ]

    def attend(
        self, layer: int, query: Tensor, out: Tensor, log_sums: Tensor, **options: Any
    ) -> None:
        """Attend from the members' queries, of [B, H, G, D]; write there what `part` returns."""
        G, D = query.shape[2:]
        members = self.members[query.device][:, None]
        for heads, *pairs in self._layers[layer]:
            at, h = (members, heads), len(heads)
            rows = query[at].transpose(0, 1).reshape(h, -1, D)  # all queries of each head
            attended, sums = part(rows, *pairs, **options)
            out[at] = attended.view(h, -1, G, out.shape[-1]).transpose(0, 1)
            log_sums[at] = sums.view(h, -1, G).transpose(0, 1)


def _in_use(block: Any) -> tuple[Any, ...]:
    n = block.schedule.used  # of the longest row; a row may use none
    bias = None if block.bias is None else block.bias[:, :, :n]
    keys, values = (x[:, :n] for x in (block.stored.keys, block.stored.values))
    return send(block.row_numbers, keys.device), keys, values, bias


def part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend to some of the pairs; also return the weight beside attention to others.

    Takes what `padded_blocks.attend` does: query [R, n, D], keys and values [R, U, D], bias
    [R, 1, U]. Returns the attention, float32 [R, n, Dv], and the logarithm of the sum of the
    logits' exponentials, float32 [R, n].
    """
    exact = torch.promote_types(query.dtype, torch.float32)  # rounded logits would change weights
    query, keys, values = (x.to(exact) for x in (query, keys, values))
    logits = masked_logits(query, keys, bias, scale, softcap)
    logits.clamp_(min=torch.finfo(torch.float32).min)  # a row of empty slots weighs nothing
    weights = logits.softmax(-1)
    # The largest weight is that of the largest logit, and not below 1 / U.
    return weights @ values, logits.amax(-1) - weights.amax(-1).log()


def tails(
    context: Context, kept: Sequence[Sequence[PaddedBlock]]
) -> list[Sequence[PaddedBlock]] | None:
    """Return the pairs after the context's, by layer and block, of a cache that began as its copy.

    None if the cache may drop pairs of the context, or has dropped some of its own, so that rows
    have different numbers of them.
    """
    n_context, layers = context.cache.get_seq_length(), list[Sequence[PaddedBlock]]()
    for blocks in kept:
        layers.append(layer := list[PaddedBlock]())
        for block in blocks:
            is_tail = block.held >= n_context
            counts = is_tail.sum(-1).cpu().numpy()
            if block.schedule.drops or (counts != counts[0]).any():
                return None
            index = is_tail.nonzero()[:, 1].view(len(counts), -1)
            stored = PlainKV(*(x.take_along_dim(index[..., None], 1) for x in block.stored.read()))
            positions, schedule = block.positions.gather(1, index), GrowingSlots(counts=counts)
            layer.append(PaddedBlock(block.row_numbers, stored, positions, None, schedule))
    return layers
