"""Device code of `decode.py`.

A language of its own in Python's clothes: parameters are pointers, numbers and constants of
compilation, and the operators mean Triton's. Its compiler checks it, which a test runs.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def _slots(first, stop, own, log_weights, start, BLOCK, WEIGHTED):
    """The slots of a step, which of them are in use, and their log-weights in powers of 2.

    The new pair, in slot `own`, stands for itself alone.
    """
    slots = first + tl.arange(0, BLOCK)
    used = slots < stop
    shift = tl.zeros([BLOCK], tl.float32)
    if WEIGHTED:
        held = used & (slots != own)
        shift = tl.load(log_weights + start + slots, mask=held, other=0.0) * 1.4426950408889634
    return slots, used, shift


@triton.jit
def _append(
    r,
    at,
    new_k,
    new_v,
    keys,
    values,
    positions,
    log_weights,
    lengths,
    length,
    position,
    D,
    DV,
    D_PAD,
    DV_PAD,
    WEIGHTED,
):
    """Write the new pair where it belongs, and how many slots the row uses with it."""
    dims = tl.arange(0, D_PAD)
    dims_v = tl.arange(0, DV_PAD)
    tl.store(keys + at * D + dims, new_k, mask=dims < D)
    tl.store(values + at * DV + dims_v, new_v, mask=dims_v < DV)
    tl.store(positions + at, tl.load(position))
    if WEIGHTED:
        tl.store(log_weights + at, 0.0)
    tl.store(lengths + r, length)


@triton.jit
def capped(logits, inner, outer, CAPPED):
    """Scaled and soft-capped logits, in powers of 2."""
    logits *= inner
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both ends
        logits = outer * (1.0 - 2.0 / (tl.exp2(logits) + 1.0))
    return logits


@triton.jit(do_not_specialize=["S", "chunk"])
def one_head_kernel(
    query,
    key,  # the new pairs
    value,
    keys,  # [N, D], contiguous
    values,  # [N, DV], contiguous
    positions,  # [N]
    log_weights,  # [N]; not read unless WEIGHTED
    starts,
    lengths,
    slots_of,  # [A, R], [A, U] or [A, 1]
    entries,  # [R], columns of `slots_of`; not read unless SHARED
    line,  # of `slots_of`
    position,
    parts,  # [R, chunks, G, DV], contiguous
    lse,  # [R, chunks, G], contiguous
    logits,  # [R, G, S], contiguous; not written unless WEIGHED
    query_r,
    query_g,
    key_r,
    value_r,
    slots_a,
    slots_u,
    S,
    G,
    chunk,
    inner,
    outer,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    G_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr,
    WEIGHED: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One query head, without dot products: memory is the limit, and all sums are float32."""
    r = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * chunk
    entry = tl.load(entries + r) if SHARED else r
    own = tl.load(slots_of + tl.load(line) * slots_a + entry * slots_u)
    # Whether or not another program of this row has written it already.
    length = tl.maximum(tl.load(lengths + r), (own + 1).to(tl.int32))
    if begin >= length:
        return
    stop = tl.minimum(begin + chunk, length)
    start = tl.load(starts + r)

    dims = tl.arange(0, D_PAD)
    dims_v = tl.arange(0, DV_PAD)
    new_k = tl.load(key + r * key_r + dims, mask=dims < D, other=0.0)
    new_v = tl.load(value + r * value_r + dims_v, mask=dims_v < DV, other=0.0)
    if (own >= begin) & (own < begin + chunk):
        _append(
            r,
            start + own,
            new_k,
            new_v,
            keys,
            values,
            positions,
            log_weights,
            lengths,
            length,
            position,
            D,
            DV,
            D_PAD,
            DV_PAD,
            WEIGHTED,
        )
    q = tl.load(query + r * query_r + dims, mask=dims < D, other=0.0).to(tl.float32)

    # Each of the BLOCK lanes goes its own way over every BLOCK-th slot, so that threads meet only
    # after the loop. A finite start: a lane without a slot must not make -inf - -inf.
    top = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    received = tl.zeros([BLOCK, DV_PAD], tl.float32)
    for first in tl.range(begin, stop, BLOCK, num_stages=STAGES):
        slots, used, shift = _slots(first, stop, own, log_weights, start, BLOCK, WEIGHTED)
        far, mine = (start + slots)[:, None], (slots == own)[:, None]
        held = used[:, None] & (slots != own)[:, None]
        k = tl.load(keys + far * D + dims[None, :], mask=held & (dims < D)[None, :], other=0.0)
        k = tl.where(mine, new_k[None, :], k)
        v = tl.load(
            values + far * DV + dims_v[None, :], mask=held & (dims_v < DV)[None, :], other=0.0
        )
        v = tl.where(mine, new_v[None, :], v)
        x = capped(tl.sum(k.to(tl.float32) * q[None, :], 1), inner, outer, CAPPED) + shift
        x = tl.where(used, x, -float("inf"))
        if WEIGHED:
            tl.store(logits + r * S + slots, x, mask=slots < stop)
        higher = tl.maximum(top, x)
        fade = tl.exp2(top - higher)
        weight = tl.exp2(x - higher)
        total = total * fade + weight
        received = received * fade[:, None] + weight[:, None] * v.to(tl.float32)
        top = higher

    highest = tl.max(top, 0)
    fade = tl.exp2(top - highest)
    total = tl.sum(total * fade, 0)
    some = tl.where(total > 0.0, total, 1.0)
    part = tl.sum(received * fade[:, None], 0) / some
    row = r * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts + row * DV + dims_v, part.to(parts.dtype.element_ty), mask=dims_v < DV)
    tl.store(lse + row, tl.where(total > 0.0, highest + tl.log2(some), -float("inf")))


