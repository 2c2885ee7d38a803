"""Eviction: from all tokens of a layer to blocks of the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import selection
from mmkv.cache.codes import BITS, relative_error, squares
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock, gathered
from mmkv.cache.plain import PlainKV
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.quantize import NEWEST, WINDOW, QuantizedKV
from mmkv.parts import RowSizes
from mmkv.parts.slots import GrowingSlots, SlotSchedule, send, spare
from mmkv.parts.victims import HeavyHitterSlots

# Empty slots of blocks, as a share of the kept tokens, that are allowed for fewer blocks.
SLACK = 0.15


def evict(
    prompt_kv: PromptKV,
    plan: CacheConfig,
    prompt: TokenMasks,
    sizes: Sequence[int],
    expected: int,
    layer_idx: int,
    split: Tensor | None = None,
    *,
    n_newest: int = 0,
) -> KeptKV:
    """Choose the tokens that a layer keeps, merge or drop the others, and copy them into blocks.

    Args:
        prompt_kv: all tokens of the layer.
        plan: policy and budget.
        prompt: the masks of the tokens.
        sizes: tokens kept per head, for each row.
        expected: how many tokens will be generated; 0 if that is not known.
        layer_idx: the index of the layer.
        split: the result of `head_sizes` for this layer.
        n_newest: how many of the last tokens were generated since the prompt.
    """
    policy, (B, H, U, _) = plan.policy, prompt_kv.keys.shape
    ranking = selection.ranked(policy, prompt_kv, prompt, sizes, layer_idx, split)
    merge = None if list(sizes) == prompt.lengths else policy.merge
    if merge is None:
        kept = ranking.kept(prompt_kv)
    else:
        # Autocast would round float32 products to 16 bits.
        device, no_autocast = prompt_kv.keys.device, nullcontext()
        if torch.is_autocast_enabled(device.type):
            no_autocast = torch.autocast(device.type, enabled=False)
        with no_autocast:
            distances = prompt.closed(prompt_kv.positions)
            kept = merge(replace(prompt_kv, positions=distances), ranking)
    reduction = "" if prompt_kv.scores is None else policy.score.turn_reduction
    scored = plan.long_enough(prompt) if reduction == "max" else []
    retained = None
    if prompt_kv.scores is not None and policy.score.ranks:
        singles = kept.indices
        if kept.weights is not None:
            singles = singles.masked_fill(kept.weights > 1, -1)
        retained = retained_share(prompt_kv.scores, singles, ranking.free)
    indices = kept.indices.expand(B, H, -1)
    tokens = indices.flatten(0, 1)  # [R, M], the index of each slot's pair in `keys` and `values`
    keys, values = prompt_kv.keys.detach(), prompt_kv.values.detach()
    if kept.keys is not None and kept.values is not None:
        keys, values = kept.keys, kept.values
        slot_numbers = torch.arange(indices.shape[-1], device=indices.device)
        tokens = torch.where(indices < 0, -1, slot_numbers).flatten(0, 1)

    def per_token(x: Tensor, padding: float) -> Tensor:
        values = x.expand(B, H, U).gather(2, indices.clamp(min=0))
        return values.masked_fill(indices < 0, padding)

    kept_positions = per_token(prompt_kv.positions, -1)
    slot_positions = kept_positions.flatten(0, 1).int()
    mass = None
    if prompt_kv.scores is not None and reduction:
        mass = per_token(prompt_kv.scores, 0)
        if kept.slot is not None:
            # Scores are at least 0 here. Those of a slot's tokens are added, or the largest counts.
            reduce = "sum" if reduction == "sum" else "amax"
            mass = prompt_kv.scores.new_zeros(B, H, indices.shape[-1] + 1)
            mass.scatter_reduce_(-1, kept.slot, prompt_kv.scores.expand(B, H, U), reduce)
            mass = mass[..., :-1]
        mass = mass.flatten(0, 1)
        if not all(scored):
            whole_rows = ~torch.tensor(scored).repeat_interleave(H)[:, None]
            whole_rows = whole_rows.to(mass.device, non_blocking=True)
            mass.masked_fill_(whole_rows, 0.0)  # outside of a batch, such a row is not scored
    elif policy.decode.needs_decode_attention and not plan.keeps_everything:
        mass = torch.zeros(slot_positions.shape, device=slot_positions.device)
    bias = kept.bias
    if bias is not None:
        bias = bias.masked_fill(indices < 0, 0.0).flatten(0, 1)

    def per_row(x: Tensor) -> np.ndarray:
        return x.expand(B, H).reshape(-1).numpy()

    counts, n_pinned = per_row(kept.counts), per_row(kept.n_pinned)
    group_index = prompt_kv.group_index
    if kept.slot is not None and kept.weights is not None:
        leaders = kept_positions.masked_fill(kept.weights < 2, -1)
        group_index = _leaders(kept.slot, leaders, prompt_kv, prompt.valid.shape[1])
    start = prompt.valid.shape[1] - min(n_newest, NEWEST)
    means = None if prompt_kv.means is None else prompt_kv.means.flatten(0, 1)
    blocks: list[PaddedBlock] = []
    errors = torch.zeros(B * H, 2, 2, device=keys.device)
    for rows, schedule, width, capacity in planned(
        plan, prompt, counts, n_pinned, expected, keys.device
    ):
        padding = (0, capacity - width)
        index = torch.from_numpy(rows).to(keys.device, non_blocking=True)
        block_tokens = pad(tokens[index, :width], padding, value=-1)
        block_positions = pad(slot_positions[index, :width], padding, value=-1)
        pair = tuple(gathered(x, index[:, None], block_tokens) for x in (keys, values))
        stored: PlainKV | QuantizedKV = PlainKV(pair[0], pair[1])
        if plan.kv_dtype is not None:
            filled = block_positions >= 0
            stored = QuantizedKV.of(
                pair[0],
                pair[1],
                filled,
                _exact_slots(block_positions, width, max(1, policy.sinks), start, n_newest > 0),
                mean=None if means is None else means[index],
                bits=BITS[plan.kv_dtype],
                start=start,
                opened=n_newest > 0,
                reuses=schedule.drops or width == 0,
            )
            for i, (x, read) in enumerate(zip(pair, stored.read(), strict=True)):
                errors[index, i] = squares(x, read, filled)
        block_mass = None if mass is None else pad(mass[index, :width], padding)
        if block_mass is not None and schedule.needs_decode_attention:
            block_mass.masked_fill_(block_positions < 0, torch.inf)
        weights = None if bias is None else pad(bias[index, :width], padding)
        fields = rows, stored, block_positions, block_mass, schedule, weights
        block = PaddedBlock(*fields)
        block.set_bias(width)
        blocks.append(block)
    error = None if plan.kv_dtype is None else relative_error(errors.view(B, H, 2, 2).sum(1))
    return KeptKV(blocks, B, H, list(sizes), retained, error, group_index)


def _exact_slots(positions: Tensor, width: int, n_first: int, start: int, opened: bool) -> Tensor:
    """Return the slots [R, X] that few bits hold exactly, of positions [R, S], -1 if empty.

    These are the `n_first` earliest tokens in the first `width` slots and, before them if there is
    a window, the tokens from position `start` on. A place without a token repeats the last place.
    """
    first = first_slots(positions, width, n_first)
    if not opened:
        return first
    newest = torch.arange(start, start + WINDOW, device=positions.device)
    same = newest[:, None] == positions[:, None, :]
    slots = torch.where(same.any(-1), same.int().argmax(-1), first[:, -1:])
    return torch.cat([slots, first], dim=1)


def first_slots(positions: Tensor, width: int, n: int) -> Tensor:
    """Return the slots of the n earliest tokens, int64 [R, n or less]; see `_exact_slots`."""
    used = positions[:, : max(1, width)]
    age = used.masked_fill(used < 0, torch.iinfo(used.dtype).max)
    # Not `contiguous`, which leaves one row a view of all of its slots.
    return age.argsort(dim=-1, stable=True)[:, :n].clone()


def retained_share(scores: Tensor, indices: Tensor, free: Tensor) -> Tensor:
    """Return the share of importance that was kept of the `free` tokens, [B]; 1 if there are none.

    `indices`, int64 [B, 1 or H, M], are the tokens kept single, not in groups, -1 as filler.
    """
    s = scores.clamp(min=0) * free
    kept = s.expand(-1, indices.shape[1], -1).gather(-1, indices.clamp(min=0))
    kept = kept.masked_fill(indices < 0, 0.0).mean(dim=1).sum(-1)
    total = s.mean(dim=1).sum(-1)
    # The two sums add in different orders, so the quotient can round to more than 1.
    return torch.where(total > 0, kept / total.clamp(min=1e-30), 1.0).clamp(max=1.0)


def _leaders(slot: Tensor, leaders: Tensor, prompt_kv: PromptKV, seen: int) -> Tensor:
    """Return the group of each token seen, as its leader's position: int16 or int32 [B, H, T].

    -1 for a token that is kept single, for an evicted one, and for padding. `slot` [B, H, U] is the
    slot of each token; `leaders` [B, H, M] is the position of each slot's leader, -1 for a single.
    """
    group, old_groups = pad(leaders, (0, 1), value=-1).gather(-1, slot), prompt_kv.group_index
    index = group.new_full((*group.shape[:2], seen + 1), -1)
    positions = prompt_kv.positions.expand(group.shape)
    index.scatter_(-1, positions.masked_fill(positions < 0, seen), group)
    index = index[..., :seen]
    if old_groups is not None:
        old_groups = pad(old_groups.long(), (0, seen - old_groups.shape[-1]), value=-1)
        own_position = torch.arange(seen, device=group.device).expand_as(old_groups)
        index = index.gather(-1, torch.where(old_groups < 0, own_position, old_groups))
    return index.to(torch.int16 if seen < 2**15 else torch.int32)


def planned(
    plan: CacheConfig,
    prompt: TokenMasks,
    counts: np.ndarray,
    n_pinned: np.ndarray,
    expected: int,
    device: torch.device,
) -> list[tuple[np.ndarray, SlotSchedule, int, int]]:
    """Return of each block its rows among the B * H, its schedule, its used slots and all slots.

    Each row keeps `counts` tokens, of which decoding must not drop the first `n_pinned`.
    """
    heads, seen = len(counts) // len(prompt.lengths), prompt.valid.shape[1]
    lengths = np.repeat(prompt.lengths, heads).clip(min=1)  # a row may begin in a later chunk
    # A row so short that it loses no token may grow to this size while decoding.
    kept_whole = plan.kept_whole
    capacity, share = np.where(lengths <= kept_whole, kept_whole, counts), None
    if not isinstance(plan.budget, int):
        share = counts / lengths * np.repeat(prompt.granted, heads)
        if plan.budget is not None:
            # Tokens kept because of `policy.least`, beyond the budget, do not raise this share.
            target = plan.budget * lengths
            share = share * (target / np.maximum(target, np.minimum(kept_whole, lengths)))
    blocks = list[tuple[np.ndarray, SlotSchedule, int, int]]()
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
                places = places.to(device)
                schedule.behind(places[send(rows // heads, device)], seen)
        width = int(counts[rows].max())
        n_expected = min(expected, spare(width, seen))
        blocks.append((rows, schedule, width, schedule.most(n_expected)))
    return blocks


def group_rows(counts: np.ndarray, *, most: int = 6, slack: float = SLACK) -> list[np.ndarray]:
    """Split rows into the fewest blocks with little padding.

    Args:
        counts: [R], tokens kept by each row.
        most: the largest number of blocks; each costs one attention call a step.
        slack: allowed padding as a share of the kept tokens, which decides the number of blocks.

    Returns:
        Row indices of each block, ascending.
    """
    order = np.argsort(-counts, kind="stable")
    size = counts[order].astype(np.int64)
    # Cut only where the rounded length changes: at most 33 cuts, so the search is cheap.
    rounded = np.ceil(size / max(1, size[0]) * 32)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(rounded)) + 1, [len(size)]])
    allowed = (1 + slack) * size.sum()
    n = len(cuts) - 1
    # cost[j]: slots needed for the first cuts[j] rows; `starts`: the cut where their last block is.
    cost = np.full(n + 1, np.inf)
    cost[0] = 0.0
    starts: list[np.ndarray] = []
    for _ in range(min(most, n)):
        longest = size[np.minimum(cuts, len(size) - 1)]
        candidates = cost[:, None] + (cuts[None, :] - cuts[:, None]) * longest[:, None]
        candidates[np.tril_indices(n + 1)] = np.inf
        starts.append(candidates.argmin(0))
        cost = candidates.min(0)
        if cost[n] <= allowed:
            break
    edges = [n]
    for start in reversed(starts):
        edges.append(int(start[edges[-1]]))
    edges.reverse()
    return [np.sort(order[cuts[a] : cuts[b]]) for a, b in pairwise(edges) if a < b]
