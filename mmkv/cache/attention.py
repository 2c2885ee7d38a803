"""Attention of new tokens over what a block of rows holds, in the model's type or in few bits.

A row is one key-value head of one sequence, R of them; G query heads read it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmkv.cache.quantize import QuantizedKV, Stored


def causal_view(positions: Tensor, first: int, q: int) -> Tensor:
    """Which tokens [R, U] the q new ones at `first`, `first` + 1, ... may see: bool [R, q, U]."""
    last = torch.arange(first, first + q, device=positions.device)[None, :, None]
    return (positions[:, None] >= 0) & (positions[:, None] <= last)


def attend(
    query: Tensor,
    keys: Stored,
    values: Stored,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of G query heads of q tokens each over one row's keys; no key is repeated.

    Args:
        query: [R, G * q, D], the q tokens of each head side by side.
        keys, values: [R, U, D].
        visible: bool [R, 1 or q, U], or a bias of the logits; None: all.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.

    Returns:
        [R, G * q, D].
    """
    if visible is not None:
        visible = _for_heads(visible, query)
    if softcap is None and isinstance(keys, Tensor) and isinstance(values, Tensor):
        mask = None if visible is None else visible[:, None]
        out = scaled_dot_product_attention(
            query[:, None], keys[:, None], values[:, None], attn_mask=mask, scale=scale
        )
        return out[:, 0]
    logits = products(query, keys, scale)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None and visible.dtype == torch.bool:
        logits = logits.masked_fill(~visible, -torch.inf)
    elif visible is not None:
        logits = logits + visible
    return mixed(logits.softmax(dim=-1), values)


def products(query: Tensor, keys: Stored, scale: float) -> Tensor:
    """Logits of queries [R, Q, D]: [R, Q, U]."""
    if isinstance(keys, QuantizedKV):
        return keys.products(query.to(keys.exact) * scale)
    return (query * scale) @ keys.mT


def mixed(weights: Tensor, values: Stored) -> Tensor:
    """Values summed by weights [R, Q, U], in the model's type: [R, Q, D]."""
    if isinstance(values, QuantizedKV):
        return values.mixed(weights.to(values.exact)).to(values.dtype)
    return weights.to(values.dtype) @ values


def weigh(
    query: Tensor,
    keys: Stored,
    bias: Tensor | None,
    weights: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """The attention weights of `attend` with a bias or none, into `weights`, float32 [R, G, U].

    In place: nothing as large as the cache is allocated in a step.
    """
    if isinstance(keys, Tensor) and query.dtype == weights.dtype:
        torch.bmm(query * scale, keys.mT, out=weights)
    else:
        weights.copy_(products(query, keys, scale))
    if softcap is not None:
        weights.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        weights.add_(bias)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    weights.div_(weights.sum(-1, keepdim=True))


def _for_heads(visible: Tensor, query: Tensor) -> Tensor:
    """The q rows of `visible`, repeated for each head that shares a row's keys."""
    q = visible.shape[1]
    return visible if q in (1, query.shape[1]) else visible.repeat(1, query.shape[1] // q, 1)
