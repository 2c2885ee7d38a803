"""Products of queries with keys, and of weights with values, that are tensors or codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# How many codes are unpacked at a time: on a CPU as many as its cache holds in float32.
_CPU_PIECE, _DEVICE_PIECE = 2**19, 2**28


class Coded(NamedTuple):
    """Keys or values of some rows as codes, and those that are exact.

    The codes of an exact slot stand for zeros, to which the exact numbers are added.
    """

    codes: Tensor  # int8 [R, S, D]
    half: str | None  # which half of a byte is its code, "low" or "high"; None: all 8 bits
    step: Tensor  # [R, G, S], of each group, in any floating type
    exact: Tensor  # [R, X, D], in any floating type
    exact_slots: Tensor  # int64 [R, 1, X]; see `QuantizedKV`
    mean: Tensor | None = None  # [R, 1, D], what to add to every key; None: softmax ignores it
    size: int | None = None  # how many numbers a value has, the others being 0; None: all
    short: bool = False  # see `QuantizedKV`

    def products(self, query: Tensor) -> Tensor:
        """Return the inner products of queries [R, Q, D] with every slot: [R, Q, S]."""
        total: Tensor | None = None
        for q, codes, step in self._groups(query):
            floats = (self._floats(codes[:, at], q.dtype) for at in self._pieces())
            pieces = [torch.bmm(q, x.mT) for x in floats]
            product = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
            product.mul_(step)
            total = product if total is None else total.add_(product)
        assert total is not None
        total.scatter_add_(
            2, self._exact_index(query), torch.bmm(query, self.exact.to(query.dtype).mT)
        )
        return total if self.mean is None else total.add_(query @ self.mean.mT)

    def weighted_sums(self, weights: Tensor) -> Tensor:
        """Return the sums of all slots by weights [R, Q, S]: [R, Q, D]."""
        sums = list[Tensor]()
        for _, codes, step in self._groups(self.codes):
            weighted, group_sum = weights * step, None
            for at in self._pieces():
                part = torch.bmm(weighted[:, :, at], self._floats(codes[:, at], weights.dtype))
                group_sum = part if group_sum is None else group_sum.add_(part)
            assert group_sum is not None
            sums.append(group_sum)
        total = sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)
        exact_weights = weights.gather(2, self._exact_index(weights))
        exact = self.exact.to(weights.dtype)
        return torch.baddbmm(total, exact_weights, exact)[..., : self.size]

    def _pieces(self) -> list[slice]:
        """Return the slots whose codes are unpacked at a time."""
        R, S, D = self.codes.shape
        most = _CPU_PIECE if self.codes.device.type == "cpu" else _DEVICE_PIECE
        n = max(1, most // max(1, R * D))
        return [slice(a, a + n) for a in range(0, S, n)]

    def _floats(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some of the codes as floats, in new storage."""
        if self.half is not None:
            codes = codes * 16 if self.half == "low" else codes & -16
        return codes.to(dtype)

    def _exact_index(self, rows: Tensor) -> Tensor:
        """Return the slots of exact numbers for each query of `rows` [R, Q, ...]: [R, Q, X]."""
        slots, S = self.exact_slots, self.codes.shape[1]
        if slots.shape[2] > S:  # a row's first places may name slots behind, whose pairs are zeros
            slots = slots.clamp(max=S - 1)
        return slots.expand(-1, rows.shape[1], -1)

    def _groups(self, x: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return a part of x [..., D], codes and steps of each group."""
        if (G := self.step.shape[1]) == 1:
            return [(x, self.codes, self.step)]
        return zip(x.chunk(G, -1), self.codes.chunk(G, -1), self.step.split(1, 1), strict=True)


# The keys and the values of a block.
Pairs = tuple[Tensor, Tensor] | tuple[Coded, Coded]


def needs_gradient(query: Tensor) -> bool:
    """Return whether a gradient is to flow through the queries, as some kernels have none."""
    return torch.is_grad_enabled() and query.requires_grad


def products(query: Tensor, keys: Tensor | Coded, scale: float) -> Tensor:
    """Return the logits [R, Q, S] of queries [R, Q, D].

    On CUDA they are float32 or wider, but for queries in 16 bits that need a gradient.
    """
    if isinstance(keys, Coded):
        return keys.products(query * scale)
    if query.is_cuda and query.itemsize == 2 and not needs_gradient(query):
        return torch.bmm(query, keys.mT, out_dtype=torch.float32).mul_(scale)
    return (query * scale) @ keys.mT


def weighted_sums(weights: Tensor, values: Tensor | Coded) -> Tensor:
    """Return the sums of values by weights [R, Q, S]: [R, Q, D]."""
    if isinstance(values, Coded):
        return values.weighted_sums(
            weights.to(torch.promote_types(weights.dtype, values.step.dtype))
        )
    return weights.to(values.dtype) @ values
