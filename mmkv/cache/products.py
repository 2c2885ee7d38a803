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

    codes: Tensor  # uint8 [R, S, D]
    bits: int  # which bits of a byte are its code: 255, 15 or 240
    step: Tensor  # [R, G, S], of each group; float32, or the model's type if that is wider
    lowest: Tensor  # [R, G, S]
    exact: Tensor  # [R, X, D]
    exact_slots: Tensor  # int64 [R, 1, X]; a slot that repeats is given once and zeros
    mean: Tensor | None = None  # [R, 1, D], what to add to every key; None: softmax ignores it
    size: int | None = None  # how many of the D numbers count, the others being 0; None: all

    @property
    def unit(self) -> float:
        """What the lowest of the bits counts."""
        return 1 / (self.bits & -self.bits)

    def products(self, query: Tensor) -> Tensor:
        """Return the inner products of queries [R, Q, D] with every slot: [R, Q, S]."""
        total: Tensor | None = None
        for q, codes, step, lowest in self._groups(query):
            pieces = [torch.bmm(q, self._floats(codes[:, at]).mT) for at in self._pieces()]
            product = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
            shift = q.sum(-1, keepdim=True) * lowest
            product = torch.addcmul(shift, product, step, value=self.unit)
            total = product if total is None else total.add_(product)
        assert total is not None
        total.scatter_add_(2, self._exact_index(query), torch.bmm(query, self.exact.mT))
        return total if self.mean is None else total.add_(query @ self.mean.mT)

    def mixed(self, weights: Tensor) -> Tensor:
        """Return the sums of all slots by weights [R, Q, S]: [R, Q, D]."""
        sums = list[Tensor]()
        for _, codes, step, lowest in self._groups(self.codes):
            total, weighted = torch.bmm(weights, lowest.mT), weights * step
            for at in self._pieces():
                floats = self._floats(codes[:, at])
                total = torch.baddbmm(total, weighted[:, :, at], floats, alpha=self.unit)
                del floats  # so that the next piece takes its place in the processor's cache
            sums.append(total)
        total = sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)
        exact_weights = weights.gather(2, self._exact_index(weights))
        return torch.baddbmm(total, exact_weights, self.exact)[..., : self.size]

    def numbers(self) -> Tensor:
        """Return what the codes stand for, and the exact numbers: [R, S, D]."""
        step, lowest = (x.mT[..., None] for x in (self.step, self.lowest))
        codes = self._floats(self.codes).unflatten(-1, (step.shape[2], -1))
        numbers = torch.addcmul(lowest, codes, step, value=self.unit).flatten(-2)
        numbers.scatter_add_(1, self.exact_slots.mT.expand(self.exact.shape), self.exact)
        return (numbers if self.mean is None else numbers.add_(self.mean))[..., : self.size]

    def _pieces(self) -> list[slice]:
        """Return the slots whose codes are unpacked at a time."""
        R, S, D = self.codes.shape
        most = _CPU_PIECE if self.codes.device.type == "cpu" else _DEVICE_PIECE
        n = max(1, most // max(1, R * D))
        return [slice(a, a + n) for a in range(0, S, n)]

    def _floats(self, codes: Tensor) -> Tensor:
        """Return some of the codes in the type of steps, in new storage."""
        return (codes if self.bits == 255 else codes & self.bits).to(self.step.dtype)

    def _exact_index(self, rows: Tensor) -> Tensor:
        """Return the slots of exact numbers for each query of `rows` [R, Q, ...]: [R, Q, X]."""
        return self.exact_slots.expand(-1, rows.shape[1], -1)

    def _groups(self, x: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return a part of x [..., D], codes, steps and lowest numbers of each group."""
        if (G := self.step.shape[1]) == 1:
            return [(x, self.codes, self.step, self.lowest)]
        parts = x.chunk(G, -1), self.codes.chunk(G, -1), self.step.split(1, 1)
        return zip(*parts, self.lowest.split(1, 1), strict=True)


def needs_gradient(query: Tensor) -> bool:
    """Return whether a gradient is to flow through the queries, as some kernels have none."""
    return torch.is_grad_enabled() and query.requires_grad


def products(query: Tensor, keys: Tensor | Coded, scale: float) -> Tensor:
    """Return the logits [R, Q, S] of queries [R, Q, D]; in float32 or wider on CUDA."""
    if isinstance(keys, Coded):
        return keys.products(query * scale)
    if query.is_cuda and query.itemsize == 2 and not needs_gradient(query):
        return torch.bmm(query, keys.mT, out_dtype=torch.float32).mul_(scale)
    return (query * scale) @ keys.mT


def mixed(weights: Tensor, values: Tensor | Coded) -> Tensor:
    """Return the sums of values by weights [R, Q, S]: [R, Q, D]."""
    if isinstance(values, Coded):
        return values.mixed(weights.to(values.step.dtype))
    return weights.to(values.dtype) @ values
