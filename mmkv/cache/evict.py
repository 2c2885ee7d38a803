"""Eviction itself: from a layer's whole tokens to blocks that hold only the kept ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import selection, splitting, token_masks
from mmkv.cache.config import CacheConfig
from mmkv.cache.group_weights import log_weights
from mmkv.cache.grouping import Groups
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock, group_rows, spare
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.quantize import QuantizedKV, Stored, relative_error, squares
from mmkv.cache.token_masks import TokenMasks
from mmkv.parts.merging import MergeIntoGroups
from mmkv.parts.slots import GrowingSlots, SlotSchedule, send
from mmkv.parts.victims import HeavyHitterSlots
from mmkv.policy import Policy


def head_sizes(
    layers: Sequence[PromptKV], policy: Policy, prompt: TokenMasks, sizes: Sequence[Sequence[int]]
) -> Sequence[Tensor | None]:
    """What each head of each layer keeps, [B, H], where the heads of all layers share the budget.

    None where each layer splits its own size, and where nothing was scored: all is kept.

    Args:
        layers: the tokens of each layer, whole.
        policy: its `heads` part decides.
        prompt: what is known of the tokens.
        sizes: [L][B], tokens kept per head if all heads of a layer kept as many.
    """
    if not policy.heads.is_global or any(x.scores is None for x in layers):
        return [None] * len(layers)
    scores, free, forced = [], [], []
    for held, size in zip(layers, sizes, strict=True):
        here = prompt.to(held.positions.device)
        s, present, must, _ = selection.contested(policy, held.scores, held.positions, here, size)
        scores.append(s)
        free.append(present & ~must)
        forced.append(must.sum(-1))
    return splitting.across_layers(policy.heads.split_all, scores, free, forced, sizes)


def evict(
    held: PromptKV,
    plan: CacheConfig,
    prompt: TokenMasks,
    sizes: Sequence[int],
    expected: int,
    layer_idx: int,
    split: Tensor | None = None,
) -> KeptKV:
    """Choose what one layer keeps, merge or drop the rest, and copy it into storage of its own.

    Args:
        held: the layer's tokens, whole.
        plan: the policy.
        prompt: what is known of the tokens, on the layer's device.
        sizes: tokens kept per head, for each row.
        expected: tokens that will be generated, as far as known.
        layer_idx: which layer of the model.
        split: what `head_sizes` found for this layer.
    """
    policy, (B, H, U, _) = plan.policy, held.keys.shape
    given = held.scores, held.positions, prompt, sizes
    ranking = selection.ranked(policy, *given, layer_idx, split)
    merge = None if list(sizes) == prompt.lengths else policy.merge
    keys, values = held.keys.detach(), held.values.detach()
    slots, weights, bias = None, held.weights, held.bias
    if isinstance(merge, MergeIntoGroups):
        groups = Groups.of(merge, keys, values, held.positions, held.weights, *ranking[:2])
        indices, counts, anchored = selection.ordered(*groups.led(*ranking))
        slots = groups.slots(indices)
        means = slots.means(keys, values)
        weights, bias = slots.weights, log_weights(slots, keys, bias, means[0], held.readers)
        keys, values = means
    else:
        known = _known_counts(policy, held, prompt, sizes) if split is None else None
        indices, counts, anchored = selection.ordered(*ranking, known)
        at = indices.expand(B, H, -1).clamp(min=0)
        weights, bias = (None if x is None else x.gather(2, at) for x in (weights, bias))
    if slots is None and merge is not None:
        keys, values = merge(keys, values, indices.expand(B, H, -1), held.positions)
    retained = None
    if held.scores is not None and policy.score.ranks:
        alone = indices if weights is None else indices.masked_fill(weights > 1, -1)
        retained = selection.retained(held.scores, alone, held.positions, prompt)
    indices = indices.expand(B, H, -1)
    tokens = indices.flatten(0, 1)  # [R, M], where each kept token lies in `keys` and `values`
    if merge is not None:
        whole = torch.arange(indices.shape[-1], device=indices.device)
        tokens = torch.where(indices < 0, -1, whole).flatten(0, 1)

    def per_token(x: Tensor, empty: float) -> Tensor:
        found = x.expand(B, H, U).gather(2, indices.clamp(min=0))
        return found.masked_fill(indices < 0, empty).flatten(0, 1)

    positions = per_token(held.positions, -1).int()
    mass = None
    if held.scores is not None and (combines := policy.score.turn_reduction):
        mass = per_token(held.scores, 0)
        if slots is not None:
            mass = slots.reduced(held.scores, combines).flatten(0, 1)
        if combines == "max" and not all(scored := plan.evicting(prompt)):
            whole_rows = ~torch.tensor(scored).repeat_interleave(H)[:, None]
            whole_rows = whole_rows.to(mass.device, non_blocking=True)
            mass.masked_fill_(whole_rows, 0.0)  # alone, such a row would not be scored
    elif policy.decode.needs_decode_attention and not plan.keeps_everything:
        mass = torch.zeros(positions.shape, device=positions.device)
    if bias is not None:
        bias = bias.masked_fill(indices < 0, 0.0).flatten(0, 1)

    def per_row(x: Tensor) -> np.ndarray:
        return x.expand(B, H).reshape(-1).numpy()

    kept, group_index = per_row(counts), held.group_index
    if slots is not None:
        group_index = slots.places(held.group_index, prompt.valid.shape[1])
    blocks: list[PaddedBlock] = []
    off = torch.zeros(B * H, 2, 2, device=keys.device)
    for rows in group_rows(kept):
        schedule = _schedule(plan, prompt, kept, per_row(anchored), rows)
        width = int(kept[rows].max())
        ahead = min(expected, spare(width, prompt.valid.shape[1]))
        empty = (0, schedule.most(ahead) - width)
        index = send(rows, keys.device)
        at = pad(tokens[index, :width], empty, value=-1)
        where = pad(positions[index, :width], empty, value=-1)
        stored: list[Stored] = []
        for i, x in enumerate((keys, values)):
            exact = _gather(x, index[:, None], at)
            if plan.kv_dtype is None:
                stored.append(exact)
                continue
            stored.append(QuantizedKV.of(exact, plan.kv_dtype))
            off[index, i] = squares(exact, stored[i][:, :], where >= 0)
        blocks.append(
            PaddedBlock.of(
                stored[0],
                stored[1],
                where,
                None if mass is None else pad(mass[index, :width], empty),
                schedule,
                rows=None if len(rows) == B * H else index,
                inv_freq=plan.inv_freq,
                log_weights=None if bias is None else pad(bias[index, :width], empty),
            )
        )
    error = None if plan.kv_dtype is None else relative_error(off.view(B, H, 2, 2).sum(1))
    return KeptKV(blocks, B, H, list(sizes), retained, error, group_index)


def _known_counts(
    policy: Policy, held: PromptKV, prompt: TokenMasks, sizes: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """What each head will keep, and what of it is protected, where that needs no look at a device.

    So it is for a first prompt whose heads keep as many each: both int64 [B, 1 or H]. Else None.
    """
    whole = held.positions.shape[1:] == (1, prompt.valid.shape[1])
    if not whole or not policy.heads.equal:
        return None
    heads = 1 if held.scores is None else held.scores.shape[1]
    counts = torch.tensor(sizes).minimum(torch.tensor(prompt.lengths))
    anchored = torch.tensor(prompt.anchored)
    return counts[:, None].expand(-1, heads), anchored[:, None].expand(-1, heads)


def _gather(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """The pairs of `rows` [...] at tokens `at` [...] of x [B, H, U, D], in storage of their own.

    [..., D]; where `at` is -1, for an empty slot, any token is copied.
    """
    _, H, U, D = x.shape
    at = at.clamp(min=0)
    if x.transpose(1, 2).is_contiguous():  # as a projection leaves it
        place = rows // H * U + at
        place, flat = place * H + rows % H, x.transpose(1, 2).reshape(-1, D)
    else:
        place, flat = rows * U + at, x.reshape(-1, D)
    return flat.index_select(0, place.flatten()).view(*at.shape, D)


def _schedule(
    plan: CacheConfig,
    prompt: TokenMasks,
    counts: np.ndarray,
    anchored: np.ndarray,
    rows: np.ndarray,
) -> SlotSchedule:
    """The schedule of some rows.

    Args:
        plan: policy and budget.
        prompt: gives the rows' lengths.
        counts: [B * H], how many tokens each row keeps.
        anchored: [B * H], how many of those, the first ones, decoding must not drop.
        rows: which of the B * H.
    """
    if plan.keeps_everything:
        return GrowingSlots(counts=counts[rows])
    heads = len(counts) // len(prompt.lengths)
    lengths = np.repeat(prompt.lengths, heads)
    # A prompt that loses nothing fills up what is kept anyway while decoding.
    whole = token_masks.kept_whole(plan.policy, plan.budget)
    capacity, share = np.where(lengths <= whole, whole, counts), None
    if not isinstance(plan.budget, int):
        share = counts / lengths * np.repeat(prompt.granted, heads)
        if plan.budget is not None:
            # What `policy.least` keeps beyond the budget is no share of later tokens.
            asked = plan.budget * lengths
            share = share * (asked / np.maximum(asked, np.minimum(whole, lengths)))
    schedule = plan.policy.decode.schedule(
        plan.policy,
        counts=counts[rows],
        lengths=lengths[rows],
        protected=anchored[rows],
        capacity=capacity[rows],
        share=None if share is None else share[rows],
        heads=heads,
    )
    if isinstance(schedule, HeavyHitterSlots):
        places = prompt.last_places(schedule.most_recent)
        if places is not None:
            index = send(rows // heads, places.device)
            schedule.behind(places[index], prompt.valid.shape[1])
    return schedule
