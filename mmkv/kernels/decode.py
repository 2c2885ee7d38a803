"""Attention of one generated token on a ragged cache, its slots split over many programs.

Each program goes once over a chunk of a row's slots, for all query heads that share them, and
leaves a normalised part and its log-sum-exp; a second kernel joins a row's parts. How many chunks
there are follows from shapes alone and lengths are read on the device: nothing waits for the host,
and a captured CUDA graph stays right as the cache grows.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from mmkv.kernels.decode_device import group_kernel, join_kernel, one_head_kernel, weights_kernel
from mmkv.kernels.launching import INTERPRETED, check_dtypes, padded, rows_of

_LOG2_E = math.log2(math.e)

# Programs that keep the 132 multiprocessors of a Hopper GPU evenly busy, some 5 at a time on each,
# when rows have different lengths. The more chunks, the more is written for the join: one part
# for at least 64 slots, and no more than the join holds in registers.
_PROGRAMS = 2048
_MIN_CHUNK = 64
_MAX_CHUNKS = 64
_MAX_GROUP = 128  # query heads that a program can hold


@torch.no_grad()
def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one token on the first `lengths[r]` slots of each row `r`.

    A row is one key-value head of one sequence: `R` is their product, `G` the query heads that
    share a key-value head. Capturable in a CUDA graph once it has run on the same shapes.

    Args:
        query: `[R, G, D]`.
        keys: `[R, S, D]`; any strides of rows and slots.
        values: `[R, S, Dv]`, likewise. All three are of one dtype.
        lengths: int32 `[R]`, on the device: slots in use. What lies beyond is never read.
        scale: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)`, before the bias (Gemma 2).
        bias: float `[R, S]` or `[1, S]`, added to the logits. What a slot with -inf holds does
            not matter; NaN and +inf are not allowed.
        weigh: also return the weights.

    Returns:
        `[R, G, Dv]` in the dtype of `query`, 0 for a row that sees no slot; and with `weigh`
        float32 `[R, S]`, each slot's softmax weight, mean over the G heads, 0 beyond the length.

    Raises:
        ValueError: shapes, dtypes or options do not fit.

    Source: flash-decoding, https://pytorch.org/blog/flash-decoding; the weights are what H2O,
    arXiv 2306.14048, accumulates.
    """
    R, G, D, S, DV = _checked(query, keys, values, lengths, bias, softcap)

    def scratch(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    out = query.new_empty((R, G, DV))
    weights = scratch(R, S) if weigh else None
    if R == 0 or S == 0:
        return out.zero_(), weights
    chunks, chunk = split(R, S)
    # A single chunk's part is the result.
    parts = out if chunks == 1 else scratch(R, chunks, G, DV)
    lse = scratch(R, chunks, G)
    whole = lse if chunks == 1 else scratch(R, G)
    logits = scratch(R, G, S) if weigh else lse
    query, keys, values = rows_of(query), rows_of(keys), rows_of(values)
    lengths = lengths.contiguous()
    shift = None if bias is None else rows_of(bias).expand(R, S)
    inner, outer = scale * _LOG2_E, 0.0
    if softcap is not None:
        inner, outer = 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E

    attend: Any = (one_head_kernel if G == 1 else group_kernel)[(R, chunks)]
    join: Any = join_kernel[(R * G,)]
    weights_of: Any = weights_kernel[(R, triton.cdiv(S, 1024))]
    with torch.cuda.device_of(keys):
        attend(
            query,
            keys,
            values,
            lengths,
            lse if shift is None else shift,
            parts,
            lse,
            logits,
            *query.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            0 if shift is None else shift.stride(0),
            S,
            G,
            chunk,
            inner,
            outer,
            D=D,
            DV=DV,
            D_PAD=padded(D),
            DV_PAD=padded(DV),
            G_PAD=padded(G),
            CAPPED=softcap is not None,
            BIASED=shift is not None,
            WEIGHED=weigh,
            WIDEN=INTERPRETED,
            **_tile(G, max(padded(D), padded(DV)), keys.element_size()),
        )
        if chunks > 1:
            sizes = {"DV": DV, "DV_PAD": padded(DV), "CHUNKS": padded(chunks)}
            join(parts, lse, lengths, out, whole, G, chunks, chunk, **sizes, num_warps=8)
        if weights is not None:
            weights_of(logits, whole, lengths, weights, S, G, BLOCK=1024)
    return out, weights


def split(R: int, S: int) -> tuple[int, int]:
    """Into how many chunks `S` slots of `R` rows are split, and the slots of one."""
    least = max(_MIN_CHUNK, triton.cdiv(S, _MAX_CHUNKS), triton.cdiv(R * S, _PROGRAMS))
    even = triton.cdiv(S, triton.cdiv(S, least))
    chunk = triton.cdiv(even, _MIN_CHUNK) * _MIN_CHUNK
    return int(triton.cdiv(S, chunk)), int(chunk)


def _tile(G: int, width: int, element_size: int) -> dict[str, int]:
    """Slots of a step, warps and pipeline stages: a step's keys or values are some 8 KiB.

    Two steps are on their way while one is worked on, and several programs share a multiprocessor:
    enough bytes in flight for the memory to be the limit.
    """
    if INTERPRETED:  # whose time goes by operations, not by elements
        return {"BLOCK": 32, "STAGES": 1}
    block = 4096 // width if G == 1 else min(128, 8192 // (width * element_size))
    return {"BLOCK": max(16, block), "STAGES": 3, "num_warps": 4 if G < 64 else 8}


def _checked(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    bias: Tensor | None,
    softcap: float | None,
) -> tuple[int, int, int, int, int]:
    """Check the shapes, dtypes and options; return `(R, G, D, S, Dv)`."""
    shapes = f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
    if query.ndim != 3 or keys.ndim != 3 or values.ndim != 3:
        raise ValueError(
            f"query must be [R, G, D], keys [R, S, D] and values [R, S, Dv], got {shapes}"
        )
    R, G, D = query.shape
    S, DV = values.shape[1:]
    if keys.shape != (R, S, D) or values.shape[0] != R or not 1 <= G <= _MAX_GROUP:
        raise ValueError(
            f"query, keys and values must have one R, keys and values one S, and G must be at "
            f"least 1 and at most {_MAX_GROUP}, got {shapes}"
        )
    check_dtypes(query=query, keys=keys, values=values)
    if tuple(lengths.shape) != (R,) or lengths.dtype != torch.int32:
        raise ValueError(
            f"lengths must be int32 [R] = ({R},), got {lengths.dtype} {tuple(lengths.shape)}"
        )
    if lengths.device != keys.device:
        raise ValueError(f"lengths must be on {keys.device}, got {lengths.device}")
    if bias is not None and (
        tuple(bias.shape) not in ((R, S), (1, S)) or not bias.is_floating_point()
    ):
        raise ValueError(
            f"bias must be float [R, S] or [1, S] with R = {R} and S = {S}, got {bias.dtype} "
            f"{tuple(bias.shape)}"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    return R, G, D, S, DV
