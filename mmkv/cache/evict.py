"""Eviction: from all tokens of a layer to blocks of the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import selection
from mmkv.cache.codes import relative_error, squares
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.group_index import GroupIndex
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock, block_of
from mmkv.cache.plain import PlainKV
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.quantize import NEWEST, WINDOW, QuantizedKV
from mmkv.cache.selection import Kept, Ranking
from mmkv.decode.slots import GrowingSlots, SlotSchedule, spare
from mmkv.decode.victims import HeavyHitterSlots
from mmkv.memory import BITS
from mmkv.parts import Merge, RowSizes
from mmkv.policy import Policy
from mmkv.tensors import flat_rows, no_autocast, send

# How many empty slots a layer may have, as a share of its kept tokens, to have fewer blocks.
SLACK = 0.15
# The largest number of blocks of a layer; each costs one attention call a step.
_MOST_BLOCKS = 6


class _BlockPlan(NamedTuple):
    """The sizes of a block before it is made."""

    rows: np.ndarray  # numbers among the layer's B * H rows
    schedule: SlotSchedule
    width: int  # slots in use
    capacity: int  # all slots


@dataclass(frozen=True)
class _Slots:
    """The pairs that the R = B * H rows of a layer keep, in M slots each, some of them empty.

    Attributes:
        tokens: int64 [R, M], the index of each slot's pair in `keys` and `values`; -1: empty.
        positions: int32 [R, M], -1: empty.
        keys, values: [B, H, U, D], or [B, H, M, D] of pairs that were merged.
        scores: [R, M], see `PaddedBlock.scores`.
        log_weights: float32 [R, M], 0 for an empty slot; None: every slot stands for one token.
        counts, n_protected: int64 [R], on the host, see `Kept`.
    """

    tokens: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor | None
    log_weights: Tensor | None
    counts: np.ndarray
    n_protected: np.ndarray


def evict(
    prompt_kv: PromptKV,
    plan: CacheConfig,
    masks: TokenMasks,
    sizes: Sequence[int],
    expected: int,
    layer_idx: int,
    split: Tensor | None = None,
    n_newest: int = 0,
) -> KeptKV:
    """Choose the tokens that a layer keeps, merge or drop the others, and copy them into blocks.

    Args:
        prompt_kv: all tokens of the layer.
        plan: policy and budget.
        masks: those of the tokens.
        sizes: tokens kept per head, for each row.
        expected: how many tokens will be generated; 0 if that is not known.
        layer_idx: the index of the layer.
        split: the result of `head_sizes` for this layer.
        n_newest: how many of the last tokens were generated since the prompt.
    """
    B, H, _, _ = prompt_kv.keys.shape
    ranking = selection.ranked(plan, prompt_kv, masks, sizes, layer_idx, split)
    merge = None if list(sizes) == masks.lengths else plan.policy.merge
    kept = ranking.kept(prompt_kv) if merge is None else _merged(merge, prompt_kv, masks, ranking)
    slots = _place(prompt_kv, kept, plan, masks)
    with no_autocast(prompt_kv.keys.device):
        blocks, stored, error = _store(slots, prompt_kv.means, plan, masks, expected, n_newest)
    retained = None
    if prompt_kv.scores is not None and plan.policy.score.ranks:
        singles = kept.indices
        if kept.weights is not None:
            singles = singles.masked_fill(kept.weights > 1, -1)
        retained = retained_share(prompt_kv.scores, singles, ranking.free)
    groups = None if prompt_kv.group_index is None else GroupIndex.of(prompt_kv.group_index)
    if kept.slot is not None and kept.weights is not None:
        leaders = slots.positions.long().view(kept.weights.shape)
        leaders = leaders.masked_fill(kept.weights < 2, -1)
        groups = _groups(kept.slot, leaders, prompt_kv, masks.valid.shape[1])
    return KeptKV(blocks, stored, B, H, list(sizes), retained, error, groups)


def _merged(merge: Merge, prompt_kv: PromptKV, masks: TokenMasks, ranking: Ranking) -> Kept:
    """Merge evicted pairs into kept ones, by positions that do not count padding between tokens."""
    with no_autocast(prompt_kv.keys.device):
        kept = merge(replace(prompt_kv, positions=masks.without_gaps(prompt_kv.positions)), ranking)
    if not isinstance(kept, Kept):
        raise ValueError(
            f"{type(merge).__name__} returned {type(kept).__name__}: expected a "
            "mmkv.cache.selection.Kept, such as ranking.kept(prompt_kv)"
        )
    return kept


def _place(prompt_kv: PromptKV, kept: Kept, plan: CacheConfig, masks: TokenMasks) -> _Slots:
    """Return the slots of each row, with the tokens in them."""
    B, H, U, _ = prompt_kv.keys.shape
    indices = kept.indices.expand(B, H, -1)
    empty = indices < 0
    tokens, keys, values = indices, prompt_kv.keys.detach(), prompt_kv.values.detach()
    if kept.keys is not None and kept.values is not None:
        keys, values = kept.keys, kept.values
        slot_numbers = torch.arange(indices.shape[-1], device=indices.device)
        tokens = torch.where(empty, -1, slot_numbers)
    positions = prompt_kv.positions.expand(B, H, U).gather(2, indices.clamp(min=0))
    positions = positions.masked_fill(empty, -1).flatten(0, 1).int()
    log_weights = kept.log_weights
    if log_weights is not None:
        log_weights = log_weights.masked_fill(empty, 0.0).flatten(0, 1)

    def per_row(x: Tensor) -> np.ndarray:
        return x.expand(B, H).reshape(-1).numpy()

    return _Slots(
        tokens.flatten(0, 1),
        positions,
        keys,
        values,
        _slot_scores(prompt_kv, kept, plan, masks),
        log_weights,
        per_row(kept.counts),
        per_row(kept.n_protected),
    )


def _slot_scores(
    prompt_kv: PromptKV, kept: Kept, plan: CacheConfig, masks: TokenMasks
) -> Tensor | None:
    """Return the scores that slots keep, [R, M], see `PaddedBlock.scores`.

    A slot of merged tokens has the sum of their scores, or the largest, as `turn_reduction` says.
    """
    (B, H, U, _), indices = prompt_kv.keys.shape, kept.indices
    M, reduction = indices.shape[-1], plan.policy.score.turn_reduction
    if prompt_kv.scores is None or not reduction:
        if plan.policy.decode.needs_decode_attention and not plan.keeps_all:
            return indices.new_zeros(B * H, M, dtype=torch.float32)
        return None
    scores = prompt_kv.scores.expand(B, H, U)
    if kept.slot is None:
        at = indices.expand(B, H, -1)
        of_slots = scores.gather(2, at.clamp(min=0)).masked_fill(at < 0, 0)
    else:  # scores are at least 0 here
        of_slots = scores.new_zeros(B, H, M + 1)
        how = "sum" if reduction == "sum" else "amax"
        of_slots = of_slots.scatter_reduce_(-1, kept.slot, scores, how)[..., :-1]
    of_slots = of_slots.flatten(0, 1)
    if reduction == "max" and not all(scored := plan.long_enough(masks)):
        # A row that is too short to lose a token is not scored when it is alone, so it has zeros.
        whole_rows = ~torch.tensor(scored, device="cpu").repeat_interleave(H)[:, None]
        of_slots.masked_fill_(whole_rows.to(of_slots.device, non_blocking=True), 0.0)
    return of_slots.to(score_dtype(plan.policy))


def score_dtype(policy: Policy) -> torch.dtype:
    """Return the type of the scores that slots keep: bfloat16 unless scores are added up."""
    compares = policy.score.turn_reduction == "max" and not policy.decode.needs_decode_attention
    return torch.bfloat16 if compares else torch.float32


def _store(
    slots: _Slots,
    means: Tensor | None,
    plan: CacheConfig,
    masks: TokenMasks,
    expected: int,
    n_newest: int,
) -> tuple[list[PaddedBlock], PlainKV | QuantizedKV, Tensor | None]:
    """Copy the pairs into blocks; with 8 or 4 bits also return the relative errors, [B, 2].

    `means` are those of `PromptKV`; other arguments are those of `evict`.
    """
    B, H, _, _ = slots.keys.shape
    device, dtype = slots.keys.device, slots.keys.dtype
    blocks, parts = list[PaddedBlock](), list[Any]()
    errors = torch.zeros(B * H, 2, 2, dtype=torch.float32, device=device)
    start = masks.valid.shape[1] - min(n_newest, NEWEST)
    for rows, schedule, width, capacity in plan_blocks(
        plan, masks, slots.counts, slots.n_protected, expected, device
    ):
        index = send(rows, device)
        tokens, positions = (
            pad(x[index, :width], (0, capacity - width), value=-1)
            for x in (slots.tokens, slots.positions)
        )
        keys, values = (_gathered(x, index[:, None], tokens) for x in (slots.keys, slots.values))
        if plan.kv_dtype is None:
            parts.append(PlainKV.of(keys, values))
        else:
            filled, opened = positions >= 0, n_newest > 0
            part = QuantizedKV.of(
                keys,
                values,
                filled,
                _exact_slots(positions, plan.policy.n_exact, start, opened),
                mean=None if means is None else means.flatten(0, 1)[index],
                bits=BITS[plan.kv_dtype],
                start=start,
                opened=opened,
                reuses=schedule.drops or width == 0,
            )
            part.short = width < plan.policy.n_exact
            for i, (x, read) in enumerate(zip((keys, values), part.read()[0], strict=True)):
                errors[index, i] = squares(x, read, filled)
            parts.append(part)
        scores, weights = (
            None if x is None else pad(x[index, :width], (0, capacity - width))
            for x in (slots.scores, slots.log_weights)
        )
        blocks.append(block_of(rows, positions, schedule, dtype, scores, weights, width))
    error = None if plan.kv_dtype is None else relative_error(errors.view(B, H, 2, 2).sum(1))
    return blocks, parts[0].joined(parts), error


def _gathered(x: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Copy the pairs of `rows` [...] at `tokens` [...] out of x [B, H, U, D]: [..., D].

    For an empty slot `tokens` is -1, and any token is copied.
    """
    flat, place = flat_rows(x, rows, tokens.clamp(min=0))
    return flat.index_select(0, place.flatten()).view(*tokens.shape, x.shape[-1])


