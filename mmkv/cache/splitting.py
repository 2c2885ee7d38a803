"""From layer sizes to head sizes: each layer's own, or those of all layers at once.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.parts.slots import send


def within_layer(
    by: Callable[[Tensor, Tensor], Tensor],
    scores: Tensor,
    free: Tensor,
    forced: Tensor,
    size: Tensor,
    sizes: Sequence[int],
) -> Tensor:
    """Split each row's size among its heads: [B, H] tokens, all at most what a head holds.

    Args:
        by: `Heads.split_rows`.
        scores: [B, H, U].
        free: bool [B, H, U], which tokens compete.
        forced: [B, H], how many stay whatever their scores.
        size: [B, H], how many each head would keep if all kept as many.
        sizes: [B], tokens kept per head.
    """
    held = forced + free.sum(-1)
    spare = send(np.array(sizes), forced.device) - forced.amax(-1)
    # Where there is room for all that earlier turns left, nothing is split.
    room = free.sum((1, 2)) <= spare * scores.shape[1]
    splits = ~room & (spare > 0)
    competing = scores.masked_fill(~free, float("-inf"))
    split = forced + by(competing, torch.where(splits, spare, 0)).to(forced.device)
    split = torch.where(splits[:, None], split, size)
    return torch.where(room[:, None], held, split.minimum(held))


def across_layers(
    by: Callable[[Tensor, int], Tensor],
    scores: Sequence[Tensor],
    free: Sequence[Tensor],
    forced: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Share each row's total out to the heads of all layers: for each layer [B, H], on the host.

    Args:
        by: `Heads.split_all`, of one row.
        scores, free, forced: those of each layer, see `within_layer`.
        sizes: [L][B], tokens kept per head if all heads of a layer kept as many.
    """
    device = scores[0].device
    offered = torch.stack([x.flatten(1).sum(-1).to(device) for x in free]).sum(0).tolist()
    needed = torch.stack([x.to(device) for x in forced]).cpu()  # [L, B, H]
    wide, heads = max(x.shape[-1] for x in scores), needed.shape[-1]
    found = list[Tensor]()
    for b, most in enumerate(offered):
        total = heads * sum(layer[b] for layer in sizes)
        # Earlier turns may have left less than there is room for.
        spare = min(total - int(needed[:, b].sum()), most)
        competing = [
            # By age, the newest last: a row ranks ties as it does alone.
            pad(s[b].masked_fill(~f[b], float("-inf")), (wide - s.shape[-1], 0), value=-torch.inf)
            for s, f in zip(scores, free, strict=True)
        ]
        found.append(by(torch.stack([x.to(device) for x in competing]), spare))
    return list(needed + torch.stack(found, dim=1).cpu())
