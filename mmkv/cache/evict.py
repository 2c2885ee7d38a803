"""Eviction itself: from a layer's whole tokens to blocks that hold only the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import selection
from mmkv.cache.config import CacheConfig
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock, gathered
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.quantize import QuantizedKV, Stored, relative_error, squares
from mmkv.cache.token_masks import TokenMasks
from mmkv.parts import RowSizes
from mmkv.parts.slots import GrowingSlots, SlotSchedule, send, spare
from mmkv.parts.victims import HeavyHitterSlots
from mmkv.scores.attention import autocast_off


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
        plan: policy and budget.
        prompt: what is known of the tokens, on the layer's device.
        sizes: tokens kept per head, for each row.
        expected: tokens that will be generated, as far as known.
        layer_idx: which layer of the model.
        split: what `head_sizes` found for this layer.
    """
    policy, (B, H, U, _) = plan.policy, held.keys.shape
    marks = prompt.marks(held.positions)
    ranking = selection.ranked(
        policy, held.scores, held.positions, prompt, marks, sizes, layer_idx, split
    )
    merge = None if list(sizes) == prompt.lengths else policy.merge
    if merge is None:
        kept = ranking.kept(held)
    else:
        with autocast_off(held.keys):
            kept = merge(held, ranking)
    reduction = "" if held.scores is None else policy.score.turn_reduction
    scored = plan.evicting(prompt) if reduction == "max" else []
    retained = None
    if held.scores is not None and policy.score.ranks:
        alone = kept.indices
        if kept.weights is not None:
            alone = alone.masked_fill(kept.weights > 1, -1)
        retained = retained_share(held.scores, alone, ranking.free)
    indices = kept.indices.expand(B, H, -1)
    tokens = indices.flatten(0, 1)  # [R, M], where each slot's pair lies in `keys` and `values`
    keys, values = held.keys.detach(), held.values.detach()
    if kept.keys is not None and kept.values is not None:
        keys, values = kept.keys, kept.values
        whole = torch.arange(indices.shape[-1], device=indices.device)
        tokens = torch.where(indices < 0, -1, whole).flatten(0, 1)

    def per_token(x: Tensor, empty: float) -> Tensor:
        found = x.expand(B, H, U).gather(2, indices.clamp(min=0))
        return found.masked_fill(indices < 0, empty)

    stands = per_token(held.positions, -1)
    positions = stands.flatten(0, 1).int()
    mass = None
    if held.scores is not None and reduction:
        mass = per_token(held.scores, 0)
        if kept.slot is not None:
            # Not negative: what a slot stands for is added up, or the largest counts.
            how = "sum" if reduction == "sum" else "amax"
            mass = held.scores.new_zeros(B, H, indices.shape[-1] + 1)
            mass.scatter_reduce_(-1, kept.slot, held.scores.expand(B, H, U), how)
            mass = mass[..., :-1]
        mass = mass.flatten(0, 1)
        if not all(scored):
            whole_rows = ~torch.tensor(scored).repeat_interleave(H)[:, None]
            whole_rows = whole_rows.to(mass.device, non_blocking=True)
            mass.masked_fill_(whole_rows, 0.0)  # alone, such a row would not be scored
    elif policy.decode.needs_decode_attention and not plan.keeps_everything:
        mass = torch.zeros(positions.shape, device=positions.device)
    bias = kept.bias
    if bias is not None:
        bias = bias.masked_fill(indices < 0, 0.0).flatten(0, 1)

    def per_row(x: Tensor) -> np.ndarray:
        return x.expand(B, H).reshape(-1).numpy()

    counts, n_pinned = per_row(kept.counts), per_row(kept.n_pinned)
    group_index = held.group_index
    if kept.slot is not None and kept.weights is not None:
        leads = stands.masked_fill(kept.weights < 2, -1)
        group_index = _leaders(kept.slot, leads, held, prompt.valid.shape[1])
    blocks: list[PaddedBlock] = []
    off = torch.zeros(B * H, 2, 2, device=keys.device)
    for rows, schedule, width, most in _planned(plan, prompt, counts, n_pinned, expected):
        empty = (0, most - width)
        index = torch.from_numpy(rows).to(keys.device, non_blocking=True)
        at = pad(tokens[index, :width], empty, value=-1)
        where = pad(positions[index, :width], empty, value=-1)
        stored: list[Stored] = []
        for i, x in enumerate((keys, values)):
            exact = gathered(x, index[:, None], at)
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
                width,
                rows=rows,
                inv_freq=plan.inv_freq,
                log_weights=None if bias is None else pad(bias[index, :width], empty),
            )
        )
    error = None if plan.kv_dtype is None else relative_error(off.view(B, H, 2, 2).sum(1))
    return KeptKV(blocks, B, H, list(sizes), retained, error, group_index)


