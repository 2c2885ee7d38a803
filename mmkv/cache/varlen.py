"""A decode step's attention by torch's variable-length kernel, without the cost of padding.

A block's rows become sequences of one query token, whose used slots are counted by `seqused_k`.
The kernel takes no bias, so the bias of a slot is stored as one more dimension of its key, against
a 1 in the query; head sizes stay multiples of 8. It needs a GPU and a 16-bit type.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# Whether decode steps use it: off until it is measured to be faster than padded blocks on a GPU.
ENABLED = False
# The logit of an empty slot, instead of -inf: a product in 16 bits must stay finite.
_EMPTY = -1e4


def applies(query: Tensor) -> bool:
    """Return whether the kernel supports a step's queries [R, G, D]."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


def varlen_attend(
    query: Tensor, keys: Tensor, values: Tensor, used: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Attend from one token, query [R, G, D], to each row's slots, keys and values [R, U, D].

    The first `used` slots of a row, int32 [R], are in use, the new token's included. The bias of
    the logits, [R, 1, U], is -inf for an empty slot; None: all slots in use are filled.
    """
    from torch.nn.attention.varlen import varlen_attn

    (R, _, D), U = query.shape, keys.shape[1]
    if bias is not None:
        query = pad(pad(query, (0, 1), value=1.0), (0, 7))
        bias_dimension = (bias[:, 0].clamp(min=_EMPTY * scale) / scale).to(keys.dtype)
        keys = pad(torch.cat([keys, bias_dimension[..., None]], dim=-1), (0, 7))
        values = pad(values, (0, 8))
    starts = torch.arange(R + 1, device=query.device, dtype=torch.int32)
    out = varlen_attn(
        query,
        keys.flatten(0, 1)[:, None],
        values.flatten(0, 1)[:, None],
        starts,
        starts * U,
        max_q=1,
        max_k=U,
        scale=scale,
        enable_gqa=True,
        seqused_k=used,
        num_splits=1,
    )
    assert isinstance(out, Tensor)
    return out[..., :D]
