"""Device code of `pointwise.py`.

Triton's language, which type checkers of Python do not know: parameters are pointers, numbers and
compile-time constants. Everything is computed in float32 and rounded to the tensors' dtype where
torch's own operations round.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,  # contiguous
    row,  # elements between rows of x
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row, normalised by its root mean square and multiplied by the weight."""
    x += tl.program_id(0).to(tl.int64) * row
    out += tl.program_id(0).to(tl.int64) * D
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        dims = first + tl.arange(0, BLOCK)
        part = tl.load(x + dims, mask=dims < D, other=0.0).to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 0) / D + eps)
    for first in range(0, D, BLOCK):
        dims = first + tl.arange(0, BLOCK)
        part = tl.load(x + dims, mask=dims < D, other=0.0).to(tl.float32)
        part = (part * scale).to(out.dtype.element_ty).to(tl.float32)
        part *= tl.load(weight + dims, mask=dims < D, other=0.0).to(tl.float32)
        tl.store(out + dims, part.to(out.dtype.element_ty), mask=dims < D)


@triton.jit
def _sum_of_products(a, b, c, d, dtype):
    """`a * b + c * d`, each product rounded."""
    return ((a * b).to(dtype).to(tl.float32) + (c * d).to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["N"])
def rotate_kernel(
    query,
    key,
    cos,
    sin,
    query_out,  # [B, HQ, N, 2 * HALF], contiguous
    key_out,  # [B, H, N, 2 * HALF], contiguous
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    cos_b,
    cos_n,
    sin_b,
    sin_n,
    HQ,
    H,
    N,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
):
    """One token of one query or key head."""
    n = (tl.program_id(0) % N).to(tl.int64)
    head = tl.program_id(0) // N % (HQ + H)
    b = (tl.program_id(0) // N // (HQ + H)).to(tl.int64)
    if head < HQ:
        x = query + (b * query_b + head * query_h + n * query_n)
        out = query_out + ((b * HQ + head) * N + n) * 2 * HALF
    else:
        x = key + (b * key_b + (head - HQ) * key_h + n * key_n)
        out = key_out + ((b * H + head - HQ) * N + n) * 2 * HALF
    cos += b * cos_b + n * cos_n
    sin += b * sin_b + n * sin_n

    dims = tl.arange(0, PAD)
    real = dims < HALF
    low = tl.load(x + dims, mask=real, other=0.0).to(tl.float32)
    high = tl.load(x + HALF + dims, mask=real, other=0.0).to(tl.float32)
    c = tl.load(cos + dims, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + dims, mask=real, other=0.0).to(tl.float32)
    dtype = query.dtype.element_ty
    tl.store(out + dims, _sum_of_products(low, c, -high, s, dtype), mask=real)
    c = tl.load(cos + HALF + dims, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + HALF + dims, mask=real, other=0.0).to(tl.float32)
    tl.store(out + HALF + dims, _sum_of_products(high, c, low, s, dtype), mask=real)


@triton.jit
def silu_mul_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    """BLOCK numbers of `silu(gate) * up`, all contiguous."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    g = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (silu * u).to(out.dtype.element_ty), mask=real)
