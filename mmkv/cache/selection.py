"""Selection of the kept tokens: calls the policy's score, and ranks a layer's tokens by it.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.sizing import (
    checked_split,
    contested,
    is_builtin,
    marked,
    n_recent,
    split_sizes,
)
from mmkv.layer_inputs import LayerInputs, rows_of
from mmkv.policy import Policy, Score
from mmkv.tensors import no_autocast

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV


@dataclass(frozen=True)
class Ranking:
    """The ranking of one layer's tokens, and how many of them each head keeps.

    Attributes:
        rank: float [B, 1 or H, U], scores; inf for pinned tokens, -inf where there is none.
        size: int64 [B, 1 or H], how many tokens each head keeps.
        protected: bool [B, 1 or H, U], tokens that decoding must not drop.
        free: bool [B, 1 or H, U], tokens that are not pinned.
        known: the result of `counts`, if the host knows it without a device read.
    """

    rank: Tensor
    size: Tensor
    protected: Tensor
    free: Tensor
    known: Tensor | None = None

    @cached_property
    def counts(self) -> Tensor:
        """The numbers of each head, int64 [4, B, 1 or H] on the host, which waits for them once.

        Its `size`, its pinned tokens, all of its tokens, and the protected ones.
        """
        if self.known is not None:
            return self.known
        rank = self.rank
        found = rank == torch.inf, rank > -torch.inf, self.protected
        return torch.stack([self.size, *(x.sum(-1) for x in found)]).cpu()

    def kept(self, kv: PromptKV) -> Kept:
        """Return the tokens of the highest rank, in the order in which slots are filled."""
        (B, H, U, _), device = kv.keys.shape, self.rank.device
        counts, _, _, n_protected = self.counts
        M = int(counts.max())
        chosen = self.rank.argsort(dim=-1, descending=True, stable=True)[..., :M]
        filler = torch.arange(M, device=device) >= self.size[..., None]
        droppable = ~self.protected.gather(-1, chosen)
        order = (chosen + U * droppable).masked_fill(filler, 3 * U).argsort(dim=-1)
        indices = chosen.masked_fill(filler, -1).gather(-1, order)
        at = indices.expand(B, H, -1).clamp(min=0)
        both = kv.weights, kv.log_weights
        weights, log_weights = (None if x is None else x.gather(2, at) for x in both)
        return Kept(indices, counts, n_protected, weights=weights, log_weights=log_weights)


@dataclass(frozen=True)
class Kept:
    """The tokens that one layer keeps, in M slots per head.

    Attributes:
        indices: int64 [B, 1 or H, M], tokens among the U, -1 as filler at the end. Those that
            decoding must not drop come first; then in order of position.
        counts: int64 [B, 1 or H], how many tokens each head keeps, on the host.
        n_protected: int64 [B, 1 or H], how many of them decoding must not drop, on the host.
        keys, values: [B, H, M, D], the slots' pairs; None: the pairs of the tokens, unchanged.
        slot: int64 [B, H, U], the slot that each token is merged into, M for none; None: nothing
            is merged.
        weights: float32 [B, H, M], how many tokens each slot stands for; None: one each.
        log_weights: float32 [B, H, M], added to each slot's logit; None if `weights` is None.
    """

    indices: Tensor
    counts: Tensor
    n_protected: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    slot: Tensor | None = None
    weights: Tensor | None = None
    log_weights: Tensor | None = None


def importance(
    policy: Policy, layer: LayerInputs, windows: Sequence[int], present: Tensor | None = None
) -> Tensor:
    """Compute the policy's scores, float32 [B, 1 or H, N], all finite.

    One query or key that overflowed must not spoil all scores: NaN and -inf become 0, inf becomes
    larger than any finite score. If a user-written score is negative for some tokens, -inf becomes
    smaller than any finite score. `windows` [B] are the lengths of the rows' observation windows.
    If there may be padding between a row's tokens, `present`, bool [B, Q], says which queries are
    of tokens; a score sees the padding before them.

    Raises:
        ValueError: the scores have another shape, or are NaN although queries and keys are finite.
    """
    longest = layer.key.shape[2] - 1

    def of_rows(window: int, inputs: LayerInputs) -> Tensor:
        # A row no longer than its window loses no token, so its scores do not matter.
        score, window = policy.score, min(window, longest)
        if score.window and window != score.window:
            score = replace(score, window=window)
        return score(inputs)

    with torch.no_grad(), no_autocast(layer.key.device):
        scores = by_parts(layer, windows, present, of_rows)
    worst = 0.0
    if not is_builtin(policy.score):
        _check_scores(policy.score, scores, layer.query, layer.key)
        worst = -1e30 if bool(_is_negative(scores).any()) else 0.0
    if policy.score.average_heads and scores.shape[1] > 1:
        scores = scores.mean(dim=1, keepdim=True)
    return scores.nan_to_num(nan=0.0, posinf=1e30, neginf=worst)


def by_parts(
    layer: LayerInputs,
    windows: Sequence[int],
    present: Tensor | None,
    function: Callable[[int, LayerInputs], Tensor],
) -> Tensor:
    """Apply `function` to the rows of each window and number of queries, without their padding.

    Arguments are those of `importance`; results are float [B], or [B, H, N] with a place a token.
    """
    if present is None and len(set(windows)) == 1:
        return function(windows[0], layer)
    Q, device = layer.query.shape[2], layer.key.device
    n_queries = [Q] * len(windows)
    if present is not None and layer.key.shape[2] > Q:  # only these are known of all tokens
        n_queries = present.sum(-1).clamp(min=1).tolist()
    parts, order = list[Tensor](), list[int]()
    kinds = list(zip(windows, n_queries, strict=True))
    for window, n in sorted(set(kinds)):
        rows = [b for b, kind in enumerate(kinds) if kind == (window, n)]
        at = torch.tensor(rows, device=device)
        part = rows_of(layer, at)
        if present is None:
            found = function(window, part)
        else:
            part, places = part.without_gaps(present[at], n)
            found = function(window, part)
            if found.ndim > 1:
                back = places.argsort(dim=-1)[:, None].expand(-1, found.shape[1], -1)
                found = found.gather(-1, back)
        parts.append(found)
        order += rows
    return torch.cat(parts)[torch.tensor(order, device=device).argsort()]


def _is_negative(scores: Tensor) -> Tensor:
    """Return which scores are finite and below 0: bool, of the same shape."""
    return scores.isfinite() & (scores < 0)


def _check_scores(score: Score, out: Tensor, query: Tensor, key: Tensor) -> None:
    """Check a score's result."""
    B, H, N, _ = key.shape
    name = type(score).__name__
    if not isinstance(out, torch.Tensor) or out.shape not in ((B, H, N), (B, 1, N)):
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise ValueError(
            f"{name} returned {got} for keys [B, H, N, D] = {tuple(key.shape)}: expected scores "
            f"[B, H, N] = {(B, H, N)}, or {(B, 1, N)} for one ranking of all heads"
        )
    if not out.is_floating_point():
        raise ValueError(f"{name} returned {out.dtype}: expected floating-point scores")
    if bool(out.isnan().any()) and bool(query.isfinite().all() and key.isfinite().all()):
        raise ValueError(
            f"{name} returned NaN for {int(out.isnan().sum())} of {out.numel()} tokens, though "
            "queries and keys are finite: give tokens that cannot be scored a number, such as 0"
        )
    if score.turn_reduction == "max" and bool(_is_negative(out).any()):  # 0: no score yet
        raise ValueError(
            f"{name} returned a score of {float(out.amin())}, and with turn_reduction='max' scores "
            "must be 0 or more: add a number to all scores, or leave turn_reduction out"
        )


