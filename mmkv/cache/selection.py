"""From scores to kept tokens: what must stay, and which tokens a layer keeps.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mmkv.cache import splitting
from mmkv.cache.token_masks import TokenMasks
from mmkv.layer_inputs import LayerInputs
from mmkv.parts.merging import MergeIntoGroups
from mmkv.parts.slots import send
from mmkv.policy import Policy, Score


def importance(policy: Policy, layer: LayerInputs, windows: Sequence[int]) -> Tensor:
    """The policy's scores, made finite: a query or key that overflowed must not decide the rest.

    NaN and -inf count as no importance, inf as more than any finite score.

    Args:
        policy: what scores.
        layer: what it is given.
        windows: [B], how many last queries observe each row.

    Returns:
        float32 [B, 1 or H, N].

    Raises:
        ValueError: the scores have another shape, or are NaN where queries and keys are numbers.
    """
    device = layer.key.device
    layer, most = replace(layer, valid=layer.valid.to(device)), layer.key.shape[2] - 1

    def of_rows(window: int, rows: LayerInputs) -> Tensor:
        # A row that is nothing but window loses nothing, so that its scores decide nothing.
        window = min(window, most)
        score = policy.score
        return (score if window == score.window_size else score.with_window(window))(rows)

    with torch.no_grad():
        if len(set(windows)) == 1:
            found = of_rows(windows[0], layer)
        else:
            parts, order = [], []
            for window in sorted(set(windows)):
                rows = [b for b, w in enumerate(windows) if w == window]
                parts.append(of_rows(window, layer.rows(torch.tensor(rows, device=device))))
                order += rows
            found = torch.cat(parts)[torch.tensor(order, device=device).argsort()]
    _check_scores(policy.score, found, layer.query, layer.key)
    return found.nan_to_num(nan=0.0, posinf=1e30, neginf=0.0)


def _check_scores(score: Score, found: Tensor, query: Tensor, key: Tensor) -> None:
    """What a score gave can be ranked."""
    if type(score).__module__.startswith("mmkv.parts."):
        return  # is tested, and would make a GPU wait
    B, H, N, _ = key.shape
    name = type(score).__name__
    if not isinstance(found, torch.Tensor) or found.shape not in ((B, H, N), (B, 1, N)):
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(
            f"{name} returned {got} for keys [B, H, N, D] = {tuple(key.shape)}: expected scores "
            f"[B, H, N] = {(B, H, N)}, or {(B, 1, N)} for one ranking of all heads"
        )
    if not found.is_floating_point():
        raise ValueError(f"{name} returned {found.dtype}: expected floating-point scores")
    if bool(found.isnan().any()) and bool(query.isfinite().all() and key.isfinite().all()):
        raise ValueError(
            f"{name} returned NaN for {int(found.isnan().sum())} of {found.numel()} tokens, though "
            "queries and keys are finite: give tokens that cannot be scored a number, such as 0"
        )


def ranked(
    policy: Policy,
    scores: Tensor | None,
    positions: Tensor,
    prompt: TokenMasks,
    sizes: Sequence[int],
    layer_idx: int = 0,
    split: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank what one layer holds.

    Args:
        policy: its `heads`, `recent` and always-kept parts decide.
        scores: [B, 1 or H, U]; None when every row keeps everything.
        positions: [B, 1 or H, U], ascending, -1 where there is no token.
        prompt: what is known of the tokens.
        sizes: tokens kept per head, for each of the B rows.
        layer_idx: which layer of the model.
        split: int64 [B, H], tokens kept by each head, where all layers shared them out at once.

    Returns:
        rank: float [B, 1 or H, U], scores; inf for tokens that must stay, -inf where there is none.
        size: int64 [B, 1 or H], how many each head keeps.
        protected: bool [B, 1 or H, U], those that decoding must not drop.
    """
    scores, present, must, size = contested(policy, scores, positions, prompt, sizes)
    protected = prompt.at("protected", positions).expand(present.shape)
    if split is not None:
        size = split.to(size.device, non_blocking=True)
    elif not (policy.heads.equal or policy.heads.is_global):
        by = partial(policy.heads.split_rows, layer_idx=layer_idx)
        size = splitting.within_layer(by, scores, present & ~must, must.sum(-1), size, sizes)
    if isinstance(policy.merge, MergeIntoGroups):
        # Of few slots no more than an eighth: the others need most of them.
        latest = (size // 8).clamp(max=policy.merge.newest).minimum(size - must.sum(-1))
        must = must | _last(latest, present & ~must)
    rank = scores.masked_fill(must, float("inf")).masked_fill(~present, float("-inf"))
    if policy.text_prior:
        rank = _text_first(rank, prompt.at("image", positions).expand(present.shape))
    return rank, size, protected


def _text_first(rank: Tensor, image: Tensor) -> Tensor:
    """The same ranking with tokens `image`, bool [B, H, U], below all others but those of -inf.

    LOOK-M (arXiv 2406.18139) adds the largest score to those of text. Here places stand for scores,
    so that sums do not round small ones away.
    """
    order = rank.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, image.gather(-1, order).int().argsort(dim=-1, stable=True))
    places = torch.arange(rank.shape[-1], 0, -1, device=rank.device, dtype=rank.dtype)
    found = torch.empty_like(rank).scatter_(-1, order, places.expand_as(rank))
    return torch.where(rank.isinf(), rank, found)


