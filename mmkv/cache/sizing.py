"""Sizes: how many tokens each layer and each of its heads keeps of a row, and which compete for it.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.parts import Heads, Part, SizeInputs
from mmkv.policy import Policy
from mmkv.sizes.layers import fit
from mmkv.tensors import last, send

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV


def sizes_of_rows(
    plan: CacheConfig,
    masks: TokenMasks,
    n_layers: int,
    scores: Sequence[Tensor] = (),
    positions: Sequence[Tensor] = (),
    measured: Sequence[Tensor] = (),
) -> list[list[int]]:
    """Return how many tokens each compressed layer keeps of each row, [B][L].

    Args:
        plan: policy, budget and profile, whose kept fractions replace the policy's layer part.
        masks: those of the tokens.
        n_layers: L.
        scores, positions: [B, 1 or H, U] of each layer; empty before they are computed.
        measured: [B] of each layer, the measure that the layer part `needs`.
    """
    policy, kept, totals = plan.policy, [[n] * n_layers for n in masks.lengths], dict[int, int]()
    for row, evicts in enumerate(plan.evicting(masks)):
        length, n_pinned = masks.lengths[row], masks.n_pinned[row]
        total = plan.total_kept(n_layers, length, n_pinned)
        if evicts and total < n_layers * length:
            totals[row] = total
    lengths, pinned = ([x[row] for row in totals] for x in (masks.lengths, masks.n_pinned))
    fractions = [plan.fractions_of(length, n_layers) for length in lengths]
    target_sizes = [[x * n for x in f or ()] for f, n in zip(fractions, lengths, strict=True)]
    if None in fractions:
        rows: Any = slice(None) if len(totals) == len(kept) else list(totals)
        on_host = sorted_scores = n_candidates = None
        if measured:
            columns = [x.to(measured[0].device) for x in measured]
            on_host = torch.stack(columns, dim=1)[rows].cpu()
        if scores and policy.layers.needs in ("scores", "mini-prefill"):
            sorted_scores, n_candidates = competing(scores, positions, masks)
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
        kept[row] = fit(sizes, total, floor=n, max_size=masks.lengths[row])
    return kept


def competing(
    scores: Sequence[Tensor], positions: Sequence[Tensor], masks: TokenMasks
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
        (pinned,) = marked([masks.pinned], p)
        free = (p >= 0) & ~pinned
        ranked = s.masked_fill(~free[:, : s.shape[1]], float("-inf"))
        ranked = ranked.sort(dim=-1, descending=True).values
        ranked = ranked.masked_fill(ranked == float("-inf"), 0.0).mean(dim=1)
        importance.append(pad(ranked, (0, width - ranked.shape[-1])).to(device))
        n_candidates.append(free.sum(-1).amax(-1).to(device))
    return torch.stack(importance, dim=1), torch.stack(n_candidates).amax(0).clamp(min=1)


def head_sizes(
    layers: Sequence[PromptKV], policy: Policy, masks: TokenMasks, sizes: Sequence[Sequence[int]]
) -> Sequence[Tensor | None]:
    """Return how many tokens each head of each layer keeps, [B, H], if they share one budget.

    None for each layer if layers split their own sizes, or if no score was computed because all
    tokens are kept. With equal heads, each head of a layer would keep `sizes` [L][B].
    """
    if policy.heads.scope != "model" or any(x.scores is None for x in layers):
        return [None] * len(layers)
    widest, device = max(x.keys.shape[2] for x in layers), layers[0].keys.device
    candidates, n_pinned, n_free = list[Tensor](), list[Tensor](), list[Tensor]()
    for kv, size in zip(layers, sizes, strict=True):
        (pinned,) = marked([masks.pinned], kv.positions)
        s, present, pinned, _ = contested(policy, kv, pinned, size)
        # Pad on the left, so that ties of a padded row are ranked as in the row alone.
        s = s.masked_fill(pinned | ~present, float("-inf"))
        candidates.append(pad(s, (widest - s.shape[-1], 0), value=-torch.inf).to(device))
        n_pinned.append(pinned.sum(-1).to(device))
        n_free.append((present & ~pinned).flatten(1).sum(-1).to(device))
    pinned_counts = torch.stack(n_pinned, dim=1)  # [B, L, H]
    totals = send(np.array(sizes).sum(0) * pinned_counts.shape[2], device)
    totals = totals - pinned_counts.sum((1, 2))
    # Earlier turns may have left fewer tokens than fit.
    totals = totals.minimum(torch.stack(n_free).sum(0))
    split = checked_split(policy.heads, torch.cat(candidates, dim=1), totals, layer_idx=0)
    return list((pinned_counts + split.view_as(pinned_counts)).cpu().unbind(1))


def is_builtin(part: Part) -> bool:
    """Return whether a part is mmkv's own. Its results are not checked: that waits for the GPU."""
    return type(part).__module__.startswith("mmkv.")


