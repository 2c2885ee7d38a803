"""Positions counted inside the cache, as StreamingLLM published it (arXiv 2309.17453, section 3.2).

Keys are stored with the rotation of their original position. Before a step they are rotated
further, so that the i-th kept token before the newest is at distance i, whatever its position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.layer_inputs import turn


def reposition(keys: Tensor, positions: Tensor, newest: int | Tensor, inv_freq: Tensor) -> Tensor:
    """Return a copy of keys [R, S, D] whose distances to the newest token are consecutive.

    They are rotated by `positions` [R, S], -1 for an empty slot, times `inv_freq` [D / 2]; pair i
    is dimensions i and i + D / 2. The newest token's own key is unchanged.
    """
    empty = positions < 0
    rank = positions.masked_fill(empty, newest + 1).argsort(dim=-1).argsort(dim=-1)
    n_kept = (~empty).sum(dim=-1, keepdim=True)
    shift = (newest - positions) - (n_kept - 1 - rank)
    angle = shift.masked_fill(empty, 0)[..., None].float() * inv_freq.to(keys.device).float()
    cos, sin = (torch.cat([x] * 2, dim=-1) for x in (angle.cos(), angle.sin()))
    return turn(keys[:, None], cos, sin)[:, 0].to(keys.dtype)