def contested(
    policy: Policy,
    scores: Tensor | None,
    positions: Tensor,
    prompt: TokenMasks,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What one layer's heads have to choose from, before sizes are split; arguments as in `ranked`.

    Returns:
        scores: float [B, 1 or H, U].
        present: bool, alike, where there is a token.
        must: bool, alike, which of them stay; recent ones are among them.
        size: int64 [B, 1 or H], how many each head keeps if all keep as many.
    """
    B, P, U = positions.shape
    if scores is None:
        scores = torch.zeros(B, P, U, device=positions.device)
    heads = max(P, scores.shape[1])
    present = (positions >= 0).expand(B, heads, U)
    must = prompt.at("must", positions).expand(B, heads, U)
    # A head cannot keep more than earlier turns left it.
    size = send(np.array(sizes), positions.device)[:, None].minimum(present.sum(-1))
    if policy.recent:
        # The most recent tokens take their share of what is left over by the tokens kept anyway.
        share = torch.minimum((policy.recent * size).long(), size - must.sum(-1))
        must = must | _last(share, present & ~must)
    return scores.expand(B, heads, U), present, must, size


def _last(number: Tensor, free: Tensor) -> Tensor:
    """The last `number` [B, H] of the tokens `free`, bool [B, H, U]."""
    return free & (free.flip(-1).cumsum(-1).flip(-1) <= number[..., None])


def ordered(
    rank: Tensor, size: Tensor, protected: Tensor, known: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the tokens one layer keeps, in the order in which slots are filled.

    Args:
        rank, size, protected: see `ranked`.
        known: `counts` and `anchored`, where the host knows them.

    Returns:
        indices: int64 [B, 1 or H, M], among the U, -1 as filler at the end. Those that decoding
            must not drop come first, then by age.
        counts: int64 [B, 1 or H], on the host.
        anchored: int64 [B, 1 or H], how many of them decoding must not drop, on the host.
    """
    U, device = rank.shape[-1], rank.device
    counts, anchored = known or torch.stack([size, protected.sum(-1)]).cpu()
    M = int(counts.max())
    chosen = rank.argsort(dim=-1, descending=True, stable=True)[..., :M]
    filler = torch.arange(M, device=device) >= size[..., None]
    late = ~protected.gather(-1, chosen)
    order = (chosen + U * late).masked_fill(filler, 3 * U).argsort(dim=-1)
    return chosen.masked_fill(filler, -1).gather(-1, order), counts, anchored


def retained(scores: Tensor, indices: Tensor, positions: Tensor, prompt: TokenMasks) -> Tensor:
    """The share of the competing tokens' importance that was kept, [B]; 1 where none compete."""
    free = (positions >= 0) & ~prompt.at("must", positions)
    s = scores.clamp(min=0) * free
    kept = s.expand(-1, indices.shape[1], -1).gather(-1, indices.clamp(min=0))
    kept = kept.masked_fill(indices < 0, 0.0).mean(dim=1).sum(-1)
    total = s.mean(dim=1).sum(-1)
    # Sums in another order may be a rounding apart.
    return torch.where(total > 0, kept / total.clamp(min=1e-30), 1.0).clamp(max=1.0)
