"""Attention that tokens receive from all queries, summed (H2O, arXiv 2306.14048, section 4).

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.parts import Score, register_part
from mmkv.scores import values
from mmkv.scores.attention import (
    Value,
    check_decoding,
    checked,
    drop_full_mask,
    scale_of,
)
from mmkv.tensors import no_autocast, tile

if TYPE_CHECKING:
    from mmkv.layer_inputs import LayerInputs
    from mmkv.policy import Policy


@register_part("accumulated")
@dataclass(frozen=True, kw_only=True)
class AccumulatedAttention(Score):
    """Attention from all queries, added up (H2O, arXiv 2306.14048, section 4).

    Options:
        value: how a token's value counts: "norm", attention times the value's L1 norm (VATP);
            "output", times its L1 norm after the output projection (CriticalKV); "residual", how
            far a query's output moves without the token (DropKV); None: not at all.
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    average_heads: bool = False
    value: Value | None = None
    turn_reduction = "sum"
    by_head = True
    queries = 0  # the attention of earlier queries is in the sum already

    def check(self, policy: Policy) -> None:
        """Refuse `value` if decode steps drop tokens by attention alone."""
        check_decoding(policy, value=self.value)

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the scores; without `value`, each query adds 1 to a head's total."""
        if self.value == "residual":
            return values.residuals(layer, layer.query.shape[2]).mean(2)
        scores = accumulated_attention(layer.query, layer.key, **layer.attention)
        if self.value == "norm":
            scores = scores * values.value_norms(layer, scores.shape[2])
        elif (
            self.value == "output"
        ):  # without CriticalKV's constant, so that scores of chunks can be added
            scores = scores * values.output_norms(layer, scores.shape[2])
        return scores


@torch.no_grad()
def accumulated_attention(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    log_weights: Tensor | None = None,
    block: int = 64,
) -> Tensor:
    """Return the attention that each token receives from all queries, without an `N x N` matrix.

    A causal query sees no keys after its own block, so one pass over blocks of queries is exact:
    softmax `block` rows against at most `N` keys, then sum the columns. It needs `O(N * block)`
    memory per query head computed at a time. With a mask, each block is computed over all keys.

    Args:
        query: `[B, Hq, Q, D]`, the last `Q <= N` tokens' queries.
        key: `[B, H, N, D]`.
        scale: factor of the logits, `D ** -0.5` by default.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        valid: bool `[B, N]`, False for padding: its queries are left out, its keys score 0.
        mask: bool `[B, 1, Q, N]`, True where a query sees a key; None: causal. A query that sees
            no key is left out.
        log_weights: float `[B, H, N]`, the logarithm of each key's weight, added to its logits;
            None: 0.
        block: query rows per block.

    Returns:
        float32 `[B, H, N]`, mean over the query heads of a group; a head's scores add up to its
        number of valid queries that see a key.

    Raises:
        ValueError: shapes do not fit or `block` is below 1.

    Source: H2O, arXiv 2306.14048, section 4; also the score of PrefixKV, arXiv 2412.03409.
    """
    B, Hq, Q, D = checked(query, key, valid, mask, softcap)
    valid = drop_full_mask(valid)
    H, N = key.shape[1], key.shape[2]
    if Q > N:
        raise ValueError(
            f"there are more queries than keys, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    G = Hq // H
    block = min(block, max(Q, 1))
    # Rows and key-value heads computed at a time; heads of one row need no copy.
    chunk = max(1, tile(key.device) // 2 // max(1, G * block * N))
    n_rows, n_heads = max(1, chunk // H), math.ceil(H / math.ceil(H / chunk))

    scores = torch.zeros(B, H, N, dtype=torch.float32, device=key.device)
    future = torch.ones(block, block, dtype=torch.bool, device=key.device).triu(1)
    grouped = query.unflatten(1, (H, G))
    with no_autocast(key.device):
        for row, head in itertools.product(range(0, B, n_rows), range(0, H, n_heads)):
            part = slice(row, row + n_rows), slice(head, head + n_heads)
            part_scores = scores[part]
            b = torch.arange(row, row + len(part_scores), device=key.device)
            b = b.repeat_interleave(part_scores.shape[1])
            part_scores[:] = _column_sums(
                grouped[part].flatten(0, 1),
                key[part].flatten(0, 1).float(),
                None if valid is None else ~valid[b],
                None if mask is None else (mask, b),
                None if log_weights is None else log_weights[part].flatten(0, 1).float()[:, None],
                future=future,
                scale=scale_of(D, scale, softcap),
                softcap=softcap,
            ).view_as(part_scores)
    return scores


def _column_sums(
    query: Tensor,
    key: Tensor,
    padding: Tensor | None,
    mask: tuple[Tensor, Tensor] | None,
    log_weights: Tensor | None,
    *,
    future: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the column sums `[n, N]` of the attention of `query [n, G, Q, D]` on `key [n, N, D]`.

    The queries are those of the last `Q` keys. `mask` is a pair, bool `[B, 1, Q, N]` and the batch
    row of each of the `n`; None: causal. `log_weights` is `[n, 1, N]`, or None.
    """
    (n, G, Q, D), N = query.shape, key.shape[1]
    block, past = future.shape[0], N - Q
    # The lowest finite number and not -inf: the row of a padding query must stay finite.
    lowest = torch.finfo(key.dtype).min
    sums = key.new_zeros(n, N)
    # All blocks share one buffer for logits and attention, so that it stays in the CPU's cache.
    buffer = key.new_empty(2, n * G * min(block, Q) * N)
    for start in range(past, N, block):
        stop = min(start + block, N)
        size, seen = stop - start, stop if mask is None else N
        scaled = query[:, :, start - past : stop - past].float() * scale
        query_weights = scaled.new_full((n, G, size), 1.0 / G)
        if padding is not None:  # its values may be anything, NaN included
            absent = padding[:, None, start:stop]
            scaled = scaled.masked_fill(absent[..., None], 0.0)
            query_weights = query_weights.masked_fill(absent, 0.0)
        # The group is folded into the rows of the matmul, so keys are never repeated.
        logits, attention = buffer[:, : n * G * size * seen].view(2, n, G * size, seen)
        torch.bmm(scaled.reshape(n, G * size, D), key[:, :seen].mT, out=logits)
        if softcap is not None:
            logits.tanh_().mul_(softcap)
        if log_weights is not None:
            logits += log_weights[..., :seen]
        if mask is None:
            diagonal = logits.view(n, G, size, stop)[..., start:]
            diagonal.masked_fill_(future[:size, :size], lowest)
            if padding is not None:
                logits.masked_fill_(padding[:, None, :stop], lowest)
        else:
            mask_rows, row = mask
            blocked = ~mask_rows[row, 0, start - past : stop - past]
            if padding is not None:
                blocked |= padding[:, None]
            logits.view(n, G, size, N).masked_fill_(blocked[:, None], lowest)
            query_weights = query_weights.masked_fill(blocked.all(-1)[:, None], 0.0)
        torch.softmax(logits, -1, out=attention)
        sums[:, :seen] += (query_weights.view(n, 1, G * size) @ attention)[:, 0]
    return sums
