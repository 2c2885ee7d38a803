"""Device code of `decode.py`, for what a step drops where attention decides (H2O, TOVA)."""

# pyright: basic, reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S", "N", "end"])
def lightest_kernel(
    logits,  # [R, G, S], contiguous
    whole,  # [R, G], contiguous
    starts,
    lengths,
    position,
    positions,  # [N]
    mass,  # [N]; neither read nor written unless ADDS
    protected,
    recent,
    capacity,
    places,  # [R, n], contiguous; not read unless PLACED
    freed,
    S,
    G,
    N,  # n
    end,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    PLACED: tl.constexpr,
):
    """The slot that each row's next token takes: the lightest one's, or a fresh one.

    A program is for HEADS rows that hold the same tokens in the same slots and drop together.
    """
    first = tl.program_id(0).to(tl.int64) * HEADS
    own = tl.load(freed + first)
    length = tl.load(lengths + first)
    start = tl.load(starts + first)
    newest = tl.load(position)
    # Positions above this are recent.
    until = newest - tl.load(recent + first)
    if PLACED:  # counted over padding, which lies between the last prompt's tokens
        wide = end - 1 - until
        place = tl.minimum(tl.maximum(N - wide, 0), N - 1)
        until = tl.where(wide > 0, tl.load(places + first * N + place).to(tl.int32) - 1, until)
    fixed = tl.load(protected + first)

    far = 2147483647
    least = float("inf")
    found = far
    eldest = far
    instead = far
    for begin in range(0, length, BLOCK):
        slots = begin + tl.arange(0, BLOCK)
        used = slots < length
        mean = tl.zeros([BLOCK], tl.float32)
        for row in range(0, HEADS * G):
            x = tl.load(logits + (first * G + row) * S + slots, mask=used, other=-float("inf"))
            mean += tl.exp2(x - tl.load(whole + first * G + row))
        mean = mean / (HEADS * G)
        if ADDS:
            held = used & (slots != own)
            mean += tl.load(mass + start + slots, mask=held, other=0.0)
            tl.store(mass + start + slots, mean, mask=used)
        at = tl.load(positions + start + slots, mask=used, other=-1)
        free = used & (slots >= fixed)
        light = tl.where(free & (at <= until), mean, float("inf"))
        lowest = tl.min(light, 0)
        where = tl.min(tl.where((light == lowest) & (light < float("inf")), slots, far), 0)
        found = tl.where(lowest < least, where, found)
        least = tl.minimum(lowest, least)
        old = tl.where(free, at, far)
        oldest = tl.min(old, 0)
        where = tl.min(tl.where((old == oldest) & free, slots, far), 0)
        instead = tl.where(oldest < eldest, where, instead)
        eldest = tl.minimum(oldest, eldest)
    # Where recent ones fill the whole capacity, the oldest of them goes.
    victim = tl.where(found < far, found, instead)
    taken = tl.where(length > tl.load(capacity + first), victim, length).to(tl.int64)
    for row in range(0, HEADS):
        tl.store(freed + first + row, taken)
