"""Replies behind a shared prefix: its kept pairs are attended to where they lie, and not copied.

Attention over two sets of pairs is that over each, weighed by the sums of their exponentials: with
`out` and `total`, the logarithm of such a sum, of both, the second set's share is
sigmoid(total2 - total1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmkv.cache.padded_blocks import PaddedBlock, masked_logits
from mmkv.contexts import Context
from mmkv.parts.slots import GrowingSlots


class SharedPrefix:
    """The kept pairs of a context that members of a pool attend to.

    Attributes:
        context: it stays as it is.
        members: int64 [m] on each device, the members' places in the batch.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.members: dict[torch.device, Tensor] = {}
        self._layers = [
            [(x.rows, *_in_use(x)) for x in layer.keeping().blocks if x.schedule.used]
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
        for at, keys, values, bias in self._layers[layer]:
            found = part(rows[at], keys, values, bias, scale=scale, softcap=softcap)
            out[at], total[at] = found
        return out.view(H, m, G, -1).transpose(0, 1), total.view(H, m, G).transpose(0, 1)


def _in_use(block: PaddedBlock) -> tuple[Tensor, Tensor, Tensor | None]:
    """The keys, values and bias of the slots in use; a row may have none of them."""
    keys, values = block.keys, block.values
    assert isinstance(keys, Tensor)  # others are in no pool
    assert isinstance(values, Tensor)
    n = block.schedule.used
    bias = None if block.bias is None else block.bias[:, :, :n]
    return keys[:, :n], values[:, :n], bias


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

    Args:
        query: [R, n, D].
        keys, values: [R, U, D].
        bias: of the logits, [R, 1, U]; None: none.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.

    Returns:
        out: float32 [R, n, Dv].
        total: float32 [R, n], the logarithm of the sum of the logits' exponentials.
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

    None where the cache may drop the context's pairs, or has dropped some of its own.
    """
    seen = context.cache.get_seq_length()
    found = [[_tail(block, seen) for block in blocks] for blocks in kept]
    if any(x is None for blocks in found for x in blocks):
        return None
    return [[x for x in blocks if x is not None] for blocks in found]


def _tail(block: PaddedBlock, seen: int) -> PaddedBlock | None:
    """The pairs of tokens from position `seen` on, if all rows hold as many of these."""
    behind = block.held >= seen
    numbers = behind.sum(-1).cpu().numpy()
    if block.schedule.drops or (numbers != numbers[0]).any():
        return None
    at = behind.nonzero()[:, 1].view(len(numbers), -1)
    keys, values, _ = _in_use(block)
    return replace(
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