def ranked(
    plan: CacheConfig,
    kv: PromptKV,
    masks: TokenMasks,
    sizes: Sequence[int],
    layer_idx: int = 0,
    split: Tensor | None = None,
) -> Ranking:
    """Rank the tokens of one layer.

    Args:
        plan: head sizes, and the policy's share of recent tokens.
        kv: the tokens; without scores if every row keeps all of them.
        masks: those of the tokens.
        sizes: tokens kept per head, for each of the B rows.
        layer_idx: the index of the layer.
        split: int64 [B, H], tokens kept by each head, if the heads of all layers share a budget.
    """
    policy = plan.policy
    pinned, protected = marked([masks.pinned, masks.protected], kv.positions)
    free = (kv.positions >= 0) & ~pinned
    scores, present, pinned, size = contested(policy, kv, pinned, sizes)
    protected, competes = protected.expand(present.shape), present & ~pinned
    known = None if kv.evicted else _known(policy, masks, sizes, scores.shape[1])
    if split is not None:
        known = None if known is None else torch.stack([split, *known[1:]])
        size = split.to(size.device, non_blocking=True)
    elif plan.table is not None:  # the host splits
        if known is None:
            marks = pinned, present, protected, competes.any(1, keepdim=True).expand_as(competes)
            *known, of_any = torch.stack([size, *(x.sum(-1) for x in marks)]).cpu()
            n_candidates = of_any[:, 0]
        else:
            n_candidates = (known[2] - known[1])[:, 0]
        host_size, n_pinned, n_present, n_protected = known
        n_layers, lengths = len(plan.table.layers), zip(masks.lengths, masks.n_pinned, strict=True)
        shares = [plan.share_kept(n_layers, *of_row) for of_row in lengths]
        heads = partial(plan.table.split, n_candidates, len(size[0]), layer_idx, shares)
        host_size = split_sizes(heads, n_pinned, n_present, host_size, sizes)
        known = torch.stack([host_size, n_pinned, n_present, n_protected])
        size = host_size.to(size.device, non_blocking=True)
    elif policy.heads.scope == "layer":
        among = scores.masked_fill(~competes, float("-inf"))
        heads = partial(checked_split, policy.heads, among, layer_idx=layer_idx)
        size, known = split_sizes(heads, pinned.sum(-1), present.sum(-1), size, sizes), None
    rank = scores.masked_fill(pinned, float("inf")).masked_fill(~present, float("-inf"))
    return Ranking(rank, size, protected, free, known)


def _known(policy: Policy, masks: TokenMasks, sizes: Sequence[int], heads: int) -> Tensor:
    """Return `Ranking.counts` of a first prompt whose heads keep the same number of tokens."""
    columns = sizes, masks.n_pinned, masks.lengths, masks.n_protected
    size, n_pinned, length, n_protected = (torch.tensor(x, device="cpu")[:, None] for x in columns)
    size = size.minimum(length)
    n_pinned = n_pinned + n_recent(policy, size, n_pinned)
    return torch.stack([size, n_pinned, length, n_protected]).expand(-1, -1, heads)
