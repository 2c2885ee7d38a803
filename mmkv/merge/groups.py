"""Which token stands for which: exact tokens for themselves, and groups of all the others.

A group is one pair, the mean key and the mean value of its `m` tokens, with a weight `w` of about
`m`, see `mmkv.merge.weights`. Attention adds `log w` to that slot's logit, `softmax(scale * q . k +
log w)`, so a group of equal pairs reads exactly as its tokens did, and no token leaves the softmax.
A group lies where the best of its tokens stood, its leader. Shape letters are those of
`mmkv.scores`.

Related: merging (KeepKV, arXiv 2504.09936; LOOK-M, arXiv 2406.18139), the log-count bias (ToMe's
proportional attention, arXiv 2210.09461).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.merge.weights import log_weights, means, sums
from mmkv.parts import Merge, NonNegativeFloat, NonNegativeInt, PositiveInt, Share, register_part
from mmkv.scores.attention import tile
from mmkv.scores.observers import largest, rows, spans

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking
    from mmkv.policy import Policy


@register_part("groups")
@dataclass(frozen=True, kw_only=True)
class MergeIntoGroups(Merge):
    """Weighted groups stand for all tokens that are not kept as they are (condense).

    Attention adds the logarithm of a group's weight to its logit.

    Options:
        exact: the share of the slots that hold the best-scored tokens, in [0, 1].
        newest: how many of the last tokens are kept as they are; 0 or more.
        group_run: groups are formed inside runs of this many positions; 1 or more.
        rounds: rounds of k-means; 1 or more.
        value_weight: how much values count beside keys where alike pairs are grouped; 0 or more.
        fit: a group weighs as much as its tokens do for so many queries, of those that the score
            remembers; 0: as many as they are.
    """

    exact: Share = 0.3
    newest: NonNegativeInt = 8
    group_run: PositiveInt = 512
    rounds: PositiveInt = 3
    value_weight: NonNegativeFloat = 0.35
    fit: NonNegativeInt = 16
    weighted = True

    def check(self, policy: Policy) -> None:
        """Every key must have one position, if positions are counted anew."""
        if policy.reposition:
            raise ValueError(
                "merge='groups' averages keys of many positions, and reposition=True turns each "
                "key from its own: use one of them"
            )

    def __call__(self, held: PromptKV, ranking: Ranking) -> Kept:
        """Slots for the leaders alone; a slot stands for all tokens of its leader."""
        B, H, U, _ = held.keys.shape
        keys, values = held.keys.detach(), held.values.detach()
        there = held.positions.expand(B, H, U) >= 0
        size, protected = ranking.size.expand(B, H), ranking.protected.expand(B, H, U)
        how: Any = {"exact": self.exact, "value_weight": self.value_weight}
        how |= {"run": self.group_run, "rounds": self.rounds}
        leader = leaders(keys, values, ranking.rank.expand(B, H, U), size, held.weights, **how)
        rank = torch.zeros(B, H, U, device=keys.device)
        rank = rank.masked_fill_(leader != _count(leader), -torch.inf)
        ranking = replace(ranking, rank=rank, size=size, protected=protected, known=None)
        kept = ranking.kept(held)
        indices, M = kept.indices, kept.indices.shape[-1]
        slot = indices.new_full((B, H, U + 1), M)
        each = torch.arange(M, device=slot.device).expand_as(indices)
        slot.scatter_(-1, indices.masked_fill(indices < 0, U), each)
        slot[..., U] = M
        slot = slot.gather(-1, leader.masked_fill(leader < 0, U))
        stands_for = there.float() if held.weights is None else held.weights
        number = sums(stands_for, slot, M)
        mean_keys, mean_values = means((keys, values), slot, stands_for, M)
        bias = log_weights(slot, M, there, keys, held.bias, mean_keys, held.readers)
        weights = number.masked_fill(number == 0, 1.0)
        return replace(
            kept, keys=mean_keys, values=mean_values, slot=slot, weights=weights, bias=bias
        )


@torch.no_grad()
def leaders(
    keys: Tensor,
    values: Tensor,
    rank: Tensor,
    sizes: Tensor,
    weights: Tensor | None = None,
    *,
    exact: float,
    run: int,
    rounds: int,
    value_weight: float,
) -> Tensor:
    """Fill each head's slots with tokens that stay alone and with groups of all its others.

    Alone stay those that must, and of the other slots the share `exact` with the best scores. All
    other slots are groups: the other tokens are cut, in order, into runs of about equal length,
    slots are shared out by tokens, and k-means runs inside each on `[key / std(key); value_weight *
    value / std(value)]`, std over the head, from its best-scored tokens as centres. An empty group
    gives its slot to the next best token of its run. Equal scores rank earlier tokens first.

    Args:
        keys, values: [B, H, N, D] and [B, H, N, Dv], after rotary embedding.
        rank: [B, H, N], scores: inf for tokens that must stay alone, -inf where there is no token.
        sizes: int64 [B, H], slots of each head, at least as many as tokens that must stay alone.
        weights: float32 [B, H, N], how many tokens each stands for already; None: itself alone.
        exact, run, rounds, value_weight: see `MergeIntoGroups`.

    Returns:
        int64 [B, H, N], the leader of each token among the N, itself where it is alone; -1 where
        there is no token, and, where a head has no slot left for a group, for all that must not
        stay. A head has as many leaders as slots, or as tokens if these are fewer.
    """
    (B, H, N), device = rank.shape, rank.device
    present = rank > -torch.inf
    plan = _Plan.of(sizes, (rank == torch.inf).sum(-1), present.sum(-1), N, exact, run)
    order, numbers = rank.argsort(dim=-1, descending=True, stable=True), _count(rank)
    place = torch.empty_like(order).scatter_(-1, order, numbers)
    alone = present & (place < plan.alone.to(device, non_blocking=True)[..., None])
    space = _Space.of(keys, values, value_weight, None if plan.whole else present)

    places = spans(plan.tokens.to(device, non_blocking=True), plan.longest)  # [B, H, R, C]
    others = (alone | ~present).to(torch.uint8).argsort(dim=-1, stable=True)
    members = others.gather(-1, places.clamp(min=0).flatten(2)).view_as(places)
    members = members.masked_fill_(places < 0, -1)
    slots = plan.slots.to(device, non_blocking=True)

    found = torch.full((B, H, N + 1), -1, device=device)
    found[..., :N] = torch.where(alone, numbers, -1)
    wide = max(plan.width, keys.shape[-1] + values.shape[-1])
    together = max(1, tile(device) // (B * H * plan.longest * wide))
    parts = zip(members.split(together, dim=2), slots.split(together, dim=2), strict=True)
    for token, number in parts:
        at, absent = token.clamp(min=0).flatten(2), token < 0
        points = torch.cat([rows(keys, at), rows(values, at)], -1).float()
        points = points.unflatten(2, token.shape[2:])
        if not plan.whole:  # padding may hold anything, NaN included
            points.masked_fill_(absent[..., None], 0.0)
        heavy = None if weights is None else weights.float().gather(-1, at).view_as(token)
        ranked = place.gather(-1, at).view_as(token).masked_fill(absent, N)
        centres = rows(points, ranked.argsort(dim=-1)[..., : plan.width])  # the best
        label = _k_means(space, points, centres, heavy, absent, number, rounds)
        label = _without_empty(label, ranked, number, plan.width)
        best = ranked.new_full((*label.shape[:3], plan.width + 1), N)
        best = best.scatter_reduce(-1, label, ranked, "amin").gather(-1, label)
        best = torch.where(label == plan.width, ranked, best).clamp(max=N - 1)
        leader = order.gather(-1, best.flatten(2))
        found.scatter_(-1, token.masked_fill(absent, N).flatten(2), leader)
    return found[..., :N]


@dataclass(frozen=True)
class _Plan:
    """What each head does with its slots, on the host."""

    alone: Tensor  # int64 [B, H], tokens that stay alone
    slots: Tensor  # int64 [B, H, R], groups of each run
    tokens: Tensor  # int64 [B, H, R + 1], where each run begins among the others, the last ends
    longest: int  # C, the most tokens of a run
    width: int  # K, the most groups of a run
    whole: bool  # every head has all N tokens

    @classmethod
    def of(
        cls, sizes: Tensor, must: Tensor, present: Tensor, N: int, exact: float, run: int
    ) -> _Plan:
        sizes, must, present = torch.stack([sizes, must, present]).cpu()
        size = sizes.minimum(present)
        alone = must + ((size - must) * exact).long()
        # At least one slot is left for a group, unless there is nothing to group or no room.
        alone = torch.where(size < present, alone.minimum(size - 1).maximum(must), size)
        groups = size - alone
        rest = torch.where(groups > 0, present - alone, 0)
        runs = (-(-rest // run)).minimum(groups).clamp(min=1)[..., None]
        # Slots are shared out first, and tokens by slots: no run has more slots than tokens.
        starts = torch.arange(int(runs.max()) + 1).minimum(runs) * groups[..., None] // runs
        tokens = starts * rest[..., None] // groups.clamp(min=1)[..., None]
        slots = starts.diff(dim=-1)
        longest, width = int(tokens.diff(dim=-1).max()), int(slots.max())
        whole = bool((present == N).all())
        return cls(alone, slots, tokens, max(1, longest), max(1, width), whole)


@dataclass(frozen=True)
class _Space:
    """Where points, keys beside values, are as far from each other as their standardised ones."""

    mean: Tensor  # float32 [B, H, 1, 1, D + Dv], of the head's tokens
    factor: Tensor  # alike, of squares: 1 / variance, times the weight of values

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, value_weight: float, present: Tensor | None
    ) -> _Space:
        """Of the tokens `present`, bool [B, H, N]; None: all."""
        means, factors, number = list[Tensor](), list[Tensor](), keys.shape[2]
        if present is not None:
            number = present.sum(-1)[..., None, None].clamp(min=1)
        for x, weight in ((keys, 1.0), (values, value_weight)):
            if present is not None:  # padding may hold anything, NaN included
                x = x.masked_fill(~present[..., None], 0.0)
            x = x.float()
            mean = x.sum(2, keepdim=True) / number
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            square = length.square().sum(2, keepdim=True) / number
            variance = (square - mean.square().sum(-1, keepdim=True)) / x.shape[-1]
            means.append(mean)
            factors.append((weight**2 / variance.clamp(min=1e-36)).expand_as(mean))
        return cls(*(torch.cat(x, -1)[:, :, None] for x in (means, factors)))

    def nearest(self, points: Tensor, centres: Tensor, unused: Tensor) -> Tensor:
        """The nearest of centres [..., K, D + Dv] to each point [..., C, D + Dv]: int64 [..., C].

        Those that are `unused`, bool [..., K], are none.
        """
        # With x and c around the mean, and scaled: the one of the largest x'c - c'c / 2.
        apart = centres - self.mean
        scaled = apart * self.factor
        behind = (scaled * (apart / 2 + self.mean)).sum(-1).masked_fill(unused, torch.inf)
        return largest((scaled @ points.mT).sub_(behind[..., None]))[1][..., 0, :]


def _k_means(
    space: _Space,
    x: Tensor,
    centres: Tensor,
    weight: Tensor | None,
    absent: Tensor,
    number: Tensor,
    rounds: int,
) -> Tensor:
    """The group int64 [..., C] of each of a run's points [..., C, D]; K for a filler, `absent`.

    Of the first centres [..., K, D] a run has `number`; `weight` is [..., C], None: all are 1.
    """
    K = centres.shape[-2]
    unused = torch.arange(K, device=x.device) >= number[..., None]
    label = space.nearest(x, centres, unused).masked_fill_(absent, K)
    weighted = x if weight is None else x * weight[..., None]
    weight = torch.ones_like(absent, dtype=x.dtype) if weight is None else weight
    for _ in range(rounds - 1):
        total = _sums_of_groups(weight[..., None], label, K)
        means = _sums_of_groups(weighted, label, K) / total.clamp(min=1e-30)
        centres = torch.where(total > 0, means, centres)
        label = space.nearest(x, centres, unused).masked_fill_(absent, K)
    return label


def _sums_of_groups(x: Tensor, label: Tensor, K: int) -> Tensor:
    """Sums [..., K, D] of x [..., C, D] by group, int64 [..., C]; what has label K is left out."""
    if x.device.type != "cpu":  # a product: its sums are the same each time
        share = x.new_zeros(*label.shape[:-1], K + 1, label.shape[-1])
        return (share.scatter_(-2, label[..., None, :], 1.0) @ x)[..., :K, :]
    first = torch.arange(0, label[..., 0].numel() * (K + 1), K + 1).view(*label.shape[:-1], 1)
    place = (first + label).view(-1, 1).expand(-1, x.shape[-1])
    found = x.new_zeros(first.numel() * (K + 1), x.shape[-1])
    found.scatter_add_(0, place, x.flatten(0, -2))
    return found.view(*label.shape[:-1], K + 1, -1)[..., :K, :]


def _without_empty(label: Tensor, ranked: Tensor, number: Tensor, K: int) -> Tensor:
    """Let tokens stay alone, label K, for groups that are empty.

    For each empty group the next best token leaves its own, of which the last in rank stays.
    """
    none = label.new_full((*label.shape[:-1], K + 1), -1)
    last = none.scatter_reduce(-1, label, ranked, "amax")
    missing = number - (last[..., :K] >= 0).sum(-1)
    free = (label < K) & (ranked != last.gather(-1, label))
    best = ranked.argsort(dim=-1)
    leaves = free.gather(-1, best)
    leaves &= leaves.cumsum(-1) <= missing[..., None]
    return label.masked_fill(torch.zeros_like(free).scatter_(-1, best, leaves), K)


def _count(like: Tensor) -> Tensor:
    """0, 1, 2, ... along the last dimension, in the shape of `like`."""
    return torch.arange(like.shape[-1], device=like.device).expand(like.shape)
