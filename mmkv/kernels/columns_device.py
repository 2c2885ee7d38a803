"""Device code of `columns.py`.

A language of its own in Python's clothes: parameters are pointers, numbers and constants of
compilation, and the operators mean Triton's. Its compiler checks it, which a test runs.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from mmkv.kernels.decode_device import capped


@triton.jit(do_not_specialize=["Q", "N"])
def row_lse_kernel(
    query,
    key,
    valid,  # uint8 [B, N], contiguous; not read unless PADDED
    lse,  # [B, Hq, Q], contiguous
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    Q,
    N,
    HEADS,
    SHARE,  # query heads that read one key-value head
    inner,  # see `capped`
    outer,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # queries of a program
    STEP: tl.constexpr,  # keys of an iteration
    CAPPED: tl.constexpr,
    PADDED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Log-sum-exp of BLOCK query rows of one query head."""
    blocks = tl.cdiv(Q, BLOCK)
    # Late queries see most keys: their programs start first.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK
    head = (tl.program_id(0) // blocks).to(tl.int64)  # b * Hq + h
    b = head // HEADS
    key += b * key_b + head % HEADS // SHARE * key_h
    valid += b * N
    past = N - Q

    rows = start + tl.arange(0, BLOCK)
    dims = tl.arange(0, D_PAD)
    real = rows < Q
    if PADDED:
        real = real & (tl.load(valid + past + rows, mask=real, other=0) != 0)
    q = tl.load(
        query
        + (b * query_b + head % HEADS * query_h)
        + rows.to(tl.int64)[:, None] * query_n
        + dims[None, :],
        mask=real[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)

    # A finite start: a row that has seen no key yet must not make -inf - -inf.
    top = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, past + tl.minimum(start + BLOCK, Q), STEP):
        cols = first + tl.arange(0, STEP)
        there = cols < N
        if PADDED:
            there = there & (tl.load(valid + cols, mask=there, other=0) != 0)
        k = tl.load(
            key + cols.to(tl.int64)[:, None] * key_n + dims[None, :],
            mask=there[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        if WIDEN:
            k = k.to(tl.float32)
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), inner, outer, CAPPED)
        seen = there[None, :] & (cols[None, :] <= past + rows[:, None])
        logits = tl.where(seen, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
        top = higher

    some = real & (total > 0.0)
    result = (top + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    tl.store(lse + head * Q + rows, tl.where(some, result, -float("inf")), mask=rows < Q)


@triton.jit(do_not_specialize=["Q", "N"])
def column_sums_kernel(
    query,
    key,
    valid,  # uint8 [B, N], contiguous; not read unless PADDED
    lse,  # [B, Hq, Q], contiguous
    sums,  # [B, HEADS, N], contiguous
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    Q,
    N,
    HEADS,
    SHARE,  # of the heads of the result, that read one key-value head
    G,  # query heads that are averaged in one head of the result
    inner,  # see `capped`
    outer,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # keys of a program
    STEP: tl.constexpr,  # queries of an iteration
    CAPPED: tl.constexpr,
    PADDED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """What BLOCK keys receive from the queries of one head of the result."""
    blocks = tl.cdiv(N, BLOCK)
    # Early keys are seen by most queries: their programs start first.
    start = tl.program_id(0) % blocks * BLOCK
    head = (tl.program_id(0) // blocks).to(tl.int64)  # b * HEADS + h
    b = head // HEADS
    query += b * query_b + head % HEADS * G * query_h
    valid += b * N
    lse += head * G * Q
    past = N - Q

    cols = start + tl.arange(0, BLOCK)
    dims = tl.arange(0, D_PAD)
    there = cols < N
    if PADDED:
        there = there & (tl.load(valid + cols, mask=there, other=0) != 0)
    k = tl.load(
        key
        + (b * key_b + head % HEADS // SHARE * key_h)
        + cols.to(tl.int64)[:, None] * key_n
        + dims[None, :],
        mask=there[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    if WIDEN:
        k = k.to(tl.float32)

    received = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, G):
        for first in range(tl.maximum(start - past, 0), Q, STEP):
            rows = first + tl.arange(0, STEP)
            real = rows < Q
            if PADDED:
                real = real & (tl.load(valid + past + rows, mask=real, other=0) != 0)
            q = tl.load(
                query + rows.to(tl.int64)[:, None] * query_n + dims[None, :],
                mask=real[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            if WIDEN:
                q = q.to(tl.float32)
            whole = tl.load(lse + rows, mask=real, other=0.0) * 1.4426950408889634
            logits = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), inner, outer, CAPPED)
            logits -= whole[None, :]
            seen = real[None, :] & (cols[:, None] <= past + rows[None, :])
            received += tl.sum(tl.exp2(tl.where(seen, logits, -float("inf"))), 1)
        query += query_h
        lse += Q
    received = tl.where(there, received / G, 0.0)
    tl.store(sums + head * N + cols, received, mask=cols < N)
