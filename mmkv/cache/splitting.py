"""From layer sizes to head sizes: each layer's own, or those of all layers at once.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def within_layer(
    by: Callable[[Tensor, int], Tensor],
    scores: Tensor,
    free: Tensor,
    forced: Tensor,
    size: Tensor,
    sizes: Sequence[int],
) -> Tensor:
    """Split each row's size among its heads: [B, H] tokens, all at most what a head holds.

    Args:
        by: `Heads.split`, of one row.
        scores: [B, H, U].
        free: bool [B, H, U], which tokens compete.
        forced: [B, H], how many stay whatever their scores.
        size: [B, H], how many each head would keep if all kept as many.
        sizes: [B], tokens kept per head.
    """
    split = size.clone()
    held = forced + free.sum(-1)
    for b, n in enumerate(sizes):
        spare = n - int(forced[b].max())
        if int(free[b].sum()) <= spare * len(split[b]):  # room for all that earlier turns left
            split[b] = held[b]
        elif spare > 0:
            columns = free[b].any(0)
            competing = scores[b].masked_fill(~free[b], float("-inf"))[:, columns]
            split[b] = forced[b] + by(competing, spare).to(split.device)
    return split.minimum(held)


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
    offered = torch.stack([x.flatten(1).sum(-1).cpu() for x in free]).sum(0).tolist()
    forced = [x.cpu() for x in forced]
    wide = max(x.shape[-1] for x in scores)
    split = torch.stack(forced)  # [L, B, H]
    heads = split.shape[-1]
    for b, most in enumerate(offered):
        total = heads * sum(layer[b] for layer in sizes)
        # Earlier turns may have left less than there is room for.
        spare = min(total - int(split[:, b].sum()), most)
        competing = [
            # By age, the newest last: a row ranks ties as it does alone.
            pad(s[b].masked_fill(~f[b], float("-inf")), (wide - s.shape[-1], 0), value=-torch.inf)
            for s, f in zip(scores, free, strict=True)
        ]
        split[:, b] += by(torch.stack([x.to(device) for x in competing]), spare).cpu()
    return list(split)
