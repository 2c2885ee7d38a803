"""From scores to kept tokens: what must stay, and which tokens a layer keeps.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.token_masks import TokenMasks
from mmkv.layer_inputs import LayerInputs
from mmkv.parts.slots import send
from mmkv.policy import Policy, Score

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV


@dataclass(frozen=True)
class Ranking:
    """What one layer's heads have to choose from, and how much of it each keeps.

    Attributes:
        rank: float [B, 1 or H, U], scores; inf for tokens that must stay, -inf where there is none.
        size: int64 [B, 1 or H], how many each head keeps.
        protected: bool [B, 1 or H, U], those that decoding must not drop.
        free: bool [B, 1 or H, U], those that only their scores keep.
        known: `counts` and `n_pinned` of what is kept, where that needs no look at a device.
    """

    rank: Tensor
    size: Tensor
    protected: Tensor
    free: Tensor
    known: tuple[Tensor, Tensor] | None = None

    def kept(self, held: PromptKV) -> Kept:
        """The tokens of the highest rank, in the order in which slots are filled."""
        (B, H, U, _), device = held.keys.shape, self.rank.device
        counts, n_pinned = self.known or torch.stack([self.size, self.protected.sum(-1)]).cpu()
        M = int(counts.max())
        chosen = self.rank.argsort(dim=-1, descending=True, stable=True)[..., :M]
        filler = torch.arange(M, device=device) >= self.size[..., None]
        late = ~self.protected.gather(-1, chosen)
        order = (chosen + U * late).masked_fill(filler, 3 * U).argsort(dim=-1)
        indices = chosen.masked_fill(filler, -1).gather(-1, order)
        at = indices.expand(B, H, -1).clamp(min=0)
        weights, bias = (None if x is None else x.gather(2, at) for x in (held.weights, held.bias))
        return Kept(indices, counts, n_pinned, weights=weights, bias=bias)


@dataclass(frozen=True)
class Kept:
    """What one layer keeps: M slots a head.

    Attributes:
        indices: int64 [B, 1 or H, M], tokens among the U, -1 as filler at the end. Those that
            decoding must not drop come first, then by age.
        counts: int64 [B, 1 or H], on the host.
        n_pinned: int64 [B, 1 or H], how many of them decoding must not drop, on the host.
        keys, values: [B, H, M, D], the slots' pairs; None: those of the tokens as they are.
        slot: int64 [B, H, U], which slot each token stands in, M for none; None: only those that
            are kept stand in one.
        weights: float32 [B, H, M], how many tokens each stands for; None: itself alone.
        bias: float32 [B, H, M], what attention adds to its logit; None where `weights` is.
    """

    indices: Tensor
    counts: Tensor
    n_pinned: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    slot: Tensor | None = None
    weights: Tensor | None = None
    bias: Tensor | None = None


def importance(policy: Policy, layer: LayerInputs, windows: Sequence[int]) -> Tensor:
    """The policy's scores, float32 [B, 1 or H, N], made finite.

    A query or key that overflowed must not decide the rest: NaN and -inf count as no importance,
    inf as more than any finite score. As many last queries observe a row as `windows` [B] say.

    Raises:
        ValueError: the scores have another shape, or are NaN where queries and keys are numbers.
    """
    device = layer.key.device
    layer, most = replace(layer, valid=layer.valid.to(device)), layer.key.shape[2] - 1

    def of_rows(window: int, rows: LayerInputs) -> Tensor:
        # A row that is nothing but window loses nothing, so that its scores decide nothing.
        score, window = policy.score, min(window, most)
        if score.window and window != score.window:
            # Its other options were checked when it was made.
            score = copy.copy(score)
            object.__setattr__(score, "window", window)
        return score(rows)

    # Under autocast, products of float32 would be rounded to 16 bits.
    exact = nullcontext()
    if torch.is_autocast_enabled(device.type):
        exact = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), exact:
        if len(set(windows)) == 1:
            found = of_rows(windows[0], layer)
        else:
            parts, order = [], []
            for window in sorted(set(windows)):
                rows = [b for b, w in enumerate(windows) if w == window]
                parts.append(of_rows(window, layer.rows(torch.tensor(rows, device=device))))
                order += rows
            found = torch.cat(parts)[torch.tensor(order, device=device).argsort()]
    if not type(policy.score).__module__.startswith(("mmkv.scores.", "mmkv.policies.")):
        _check_scores(policy.score, found, layer.query, layer.key)
    if policy.score.average_heads and found.shape[1] > 1:
        found = found.mean(dim=1, keepdim=True)
    return found.nan_to_num(nan=0.0, posinf=1e30, neginf=0.0)


def _check_scores(score: Score, found: Tensor, query: Tensor, key: Tensor) -> None:
    """What a score gave can be ranked; not asked of our own, as it makes a GPU wait."""
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
    marks: Sequence[Tensor],
    sizes: Sequence[int],
    layer_idx: int = 0,
    split: Tensor | None = None,
) -> Ranking:
    """Rank what one layer holds.

    Args:
        policy: its `heads`, `recent` and always-kept parts decide.
        scores: [B, 1 or H, U]; None when every row keeps everything.
        positions: [B, 1 or H, U], ascending, -1 where there is no token.
        prompt: what is known of the tokens.
        marks: `prompt.marks(positions)`, bool [B, 1 or H, U] each.
        sizes: tokens kept per head, for each of the B rows.
        layer_idx: which layer of the model.
        split: int64 [B, H], tokens kept by each head, where all layers shared them out at once.
    """
    heads, merge = policy.heads, policy.merge
    known = None
    if heads.equal and split is None and positions.shape[1:] == (1, prompt.valid.shape[1]):
        # A first prompt whose heads keep as many each.
        lengths, n_pinned = torch.tensor(prompt.lengths), torch.tensor(prompt.n_pinned)
        each = 1 if scores is None else scores.shape[1]
        counts = torch.tensor(sizes).minimum(lengths)
        known = counts[:, None].expand(-1, each), n_pinned[:, None].expand(-1, each)
    always_kept, protected, image = marks
    free = (positions >= 0) & ~always_kept
    scores, present, always_kept, size = contested(policy, scores, positions, always_kept, sizes)
    protected = protected.expand(present.shape)
    if split is not None:
        size = split.to(size.device, non_blocking=True)
    elif not (heads.equal or heads.is_global):
        forced, competes = always_kept.sum(-1), present & ~always_kept
        size = _split(policy, scores, competes, forced, size, sizes, layer_idx)
    if merge is not None and merge.newest:
        # Of few slots no more than an eighth: the others need most of them.
        latest = (size // 8).clamp(max=merge.newest).minimum(size - always_kept.sum(-1))
        always_kept = always_kept | _last(latest, present & ~always_kept)
    rank = scores.masked_fill(always_kept, float("inf")).masked_fill(~present, float("-inf"))
    if policy.text_prior:
        rank = _text_first(rank, image.expand(present.shape))
    return Ranking(rank, size, protected, free, known)


def _split(
    policy: Policy,
    scores: Tensor,
    free: Tensor,
    forced: Tensor,
    size: Tensor,
    sizes: Sequence[int],
    layer_idx: int,
) -> Tensor:
    """Split each row's size among its heads: [B, H] tokens, all at most what a head holds.

    Of scores [B, H, U] those that are `free` compete, and `forced` [B, H] tokens stay whatever they
    score; if all heads kept as many, each would keep `size` [B, H], which is at most `sizes` [B].
    """
    held, H = forced + free.sum(-1), scores.shape[1]
    asked = torch.tensor(sizes).to(forced.device, non_blocking=True)
    spare = asked - forced.amax(-1)
    # Where there is room for all that earlier turns left, nothing is split.
    room = free.sum((1, 2)) <= spare * H
    splits = ~room & (spare > 0)
    competing = scores.masked_fill(~free, float("-inf"))
    totals = torch.where(splits, H * spare, 0)
    split = forced + policy.heads(competing, totals, layer_idx=layer_idx)
    split = torch.where(splits[:, None], split, size)
    return torch.where(room[:, None], held, split.minimum(held))


def head_sizes(
    layers: Sequence[PromptKV], policy: Policy, prompt: TokenMasks, sizes: Sequence[Sequence[int]]
) -> Sequence[Tensor | None]:
    """What each head of each layer keeps, [B, H], where the heads of all layers share the budget.

    None where each layer splits its own size, and where nothing was scored: all is kept. If all
    heads of a layer kept as many, they would keep `sizes` [L][B].
    """
    if not policy.heads.is_global or any(x.scores is None for x in layers):
        return [None] * len(layers)
    wide, device = max(x.keys.shape[2] for x in layers), layers[0].keys.device
    competing, forced, free = list[Tensor](), list[Tensor](), list[Tensor]()
    for held, size in zip(layers, sizes, strict=True):
        here = prompt.to(held.positions.device)
        (stays,) = here.at(held.positions, "always_kept")
        s, present, always_kept, _ = contested(policy, held.scores, held.positions, stays, size)
        # By age, the newest last: a row ranks ties as it does alone.
        s = s.masked_fill(always_kept | ~present, float("-inf"))
        competing.append(pad(s, (wide - s.shape[-1], 0), value=-torch.inf).to(device))
        forced.append(always_kept.sum(-1).to(device))
        free.append((present & ~always_kept).flatten(1).sum(-1).to(device))
    needed = torch.stack(forced, dim=1)  # [B, L, H]
    totals = send(np.array(sizes).sum(0) * needed.shape[2], device) - needed.sum((1, 2))
    # Earlier turns may have left less than there is room for.
    totals = totals.minimum(torch.stack(free).sum(0))
    split = policy.heads(torch.cat(competing, dim=1), totals, layer_idx=0)
    return list((needed + split.view_as(needed)).cpu().unbind(1))


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
    always_kept: Tensor,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What one layer's heads have to choose from, before sizes are split; arguments as of `ranked`.

    Returns:
        scores: float [B, 1 or H, U].
        present: bool, alike, where there is a token.
        always_kept: bool, alike, which of them stay; recent ones are among them.
        size: int64 [B, 1 or H], how many each head keeps if all keep as many.
    """
    B, P, U = positions.shape
    if scores is None:
        scores = torch.zeros(B, P, U, device=positions.device)
    heads = max(P, scores.shape[1])
    present = (positions >= 0).expand(B, heads, U)
    always_kept = always_kept.expand(B, heads, U)
    # A head cannot keep more than earlier turns left it.
    asked = torch.tensor(sizes).to(positions.device, non_blocking=True)
    size = asked[:, None].minimum(present.sum(-1))
    if policy.recent:
        # The most recent tokens take their share of what is left over by the tokens kept anyway.
        share = torch.minimum((policy.recent * size).long(), size - always_kept.sum(-1))
        always_kept = always_kept | _last(share, present & ~always_kept)
    return scores.expand(B, heads, U), present, always_kept, size


def _last(number: Tensor, free: Tensor) -> Tensor:
    """The last `number` [B, H] of the tokens `free`, bool [B, H, U]."""
    return free & (free.flip(-1).cumsum(-1).flip(-1) <= number[..., None])
