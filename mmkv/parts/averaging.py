"""Merging: evicted pairs are averaged into a kept one instead of being dropped.

ElasticCache (arXiv 2407.18121, section 3) merges into the nearest kept position; PrefixKV (arXiv
2412.03409, "combination with merging") also into the kept key of highest cosine similarity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


def merge(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    positions: Tensor,
    *,
    how: Literal["position", "feature"],
    block: int = 256,
) -> tuple[Tensor, Tensor]:
    """Average every evicted pair into its anchor.

    Args:
        keys: [B, H, N, D], after rotary embedding.
        values: [B, H, N, D].
        indices: [B, H, M], kept tokens among the N, -1 as filler at the end.
        positions: [B, 1 or H, N], where each token stands; -1 for padding, which is merged nowhere.
        how: "position", the nearest kept position, the earlier one of two equally near; or
            "feature", the kept key of highest cosine similarity.
        block: tokens compared at a time for "feature".

    Returns:
        The kept keys and values [B, H, M, D]: each the plain mean of its group. Any one token where
        none is kept (M = 0).
    """
    B, H, N, D = keys.shape
    if indices.shape[-1] == 0:  # nothing to merge into; a token for empty slots to copy
        return keys[:, :, :1], values[:, :, :1]
    filler, at = indices < 0, indices.clamp(min=0)
    positions = positions.expand(B, H, N)
    if how == "position":
        far = torch.iinfo(torch.int64).max // 4
        anchor = _nearest(positions.gather(-1, at).masked_fill(filler, far), positions)
    else:
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        kept = unit.gather(2, at[..., None].expand(-1, -1, -1, D))
        anchor = torch.cat(
            [
                (part @ kept.transpose(-1, -2))
                .masked_fill(filler[:, :, None], float("-inf"))
                .argmax(dim=-1)
                for part in unit.split(block, dim=2)
            ],
            dim=2,
        )
    # A kept token is its own anchor. Fillers write past the end, into a column that is cut off.
    own = torch.arange(indices.shape[-1], device=keys.device).expand_as(indices)
    anchor = torch.cat([anchor, torch.zeros_like(anchor[..., :1])], dim=-1)
    anchor = anchor.scatter(-1, indices.masked_fill(filler, N), own)[..., :N]
    slots = indices.shape[-1]
    weight = (positions >= 0).float()
    bags = Bags.of(anchor, weight, sums(weight, anchor, slots))
    return bags.mean(keys), bags.mean(values)


def sums(x: Tensor, anchor: Tensor, slots: int) -> Tensor:
    """Sums over tokens of x [B, H, N, ...], each into its slot `anchor` [B, H, N]: [B, H, S, ...].

    An anchor of S, the number of `slots`, is none.
    """
    total = x.new_zeros(*x.shape[:2], slots + 1, *x.shape[3:])
    at = anchor if x.ndim == 3 else anchor[..., None].expand_as(x)
    return total.scatter_add_(2, at, x)[:, :, :slots]


@dataclass(frozen=True)
class Bags:
    """The tokens of each slot, one bag behind the other.

    Attributes:
        order: int64 [B, H, N], the tokens of the first slot, then of the next, and last all others.
        starts: int64 [B, H, S + 1], where each slot's begin.
        weight: float32 [B, H, N], of the tokens in this order.
        size: float32 [B, H, S], of each slot, sums of the weights.
    """

    order: Tensor
    starts: Tensor
    weight: Tensor
    size: Tensor

    @classmethod
    def of(cls, anchor: Tensor, weight: Tensor, size: Tensor) -> Bags:
        """By slots `anchor` [B, H, N] of tokens, weights [B, H, N], and `size`, their `sums`."""
        slots = size.shape[-1]
        # What padding holds may be anything, NaN included.
        found, order = anchor.masked_fill(weight <= 0, slots).sort(dim=-1, stable=True)
        slot = torch.arange(slots + 1, device=anchor.device).expand(*anchor.shape[:2], -1)
        starts = torch.searchsorted(found, slot.contiguous())
        return cls(order, starts, weight.gather(-1, order), size)

    def mean(self, x: Tensor) -> Tensor:
        """Weighted means of tokens [B, H, N, D] by slot: [B, H, S, D] in the type of `x`."""
        B, H, N, D = x.shape
        row = torch.arange(B * H, device=x.device).view(B, H, 1)
        if x.transpose(1, 2).is_contiguous():  # as a projection leaves it
            flat = x.transpose(1, 2).reshape(-1, D)
            token = (row // H * N + self.order) * H + row % H
        else:
            flat, token = x.reshape(-1, D), row * N + self.order
        total = embedding_bag(
            token.flatten(),
            flat.float(),
            (row * N + self.starts).flatten(),
            mode="sum",
            per_sample_weights=self.weight.flatten(),
        )
        total = total.view(B, H, -1, D)[:, :, :-1]
        return (total / self.size.clamp(min=1)[..., None]).to(x.dtype)


def _nearest(kept: Tensor, positions: Tensor) -> Tensor:
    """For each of `positions` [B, H, N] the index of the nearest of `kept` [B, H, M]."""
    ordered, order = kept.sort(dim=-1)
    right = torch.searchsorted(ordered, positions.contiguous()).clamp(max=kept.shape[-1] - 1)
    left = (right - 1).clamp(min=0)
    above = (ordered.gather(-1, right) - positions).abs()
    below = (positions - ordered.gather(-1, left)).abs()
    return order.gather(-1, torch.where(below <= above, left, right))
