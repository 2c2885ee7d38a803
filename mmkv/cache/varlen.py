"""A decode step's attention by torch's variable-length kernel, without the cost of padding.

A block's rows become sequences of one query token: `seqused_k` says how many slots of a row are in
use. The kernel takes no bias, so the bias of a slot is one more dimension of its key, against a 1
in the query; head sizes stay multiples of 8. It needs a GPU and 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# Whether decode steps use it: off until a GPU has shown that it is faster than padded blocks.
ENABLED = False
# Of a slot that is empty, in place of -inf: a product in 16 bits must stay finite.
_EMPTY = -1e4


def applies(query: Tensor) -> bool:
    """Whether a step's queries [R, G, D] can be attended to by the kernel."""
    return query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)


def varlen_attend(
    query: Tensor, keys: Tensor, values: Tensor, used: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention of one token, query [R, G, D], over what each row holds, keys, values [R, U, D].

    The first `used` slots of a row, int32 [R], are in use, the new token's included. The bias of
    the logits, [R, 1, U], is -inf for an empty slot; None: all in use are filled.
    """
    from torch.nn.attention.varlen import varlen_attn

    (R, _, D), U = query.shape, keys.shape[1]
    if bias is not None:
        query = pad(pad(query, (0, 1), value=1.0), (0, 7))
        more = (bias[:, 0].clamp(min=_EMPTY * scale) / scale).to(keys.dtype)
        keys = pad(torch.cat([keys, more[..., None]], dim=-1), (0, 7))
        values = pad(values, (0, 8))
    first = torch.arange(R + 1, device=query.device, dtype=torch.int32)
    out = varlen_attn(
        query,
        keys.flatten(0, 1)[:, None],
        values.flatten(0, 1)[:, None],
        first,
        first * U,
        max_q=1,
        max_k=U,
        scale=scale,
        enable_gqa=True,
        seqused_k=used,
        num_splits=1,
    )
    assert isinstance(out, Tensor)
    return out[..., :D]
