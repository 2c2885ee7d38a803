"""How large each layer is: what the policy's layer part says, fitted to the budget.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv import allocation
from mmkv.cache.config import CacheConfig
from mmkv.cache.token_masks import TokenMasks, keeps_everything, kept_whole, total_kept
from mmkv.parts.slots import send
from mmkv.policy import Policy


def sizes_of_rows(
    plan: CacheConfig,
    prompt: TokenMasks,
    n_layers: int,
    scores: Sequence[Tensor] = (),
    positions: Sequence[Tensor] = (),
    measured: Sequence[Tensor] = (),
    similarity: Sequence[Tensor] = (),
) -> list[list[int]]:
    """How many tokens each layer keeps of each row, [B][L].

    Args:
        plan: policy, budget and profile.
        prompt: what is known of the tokens.
        n_layers: L, the compressed layers.
        scores: [B, 1 or H, U] of each layer, where they are known.
        positions: [B, 1 or H, U] of each layer, with `scores`.
        measured: [B] of each layer, what the layer part's `measure` found, where it needs that.
        similarity: [B] of each layer, of the residual stream, where the layer part needs it.
    """
    shared: Sequence[Sequence[float] | None] = [None] * len(prompt.lengths)
    if scores and plan.policy.layers.needs == "scores":
        shared = shared_out(plan.policy, plan.budget, scores, positions, prompt)
    alike, found = (
        torch.stack([x.to(each[0].device) for x in each], dim=1).cpu() if each else None
        for each in (similarity, measured)
    )
    return [
        row_sizes(
            plan.policy,
            plan.budget,
            n_layers=n_layers,
            length=length,
            floor=floor,
            fractions=plan.fractions_of(length, n_layers),
            shared=shared[row],
            similarity=None if alike is None else alike[row],
            measured=None if found is None else found[row],
        )
        for row, (length, floor) in enumerate(zip(prompt.lengths, prompt.floors, strict=True))
    ]


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
    if keeps_everything(policy, budget) or length <= max(floor, kept_whole(policy, budget)):
        return [length] * n_layers
    known: Any = {"n_layers": n_layers, "length": length, "floor": floor}
    total = max(total_kept(policy, budget, n_layers, length), n_layers * floor)
    if policy.retention is not None and fractions is None:
        assert shared is not None
        total = max(total, int(sum(shared)))
    if total == n_layers * length:
        return [length] * n_layers
    sizes = [f * length for f in fractions or ()] or shared
    if sizes is None:
        sizes = policy.layers.sizes(total, similarity=similarity, measured=measured, **known)
    return allocation.fit(sizes, total, floor=floor, max_size=length)


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
    totals = [total_kept(policy, budget, L, n) - L * floor for n, floor in rows]
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
