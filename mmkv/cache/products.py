"""Products of queries with keys, and of weights with values, that are tensors or codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Coded(NamedTuple):
    """Keys or values of some rows as codes, which products take as they are.

    The codes of an exact slot are its numbers, with a step of 1 and a lowest number of 0.
    """

    codes: Tensor  # float32 [R, S, D], or the model's type if that is wider
    step: Tensor  # [R, G, S], of each group
    lowest: Tensor  # [R, G, S]
    mean: Tensor | None = None  # [R, 1, D], what to add to every key; None: softmax ignores it
    size: int | None = None  # how many of the D numbers count, the others being 0; None: all

    def products(self, query: Tensor) -> Tensor:
        """Return the inner products of queries [R, Q, D] with every slot: [R, Q, S]."""
        total: Tensor | None = None
        for q, codes, step, lowest in self._groups(query):
            shift = q.sum(-1, keepdim=True) * lowest
            product = torch.addcmul(shift, torch.bmm(q, codes.mT), step)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total if self.mean is None else total.add_(query @ self.mean.mT)

    def mixed(self, weights: Tensor) -> Tensor:
        """Return the sums of all slots by weights [R, Q, S]: [R, Q, D]."""
        sums = [
            torch.baddbmm(torch.bmm(weights, lowest.mT), weights * step, codes)
            for _, codes, step, lowest in self._groups(self.codes)
        ]
        mixed = sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)
        return mixed[..., : self.size]

    def numbers(self) -> Tensor:
        """Return what the codes stand for, [R, S, D]."""
        step, lowest = (x.mT[..., None] for x in (self.step, self.lowest))
        groups = self.codes.unflatten(-1, (step.shape[2], -1))
        numbers = torch.addcmul(lowest, groups, step).flatten(-2)
        return (numbers if self.mean is None else numbers.add_(self.mean))[..., : self.size]

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
        return values.mixed(weights.to(values.codes.dtype))
    return weights.to(values.dtype) @ values
