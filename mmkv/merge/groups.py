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
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mmkv.merge.k_means import leaders
from mmkv.option_types import NonNegativeFloat, NonNegativeInt, PositiveInt, Share
from mmkv.parts import Merge, register_part
from mmkv.tensors import flat_rows, last

if TYPE_CHECKING:
    from mmkv.cache.prompt_kv import PromptKV
    from mmkv.cache.selection import Kept, Ranking
    from mmkv.merge.reference import ReferenceQueries

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
        rank, counts = self._with_newest_pinned(ranking.rank.expand(B, H, U), known[:3])
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

    def _with_newest_pinned(self, rank: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
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


def positive(rank: Tensor) -> Tensor:
    """Return how much each token counts in the mean of its group: float32 [B, H, N], above 0.

    It is the token's score, but at least a millionth of the head's largest score. If no score of a
    head is above 0, all its tokens count alike. For pinned tokens, which are in no group, the
    result is this least number.
    """
    score = rank.float().masked_fill(rank.isinf(), 0.0)
    return score.maximum((1e-6 * score.amax(-1, keepdim=True)).clamp(min=1e-30))


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
