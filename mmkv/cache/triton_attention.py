"""Attention of a decode step on a GPU, as one Triton kernel that reads codes as they are stored.

Each program reads some slots of a row, or a row's exact pairs. Their outputs are joined by their
sums of exponentials, as in flash decoding. Factors of products have the model's type, of 16 bits,
and sums are float32, as in torch's own kernels.
"""

# Triton compiles what it decorates; parameters there have no Python types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.cache.products import Coded

SLOTS = 64  # that a program reads at a time
PROGRAMS = 528  # of a call, if there are slots enough: four for each multiprocessor of an H200
WARPS, STAGES = 4, 2

# Triton's name of a model's type; float32 where its interpreter tests the kernel.
_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def attend(
    query: Tensor,
    keys: Tensor | Coded,
    values: Tensor | Coded,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the output [R, Q, Dv] of `mmkv.cache.kernels.attend`, in float32 or autocast's type.

    Args:
        query: [R, Q, D].
        keys, values: of U slots.
        bias: [R, 1, U], added to the logits; None: all slots are visible.
        scale: factor of the query-key products.
    """
    if isinstance(keys, Coded) and isinstance(values, Coded):
        stored = keys.codes, values.codes
        steps, exact = (keys.step, values.step), (keys.exact, values.exact)
        slots, bits, size = keys.exact_slots, 8 if keys.half is None else 4, values.size
        n_groups, n_exact = steps[0].shape[1], slots.shape[2]
    else:
        assert isinstance(keys, Tensor)
        assert isinstance(values, Tensor)
        stored = steps = exact = keys, values
        slots, bits, size, n_groups, n_exact = keys, 16, None, 1, 0
    (R, Q, D), U, Dv = query.shape, stored[0].shape[1], stored[1].shape[2]
    n_tiles = -(-U // SLOTS)
    per_part = -(-n_tiles // min(n_tiles, -(-PROGRAMS // R)))
    n_parts = -(-n_tiles // per_part) + (n_exact > 0)
    outputs = torch.empty(R, Q, n_parts, Dv, dtype=torch.float32, device=query.device)
    log_sums = torch.empty(R, Q, n_parts, dtype=torch.float32, device=query.device)
    _attend[(R, n_parts)](
        query.contiguous(),
        *stored,
        *steps,
        *exact,
        slots,
        outputs if bias is None else bias,
        outputs,
        log_sums,
        scale,
        U,
        per_part * SLOTS,
        *(x.stride(i) for x in stored for i in (0, 1)),
        *steps[0].stride(),
        exact[0].stride(0),
        exact[0].stride(1),
        slots.stride(0),
        0 if bias is None else bias.stride(0),
        Q,
        _tile(Q),
        D,
        _tile(D),
        Dv,
        _tile(Dv),
        D // n_groups,
        _tile(D // n_groups),
        n_exact,
        _tile(n_exact),
        SLOTS,
        bits,
        bias is not None,
        _TYPES[exact[0].dtype],
        num_warps=WARPS,
        num_stages=STAGES,
    )
    weights = log_sums.softmax(-1)[:, :, None]
    return (weights @ outputs)[:, :, 0, :size]


def try_triton(device: torch.device) -> None:
    """Compile a small kernel and run it; an error says why Triton does not work."""
    with torch.cuda.device(device):
        _write_one[(1,)](torch.empty(1, device=device))


@triton.jit
def _write_one(x):
    tl.store(x, 1.0)


def _tile(n: int) -> int:
    """Return the size of a tile for n numbers: a power of two that a product takes."""
    return max(16, 1 << (n - 1).bit_length())


# Numbers and tensors by whose value and alignment Triton would compile the kernel anew.
_LENGTHS = [
    "scale",
    "U",
    "per_part",
    "steps_row",
    "steps_group",
    "steps_slot",
    "exact_slots_row",
    "bias_row",
    "Q",
]
_UNALIGNED = ["key_steps", "value_steps", "exact_slots", "bias", "log_sums"]


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_UNALIGNED)
def _attend(
    query,
    key_store,
    value_store,
    key_steps,
    value_steps,
    exact_keys,
    exact_values,
    exact_slots,
    bias,
    outputs,
    log_sums,
    scale,
    U,
    per_part,
    key_row,
    key_slot,
    value_row,
    value_slot,
    steps_row,
    steps_group,
    steps_slot,
    exact_row,
    exact_place,
    exact_slots_row,
    bias_row,
    Q,
    Q_TILE: tl.constexpr,
    D: tl.constexpr,
    D_TILE: tl.constexpr,
    DV: tl.constexpr,
    DV_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    X: tl.constexpr,
    X_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    BIASED: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Write `outputs` [R, Q, parts, Dv], and the logarithms of sums of exponentials [R, Q, parts].

    A program computes one part of one row: `per_part` of the U slots, or, in codes, the X exact
    pairs, which are part 0. Names in capitals with TILE are a length's power of two; `key_row` and
    the like are strides.
    """
    row, part, n_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    q, d, dv = tl.arange(0, Q_TILE), tl.arange(0, D_TILE), tl.arange(0, DV_TILE)
    own = (q < Q)[:, None] & (d < D)[None, :]
    x = tl.load(query + (row * Q + q)[:, None] * D + d[None, :], mask=own, other=0.0)
    x = x.to(tl.float32) * scale
    most = tl.full([Q_TILE], float("-inf"), tl.float32)
    total = tl.zeros([Q_TILE], tl.float32)
    out = tl.zeros([Q_TILE, DV_TILE], tl.float32)
    if X > 0:
        places = tl.arange(0, X_TILE)
        of_place = tl.load(exact_slots + row * exact_slots_row + places, mask=places < X, other=-1)
    if X > 0 and part == 0:
        for first in range(0, X, 16):
            place = first + tl.arange(0, 16)
            slot = tl.load(exact_slots + row * exact_slots_row + place, mask=place < X, other=-1)
            # Of places with the same slot the last one has its pair.
            again = (places[None, :] > place[:, None]) & (of_place[None, :] == slot[:, None])
            seen = (slot >= 0) & (slot < U) & (tl.max(again.to(tl.int32), 1) == 0)
            at = row * exact_row + place[:, None] * exact_place
            of_key, of_value = seen[:, None] & (d < D)[None, :], seen[:, None] & (dv < DV)[None, :]
            keys = tl.load(exact_keys + at + d[None, :], mask=of_key, other=0.0)
            values = tl.load(exact_values + at + dv[None, :], mask=of_value, other=0.0)
            added = tl.where(seen, 0.0, float("-inf"))
            if BIASED:
                added += tl.load(bias + row * bias_row + slot, mask=seen, other=0.0).to(tl.float32)
            most, total, out = _add(x, keys, values, added, most, total, out)
    else:
        start = (part - (X > 0)) * per_part
        end = tl.minimum(start + per_part, U)
        for first in range(start, end, SLOTS):
            slot = first + tl.arange(0, SLOTS)
            seen = slot < end
            of_key, of_value = seen[:, None] & (d < D)[None, :], seen[:, None] & (dv < DV)[None, :]
            at = row * key_row + slot[:, None] * key_slot + d[None, :]
            keys = tl.load(key_store + at, mask=of_key, other=0)
            if BITS == 4:
                values = keys & -16
                keys = keys << 4
            else:
                of_slot = row * value_row + slot[:, None] * value_slot + dv[None, :]
                values = tl.load(value_store + of_slot, mask=of_value, other=0)
            if BITS < 16:
                group = tl.arange(0, D_TILE // GROUP_TILE)
                step = row * steps_row + slot[:, None] * steps_slot + group[None, :] * steps_group
                of_group = seen[:, None] & (group * GROUP < D)[None, :]
                key_step = tl.load(key_steps + step, mask=of_group, other=0.0)
                value_step = tl.load(value_steps + step, mask=of_group, other=0.0)
                keys = _numbers(keys, key_step, SLOTS, D_TILE, GROUP_TILE).to(TYPE)
                values = _numbers(values, value_step, SLOTS, D_TILE, GROUP_TILE).to(TYPE)
                exact = tl.max((of_place[:, None] == slot[None, :]).to(tl.int32), 0)
                seen = seen & (exact == 0)
            added = tl.where(seen, 0.0, float("-inf"))
            if BIASED:
                added += tl.load(bias + row * bias_row + slot, mask=seen, other=0.0).to(tl.float32)
            most, total, out = _add(x, keys, values, added, most, total, out)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    output = (row * Q + q) * n_parts + part
    own = (q < Q)[:, None] & (dv < DV)[None, :]
    tl.store(outputs + output[:, None] * DV + dv[None, :], out, mask=own)
    log_sum = tl.where(total > 0, most + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(log_sums + output, log_sum, mask=q < Q)


@triton.jit
def _numbers(codes, step, S: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """Return the numbers [S, D] that codes stand for; steps of their groups are [S, D / GROUP]."""
    if GROUP < D:
        step = tl.broadcast_to(step[:, :, None], (S, D // GROUP, GROUP)).reshape(S, D)
    return codes.to(tl.float32) * step.to(tl.float32)


@triton.jit
def _add(x, keys, values, added, most, total, out):
    """Add S slots to the outputs, the largest logits and the sums of exponentials of Q queries.

    Queries x are [Q, D], keys and values [S, D] and [S, Dv], `added` to the logits is [S].
    """
    logits = tl.dot(x.to(keys.dtype), tl.trans(keys), input_precision="ieee") + added[None, :]
    new_most = tl.maximum(most, tl.max(logits, 1))
    base = tl.where(new_most == float("-inf"), 0.0, new_most)
    weights, shrink = tl.exp(logits - base[:, None]), tl.exp(most - base)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_most, total, out