def retained_share(scores: Tensor, indices: Tensor, free: Tensor) -> Tensor:
    """The share of the importance of the tokens `free` that was kept, [B]; 1 where none compete.

    Kept as they are, and not in groups, were `indices` int64 [B, 1 or H, M], -1 as filler.
    """
    s = scores.clamp(min=0) * free
    kept = s.expand(-1, indices.shape[1], -1).gather(-1, indices.clamp(min=0))
    kept = kept.masked_fill(indices < 0, 0.0).mean(dim=1).sum(-1)
    total = s.mean(dim=1).sum(-1)
    # Sums in another order may be a rounding apart.
    return torch.where(total > 0, kept / total.clamp(min=1e-30), 1.0).clamp(max=1.0)


def _leaders(slot: Tensor, leads: Tensor, held: PromptKV, seen: int) -> Tensor:
    """In which group each token seen lies, by the position of its leader: int16 or 32 [B, H, T].

    -1 for a token that is kept alone, gone, or padding. Each token held has its slot [B, H, U], and
    `leads` [B, H, M] is where the leader of each slot stands, -1: it is alone.
    """
    at, before = pad(leads, (0, 1), value=-1).gather(-1, slot), held.group_index
    now = at.new_full((*at.shape[:2], seen + 1), -1)
    positions = held.positions.expand(at.shape)
    now.scatter_(-1, positions.masked_fill(positions < 0, seen), at)
    now = now[..., :seen]
    if before is not None:
        before = pad(before.long(), (0, seen - before.shape[-1]), value=-1)
        itself = torch.arange(seen, device=at.device).expand_as(before)
        now = now.gather(-1, torch.where(before < 0, itself, before))
    return now.to(torch.int16 if seen < 2**15 else torch.int32)


def _planned(
    plan: CacheConfig, prompt: TokenMasks, counts: np.ndarray, n_pinned: np.ndarray, expected: int
) -> list[tuple[np.ndarray, SlotSchedule, int, int]]:
    """Each block's rows of the B * H, its schedule, the slots it uses and those it has.

    Each row keeps `counts` tokens, of which decoding must not drop the first `n_pinned`.
    """
    heads, seen = len(counts) // len(prompt.lengths), prompt.valid.shape[1]
    lengths = np.repeat(prompt.lengths, heads)
    # A prompt that loses nothing fills up what is kept anyway while decoding.
    whole = plan.kept_whole
    capacity, share = np.where(lengths <= whole, whole, counts), None
    if not isinstance(plan.budget, int):
        share = counts / lengths * np.repeat(prompt.granted, heads)
        if plan.budget is not None:
            # What `policy.least` keeps beyond the budget is no share of later tokens.
            asked = plan.budget * lengths
            share = share * (asked / np.maximum(asked, np.minimum(whole, lengths)))
    found = list[tuple[np.ndarray, SlotSchedule, int, int]]()
    for rows in group_rows(counts):
        sizes = RowSizes(
            counts=counts[rows],
            lengths=lengths[rows],
            protected=n_pinned[rows],
            capacity=capacity[rows],
            share=None if share is None else share[rows],
            heads=heads,
        )
        if plan.keeps_everything:
            schedule: SlotSchedule = GrowingSlots(counts=sizes.counts)
        else:
            schedule = plan.policy.decode.schedule(plan.policy, sizes)
        if isinstance(schedule, HeavyHitterSlots):
            places = prompt.last_places(int(schedule.recent.max()))
            if places is not None:
                schedule.behind(places[send(rows // heads, places.device)], seen)
        width = int(counts[rows].max())
        ahead = min(expected, spare(width, seen))
        found.append((rows, schedule, width, schedule.most(ahead)))
    return found


def group_rows(counts: np.ndarray, *, most: int = 6, slack: float = 0.15) -> list[np.ndarray]:
    """Split rows into as few blocks as hold them with little padding.

    Args:
        counts: [R], tokens kept by each row.
        most: blocks at the most; each costs one attention call a step.
        slack: padding allowed as a share of what is kept; more blocks are tried until it is met.

    Returns:
        Row indices of each block, each in rising order.
    """
    order = np.argsort(-counts, kind="stable")
    size = counts[order].astype(np.int64)
    # Cut only where the rounded length changes: at most 33 places, so the search is cheap.
    rounded = np.ceil(size / max(1, size[0]) * 32)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(rounded)) + 1, [len(size)]])
    allowed = (1 + slack) * size.sum()
    n = len(cuts) - 1
    # cost[j]: slots needed for the first cuts[j] rows; `back`: where their last block starts.
    cost = np.full(n + 1, np.inf)
    cost[0] = 0.0
    back: list[np.ndarray] = []
    for _ in range(min(most, n)):
        longest = size[np.minimum(cuts, len(size) - 1)]
        tried = cost[:, None] + (cuts[None, :] - cuts[:, None]) * longest[:, None]
        tried[np.tril_indices(n + 1)] = np.inf
        back.append(tried.argmin(0))
        cost = tried.min(0)
        if cost[n] <= allowed:
            break
    edges = [n]
    for step in reversed(back):
        edges.append(int(step[edges[-1]]))
    edges.reverse()
    return [np.sort(order[cuts[a] : cuts[b]]) for a, b in pairwise(edges) if a < b]