def _exact_slots(positions: Tensor, n_first: int, start: int, opened: bool) -> Tensor:
    """Return the slots [R, X] whose pairs stay exact in 8 or 4 bits.

    These are the slots of the `n_first` earliest tokens. If the window is `opened`, the slots of
    the tokens from position `start` on come before them; a place of the window without a token
    repeats the last place. Positions are [R, S], -1 for an empty slot.
    """
    first = first_slots(positions, n_first)
    if not opened:
        return first
    newest = torch.arange(start, start + WINDOW, device=positions.device)
    same = newest[:, None] == positions[:, None, :]
    slots = torch.where(same.any(-1), same.int().argmax(-1), first[:, -1:])
    return torch.cat([slots, first], dim=1)


def first_slots(positions: Tensor, n: int) -> Tensor:
    """Return the slots of each row's n earliest tokens, int64 [R, n]; empty ones if it has fewer.

    Positions are [R, S], -1 for an empty slot.
    """
    age = positions.masked_fill(positions < 0, torch.iinfo(positions.dtype).max)
    # Not `contiguous`, which leaves one row a view of all of its slots.
    return age.argsort(dim=-1, stable=True)[:, :n].clone()


def retained_share(scores: Tensor, indices: Tensor, free: Tensor) -> Tensor:
    """Return the share of importance that was kept of the `free` tokens, [B]; 1 if there are none.

    `indices`, int64 [B, 1 or H, M], are the tokens kept single, not in groups, -1 as filler.
    """
    s = scores.clamp(min=0) * free
    kept = s.expand(-1, indices.shape[1], -1).gather(-1, indices.clamp(min=0))
    kept = kept.masked_fill_(indices < 0, 0.0).mean(dim=1).sum(-1)
    # The two sums add in different orders, so the quotient can round to more than 1.
    return (kept / s.mean(dim=1).sum(-1)).nan_to_num_(nan=1.0).clamp_(max=1.0)


