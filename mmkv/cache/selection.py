"""Selection of the kept tokens: how many each layer and head keeps, and which by score.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.layer_inputs import LayerInputs, rows_of
from mmkv.parts import SizeInputs
from mmkv.policy import Policy, Score
from mmkv.sizes.layers import fit
from mmkv.tensors import last, send

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
    larger than any finite score. `windows` [B] are the lengths of the rows' observation windows.
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
    if not type(policy.score).__module__.startswith(("mmkv.scores.", "mmkv.policies.")):
        _check_scores(policy.score, scores, layer.query, layer.key)
    if policy.score.average_heads and scores.shape[1] > 1:
        scores = scores.mean(dim=1, keepdim=True)
    return scores.nan_to_num(nan=0.0, posinf=1e30, neginf=0.0)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off, which would round float32 products to 16 bits."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def by_parts(
    layer: LayerInputs,
    windows: Sequence[int],
    present: Tensor | None,
    function: Callable[[int, LayerInputs], Tensor],
) -> Tensor:
    """Apply a function of windows and inputs to rows that have these in common, without gaps.

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


def _check_scores(score: Score, out: Tensor, query: Tensor, key: Tensor) -> None:
    """Check a score's result; skipped for built-in scores, as it waits for the GPU."""
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


def ranked(
    plan: CacheConfig,
    kv: PromptKV,
    prompt: TokenMasks,
    sizes: Sequence[int],
    layer_idx: int = 0,
    split: Tensor | None = None,
) -> Ranking:
    """Rank the tokens of one layer.

    Args:
        plan: head sizes, and the policy's share of recent tokens.
        kv: the tokens; without scores if every row keeps all of them.
        prompt: the masks of the tokens.
        sizes: tokens kept per head, for each of the B rows.
        layer_idx: the index of the layer.
        split: int64 [B, H], tokens kept by each head, if the heads of all layers share a budget.
    """
    policy = plan.policy
    pinned, protected = marked([prompt.pinned, prompt.protected], kv.positions)
    free = (kv.positions >= 0) & ~pinned
    scores, present, pinned, size = contested(policy, kv, pinned, sizes)
    protected, competes = protected.expand(present.shape), present & ~pinned
    known = None if kv.evicted else _known(policy, prompt, sizes, scores.shape[1])
    if split is not None:
        known = None if known is None else torch.stack([split, *known[1:]])
        size = split.to(size.device, non_blocking=True)
    elif plan.table is not None:  # the host splits
        n_candidates = torch.tensor(prompt.lengths) - torch.tensor(prompt.n_pinned)
        if known is None:
            marks = pinned, present, protected, competes.any(1, keepdim=True).expand_as(competes)
            *known, of_any = torch.stack([size, *(x.sum(-1) for x in marks)]).cpu()
            n_candidates = of_any[:, 0]
        host_size, n_pinned, n_present, n_protected = known
        heads = partial(plan.table.split, n_candidates, len(size[0]), layer_idx)
        host_size = _split(heads, n_pinned, n_present, host_size, sizes)
        known = torch.stack([host_size, n_pinned, n_present, n_protected])
        size = host_size.to(size.device, non_blocking=True)
    elif policy.heads.scope == "layer":
        among = scores.masked_fill(~competes, float("-inf"))
        heads = partial(policy.heads, among, layer_idx=layer_idx)
        size, known = _split(heads, pinned.sum(-1), present.sum(-1), size, sizes), None
    rank = scores.masked_fill(pinned, float("inf")).masked_fill(~present, float("-inf"))
    return Ranking(rank, size, protected, free, known)


def _known(policy: Policy, prompt: TokenMasks, sizes: Sequence[int], heads: int) -> Tensor:
    """Return `Ranking.counts` of a first prompt whose heads keep the same number of tokens."""
    columns = sizes, prompt.n_pinned, prompt.lengths, prompt.n_protected
    size, n_pinned, length, n_protected = (torch.tensor(x)[:, None] for x in columns)
    size = size.minimum(length)
    n_pinned = n_pinned + _n_recent(policy, size, n_pinned)
    return torch.stack([size, n_pinned, length, n_protected]).expand(-1, -1, heads)


