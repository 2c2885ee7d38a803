"""Positions counted inside the cache, as StreamingLLM published it (arXiv 2309.17453, section 3.2).

Keys are stored with the rotation of their original position. Before a step they are turned on, so
that the token kept i-th before the newest is seen at distance i, however far back it stood.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.layer_inputs import turn


def reposition(keys: Tensor, positions: Tensor, newest: int | Tensor, inv_freq: Tensor) -> Tensor:
    """A copy of keys [R, S, D] whose distances to the newest token are consecutive.

    They were turned at `positions` [R, S], -1 where a slot is empty, by `inv_freq` [D / 2]; pair i
    is dimensions i and i + D / 2. The newest token's own key stays as it is.
    """
    empty = positions < 0
    rank = positions.masked_fill(empty, newest + 1).argsort(dim=-1).argsort(dim=-1)
    held = (~empty).sum(dim=-1, keepdim=True)
    further = (newest - positions) - (held - 1 - rank)
    angle = further.masked_fill(empty, 0)[..., None].float() * inv_freq.to(keys.device).float()
    cos, sin = (torch.cat([x] * 2, dim=-1) for x in (angle.cos(), angle.sin()))
    return turn(keys[:, None], cos, sin)[:, 0].to(keys.dtype)
