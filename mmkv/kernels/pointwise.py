"""RMS norm, rotary embedding and gated activation of a decoder layer, one launch each.

The results equal those of the models' own operations to rounding: all is computed in float32 and
rounded to the dtype where those operations round.
"""

import torch
import triton
from torch import Tensor

from mmkv.kernels.launching import check_dtypes, launch, padded, rows_of
from mmkv.kernels.pointwise_device import rms_norm_kernel, rotate_kernel, silu_mul_kernel

_MAX_BLOCK = 4096  # numbers that a program holds at a time


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, then times the weight.

    Args:
        x: `[..., D]`.
        weight: `[D]`, of the same dtype.
        eps: added to the mean of squares.

    Returns:
        A new contiguous tensor like `x`.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: arXiv 1910.07467, equation 4.
    """
    check_dtypes(x=x, weight=weight)
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x must be [..., D] and weight [D], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    D = x.shape[-1]
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    rows = rows_of(x.reshape(-1, D))
    block = min(padded(D), _MAX_BLOCK)
    with torch.cuda.device_of(x):
        launch(rms_norm_kernel, (len(rows),))(
            rows,
            weight.contiguous(),
            out,
            rows.stride(0),
            eps,
            D=D,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
        )
    return out


@torch.no_grad()
def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys; dimensions i and D / 2 + i turn together.

    Args:
        query: `[B, Hq, N, D]`.
        key: `[B, H, N, D]`.
        cos: `[B, N, D]` or `[1, N, D]`.
        sin: as `cos`. All are of one dtype.

    Returns:
        Query and key, turned; new and contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: RoFormer, arXiv 2104.09864, equation 34.
    """
    tensors = {"query": query, "key": key, "cos": cos, "sin": sin}
    check_dtypes(**tensors)
    B, HQ, N, D = query.shape if query.ndim == 4 else (0, 0, 0, 1)
    H = key.shape[1] if key.ndim == 4 else 0
    turns = cos.shape == sin.shape and tuple(cos.shape) in ((B, N, D), (1, N, D))
    if not turns or key.shape != (B, H, N, D) or D % 2:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise ValueError(
            "query must be [B, Hq, N, D], key [B, H, N, D], cos and sin [B, N, D] or [1, N, D], "
            f"with D even, got {shapes}"
        )
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    if B * N * (HQ + H) * D == 0:
        return query_out, key_out
    query, key, cos, sin = map(rows_of, tensors.values())
    of_rows = [0 if x.shape[0] == 1 else x.stride(0) for x in (cos, sin)]
    with torch.cuda.device_of(query):
        launch(rotate_kernel, (B * (HQ + H) * N,))(
            query,
            key,
            cos,
            sin,
            query_out,
            key_out,
            *query.stride()[:3],
            *key.stride()[:3],
            of_rows[0],
            cos.stride(1),
            of_rows[1],
            sin.stride(1),
            HQ,
            H,
            N,
            HALF=D // 2,
            PAD=padded(D // 2),
            num_warps=1,
        )
    return query_out, key_out


@torch.no_grad()
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`.

    Args:
        gate: of any shape.
        up: of the same shape and dtype.

    Returns:
        A new contiguous tensor like `gate`.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Source: SwiGLU, arXiv 2002.05202, equation 5.
    """
    check_dtypes(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(
            f"gate and up must be of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    out = gate.new_empty(gate.shape)
    if out.numel() == 0:
        return out
    block = 1024
    with torch.cuda.device_of(gate):
        launch(silu_mul_kernel, (int(triton.cdiv(out.numel(), block)),))(
            gate.contiguous(), up.contiguous(), out, out.numel(), BLOCK=block
        )
    return out
