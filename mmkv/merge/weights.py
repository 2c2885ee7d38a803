"""The mean pair of a group of tokens, and its weight in attention.

The mean key of m tokens, with weight m, gets less attention than the tokens did, as a mean of
exponentials is above the exponential of the mean. So the weight is fitted to some queries of the
prompt, rotated to the position after it: `sum_i p_i / sum_i (exp(l_i) / Z_i)`, with `p_i` the
attention of query `i` to the group's tokens, `l_i` its logit on their mean key, and `Z_i` the
denominator of its softmax over all tokens. A group of m equal keys has the weight m. Shape letters
are those of `mmkv.scores`; M is the number of slots of a head.

Related: Attention Matching, arXiv 2602.16284, fits one bias per kept key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mmkv.layer_inputs import LayerInputs
from mmkv.scores.observers import tile

# A fitted weight differs from the number of tokens by at most this factor, as a logarithm.
_BOUND = math.log(4)


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
        if x.transpose(1, 2).is_contiguous():  # as a projection leaves it
            flat = x.transpose(1, 2).reshape(-1, x.shape[-1])
            token = (row // H * N + order) * H + row % H
        else:
            flat, token = x.reshape(-1, x.shape[-1]), row * N + order
        total = embedding_bag(
            token.flatten(), flat.float(), starts, mode="sum", per_sample_weights=weight
        )
        slot_means.append((total.view(B, H, slots + 1, -1)[:, :, :-1] / size).to(x.dtype))
    return slot_means


@dataclass(frozen=True)
class ReferenceQueries:
    """Queries of a prompt, rotated to the position after it."""

    query: Tensor  # float32 [B, Hq, S, D], times the layer's scale
    present: Tensor  # bool [B, S], False for fillers
    softcap: float | None  # bound of the logits

    @classmethod
    def of(cls, layer: LayerInputs, number: int, remembered: int | None) -> ReferenceQueries | None:
        """Choose `number` (S) of a layer's queries, evenly spread up to the last; None if none.

        Only the last `remembered` queries (None: all) are used, which are kept however a prompt is
        read. Padding is left out, so a padded row has the queries that it has alone.
        """
        query, valid, rotary = layer.query, layer.valid[:, -layer.query.shape[2] :], layer.rotary
        n_known = valid.shape[1] if remembered is None else min(remembered, valid.shape[1])
        if number * n_known == 0:
            return None
        valid = valid[:, -n_known:]
        count = valid.sum(-1, keepdim=True)
        step = torch.arange(min(number, n_known), device=valid.device)
        index = count - 1 - step * (-(-count // number)).clamp(min=1)
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        at = order.gather(1, index.clamp(min=0)) + query.shape[2] - n_known
        query = query.gather(2, at[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        if rotary is not None:
            query = rotary.of_tokens(at).moved(query, rotary.ahead(1))
        scale = query.shape[-1] ** -0.5 if layer.scale is None else layer.scale
        present = index >= 0
        query = (query.float() * scale).masked_fill(~present[:, None, :, None], 0.0)
        return cls(query, present, layer.softcap)

    def mass(self, keys: Tensor, bias: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of tokens, and that of mean keys with a weight of 1 each.

        Keys are [B, H, U, D], means [B, H, M, D]; bias [B, H, U] is -inf for no token.

        Returns:
            float32 [B, H, U] and [B, H, M], sums over queries and the query heads of a group.
        """
        B, H, U, _ = keys.shape
        keys, means, absent = keys.float(), means.float(), (bias == -math.inf)[:, :, None]
        token_attention = torch.zeros(B, H, U, device=keys.device)
        mean_attention = torch.zeros(B, H, means.shape[2], device=keys.device)
        n_queries = max(1, tile(keys.device) // (self.query.shape[1] * B * U))
        grouped = self.query.unflatten(1, (H, -1))
        parts = zip(grouped.split(n_queries, dim=3), self.present.split(n_queries, 1), strict=True)
        for query, present in parts:
            rows = query.flatten(2, 3)
            mask = present[:, None, None].expand(-1, 1, query.shape[2], -1).flatten(2)[..., None]
            # Padding may hold any values, NaN included.
            logits = (self._logits(rows, keys) + bias[:, :, None]).masked_fill_(absent, -math.inf)
            total = logits.logsumexp(-1, keepdim=True)
            token_attention += (logits - total).exp().mul(mask).sum(2)
            mean_attention += (self._logits(rows, means) - total).exp().mul(mask).sum(2)
        return token_attention, mean_attention

    def _logits(self, rows: Tensor, keys: Tensor) -> Tensor:
        logits = rows @ keys.mT
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def log_weights(
    slot: Tensor,
    slots: int,
    present: Tensor,
    keys: Tensor,
    bias: Tensor | None,
    means: Tensor,
    queries: ReferenceQueries | None,
) -> Tensor:
    """Return the bias that attention adds to each slot's logit: float32 [B, H, M], 0 if empty.

    It is the logarithm of the group's weight, fitted or the sum of its tokens' weights. A token
    that is alone in its slot keeps its bias.

    Args:
        slot: int64 [B, H, U], each token's slot; M (the number `slots`) for none.
        present: bool [B, H, U], False for no token.
        keys: [B, H, U, D], the tokens' keys.
        bias: float32 [B, H, U], added to the tokens' logits so far; None: 0.
        means: [B, H, M, D], the slots' keys.
        queries: the queries to which weights are fitted; None: tokens' weights are summed.
    """
    bias = torch.zeros(present.shape, device=keys.device) if bias is None else bias
    bias = bias.masked_fill(~present, -math.inf)
    summed = sums(bias.exp(), slot, slots)
    log_weight = log_sum = summed.log()
    if queries is not None and slots:
        attention, of_means = queries.mass(keys, bias, means)
        of_groups, tiny = sums(attention, slot, slots), torch.finfo(torch.float32).tiny
        is_group = sums(present.float(), slot, slots) > 1
        fitted = (of_groups.log() - of_means.log()).clamp(log_sum - _BOUND, log_sum + _BOUND)
        log_weight = torch.where(is_group & (of_groups > tiny) & (of_means > tiny), fitted, log_sum)
    return log_weight.masked_fill(summed == 0, 0.0)
