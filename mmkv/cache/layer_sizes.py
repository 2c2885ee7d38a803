"""How large each layer is: what the policy's layer part says, fitted to the budget.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.config import CacheConfig
from mmkv.cache.token_masks import TokenMasks, total_kept
from mmkv.parts import SizeInputs
from mmkv.sizes.layers import fit


def sizes_of_rows(
    plan: CacheConfig,
    prompt: TokenMasks,
    n_layers: int,
    scores: Sequence[Tensor] = (),
    positions: Sequence[Tensor] = (),
    measured: Sequence[Tensor] = (),
) -> list[list[int]]:
    """How many tokens each layer keeps of each row, [B][L].

    Args:
        plan: policy, budget and profile, whose kept fractions replace the policy's layer part.
        prompt: what is known of the tokens.
        n_layers: L, the compressed layers.
        scores: [B, 1 or H, U] of each layer, where they are known.
        positions: [B, 1 or H, U] of each layer, with `scores`.
        measured: [B] of each layer, what the layer part `needs`.
    """
    policy, found, totals = plan.policy, [[n] * n_layers for n in prompt.lengths], dict[int, int]()
    for row, loses in enumerate(plan.evicting(prompt)):
        length, floor = prompt.lengths[row], prompt.floors[row]
        total = max(total_kept(policy, plan.budget, n_layers, length), n_layers * floor)
        if loses and total < n_layers * length:
            totals[row] = total
    lengths, floors = ([x[row] for row in totals] for x in (prompt.lengths, prompt.floors))
    fractions = [plan.fractions_of(length, n_layers) for length in lengths]
    wished = [[x * n for x in known or ()] for known, n in zip(fractions, lengths, strict=True)]
    if None in fractions:
        rows: Any = slice(None) if len(totals) == len(found) else list(totals)
        known = dict[str, Tensor]()
        if measured:
            each = [x.to(measured[0].device) for x in measured]
            known["measured"] = torch.stack(each, dim=1)[rows].cpu()
        if scores and policy.layers.needs == "scores":
            best, offered = competing(scores, positions, prompt)
            known |= {"scores": best[rows], "offered": offered[rows]}
        spent = list(totals.values())
        given = SizeInputs(totals=spent, lengths=lengths, floors=floors, n_layers=n_layers, **known)
        wished = policy.layers(given)
        if policy.retention is not None:
            totals = {
                b: max(n, int(sum(w))) for (b, n), w in zip(totals.items(), wished, strict=True)
            }
    for (row, total), sizes, floor in zip(totals.items(), wished, floors, strict=True):
        found[row] = fit(sizes, total, floor=floor, max_size=prompt.lengths[row])
    return found


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
        (always_kept,) = prompt.to(p.device).at(p, "always_kept")
        free = (p >= 0) & ~always_kept
        own = s.masked_fill(~free[:, : s.shape[1]], float("-inf"))
        own = own.sort(dim=-1, descending=True).values
        own = own.masked_fill(own == float("-inf"), 0.0).mean(dim=1)
        ranked.append(pad(own, (0, wide - own.shape[-1])).to(device))
        offered.append(free.sum(-1).amax(-1).to(device))
    return torch.stack(ranked, dim=1), torch.stack(offered).amax(0).clamp(min=1)
