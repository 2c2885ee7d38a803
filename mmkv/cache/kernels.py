"""Attention of a few new tokens to stored pairs, that are tensors or codes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmkv.cache.products import Coded, needs_gradient, products, weighted_sums

aten: Any = torch.ops.aten

logger = logging.getLogger(__name__)


def attend(
    query: Tensor,
    keys: Tensor | Coded,
    values: Tensor | Coded,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    *,
    replayed: bool = False,
) -> Tensor:
    """Attend from q tokens of G query heads to one row's keys, without repeating keys.

    On CUDA the kernels are named, as the default choice (cuDNN on Hopper) plans a kernel for each
    new number of slots, half a second each. Flash attention takes neither a bias nor codes; for
    these there is a kernel of our own. The host takes longer to launch it than two matrix products
    and a softmax, which are as good for pairs in a step that is not replayed (docs/gpu).

    Args:
        query: [R, G * q, D], the q tokens of each head together; the output has the same shape,
            and their type or float32.
        keys, values: [R, U, D].
        visible: bool [R, 1 or q, U], or a bias of the logits; None: all are visible.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.
        replayed: whether a CUDA graph replays the call.
    """
    if visible is not None and (q := visible.shape[1]) not in (1, query.shape[1]):
        visible = visible.repeat(1, query.shape[1] // q, 1)  # for each head of the group
    if softcap is None and isinstance(keys, Tensor) and isinstance(values, Tensor):
        rows = query[:, None], keys[:, None], values[:, None]
        if not query.is_cuda:
            mask = None if visible is None else visible[:, None]
            if mask is not None and mask.dtype != torch.bool:
                mask = mask.to(query.dtype)
            return scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale)[:, 0]
        if visible is None and flash_takes(query):
            return aten._scaled_dot_product_flash_attention(*rows, scale=scale)[0][:, 0]
    if query.is_cuda and softcap is None:
        kernel = _kernel_for(query, keys, visible, replayed=replayed)
        if kernel is not None:
            with torch.cuda.device(query.device):
                return kernel(query, keys, values, visible, scale)
    logits = products(query, keys, scale)
    if logits.itemsize < 4:
        logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None and visible.dtype == torch.bool:
        logits = logits.masked_fill(~visible, -torch.inf)
    elif visible is not None:
        logits += visible
    return weighted_sums(logits.softmax(dim=-1), values)


def _kernel_for(
    query: Tensor, keys: Tensor | Coded, visible: Tensor | None, *, replayed: bool
) -> Callable[..., Tensor] | None:
    """Return our kernel if it is to compute these arguments of `attend` on CUDA, otherwise None.

    It needs a model in 16 bits, a bias that is the same for all queries, and no gradient. It leaves
    out the codes of each slot that a place of exact pairs names; some may be needed if `short`.
    """
    if isinstance(keys, Coded) and not keys.short:
        pairs = keys.exact
    elif replayed and isinstance(keys, Tensor):
        pairs = keys
    else:
        return None
    alike = visible is None or (visible.shape[1] == 1 and visible.dtype != torch.bool)
    D = query.shape[2]
    few = D <= 256 and query.shape[1] <= (64 if D <= 128 else 32)  # as its memory has room for
    if pairs.itemsize == 2 and alike and few and not needs_gradient(query):
        return _kernel(query.device)
    return None


@cache
def _kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """Return our kernel; None on GPUs older than NVIDIA's Ampere, and where Triton does not work.

    Triton comes with torch for CUDA on Linux, but needs a C compiler and Python's headers.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from mmkv.cache import triton_attention

        triton_attention.try_triton(device)
    except Exception as error:  # those of Triton and of compilers have no class in common
        logger.warning("decode steps use torch's operations, which take longer: %s", error)
        return None
    return triton_attention.attend


def flash_takes(query: Tensor) -> bool:
    """Return whether torch's flash attention computes these queries [R, Q, D] on CUDA."""
    D = query.shape[-1]
    return query.itemsize == 2 and D % 8 == 0 and D <= 256 and not needs_gradient(query)


def weigh(
    query: Tensor,
    keys: Tensor | Coded,
    bias: Tensor | None,
    weights: Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    """Write the attention weights of `attend` into `weights`, float32 [R, G, U].

    In place, so that a step allocates nothing as large as the cache.
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
