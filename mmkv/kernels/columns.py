"""What each key receives of causal attention, without ever storing a row of it.

Two passes: the log-sum-exp of each query's row, then, with rows known, the sum of each column. No
program of the second pass shares a column with another, so nothing is added up atomically and
a result is the same each time.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from mmkv.kernels.columns_device import column_sums_kernel, row_lse_kernel
from mmkv.kernels.launching import INTERPRETED, check_dtypes, check_widths, padded, rows_of

_LOG2_E = math.log2(math.e)


@torch.no_grad()
def row_lse(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Log-sum-exp of each query's row of causal attention logits.

    Args:
        query: `[B, Hq, Q, D]`, the last `Q <= N` tokens' queries: query `i` sees keys up to
            `N - Q + i`.
        key: `[B, H, N, D]`, of the same dtype.
        scale: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        valid: bool `[B, N]`, False for padding, which no query sees. What padding holds does not
            matter.

    Returns:
        float32 `[B, Hq, Q]`, natural logarithms; -inf for the queries of padding.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    B, Hq, Q, _ = _checked(query, key, valid, softcap)
    lse = query.new_empty((B, Hq, Q), dtype=torch.float32)
    if lse.numel() == 0:
        return lse
    shared = {"SHARE": Hq // key.shape[1]}
    _launch(row_lse_kernel, Q, Hq, shared, query, key, valid, scale, softcap, lse)
    return lse


@torch.no_grad()
def column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    valid: Tensor | None = None,
    by_query_head: bool = False,
) -> Tensor:
    """Attention that each key receives from all queries, summed, given each row's log-sum-exp.

    Args:
        query: `[B, Hq, Q, D]`, the last `Q <= N` tokens' queries: query `i` sees keys up to
            `N - Q + i`.
        key: `[B, H, N, D]`, of the same dtype.
        lse: float32 `[B, Hq, Q]`, of `row_lse` or of an attention kernel that returns it. Less
            the logarithm of a weight, that query's row counts so much.
        scale: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        valid: bool `[B, N]`, False for padding: such queries are left out, such keys get 0. What
            padding holds, in `lse` too, does not matter.
        by_query_head: keep the query heads of a group apart.

    Returns:
        float32 `[B, H, N]`, mean over the query heads of a group; or `[B, Hq, N]`.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: H2O, arXiv 2306.14048, section 4.
    """
    B, Hq, Q, _ = _checked(query, key, valid, softcap)
    _, H, N, _ = key.shape
    if tuple(lse.shape) != (B, Hq, Q) or lse.dtype != torch.float32:
        raise ValueError(
            f"lse must be float32 [B, Hq, Q] = ({B}, {Hq}, {Q}), got {lse.dtype} {tuple(lse.shape)}"
        )
    heads = Hq if by_query_head else H
    sums = key.new_empty((B, heads, N), dtype=torch.float32)
    if sums.numel() == 0:
        return sums
    shared = {"SHARE": heads // H, "G": Hq // heads}
    results = lse.contiguous(), sums
    _launch(column_sums_kernel, N, heads, shared, query, key, valid, scale, softcap, *results)
    return sums


def _launch(
    kernel: Any,
    tokens: int,
    heads: int,
    shared: dict[str, int],
    query: Tensor,
    key: Tensor,
    valid: Tensor | None,
    scale: float,
    softcap: float | None,
    *results: Tensor,
) -> None:
    """Run `kernel` for each block of `tokens` of each of the `heads` of each sequence.

    `results` are what it reads and writes beside query `[B, Hq, Q, D]` and key `[B, H, N, D]`;
    `shared` says how many of the heads read one head of these.
    """
    (B, _, Q, D), N = query.shape, key.shape[2]
    query, key = rows_of(query), rows_of(key)
    sizes = _blocks(D, query.element_size())
    inner, outer = scale * _LOG2_E, 0.0
    if softcap is not None:
        inner, outer = 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E
    with torch.cuda.device_of(key):
        kernel[(triton.cdiv(tokens, sizes["BLOCK"]) * B * heads,)](
            query,
            key,
            key if valid is None else valid.contiguous().view(torch.uint8),
            *results,
            *query.stride()[:3],
            *key.stride()[:3],
            Q,
            N,
            heads,
            inner=inner,
            outer=outer,
            **shared,
            D=D,
            D_PAD=padded(D),
            CAPPED=softcap is not None,
            PADDED=valid is not None,
            WIDEN=INTERPRETED,
            **sizes,
        )


def _blocks(D: int, element_size: int) -> dict[str, int]:
    """Rows of a program's own tile and of a step's, warps and pipeline stages.

    Tiles fit the 99 KiB of shared memory that every GPU since Ampere has for a program, and with
    these, compiled for Hopper, registers do not spill to memory.
    """
    if INTERPRETED:  # whose time goes by operations, not by elements
        return {"BLOCK": 32, "STEP": 32}
    if element_size > 2:  # no matrix unit takes it without rounding: sums of products in registers
        return {"BLOCK": 32, "STEP": 16, "num_warps": 8, "num_stages": 2}
    if D > 128:
        return {"BLOCK": 64, "STEP": 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK": 128, "STEP": 64, "num_warps": 8, "num_stages": 3}


def _checked(
    query: Tensor, key: Tensor, valid: Tensor | None, softcap: float | None
) -> tuple[int, int, int, int]:
    """Check `query [B, Hq, Q, D]`, `key [B, H, N, D]` and options; return `(B, Hq, Q, D)`."""
    shapes = f"query {tuple(query.shape)} and key {tuple(key.shape)}"
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query must be [B, Hq, Q, D] and key [B, H, N, D], got {shapes}")
    B, Hq, Q, D = query.shape
    _, H, N, _ = key.shape
    if key.shape != (B, H, N, D) or H < 1 or Hq < 1 or Hq % H or Q > N:
        raise ValueError(
            "query and key must have one B and D, Hq a multiple of H and Q <= N, got " + shapes
        )
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (B, N)):
        raise ValueError(
            f"valid must be a bool [B, N] = ({B}, {N}), got {valid.dtype} {tuple(valid.shape)}"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    check_dtypes(query=query, key=key)
    check_widths(query=query, key=key)
    return B, Hq, Q, D