@triton.jit(do_not_specialize=["S", "chunk"])
def group_kernel(
    query,
    key,  # the new pairs
    value,
    keys,  # [N, D], contiguous
    values,  # [N, DV], contiguous
    positions,  # [N]
    log_weights,  # [N]; not read unless WEIGHTED
    starts,
    lengths,
    slots_of,  # [A, R], [A, U] or [A, 1]
    entries,  # [R], columns of `slots_of`; not read unless SHARED
    line,  # of `slots_of`
    position,
    parts,  # [R, chunks, G, DV], contiguous
    lse,  # [R, chunks, G], contiguous
    logits,  # [R, G, S], contiguous; not written unless WEIGHED
    query_r,
    query_g,
    key_r,
    value_r,
    slots_a,
    slots_u,
    S,
    G,
    chunk,
    inner,
    outer,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    G_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr,
    WEIGHED: tl.constexpr,
    WIDEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A group of query heads, as the rows of dot products with keys and values loaded once."""
    r = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * chunk
    entry = tl.load(entries + r) if SHARED else r
    own = tl.load(slots_of + tl.load(line) * slots_a + entry * slots_u)
    # Whether or not another program of this row has written it already.
    length = tl.maximum(tl.load(lengths + r), (own + 1).to(tl.int32))
    if begin >= length:
        return
    stop = tl.minimum(begin + chunk, length)
    start = tl.load(starts + r)

    dims = tl.arange(0, D_PAD)
    dims_v = tl.arange(0, DV_PAD)
    new_k = tl.load(key + r * key_r + dims, mask=dims < D, other=0.0)
    new_v = tl.load(value + r * value_r + dims_v, mask=dims_v < DV, other=0.0)
    if (own >= begin) & (own < begin + chunk):
        _append(
            r,
            start + own,
            new_k,
            new_v,
            keys,
            values,
            positions,
            log_weights,
            lengths,
            length,
            position,
            D,
            DV,
            D_PAD,
            DV_PAD,
            WEIGHTED,
        )
    heads = tl.arange(0, G_PAD)
    q = tl.load(
        query + r * query_r + heads[:, None] * query_g + dims[None, :],
        mask=(heads < G)[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)

    top = tl.full([G_PAD], -1.0e30, tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    received = tl.zeros([G_PAD, DV_PAD], tl.float32)
    for first in tl.range(begin, stop, BLOCK, num_stages=STAGES):
        slots, used, shift = _slots(first, stop, own, log_weights, start, BLOCK, WEIGHTED)
        far, mine = (start + slots)[:, None], (slots == own)[:, None]
        held = used[:, None] & (slots != own)[:, None]
        k = tl.load(keys + far * D + dims[None, :], mask=held & (dims < D)[None, :], other=0.0)
        k = tl.where(mine, new_k[None, :], k)
        v = tl.load(
            values + far * DV + dims_v[None, :], mask=held & (dims_v < DV)[None, :], other=0.0
        )
        v = tl.where(mine, new_v[None, :], v)
        if WIDEN:
            k = k.to(tl.float32)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        x = capped(x, inner, outer, CAPPED) + shift[None, :]
        x = tl.where(used[None, :], x, -float("inf"))
        if WEIGHED:
            tl.store(
                logits + r * G * S + heads.to(tl.int64)[:, None] * S + slots[None, :],
                x,
                mask=(heads < G)[:, None] & (slots < stop)[None, :],
            )
        higher = tl.maximum(top, tl.max(x, 1))
        fade = tl.exp2(top - higher)
        weight = tl.exp2(x - higher[:, None])
        total = total * fade + tl.sum(weight, 1)
        weight = weight.to(v.dtype)
        if WIDEN:
            weight = weight.to(tl.float32)
            v = v.to(tl.float32)
        received = received * fade[:, None]
        received += tl.dot(weight, v, input_precision="ieee")
        top = higher

    some = tl.where(total > 0.0, total, 1.0)
    row = (r * tl.num_programs(1) + tl.program_id(1)) * G + heads
    tl.store(
        parts + row[:, None] * DV + dims_v[None, :],
        (received / some[:, None]).to(parts.dtype.element_ty),
        mask=(heads < G)[:, None] & (dims_v < DV)[None, :],
    )
    result = tl.where(total > 0.0, top + tl.log2(some), -float("inf"))
    tl.store(lse + row, result, mask=heads < G)


@triton.jit(do_not_specialize=["chunks", "chunk"])
def join_kernel(
    parts,  # [R, chunks, G, DV], contiguous
    lse,  # [R, chunks, G], contiguous
    lengths,
    out,  # [R, G, DV], contiguous
    whole,  # [R, G], contiguous
    G,
    chunks,
    chunk,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Join the parts of one row's query head, those that its length reaches."""
    row = tl.program_id(0).to(tl.int64)  # r * G + g
    index = tl.arange(0, CHUNKS)
    dims = tl.arange(0, DV_PAD)
    used = (index < chunks) & (index * chunk < tl.load(lengths + row // G))
    places = (row // G * chunks + index) * G + row % G
    x = tl.load(lse + places, mask=used, other=-float("inf"))
    part = tl.load(
        parts + places[:, None] * DV + dims[None, :],
        mask=used[:, None] & (dims < DV)[None, :],
        other=0.0,
    )
    top = tl.maximum(tl.max(x, 0), -1.0e30)
    weight = tl.exp2(x - top)
    total = tl.sum(weight, 0)
    some = tl.where(total > 0.0, total, 1.0)
    joined = tl.sum(part * weight[:, None], 0) / some
    tl.store(out + row * DV + dims, joined.to(out.dtype.element_ty), mask=dims < DV)
    tl.store(whole + row, tl.where(total > 0.0, top + tl.log2(some), -float("inf")))
