"""Assignment of a head's tokens to its slots: single tokens, and groups by k-means.

Shape letters are those of `mmkv.scores`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.tensors import largest, rows, spans, tile

# Columns behind those of a point: a one, and zeros that keep rows aligned to 16 bytes.
_MORE = 4


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
    n_single, n_groups, starts = _split_slots(counts, exact, run)
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


def _split_slots(counts: Tensor, exact: float, run: int) -> tuple[Tensor, Tensor, Tensor]:
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
