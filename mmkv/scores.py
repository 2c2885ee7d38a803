"""Importance of a prompt's tokens, computed from what attention already has at hand.

Every score is a pure function of tensors: float32 out, higher = keep, inputs are never written to.

Shape letters, here and in the rest of the package:

- `B` rows of the batch
- `Hq` query heads, `H` key-value heads; query head `h` reads key-value head `h // (Hq // H)`
- `N` prompt tokens, padding included
- `D` head dimension
- `L` attention layers

`valid` is a bool `[B, N]`, False for padding. Padding tokens score 0 and influence nothing: a
left-padded row gives exactly what it gives alone.

Scores by attention follow what the layer computes: its `scale`, its `softcap`, and its `mask` where
that is not causal. They are float32 inside `torch.autocast` too.
"""

import itertools
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.tiling import autocast_off, tile

Pooling = Literal["avg", "max"]


@torch.no_grad()
def window_attention(
    query: Tensor,
    key: Tensor,
    *,
    window: int,
    kernel_size: int,
    pooling: Pooling | None,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean attention that the last `window` queries pay to each earlier token, pooled over tokens.

    Args:
        query: `[B, Hq, Q, D]` with `window <= Q <= N`, of which the last `window` rows are used.
        key: `[B, H, N, D]`.
        window: number of queries in the observation window.
        kernel_size: odd width of the pooling, in tokens; unused without pooling.
        pooling: "avg" (zeros beyond the edges count), "max", or None. It is done per query head,
            before the mean over the query heads of a group.
        scale: factor of the logits, `D ** -0.5` by default.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        valid: bool `[B, N]`, False for padding.
        mask: bool `[B, 1, Q, N]`, True where a query sees a key, in place of the causal rule. A
            query that sees nothing pays no attention.
        bias: float `[B, H, N]`, added to the logits of each key.
        weights: `[window]`, non-negative, for a weighted mean over the window's queries
            (PyramidInfer's recency weights); uniform by default.

    Returns:
        float32 `[B, H, N - window]`, in [0, 1].

    Raises:
        ValueError: shapes do not fit, the prompt is not longer than the window, or an option is
            out of range.

    Source: SnapKV, arXiv 2404.14469, section 4; weights: PyramidInfer, arXiv 2405.12532, section 3.
    """
    B, Hq, Q, _ = _checked(query, key, valid, mask, softcap)
    valid = _unless_all(valid)
    H, N = key.shape[1], key.shape[2]
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if window >= N:
        raise ValueError(f"the prompt has {N} tokens, not more than the window of {window}")
    if not window <= Q <= N:
        raise ValueError(
            f"query must have between window = {window} and N = {N} rows, got {tuple(query.shape)}"
        )
    if pooling not in ("avg", "max", None):
        raise ValueError(f'pooling must be "avg", "max" or None, got {pooling!r}')
    if pooling is not None and (kernel_size < 1 or kernel_size % 2 == 0):
        raise ValueError(f"kernel_size must be a positive odd number, got {kernel_size}")
    per_query = _window_weights(weights, window, query.device)

    if valid is not None:
        per_query = per_query * valid[:, -window:].float()[:, None, None, None, :]
    per_query = per_query / per_query.sum(-1, keepdim=True).clamp_min(torch.finfo().tiny)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "valid": valid}
    last = query[:, :, -window:]
    attention = window_rows(last, key, window, mask=mask, bias=bias, **options)
    with autocast_off(key):
        scores = (per_query @ attention[..., : N - window]).view(B, Hq, N - window)
    # Scores are not negative, so the zeros of padding act as either pooling's edge does.
    if pooling == "avg":
        scores = F.avg_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)
    elif pooling == "max":
        scores = F.max_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)
    scores = scores.view(B, H, -1, N - window).mean(2)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, : N - window], 0.0)
    return scores


def window_rows(
    query: Tensor,
    key: Tensor,
    window: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of the last `window` queries, `[B, H, G, window, N]`; 0 where nothing is seen."""
    B, H, N, D = key.shape
    if mask is None:
        allowed = torch.ones(window, N, dtype=torch.bool, device=key.device).tril(N - window)
    else:
        allowed = mask[:, :, None, -window:]
    if valid is not None:
        # Both sides of the mask: what padding holds may be anything, NaN included.
        allowed = allowed & valid[:, None, None, None] & valid[:, None, None, -window:, None]
    with autocast_off(key):
        rows = query[:, :, -window:].float() * _factor(D, scale, softcap)
        logits = (rows.reshape(B, H, -1, D) @ key.float().mT).view(B, H, -1, window, N)
        if softcap is not None:
            logits.tanh_().mul_(softcap)
        if bias is not None:
            logits += bias[:, :, None, None]
        attention = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return attention.masked_fill(~allowed, 0.0)


@torch.no_grad()
def accumulated_attention(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    block: int = 64,
) -> Tensor:
    """Attention that each token receives from all queries of the prompt, summed, without `N x N`.

    A causal query row is complete in the keys up to its own block, so one pass over blocks of
    queries is exact: softmax `block` rows against at most `N` keys, add up the columns. Extra
    memory is `O(N * block)` per query head in flight. With a mask, each block of queries looks at
    all keys.

    Args:
        query: `[B, Hq, Q, D]`, the last `Q <= N` tokens' queries.
        key: `[B, H, N, D]`.
        scale: factor of the logits, `D ** -0.5` by default.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        valid: bool `[B, N]`, False for padding: such queries are left out, such keys score 0.
        mask: bool `[B, 1, Q, N]`, True where a query sees a key, in place of the causal rule. A
            query that sees nothing is left out.
        bias: float `[B, H, N]`, added to the logits of each key.
        block: query rows per block.

    Returns:
        float32 `[B, H, N]`, mean over the query heads of a group; a head's scores add up to its
        number of valid queries that see anything.

    Raises:
        ValueError: shapes do not fit or `block` is below 1.

    Source: H2O, arXiv 2306.14048, section 4; also the score of PrefixKV, arXiv 2412.03409.
    """
    B, Hq, Q, D = _checked(query, key, valid, mask, softcap)
    valid = _unless_all(valid)
    H, N = key.shape[1], key.shape[2]
    if Q > N:
        raise ValueError(
            f"there are more queries than keys, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    G = Hq // H
    block = min(block, max(Q, 1))
    # Rows and key-value heads in flight; those of one row are read where they lie.
    chunk = max(1, tile(key.device) // 2 // max(1, G * block * N))
    several, heads = max(1, chunk // H), math.ceil(H / math.ceil(H / chunk))

    scores = torch.zeros(B, H, N, dtype=torch.float32, device=key.device)
    future = torch.ones(block, block, dtype=torch.bool, device=key.device).triu(1)
    grouped = query.unflatten(1, (H, G))
    with autocast_off(key):
        for row, head in itertools.product(range(0, B, several), range(0, H, heads)):
            part = slice(row, row + several), slice(head, head + heads)
            found = scores[part]
            b = torch.arange(row, row + len(found), device=key.device)
            b = b.repeat_interleave(found.shape[1])
            found[:] = _column_sums(
                grouped[part].flatten(0, 1),
                key[part].flatten(0, 1).float(),
                None if valid is None else ~valid[b],
                None if mask is None else (mask, b),
                None if bias is None else bias[part].flatten(0, 1).float()[:, None],
                future=future,
                scale=_factor(D, scale, softcap),
                softcap=softcap,
            ).view_as(found)
    return scores


@torch.no_grad()
def recency(valid: Tensor) -> Tensor:
    """Score each token by its place in the prompt: `s_j = j`, and 0 for padding.

    Args:
        valid: bool `[B, N]`, False for padding.

    Returns:
        float32 `[B, 1, N]`, one ranking for all heads.

    Raises:
        ValueError: `valid` is not a bool `[B, N]`.

    Source: StreamingLLM, arXiv 2309.17453, section 3.2, without its sinks.
    """
    if valid.ndim != 2 or valid.dtype != torch.bool:
        raise ValueError(f"valid must be a bool [B, N], got {valid.dtype} {tuple(valid.shape)}")
    place = torch.arange(valid.shape[1], dtype=torch.float32, device=valid.device)
    return (place * valid)[:, None]


@torch.no_grad()
def residual_similarity(before: Tensor, after: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean cosine similarity of the residual stream before and after an attention block.

    Args:
        before: `[B, N, hidden]`, the input of the block.
        after: `[B, N, hidden]`, the same stream once the block's output was added.
        valid: bool `[B, N]`, False for padding, which the mean leaves out.

    Returns:
        float32 `[B]`, in [-1, 1]; 0 for a row that is all padding. High means that the layer
        changes little.

    Raises:
        ValueError: shapes do not fit.

    Source: SqueezeAttention, arXiv 2404.04793, section 3.
    """
    if before.ndim != 3 or before.shape != after.shape:
        raise ValueError(
            "before and after must have one shape [B, N, hidden], got "
            f"{tuple(before.shape)} and {tuple(after.shape)}"
        )
    check_valid(valid, before.shape[0], before.shape[1])
    similarity = F.cosine_similarity(before.float(), after.float(), dim=-1)  # [B, N]
    if valid is None:
        return similarity.mean(-1)
    similarity = similarity.masked_fill(~valid, 0.0)
    return similarity.sum(-1) / valid.sum(-1).clamp_min(1)


def _column_sums(
    query: Tensor,
    key: Tensor,
    padding: Tensor | None,
    mask: tuple[Tensor, Tensor] | None,
    bias: Tensor | None,
    *,
    future: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Column sums `[n, N]` of the attention of `query [n, G, Q, D]` on `key [n, N, D]`.

    The queries are those of the last `Q` keys. Causal, without a mask: bool `[B, 1, Q, N]`, and
    which of its `B` is each of the `n`. `bias` is `[n, 1, N]`, or None.
    """
    (n, G, Q, D), N = query.shape, key.shape[1]
    block, past = future.shape[0], N - Q
    # The lowest finite number and not -inf: the row of a padding query must stay finite.
    lowest = torch.finfo(key.dtype).min
    sums = key.new_zeros(n, N)
    # Memory for the logits and the attention of every block: what was just used is near.
    memory = key.new_empty(2, n * G * min(block, Q) * N)
    for start in range(past, N, block):
        stop = min(start + block, N)
        size, seen = stop - start, stop if mask is None else N
        rows = query[:, :, start - past : stop - past].float() * scale
        counted = rows.new_full((n, G, size), 1.0 / G)
        if padding is not None:  # what it holds may be anything, NaN included
            absent = padding[:, None, start:stop]
            rows = rows.masked_fill(absent[..., None], 0.0)
            counted = counted.masked_fill(absent, 0.0)
        # The group is folded into the rows of the matmul, so keys are never repeated.
        logits, attention = memory[:, : n * G * size * seen].view(2, n, G * size, seen)
        torch.bmm(rows.reshape(n, G * size, D), key[:, :seen].mT, out=logits)
        if softcap is not None:
            logits.tanh_().mul_(softcap)
        if bias is not None:
            logits += bias[..., :seen]
        if mask is None:
            diagonal = logits.view(n, G, size, stop)[..., start:]
            diagonal.masked_fill_(future[:size, :size], lowest)
            if padding is not None:
                logits.masked_fill_(padding[:, None, :stop], lowest)
        else:
            every, row = mask
            blocked = ~every[row, 0, start - past : stop - past]
            if padding is not None:
                blocked |= padding[:, None]
            logits.view(n, G, size, N).masked_fill_(blocked[:, None], lowest)
            counted = counted.masked_fill(blocked.all(-1)[:, None], 0.0)
        torch.softmax(logits, -1, out=attention)
        sums[:, :seen] += (counted.view(n, 1, G * size) @ attention)[:, 0]
    return sums


def _factor(D: int, scale: float | None, softcap: float | None = None) -> float:
    """What to multiply queries with; before a softcap, logits are counted in units of it."""
    return (D**-0.5 if scale is None else scale) / (1.0 if softcap is None else softcap)


def _checked(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None,
    mask: Tensor | None,
    softcap: float | None,
) -> tuple[int, int, int, int]:
    """Check what scores by attention are given; return `(B, Hq, Q, D)`."""
    shapes = f"query {tuple(query.shape)} and key {tuple(key.shape)}"
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query must be [B, Hq, N, D] and key [B, H, N, D], got {shapes}")
    B, Hq, Q, D = query.shape
    if key.shape[0] != B:
        raise ValueError(f"query and key must have the same batch size, got {shapes}")
    if key.shape[3] != D:
        raise ValueError(f"query and key must have the same head_dim, got {shapes}")
    if key.shape[1] < 1 or Hq < 1 or Hq % key.shape[1]:
        raise ValueError(f"query heads must be a multiple of key-value heads, got {shapes}")
    N = key.shape[2]
    check_valid(valid, B, N)
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (B, 1, Q, N)):
        raise ValueError(
            f"mask must be a bool [B, 1, Q, N] = ({B}, 1, {Q}, {N}), "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    return B, Hq, Q, D


def check_valid(valid: Tensor | None, B: int, N: int) -> None:
    """Check that `valid` is a bool [B, N], or None."""
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (B, N)):
        raise ValueError(
            f"valid must be a bool [B, N] = ({B}, {N}), got {valid.dtype} {tuple(valid.shape)}"
        )


def _unless_all(valid: Tensor | None) -> Tensor | None:
    """None where nothing is padding, which saves masking; not asked of a device that would sync."""
    if valid is not None and valid.device.type == "cpu" and bool(valid.all()):
        return None
    return valid


def _window_weights(weights: Tensor | None, window: int, device: torch.device) -> Tensor:
    if weights is None:
        return torch.ones(window, device=device)
    if tuple(weights.shape) != (window,):
        raise ValueError(f"weights must be [window] = ({window},), got {tuple(weights.shape)}")
    if not (bool(weights.isfinite().all()) and weights.min() >= 0 and weights.max() > 0):
        raise ValueError(
            f"weights must be finite, not negative and not all 0, got {weights.tolist()}"
        )
    return weights.detach().to(device, torch.float32, non_blocking=True)
