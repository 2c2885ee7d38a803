"""Merging of a layer's tokens into groups, besides the best tokens, which keep pairs of their own.

A group is one pair, a mean key and a mean value of its `m` tokens, with a weight `w` of about `m`.
Attention adds `log w` to that slot's logit, `softmax(scale * q . k + log w)`, so a group of equal
pairs counts exactly as its tokens did, and no token leaves the softmax. A group has the position of
its best-scored token, its leader. In the means a token counts as much as its score, so that a group
is nearest to its most important tokens.

With weight m, a mean key gets less attention than its m tokens did, as a mean of exponentials is
above the exponential of the mean. So the weight is fitted to some queries of the prompt, rotated to
the position after it: `sum_i p_i / sum_i (exp(l_i) / Z_i)`, with `p_i` the attention of query `i`
to the group's tokens, `l_i` its logit on their mean key, and `Z_i` the denominator of its softmax
over all tokens. A group of m equal keys has the weight m. Shape letters are those of `mmkv.scores`;
M is the number of slots of a head.

Related: merging (KeepKV, arXiv 2504.09936; LOOK-M, arXiv 2406.18139), the log-count bias (ToMe's
proportional attention, arXiv 2210.09461), one fitted bias per kept key (Attention Matching,
arXiv 2602.16284).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from mmkv.parts import Merge, NonNegativeFloat, NonNegativeInt, PositiveInt, Share, register_part
from mmkv.tensors import flat_rows, largest, last, rows, spans, tile

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking
    from mmkv.merge.reference import ReferenceQueries

# Columns behind those of a point: a one, and zeros that keep rows aligned to 16 bytes.
_MORE = 4

# A fitted weight differs from the number of tokens by at most this factor, as a logarithm.
_BOUND = math.log(4)


@register_part("groups")
@dataclass(frozen=True, kw_only=True)
class MergeIntoGroups(Merge):
    """All tokens but the best-scored ones are merged into weighted groups (condense).

    Attention adds the logarithm of a group's weight to its logit.

    Options:
        exact: the share of the slots that hold the best-scored tokens unmerged, in [0, 1].
        newest: how many of the last tokens are never merged; 0 or more.
        group_run: groups are formed inside runs of this many positions; 1 or more.
        rounds: rounds of k-means; 1 or more.
        value_weight: weight of values relative to keys in the distance of two pairs; 0 or more.
        fit: how many queries of the prompt a group's weight is fitted to, so that they give the
            group the attention that its tokens got; 0: its weight is its number of tokens.
    """

    exact: Share = 0.3
    newest: NonNegativeInt = 8
    group_run: PositiveInt = 512
    rounds: PositiveInt = 3
    value_weight: NonNegativeFloat = 0.35
    fit: NonNegativeInt = 16
    weighted = True

    def __call__(self, prompt_kv: PromptKV, ranking: Ranking) -> Kept:
        """Return one pair for each leader, of all tokens that it leads."""
        B, H, U, _ = prompt_kv.keys.shape
        keys, values = prompt_kv.keys.detach(), prompt_kv.values.detach()
        present = prompt_kv.positions.expand(B, H, U) >= 0
        size, protected = ranking.size.expand(B, H), ranking.protected.expand(B, H, U)
        known = ranking.counts.expand(-1, B, H)
        rank, counts = self._without_newest(ranking.rank.expand(B, H, U), known[:3])
        token_weights = present.float() if prompt_kv.weights is None else prompt_kv.weights
        score = positive(rank)
        leader = leaders(
            keys,
            values,
            rank,
            counts,
            token_weights * score,
            exact=self.exact,
            run=self.group_run,
            rounds=self.rounds,
            value_weight=self.value_weight,
        )
        rank = torch.zeros(B, H, U, dtype=torch.float32, device=keys.device)
        rank = rank.masked_fill_(leader != torch.arange(U, device=rank.device), -torch.inf)
        ranking = replace(ranking, rank=rank, size=size, protected=protected, known=known)
        kept = ranking.kept(prompt_kv)
        indices, M = kept.indices, kept.indices.shape[-1]
        slot = indices.new_full((B, H, U + 1), M)
        slot_numbers = torch.arange(M, device=slot.device).expand_as(indices)
        slot.scatter_(-1, indices.masked_fill(indices < 0, U), slot_numbers)
        slot[..., U] = M
        slot = slot.gather(-1, leader.masked_fill(leader < 0, U))
        n_tokens = sums(token_weights, slot, M)
        # Relative to the leader's score, so that a single token counts exactly 1.
        counted = token_weights * (score / score.gather(-1, leader.clamp(min=0)))
        mean_keys, mean_values = means((keys, values), slot, counted, M)
        return replace(
            kept,
            keys=mean_keys,
            values=mean_values,
            slot=slot,
            weights=n_tokens.masked_fill(n_tokens == 0, 1.0),
            log_weights=log_weights(
                slot, M, present, keys, prompt_kv.log_weights, mean_keys, prompt_kv.reference
            ),
        )

    def _without_newest(self, rank: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Pin the newest tokens, so that they stay single; at most an eighth of the slots.

        Args:
            rank: [B, H, U], inf for pinned tokens, -inf for no token.
            counts: int64 [3, B, H], see `leaders`.

        Returns:
            `rank` and `counts` with these tokens among the pinned ones.
        """
        if not self.newest:
            return rank, counts

        sizes, n_pinned, n_present = counts
        number = (sizes // 8).clamp(max=self.newest).minimum(sizes - n_pinned)
        newest = last(number.to(rank.device, non_blocking=True), rank.abs() < torch.inf)
        counts = torch.stack([sizes, n_pinned + number, n_present])
        return rank.masked_fill(newest, torch.inf), counts


@torch.no_grad()
def leaders(
    keys: Tensor,
    values: Tensor,
    rank: Tensor,
    counts: Tensor,
    weights: Tensor,
    *,
    exact: float,
    run: int,
    rounds: int,
    value_weight: float,
) -> Tensor:
    """Assign each head's tokens to its slots: single tokens, and groups of all others.

    Tokens that must stay are single, and so are the best-scored ones, for the share `exact` of the
    other slots. The rest are groups: the other tokens are cut, in order, into runs of about equal
    length, slots are divided by tokens, and each run is clustered by k-means on `[key / std(key);
    value_weight * value / std(value)]`, std over the head, from its best-scored tokens as centres.
    The slot of an empty group goes to its run's next best token; among equal scores the earliest.

    Args:
        keys, values: [B, H, N, D] and [B, H, N, Dv], after rotary embedding.
        rank: [B, H, N], scores: inf for tokens that must stay single, -inf for no token.
        counts: int64 [3, B, H] on the host: each head's slots, at least as many as its tokens that
            must stay; these; and all of its tokens.
        weights: float32 [B, H, N], how much each token counts in the mean of its group.
        exact, run, rounds, value_weight: see `MergeIntoGroups`.

    Returns:
        int64 [B, H, N], the index of each token's leader, its own if it is single; -1 for no token,
        and, in a head without slots for groups, for tokens that need not stay. A head has as many
        leaders as slots, or as tokens if these are fewer.
    """
    (B, H, N), device = rank.shape, rank.device
    present, indices = rank > -torch.inf, torch.arange(N, device=device)
    if keys.dtype == torch.float64:  # narrower ones are widened by the operations that read them
        keys, values = keys.float(), values.float()
    # How many single tokens and groups each head has, on the host.
    n_single, n_groups, starts = _planned(counts, exact, run)
    longest, width = (max(1, int(x.max())) for x in (starts.diff(dim=-1), n_groups))
    unpadded = bool((counts[2] == N).all())
    order = rank.argsort(dim=-1, descending=True, stable=True)
    rank_of = torch.empty_like(order).scatter_(-1, order, indices.expand_as(order))
    single = present & (rank_of < n_single.to(device, non_blocking=True)[..., None])
    less, factor = _scales(keys, values, value_weight, None if unpadded else present)
    more = keys.new_zeros(_MORE)
    more[0] = 1.0

    run_indices = spans(starts.to(device, non_blocking=True), longest)  # [B, H, R, C]
    others = (single | ~present).to(torch.uint8).argsort(dim=-1, stable=True)
    members = others.gather(-1, run_indices.clamp(min=0).flatten(2)).view_as(run_indices)
    members = members.masked_fill_(run_indices < 0, -1)
    slots = n_groups.to(device, non_blocking=True)

    leader_of = torch.full((B, H, N + 1), -1, device=device)
    leader_of[..., :N] = torch.where(single, indices, -1)
    # Few tensors are as large as the points, so that there is room for twice as many.
    n_runs = max(1, 2 * tile(device) // (B * H * longest * max(width, factor.shape[-1])))
    parts = zip(members.split(n_runs, dim=2), slots.split(n_runs, dim=2), strict=True)
    for token, number in parts:
        index, absent = token.clamp(min=0).flatten(2), token < 0
        places = rank_of.gather(-1, index).view_as(token).masked_fill(absent, N)
        pairs = rows(keys, index), rows(values, index), more.expand(*index.shape, -1)
        points = torch.addcmul(less, torch.cat(pairs, -1), factor).unflatten(2, token.shape[2:])
        if not unpadded:  # padding may hold any values, NaN included
            points.masked_fill_(absent[..., None], 0.0)
        weight = weights.gather(-1, index).view_as(token)
        by_rank = places.argsort(dim=-1)
        label = _k_means(points, weight, by_rank[..., :width], absent, number, rounds)
        label = _without_empty(label, places, by_rank, number, width)
        best = places.new_full((*label.shape[:3], width + 1), N)
        best = best.scatter_reduce(-1, label, places, "amin").gather(-1, label)
        best = torch.where(label == width, places, best).clamp(max=N - 1)
        leader = order.gather(-1, best.flatten(2))
        leader_of.scatter_(-1, token.masked_fill(absent, N).flatten(2), leader)
    return leader_of[..., :N]


def positive(rank: Tensor) -> Tensor:
    """Return how much each token counts in the mean of its group: float32 [B, H, N], above 0.

    It is the token's score, but at least a millionth of the head's largest score. If no score of a
    head is above 0, all its tokens count alike. For pinned tokens, which are in no group, the
    result is this least number.
    """
    score = rank.float().masked_fill(rank.isinf(), 0.0)
    return score.maximum((1e-6 * score.amax(-1, keepdim=True)).clamp(min=1e-30))


def _planned(counts: Tensor, exact: float, run: int) -> tuple[Tensor, Tensor, Tensor]:
    """Plan each head's single tokens, runs and groups, on the host; arguments as for `leaders`.

    Returns:
        int64 [B, H], how many tokens stay single.
        int64 [B, H, R], how many groups each run has.
        int64 [B, H, R + 1], where runs start among the other tokens in order, and the end.
    """
    sizes, pinned, present = counts
    size = sizes.minimum(present)
    single = pinned + ((size - pinned) * exact).long()
    # At least one slot is left for a group, unless no token or no slot is left.
    single = torch.where(size < present, single.minimum(size - 1).maximum(pinned), size)
    groups = size - single
    rest = torch.where(groups > 0, present - single, 0)
    runs = (-(-rest // run)).minimum(groups).clamp(min=1)[..., None]
    # Slots are divided first, and tokens by slots, so that no run has more slots than tokens.
    slots = (
        torch.arange(int(runs.max()) + 1, device=runs.device).minimum(runs)
        * groups[..., None]
        // runs
    )
    tokens = slots * rest[..., None] // groups.clamp(min=1)[..., None]
    return single, slots.diff(dim=-1), tokens


def _scales(
    keys: Tensor, values: Tensor, value_weight: float, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what standardises a head's points for k-means; a point is a key next to its value.

    Returns:
        float32 [B, H, 1, X], the mean of the tokens `present`, bool [B, H, N] (None: all), times
            minus the factors.
        float32 [B, H, 1, X], factors: 1 / std, for values times `value_weight`. X is the number of
            columns of a point, see `_k_means`.
    """
    means, factors, number = list[Tensor](), list[Tensor](), keys.shape[2]
    if present is not None:
        number = present.sum(-1)[..., None, None].clamp(min=1)
    for x, weight in ((keys, 1.0), (values, value_weight)):
        if present is not None:  # padding may hold any values, NaN included
            x = x.masked_fill(~present[..., None], 0.0)
        mean = x.sum(2, keepdim=True, dtype=torch.float32) / number
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        square = length.square().sum(2, keepdim=True) / number
        variance = (square - mean.square().sum(-1, keepdim=True)) / x.shape[-1]
        means.append(mean)
        factors.append((variance.clamp_(min=1e-36).rsqrt_() * weight).expand_as(mean))
    factor = torch.cat(factors, -1)
    less = torch.cat(means, -1).mul_(factor).neg_()
    return pad(less, (0, _MORE)), pad(factor, (0, _MORE), value=1.0)


def _k_means(
    x: Tensor,
    weight: Tensor,
    first: Tensor,
    absent: Tensor,
    number: Tensor,
    rounds: int,
) -> Tensor:
    """Return the group int64 [..., C] of each of a run's points [..., C, X]; K for `absent` ones.

    A run has the first `number` of K groups; their first centres are its points `first`, [..., K].
    `weight` is [..., C]. The last columns of a point are 1, 0, 0, 0.
    """
    (*leading, C, X), K, device = x.shape, first.shape[-1], x.device
    unused = torch.arange(K, device=device) >= number[..., None]
    centres, one = rows(x, first), X - _MORE
    label: Any = None
    for i in range(rounds):
        if i:  # the mean of each group; points of label K are left out
            if device.type == "cpu":
                start = torch.arange(0, label[..., 0].numel() * (K + 1), K + 1, device=device)
                index = (start.view(*leading, 1) + label).view(-1, 1).expand(-1, X)
                totals = x.new_zeros(start.numel() * (K + 1), X)
                totals.scatter_add_(0, index, (x * weight[..., None]).flatten(0, -2))
                totals = totals.view(*leading, K + 1, -1)
            else:  # a product, which is deterministic
                one_hot = x.new_zeros(*leading, K + 1, C)
                totals = one_hot.scatter_(-2, label[..., None, :], weight[..., None, :]) @ x
            totals = totals[..., :K, :]
            total = totals[..., one : one + 1]
            centres = torch.where(total > 0, totals / total.clamp(min=1e-30), centres)
        # The nearest centre c of x has the largest x'c - c'c / 2; the latter is times x's one.
        length = torch.linalg.vector_norm(centres[..., :one], dim=-1)
        centres[..., one] = length.square_().mul_(-0.5).masked_fill_(unused, -1e30)
        label = largest(centres @ x.mT)[1][..., 0, :].masked_fill_(absent, K)
    return label


def _without_empty(label: Tensor, places: Tensor, order: Tensor, number: Tensor, K: int) -> Tensor:
    """Make one token single, label K, for each empty group.

    The best-ranked tokens leave their groups, except the last in rank of each group. `order` sorts
    `places`.
    """
    empty = label.new_full((*label.shape[:-1], K + 1), -1)
    worst = empty.scatter_reduce(-1, label, places, "amax")
    missing = number - (worst[..., :K] >= 0).sum(-1)
    may_leave = (label < K) & (places != worst.gather(-1, label))
    leaves = may_leave.gather(-1, order)
    leaves &= leaves.cumsum(-1) <= missing[..., None]
    return label.masked_fill(torch.zeros_like(may_leave).scatter_(-1, order, leaves), K)


def sums(x: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Sum x [B, H, N, ...] over the tokens of each slot: [B, H, M, ...].

    `slot` is int64 [B, H, N], M (the number `slots`) for tokens that are in none.
    """
    total = x.new_zeros(*x.shape[:2], slots + 1, *x.shape[3:])
    index = slot if x.ndim == 3 else slot[..., None].expand_as(x)
    return total.scatter_add_(2, index, x)[:, :, :slots]


def means(pairs: tuple[Tensor, Tensor], slot: Tensor, weight: Tensor, slots: int) -> list[Tensor]:
    """Return the weighted means of keys and values [B, H, N, D] by slot: [B, H, M, D], same dtypes.

    `slot` is int64 [B, H, N], M (the number `slots`) for tokens that are in none; `weight` is
    float32 [B, H, N], 0 for no token. Without slots the first token is returned as filler.
    """
    if not slots:
        return [x[:, :, :1] for x in pairs]
    B, H, N, _ = pairs[0].shape
    size = sums(weight, slot, slots).clamp(min=1)[..., None]
    # Tokens sorted by slot, a bag for each; padding, which may hold any values, is in the last.
    sorted_slots, order = slot.masked_fill(weight <= 0, slots).sort(dim=-1, stable=True)
    slot_numbers = torch.arange(slots + 1, device=slot.device).expand(B, H, -1).contiguous()
    row = torch.arange(B * H, device=slot.device).view(B, H, 1)
    starts = (row * N + torch.searchsorted(sorted_slots, slot_numbers)).flatten()
    weight = weight.gather(-1, order).flatten()
    slot_means = list[Tensor]()
    for x in pairs:
        flat, token = flat_rows(x, row, order)
        total = embedding_bag(
            token.flatten(), flat.float(), starts, mode="sum", per_sample_weights=weight
        )
        slot_means.append((total.view(B, H, slots + 1, -1)[:, :, :-1] / size).to(x.dtype))
    return slot_means


def log_weights(
    slot: Tensor,
    slots: int,
    present: Tensor,
    keys: Tensor,
    of_tokens: Tensor | None,
    means: Tensor,
    queries: ReferenceQueries | None,
) -> Tensor:
    """Return what attention adds to each slot's logit: float32 [B, H, M], 0 if empty.

    It is the logarithm of the group's weight, fitted or the sum of its tokens' weights. A token
    that is alone in its slot keeps its own.

    Args:
        slot: int64 [B, H, U], each token's slot; M (the number `slots`) for none.
        present: bool [B, H, U], False for no token.
        keys: [B, H, U, D], the tokens' keys.
        of_tokens: float32 [B, H, U], the logarithms of the tokens' weights so far; None: 0.
        means: [B, H, M, D], the slots' keys.
        queries: the queries to which weights are fitted; None: tokens' weights are summed.
    """
    before = (
        present.new_zeros(present.shape, dtype=torch.float32) if of_tokens is None else of_tokens
    )
    before = before.masked_fill(~present, -math.inf)
    summed = sums(before.exp(), slot, slots)
    log_weight = log_sum = summed.log()
    if queries is not None and slots:
        attention, of_means = queries.attention(keys, before, means)
        of_groups, tiny = sums(attention, slot, slots), torch.finfo(torch.float32).tiny
        is_group = sums(present.float(), slot, slots) > 1
        fitted = (of_groups.log() - of_means.log()).clamp(log_sum - _BOUND, log_sum + _BOUND)
        log_weight = torch.where(is_group & (of_groups > tiny) & (of_means > tiny), fitted, log_sum)
    return log_weight.masked_fill(summed == 0, 0.0)
