"""From scores to kept tokens: what must stay, how large each layer is, which tokens it keeps.

Shape letters as in `mmkv.scores`. Budgets are per row: a row of a left-padded batch is sized by its
own length, so it keeps exactly what it keeps alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv import allocation
from mmkv.cache import splitting
from mmkv.layer_inputs import LayerInputs
from mmkv.parts.merging import MergeIntoGroups
from mmkv.parts.slots import send
from mmkv.policy import Policy, Score


@dataclass(frozen=True)
class TokenMasks:
    """What is known of the T tokens seen so far, before the last of them run through the layers.

    Attributes:
        valid: bool [B, T], False for padding.
        image: bool [B, T], True where an image token stands.
        asked: bool [B, T], True for tokens given in a prompt, False for generated ones.
        must: bool [B, T], kept in every layer whatever the scores say.
        protected: bool [B, T], the part of `must` that decoding may not drop either.
        lengths: valid tokens of each row, on the host.
        windows: how many last tokens of each row observe, and are part of `must`, on the host;
            fewer than the policy's where a short row's budget is below what must be kept.
        floors: how many tokens each row must keep, on the host.
        anchored: how many of them are protected, on the host.
        inner: padding of each row behind its first token, as a later turn's is, on the host.
        granted: how much of those the budget has room for, in [0, 1], on the host.
    """

    valid: Tensor
    image: Tensor
    asked: Tensor
    must: Tensor
    protected: Tensor
    lengths: list[int]
    windows: list[int]
    floors: list[int]
    anchored: list[int]
    inner: list[int]
    granted: list[float]

    @classmethod
    def of(
        cls,
        policy: Policy,
        valid: Tensor,
        image: Tensor | None = None,
        *,
        budget: float | int | None,
        n_layers: int,
        before: TokenMasks | None = None,
        earlier: Tensor | None = None,
    ) -> TokenMasks:
        """Mark what the policy always keeps: sinks, the observation window, protected text.

        Args:
            policy: its always-kept parts decide.
            valid: bool [B, q], the new tokens; none of them where generated ones compete, of which
                the policy's `decode.latest` last ones stay.
            image: bool [B, q], or None without pictures.
            budget: see `total_kept`; None when `policy.retention` decides the total.
            n_layers: L, the compressed layers.
            before: what was known of earlier tokens.
            earlier: bool [B, seen], with `before`: which of all earlier tokens still count; the
                last of them were generated since.
        """
        round_of_replies = valid.shape[1] == 0
        image = torch.zeros_like(valid) if image is None else image
        asked = torch.ones_like(valid)
        if before is not None and earlier is not None:
            generated = earlier.shape[1] - before.valid.shape[1]
            neither = valid.new_zeros(valid.shape[0], generated)
            valid = torch.cat([earlier, valid], dim=1)
            image = torch.cat([before.image, neither, image], dim=1)
            asked = torch.cat([before.asked, neither, asked], dim=1)
        order = valid.cumsum(-1)
        length = order[:, -1:]
        protected = valid & (order <= policy.sinks)
        if policy.protect is not None:
            protected = protected | policy.protect.marks(valid, asked, image)
        must = protected | (valid & (order > length - policy.observed))
        before_first = (order == 0).sum(-1)
        counted = torch.stack([length[:, 0], must.sum(-1), protected.sum(-1), before_first])
        lengths, floors, anchored, outer = counted.tolist()
        inner = [valid.shape[1] - n - m for n, m in zip(lengths, outer, strict=True)]
        windows = [
            _window(policy, budget, n_layers=n_layers, length=n, floor=floor)
            for n, floor in zip(lengths, floors, strict=True)
        ]
        if any(w < policy.observed for w in windows):
            last = torch.tensor(windows, device=valid.device)[:, None]
            must = protected | (valid & (order > length - last))
            floors = must.sum(-1).tolist()
        if round_of_replies:
            must = must | (valid & (order > length - policy.decode.latest))
            floors = must.sum(-1).tolist()
        granted = [
            1.0
            if budget is None or floor == 0
            else min(1.0, total_kept(budget, n_layers, n) / (n_layers * floor))
            for n, floor in zip(lengths, floors, strict=True)
        ]
        marks = valid, image, asked, must, protected
        return cls(*marks, lengths, windows, floors, anchored, inner, granted)

    def to(self, device: torch.device) -> TokenMasks:
        """The same on another device, for models split over several."""
        return self if self.valid.device == device else self._each(lambda x: x.to(device))

    def rows(self, batch: Tensor) -> TokenMasks:
        """A choice of rows, which may repeat."""
        chosen = [int(b) for b in batch]
        return replace(
            self._each(lambda x: x[batch.to(x.device)]),
            lengths=[self.lengths[b] for b in chosen],
            windows=[self.windows[b] for b in chosen],
            floors=[self.floors[b] for b in chosen],
            anchored=[self.anchored[b] for b in chosen],
            inner=[self.inner[b] for b in chosen],
            granted=[self.granted[b] for b in chosen],
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenMasks:
        names = ("valid", "image", "asked", "must", "protected")
        return replace(self, **{name: change(getattr(self, name)) for name in names})

    def last_places(self, n: int) -> Tensor | None:
        """Positions of each row's n last tokens, int64 [B, n], ascending; None without gaps.

        Fillers before a row's first token are below 0.
        """
        if not any(self.inner):
            return None
        T = self.valid.shape[1]
        place = torch.arange(T, device=self.valid.device).expand_as(self.valid)
        found = place.masked_fill(~self.valid, -1).sort(dim=-1).values
        return pad(found, (max(0, n - T), 0), value=-1)[:, -n:]

    def at(self, name: str, positions: Tensor) -> Tensor:
        """A mark of the tokens at `positions` [B, 1 or H, U]; False where there is none."""
        mark: Tensor = getattr(self, name)[:, None].expand(-1, positions.shape[1], -1)
        return mark.gather(-1, positions.clamp(min=0)) & (positions >= 0)


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
        return (score if window == score.observed else score.observing(window))(rows)

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


def total_kept(budget: float | int, n_layers: int, length: int) -> int:
    """Tokens asked for over all layers (per head): a float is a fraction, an int a mean per layer.

    More than these are kept where more must be.
    """
    if isinstance(budget, float):
        return round(budget * n_layers * length)
    return min(budget, length) * n_layers


def _window(
    policy: Policy, budget: float | int | None, *, n_layers: int, length: int, floor: int
) -> int:
    """How many last tokens of one row observe: half of its budget where that is below the floor."""
    if budget is None or keeps_everything(policy, budget):
        return policy.observed
    total = total_kept(budget, n_layers, length)
    if total >= n_layers * floor:
        return policy.observed
    return min(policy.observed, max(1, total // (2 * n_layers)))


def row_sizes(
    policy: Policy,
    budget: float | int | None,
    *,
    n_layers: int,
    length: int,
    floor: int,
    fractions: Sequence[float] | None = None,
    shared: Sequence[float] | None = None,
    similarity: Tensor | None = None,
    measured: Tensor | None = None,
) -> list[int]:
    """How many tokens each layer keeps of one row.

    Args:
        policy: its `layers` part decides.
        budget: see `total_kept`; None when `policy.retention` decides the total.
        n_layers: L, the compressed layers.
        length: the row's tokens, without padding.
        floor: how many of them must be kept in every layer.
        fractions: a profile's kept fraction per layer; it replaces the policy's layer part.
        shared: [L], what `shared_out` found for the row, where sizes need scores.
        similarity: [L], of the residual stream around attention, where sizes need it.
        measured: [L], what the layer part's `measure` found, where sizes need it.
    """
    if keeps_everything(policy, budget) or length <= floor:
        return [length] * n_layers
    known: Any = {"n_layers": n_layers, "length": length, "floor": floor}
    if policy.retention is not None and fractions is None:
        assert shared is not None
        return [int(n) for n in shared]
    assert budget is not None
    total = max(total_kept(budget, n_layers, length), n_layers * floor)
    if total == n_layers * length:
        return [length] * n_layers
    sizes = [f * length for f in fractions or ()] or shared
    if sizes is None:
        sizes = policy.layers.sizes(total, similarity=similarity, measured=measured, **known)
    return allocation.fit(sizes, total, floor=floor, max_size=length)


def keeps_everything(policy: Policy, budget: float | int | None) -> bool:
    """Whether nothing is ever evicted. budget=1.0 is the full cache, in decoding too."""
    return policy.keeps_all or (isinstance(budget, float) and budget >= 1.0)


def shared_out(
    policy: Policy,
    budget: float | int | None,
    scores: Sequence[Tensor],
    positions: Sequence[Tensor],
    prompt: TokenMasks,
) -> list[list[float]]:
    """What each layer keeps of each row by the scores of all layers, [B][L], before any bounds.

    Args:
        policy: its `layers` part decides.
        budget: see `total_kept`; None when `policy.retention` decides the total.
        scores: [B, 1 or H, U] of each layer.
        positions: [B, 1 or H, U] of each layer.
        prompt: what is known of the tokens.
    """
    importance, offered = competing(scores, positions, prompt)
    L, rows = len(scores), list(zip(prompt.lengths, prompt.floors, strict=True))
    totals = [0 if budget is None else total_kept(budget, L, n) - L * floor for n, floor in rows]
    # In a later turn what competes may be less than there is room for.
    spare = send(np.array(totals), offered.device).clamp(min=0).minimum(L * offered)
    found = policy.layers.share_out(importance, spare, offered)
    return [[f + n for n in row] for (_, f), row in zip(rows, found, strict=True)]


def competing(
    scores: Sequence[Tensor], positions: Sequence[Tensor], prompt: TokenMasks
) -> tuple[Tensor, Tensor]:
    """The scores of each row's competing tokens, largest first, as the layer allocators want them.

    Heads that rank for themselves keep their own best, so a layer's n-th entry is the mean over
    heads of each head's n-th largest score: its prefix sums are what the layer then really retains.
    (The papers' R_l is defined on one ranking; with one ranking per layer this is the same.)

    Args:
        scores: [B, 1 or H, U] of each layer.
        positions: [B, 1 or H, U] of each layer.
        prompt: what is known of the tokens.

    Returns:
        importance: [B, L, U] of the widest layer, on the first layer's device; what a layer lost
            in earlier turns is 0.
        offered: int64 [B], the most that a layer has to offer of each row, 1 where it is nothing.
    """
    ranked, offered = [], []
    wide, device = max(s.shape[-1] for s in scores), scores[0].device
    for s, p in zip(scores, positions, strict=True):
        free = (p >= 0) & ~prompt.to(p.device).at("must", p)
        own = s.masked_fill(~free[:, : s.shape[1]], float("-inf"))
        own = own.sort(dim=-1, descending=True).values
        own = own.masked_fill(own == float("-inf"), 0.0).mean(dim=1)
        ranked.append(pad(own, (0, wide - own.shape[-1])).to(device))
        offered.append(free.sum(-1).amax(-1).to(device))
    return torch.stack(ranked, dim=1), torch.stack(offered).amax(0).clamp(min=1)


def select(
    policy: Policy,
    scores: Tensor | None,
    positions: Tensor,
    prompt: TokenMasks,
    sizes: Sequence[int],
    layer_idx: int = 0,
    split: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the tokens one layer keeps.

    Args:
        policy: its `heads`, `recent` and always-kept parts decide.
        scores: [B, 1 or H, U]; None when every row keeps everything.
        positions: [B, 1 or H, U], ascending, -1 where there is no token.
        prompt: what is known of the tokens.
        sizes: tokens kept per head, for each of the B rows.
        layer_idx: which layer of the model.
        split: int64 [B, H], tokens kept by each head, where all layers shared them out at once.

    Returns:
        indices: int64 [B, 1 or H, M], among the U, -1 as filler at the end. Those that decoding
            must not drop come first, then by age: the order in which slots are filled.
        counts: int64 [B, 1 or H], on the host.
        anchored: int64 [B, 1 or H], how many of them decoding must not drop, on the host.
    """
    return ordered(*ranked(policy, scores, positions, prompt, sizes, layer_idx, split))


def ranked(
    policy: Policy,
    scores: Tensor | None,
    positions: Tensor,
    prompt: TokenMasks,
    sizes: Sequence[int],
    layer_idx: int = 0,
    split: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank what one layer holds; arguments as in `select`.

    Returns:
        rank: float [B, 1 or H, U], scores; inf for tokens that must stay, -inf where there is none.
        size: int64 [B, 1 or H], how many each head keeps.
        protected: bool [B, 1 or H, U], those that decoding must not drop.
    """
    scores, present, must, size = contested(policy, scores, positions, prompt, sizes)
    protected = prompt.at("protected", positions).expand(present.shape)
    if split is not None:
        size = split.to(size.device, non_blocking=True)
    elif not (policy.heads.equal or policy.heads.spans_layers):
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
    """What one layer's heads have to choose from, before sizes are split; arguments as in `select`.

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
    """The best-ranked tokens in the order of slots: what `ranked` gives, to what `select` gives.

    Args:
        rank, size, protected: see `ranked`.
        known: the counts of `select`, where the host knows them.
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