def _groups(slot: Tensor, leaders: Tensor, prompt_kv: PromptKV, seen: int) -> GroupIndex:
    """Return the group of each of the `seen` tokens.

    A token that is kept single, an evicted one and padding are in no group. `slot` [B, H, U] is the
    slot of each token. `leaders` [B, H, M] is the position of each slot's leader, -1 for a single
    token. A token whose group is merged into another one follows its leader.
    """
    group, old_groups = pad(leaders, (0, 1), value=-1).gather(-1, slot), prompt_kv.group_index
    index = group.new_full((*group.shape[:2], seen + 1), -1)
    positions = prompt_kv.positions.expand(group.shape)
    index.scatter_(-1, positions.masked_fill(positions < 0, seen), group)
    index = index[..., :seen]
    if old_groups is not None:
        old_groups = pad(old_groups, (0, seen - old_groups.shape[-1]), value=-1)
        own_position = torch.arange(seen, device=group.device).expand_as(old_groups)
        index = index.gather(-1, torch.where(old_groups < 0, own_position, old_groups))
    return GroupIndex.of(index)


def plan_blocks(
    plan: CacheConfig,
    masks: TokenMasks,
    counts: np.ndarray,
    n_protected: np.ndarray,
    expected: int,
    device: torch.device,
) -> list[_BlockPlan]:
    """Divide a layer's rows into blocks, and plan the slots of each.

    A row keeps `counts` [R] tokens, of which decoding must not drop the first `n_protected` [R].
    Other arguments are those of `evict`.
    """
    heads, seen = len(counts) // len(masks.lengths), masks.valid.shape[1]
    lengths = np.repeat(masks.lengths, heads).clip(min=1)  # a row may begin in a later chunk
    # A row so short that it loses no token may grow to this size while decoding.
    kept_whole = plan.kept_whole
    capacity, share = np.where(lengths <= kept_whole, kept_whole, counts), None
    if not isinstance(plan.budget, int):
        share = counts / lengths * np.repeat(masks.granted, heads)
        if plan.budget is not None:
            # Tokens kept because of `policy.least`, beyond the budget, do not raise this share.
            target = plan.budget * lengths
            share = share * (target / np.maximum(target, np.minimum(kept_whole, lengths)))
    blocks = list[_BlockPlan]()
    for rows in group_rows(counts):
        sizes = RowSizes(
            counts=counts[rows],
            lengths=lengths[rows],
            protected=n_protected[rows],
            capacity=capacity[rows],
            share=None if share is None else share[rows],
            heads=heads,
        )
        if plan.keeps_all:
            schedule: SlotSchedule = GrowingSlots(counts=sizes.counts)
        else:
            decode = plan.policy.decode
            schedule = decode.schedule(plan.policy, sizes)
            if not isinstance(schedule, SlotSchedule):
                raise ValueError(
                    f"{type(decode).__name__}.schedule returned {type(schedule).__name__}: "
                    "expected a mmkv.decode.slots.SlotSchedule"
                )
        if isinstance(schedule, HeavyHitterSlots):
            last = masks.last_positions(int(schedule.recent.max()))
            if last is not None:
                schedule.skip_padding(last.to(device)[send(rows // heads, device)], seen)
        width = int(counts[rows].max())
        n_expected = min(expected, spare(width, seen))
        n_slots = schedule.slots_needed(n_expected)
        if plan.kv_dtype is not None:  # each row has slots for its exact first tokens
            n_slots = max(n_slots, plan.policy.n_exact)
        blocks.append(_BlockPlan(rows, schedule, width, n_slots))
    return blocks


def group_rows(counts: np.ndarray) -> list[np.ndarray]:
    """Split rows into the fewest blocks with little padding; `counts` [R] is what each row keeps.

    Returns:
        Row indices of each block, ascending. Blocks are in the order of their first row, so that
        a layer seldom has to reorder its rows in a step.
    """
    order = np.argsort(-counts, kind="stable")
    size = counts[order].astype(np.int64)
    # Cut only where the rounded length changes: at most 33 cuts, so the search is cheap.
    rounded = np.ceil(size / max(1, size[0]) * 32)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(rounded)) + 1, [len(size)]])
    allowed = (1 + SLACK) * size.sum()
    n = len(cuts) - 1
    # cost[j]: slots needed for the first cuts[j] rows; `starts`: the cut where their last block is.
    cost = np.full(n + 1, np.inf)
    cost[0] = 0.0
    starts: list[np.ndarray] = []
    for _ in range(min(_MOST_BLOCKS, n)):
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
    blocks = [np.sort(order[cuts[a] : cuts[b]]) for a, b in pairwise(edges) if a < b]
    return sorted(blocks, key=lambda rows: rows[0])