def checked_split(heads: Heads, scores: Tensor, totals: Tensor, *, layer_idx: int) -> Tensor:
    """Call a policy's part for head sizes, see `mmkv.parts.Heads`; return its result, checked."""
    split = heads(scores, totals, layer_idx=layer_idx)
    if not is_builtin(heads):
        _check_split(type(heads).__name__, split, totals, tuple(scores.shape[:2]))
    return split


def _check_split(name: str, split: Any, totals: Tensor, shape: tuple[int, ...]) -> None:
    """Check head sizes [B, H]: their sums have to be `totals` [B] wherever those are above 0."""
    if not isinstance(split, Tensor) or split.shape != shape or split.dtype != torch.int64:
        got = type(split).__name__
        if isinstance(split, Tensor):
            got = f"{split.dtype} of shape {tuple(split.shape)}"
        raise ValueError(f"{name} returned {got}: expected int64 of shape [B, H] = {shape}")
    sums, totals = split.sum(-1).cpu(), totals.cpu()
    wrong = (totals > 0) & ((sums != totals) | (split < 0).any(-1).cpu())
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name} returned head sizes {split[row].tolist()} for row {row}: expected no negative "
            f"ones, and a sum of {int(totals[row])}, the row's total"
        )


def split_sizes(
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
    H = size.shape[1]
    row_sizes = torch.tensor(sizes, device="cpu").to(size.device, non_blocking=True)
    budget_left = row_sizes - n_pinned.amax(-1)
    # If all tokens left by earlier turns fit, there is nothing to split.
    fits = (n_present - n_pinned).sum(-1) <= budget_left * H
    splits = ~fits & (budget_left > 0)
    split = n_pinned + heads(torch.where(splits, H * budget_left, 0))
    split = torch.where(splits[:, None], split, size)
    return torch.where(fits[:, None], n_present, split.minimum(n_present))


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
    scores = positions.new_zeros(B, P, U, dtype=torch.float32) if kv.scores is None else kv.scores
    heads = max(P, scores.shape[1])
    present = (positions >= 0).expand(B, heads, U)
    pinned = pinned.expand(B, heads, U)
    # A head cannot keep more tokens than earlier turns left it.
    row_sizes = torch.tensor(sizes, device="cpu").to(positions.device, non_blocking=True)
    size = row_sizes[:, None].minimum(present.sum(-1))
    if policy.recent:
        pinned = pinned | last(n_recent(policy, size, pinned.sum(-1)), present & ~pinned)
    return scores.expand(B, heads, U), present, pinned, size


def n_recent(policy: Policy, size: Tensor, n_pinned: Tensor) -> Tensor:
    """Return how many more tokens of the share `policy.recent` are pinned.

    It is bounded by what pinned tokens leave.
    """
    return torch.minimum((policy.recent * size).long(), size - n_pinned)


def marked(masks: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
    """Return masks [B, T] at `positions` [B, 1 or H, U]; False where there is no token."""
    place, present = positions.clamp(min=0), positions >= 0
    by_head = [x.to(place.device)[:, None].expand(-1, place.shape[1], -1) for x in masks]
    return [x.gather(-1, place) & present for x in by_head]
