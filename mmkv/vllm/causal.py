"""Attention of a prompt before it is compressed: by vLLM's kernel on a CPU, else by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

_BLOCK = 32  # tokens of a block of the kernel's scratch cache


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend from the last tokens [q, H, G, D] to keys and values [H, n, D]: [q, H, G, D]."""
    n, end = len(query), keys.shape[1]
    if (
        current_platform.is_cpu()  # other wheels of vLLM lack this kernel
        and query.shape[-1] in CPUAttentionBackend.get_supported_head_sizes()
    ):
        return _on_cpu(query, keys, values, scale)
    if n == end:
        return attend(query, keys, values, scale, is_causal=True)
    return attend(query, keys, values, scale, attn_mask=causal_lower_right(n, end))


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, **mask: Any) -> Tensor:
    """Attend as `causal` does, with a mask of `scaled_dot_product_attention`'s."""
    G = query.shape[2]
    keys, values = (x[:, None].expand(-1, G, -1, -1) for x in (keys, values))
    out = scaled_dot_product_attention(query.permute(1, 2, 0, 3), keys, values, **mask, scale=scale)
    return out.permute(2, 0, 1, 3)


def _on_cpu(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend by vLLM's kernel, which reads its own layout of blocks: pairs are copied into it."""
    (n, H, G, D), end, dtype = query.shape, keys.shape[1], query.dtype
    isa, blocks = _get_attn_isa(dtype, _BLOCK, D), -(-end // _BLOCK)
    # The kernel multiplies what is after the last token by 0, so that may not be NaN.
    cache = torch.zeros(blocks, H, 2 * _BLOCK, D, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    keys, values = (x.transpose(0, 1).contiguous() for x in (keys, values))
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(end), isa)
    starts = torch.tensor([0, n], dtype=torch.int32)
    length = torch.tensor([end], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=H * G,
        num_kv_heads=H,
        head_dim=D,
        seq_lens=length,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    out = torch.empty(n, H * G, D, dtype=dtype)
    ops.cpu_attention_with_kv_cache(
        query=query.reshape(n, H * G, D),
        key_cache=key_cache,
        value_cache=value_cache,
        output=out,
        query_start_loc=starts,
        seq_lens=length,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return out.unflatten(1, (H, G))