def _n_recent(policy: Policy, size: Tensor, n_pinned: Tensor) -> Tensor:
    """Return how many more tokens of the share `policy.recent` are pinned.

    It is bounded by what pinned tokens leave.
    """
    return torch.minimum((policy.recent * size).long(), size - n_pinned)


def _split(
    heads: Callable[[Tensor], Tensor],
    n_pinned: Tensor,
    n_present: Tensor,
    size: Tensor,
    sizes: Sequence[int],
) -> Tensor:
    """Split each row's size among its heads: [B, H] tokens, at most as many as a head has.

    Of a head's tokens, `n_present` [B, H], `n_pinned` [B, H] are pinned, and the others compete.
    `heads` splits the rows' totals [B]. With equal heads each would keep `size` [B, H], which is at
    most `sizes` [B].
    """
    H, row_sizes = size.shape[1], torch.tensor(sizes).to(size.device, non_blocking=True)
    budget_left = row_sizes - n_pinned.amax(-1)
    # If all tokens left by earlier turns fit, there is nothing to split.
    fits = (n_present - n_pinned).sum(-1) <= budget_left * H
    splits = ~fits & (budget_left > 0)
    split = n_pinned + heads(torch.where(splits, H * budget_left, 0))
    split = torch.where(splits[:, None], split, size)
    return torch.where(fits[:, None], n_present, split.minimum(n_present))


