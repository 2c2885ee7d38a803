"""Decoding one token on a ragged store, each row's slots split over many programs.

Each program goes once over a chunk of a row's slots, for all query heads that share them, and
leaves a normalised part and its log-sum-exp; a second kernel joins a row's parts. The program that
comes to the new token's slot writes its pair. How many chunks there are follows from shapes alone,
and slots and lengths are read on the device: nothing waits for the host, and a captured CUDA graph
stays right as the cache grows.
"""

import math

import torch
import triton
from torch import Tensor

from mmkv.kernels.decode_device import group_kernel, join_kernel, one_head_kernel
from mmkv.kernels.launching import INTERPRETED, check_dtypes, check_widths, launch, padded, rows_of
from mmkv.kernels.lightest_device import lightest_kernel
from mmkv.kernels.ragged import Lightest, RaggedStore, StepInputs

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
    key: Tensor,
    value: Tensor,
    store: RaggedStore,
    step: StepInputs,
    *,
    scale: float,
    softcap: float | None = None,
    lightest: Lightest | None = None,
) -> Tensor:
    """Write one new token's pairs into their slots, and attend to what each row holds with them.

    A row is one key-value head of one sequence: `R` is their product, `G` the query heads that
    share a key-value head. Capturable in a CUDA graph once it has run on the same shapes.

    Args:
        query: `[R, G, D]`.
        key: `[R, D]`.
        value: `[R, Dv]`. All are of the store's dtype.
        store: what the rows hold; the new pairs are written into it.
        step: which slots they take.
        scale: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)`, before the log-weights (Gemma 2).
        lightest: what it drops; `freed` becomes the slots that the next token takes.

    Returns:
        `[R, G, Dv]` in the dtype of `query`.

    Raises:
        ValueError: shapes, dtypes or options do not fit.

    Source: flash-decoding, https://pytorch.org/blog/flash-decoding; the weights are what H2O,
    arXiv 2306.14048, accumulates.
    """
    R, G, D, DV = _checked(query, key, value, store, softcap)
    S = step.most

    def scratch(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    out = query.new_empty((R, G, DV))
    if R == 0:
        return out
    chunks, chunk = split(R, S)
    # A single chunk's part is the result.
    parts = out if chunks == 1 else scratch(R, chunks, G, DV)
    lse = scratch(R, chunks, G)
    whole = lse if chunks == 1 else scratch(R, G)
    logits = scratch(R, G, S) if lightest is not None else lse
    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    inner, outer = scale * _LOG2_E, 0.0
    if softcap is not None:
        inner, outer = 2 * scale * _LOG2_E / softcap, softcap * _LOG2_E
    with torch.cuda.device_of(store.keys):
        launch(one_head_kernel if G == 1 else group_kernel, (R, chunks))(
            query,
            key,
            value,
            store.keys,
            store.values,
            store.positions,
            lse if store.log_weights is None else store.log_weights,
            store.starts,
            store.lengths,
            step.slots,
            step.line if step.entries is None else step.entries,
            step.line,
            step.position,
            parts,
            lse,
            logits,
            *query.stride()[:2],
            key.stride(0),
            value.stride(0),
            0 if step.slots.shape[0] == 1 else step.slots.stride(0),
            0 if step.slots.shape[1] == 1 else 1,
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
            WEIGHTED=store.log_weights is not None,
            SHARED=step.entries is not None,
            WEIGHED=lightest is not None,
            WIDEN=INTERPRETED,
            **_tile(G, max(padded(D), padded(DV)), store.keys.element_size()),
        )
        if chunks > 1:
            sizes = {"DV": DV, "DV_PAD": padded(DV), "CHUNKS": padded(chunks)}
            join = launch(join_kernel, (R * G,))
            join(parts, lse, store.lengths, out, whole, G, chunks, chunk, **sizes, num_warps=8)
        if lightest is not None:
            _free(store, step, lightest, logits, whole)
    return out


def _free(
    store: RaggedStore, step: StepInputs, lightest: Lightest, logits: Tensor, whole: Tensor
) -> None:
    """Find the slots that the next token takes; with single heads, accumulate the attention."""
    (R, G, S), places, heads = logits.shape, lightest.places, lightest.heads
    launch(lightest_kernel, (R // heads,))(
        logits,
        whole,
        store.starts,
        store.lengths,
        step.position,
        store.positions,
        logits if store.mass is None else store.mass,
        lightest.protected,
        lightest.recent,
        lightest.capacity,
        lightest.freed if places is None else places,
        lightest.freed,
        S,
        G,
        0 if places is None else places.shape[1],
        lightest.end,
        HEADS=heads,
        BLOCK=1024,
        ADDS=heads == 1,
        PLACED=places is not None,
    )


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
    query: Tensor, key: Tensor, value: Tensor, store: RaggedStore, softcap: float | None
) -> tuple[int, int, int, int]:
    """Check the shapes, dtypes and options; return `(R, G, D, Dv)`."""
    new = {"query": query, "key": key, "value": value}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in new.items())
    if query.ndim != 3 or key.ndim != 2 or value.ndim != 2:
        raise ValueError(f"query must be [R, G, D], key [R, D] and value [R, Dv], got {shapes}")
    R, G, D = query.shape
    DV = value.shape[1]
    if key.shape != (R, D) or len(value) != R or not 1 <= G <= _MAX_GROUP:
        raise ValueError(
            "query, key and value must have one R, query and key one D, and G must be at least 1 "
            f"and at most {_MAX_GROUP}, got {shapes}"
        )
    keys, values = store.keys, store.values
    if keys.shape[1:] != (D,) or values.shape[1:] != (DV,) or len(store.starts) != R:
        raise ValueError(
            f"the store has {len(store.starts)} rows of {tuple(keys.shape[1:])} and "
            f"{tuple(values.shape[1:])}, got {shapes}"
        )
    check_dtypes(**new, keys=keys, values=values)
    check_widths(**new)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    return R, G, D, DV
