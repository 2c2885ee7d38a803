"""Merging: evicted pairs are averaged into a kept one instead of being dropped.

ElasticCache (arXiv 2407.18121, section 3) merges into the nearest kept position; PrefixKV (arXiv
2412.03409, "combination with merging") also into the kept key of highest cosine similarity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.policy import Merge


def merge(
    keys: Tensor, values: Tensor, indices: Tensor, valid: Tensor, *, how: Merge, block: int = 256
) -> tuple[Tensor, Tensor]:
    """Average every evicted pair into its anchor.

    Args:
        keys: [B, H, N, D], after rotary embedding.
        values: [B, H, N, D].
        indices: [B, H, M], kept positions, -1 as filler at the end.
        valid: bool [B, N]; padding is merged nowhere.
        how: "position", the nearest kept position, the earlier one of two equally near; or
            "feature", the kept key of highest cosine similarity.
        block: tokens compared at a time for "feature".

    Returns:
        The kept keys and values [B, H, M, D]: each the plain mean of its group.
    """
    B, H, N, D = keys.shape
    filler = indices < 0
    if how == "position":
        anchor = _nearest(indices.masked_fill(filler, 4 * N), N)
    else:
        unit = torch.nn.functional.normalize(keys.float(), dim=-1)
        kept = unit.gather(2, indices.clamp(min=0)[..., None].expand(-1, -1, -1, D))
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
    weight = valid[:, None, :, None].float()
    where = anchor[..., None].expand(-1, -1, -1, D)

    def mean(x: Tensor) -> Tensor:
        total = x.new_zeros(B, H, indices.shape[-1], D, dtype=torch.float32)
        total.scatter_add_(2, where, x.float() * weight)
        return (total / group.clamp(min=1)).to(x.dtype)

    group = torch.zeros(B, H, indices.shape[-1], 1, device=keys.device)
    group.scatter_add_(2, anchor[..., None], weight.expand(B, H, N, 1))
    return mean(keys), mean(values)


def _nearest(kept: Tensor, n: int) -> Tensor:
    """For each position 0..n-1 the index into `kept` [B, H, M] of the nearest kept position."""
    ordered, order = kept.sort(dim=-1)
    position = torch.arange(n, device=kept.device).expand(*kept.shape[:2], n).contiguous()
    right = torch.searchsorted(ordered, position).clamp(max=kept.shape[-1] - 1)
    left = (right - 1).clamp(min=0)
    far = (ordered.gather(-1, right) - position).abs()
    near = (position - ordered.gather(-1, left)).abs()
    return order.gather(-1, torch.where(near <= far, left, right))