def marked(masks: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
    """Return masks [B, T] at `positions` [B, 1 or H, U]; False where there is no token."""
    place, present = positions.clamp(min=0), positions >= 0
    by_head = [x.to(place.device)[:, None].expand(-1, place.shape[1], -1) for x in masks]
    return [x.gather(-1, place) & present for x in by_head]


def sizes_of_rows(
    plan: CacheConfig,
    prompt: TokenMasks,
    n_layers: int,
    scores: Sequence[Tensor] = (),
    positions: Sequence[Tensor] = (),
    measured: Sequence[Tensor] = (),
) -> list[list[int]]:
    """Return how many tokens each compressed layer keeps of each row, [B][L].

    Args:
        plan: policy, budget and profile, whose kept fractions replace the policy's layer part.
        prompt: the masks of the tokens.
        n_layers: L.
        scores, positions: [B, 1 or H, U] of each layer; empty before they are computed.
        measured: [B] of each layer, the measure that the layer part `needs`.
    """
    policy, kept, totals = plan.policy, [[n] * n_layers for n in prompt.lengths], dict[int, int]()
    for row, evicts in enumerate(plan.evicting(prompt)):
        length, n_pinned = prompt.lengths[row], prompt.n_pinned[row]
        total = max(plan.total_kept(n_layers, length), n_layers * n_pinned)
        if evicts and total < n_layers * length:
            totals[row] = total
    lengths, pinned = ([x[row] for row in totals] for x in (prompt.lengths, prompt.n_pinned))
    fractions = [plan.fractions_of(length, n_layers) for length in lengths]
    target_sizes = [[x * n for x in f or ()] for f, n in zip(fractions, lengths, strict=True)]
    if None in fractions:
        rows: Any = slice(None) if len(totals) == len(kept) else list(totals)
        on_host = sorted_scores = n_candidates = None
        if measured:
            columns = [x.to(measured[0].device) for x in measured]
            on_host = torch.stack(columns, dim=1)[rows].cpu()
        if scores and policy.layers.needs in ("scores", "mini-prefill"):
            sorted_scores, n_candidates = competing(scores, positions, prompt)
            sorted_scores, n_candidates = sorted_scores[rows], n_candidates[rows]
        inputs = SizeInputs(
            totals=list(totals.values()),
            lengths=lengths,
            pinned=pinned,
            n_layers=n_layers,
            measured=on_host,
            scores=sorted_scores,
            n_candidates=n_candidates,
        )
        target_sizes = plan.layer_sizes(inputs)
        if policy.layers.retention is not None:
            items = zip(totals.items(), target_sizes, strict=True)
            totals = {row: max(total, int(sum(sizes))) for (row, total), sizes in items}
    for (row, total), sizes, n in zip(totals.items(), target_sizes, pinned, strict=True):
        kept[row] = fit(sizes, total, floor=n, max_size=prompt.lengths[row])
    return kept


def competing(
    scores: Sequence[Tensor], positions: Sequence[Tensor], prompt: TokenMasks
) -> tuple[Tensor, Tensor]:
    """Return the scores of each row's competing tokens, largest first, for the layer allocators.

    Heads with rankings of their own keep their own best tokens, so a layer's n-th entry is the mean
    over heads of each head's n-th largest score: its prefix sums are the scores the layer retains.
    (The papers' R_l is defined on one ranking; with one ranking per layer this is the same.)

    Returns:
        importance: [B, L, U] of the widest layer, on the first layer's device; 0 for tokens that a
            layer lost in earlier turns.
        n_candidates: int64 [B], the largest number of competing tokens in a layer, at least 1.
    """
    importance, n_candidates = [], []
    width, device = max(s.shape[-1] for s in scores), scores[0].device
    for s, p in zip(scores, positions, strict=True):
        (pinned,) = marked([prompt.pinned], p)
        free = (p >= 0) & ~pinned
        ranked = s.masked_fill(~free[:, : s.shape[1]], float("-inf"))
        ranked = ranked.sort(dim=-1, descending=True).values
        ranked = ranked.masked_fill(ranked == float("-inf"), 0.0).mean(dim=1)
        importance.append(pad(ranked, (0, width - ranked.shape[-1])).to(device))
        n_candidates.append(free.sum(-1).amax(-1).to(device))
    return torch.stack(importance, dim=1), torch.stack(n_candidates).amax(0).clamp(min=1)


def head_sizes(
    layers: Sequence[PromptKV], policy: Policy, prompt: TokenMasks, sizes: Sequence[Sequence[int]]
) -> Sequence[Tensor | None]:
    """Return how many tokens each head of each layer keeps, [B, H], if they share one budget.

    None for each layer if layers split their own sizes, or if no score was computed because all
    tokens are kept. With equal heads, each head of a layer would keep `sizes` [L][B].
    """
    if policy.heads.scope != "model" or any(x.scores is None for x in layers):
        return [None] * len(layers)
    widest, device = max(x.keys.shape[2] for x in layers), layers[0].keys.device
    competing, n_pinned, n_free = list[Tensor](), list[Tensor](), list[Tensor]()
    for kv, size in zip(layers, sizes, strict=True):
        (pinned,) = marked([prompt.pinned], kv.positions)
        s, present, pinned, _ = contested(policy, kv, pinned, size)
        # Pad on the left, so that ties of a padded row are ranked as in the row alone.
        s = s.masked_fill(pinned | ~present, float("-inf"))
        competing.append(pad(s, (widest - s.shape[-1], 0), value=-torch.inf).to(device))
        n_pinned.append(pinned.sum(-1).to(device))
        n_free.append((present & ~pinned).flatten(1).sum(-1).to(device))
    pinned_counts = torch.stack(n_pinned, dim=1)  # [B, L, H]
    totals = send(np.array(sizes).sum(0) * pinned_counts.shape[2], device)
    totals = totals - pinned_counts.sum((1, 2))
    # Earlier turns may have left fewer tokens than fit.
    totals = totals.minimum(torch.stack(n_free).sum(0))
    split = policy.heads(torch.cat(competing, dim=1), totals, layer_idx=0)
    return list((pinned_counts + split.view_as(pinned_counts)).cpu().unbind(1))


def contested(
    policy: Policy, kv: PromptKV, pinned: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tokens from which one layer's heads choose; arguments are those of `ranked`.

    Returns:
        scores: float [B, 1 or H, U].
        present: bool [B, 1 or H, U], where there is a token.
        pinned: bool [B, 1 or H, U], pinned tokens, with the share `policy.recent`.
        size: int64 [B, 1 or H], how many tokens each head keeps if heads are equal.
    """
    (B, P, U), positions = kv.positions.shape, kv.positions
    scores = torch.zeros(B, P, U, device=positions.device) if kv.scores is None else kv.scores
    heads = max(P, scores.shape[1])
    present = (positions >= 0).expand(B, heads, U)
    pinned = pinned.expand(B, heads, U)
    # A head cannot keep more tokens than earlier turns left it.
    row_sizes = torch.tensor(sizes).to(positions.device, non_blocking=True)
    size = row_sizes[:, None].minimum(present.sum(-1))
    if policy.recent:
        pinned = pinned | last(_n_recent(policy, size, pinned.sum(-1)), present & ~pinned)
    return scores.expand(B, heads, U), present, pinned, size
