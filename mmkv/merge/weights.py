"""What a slot that several tokens share holds: their mean pair, and what it weighs in attention.

The mean key of m tokens, counted m times, weighs less than they do: a mean of exponentials is above
the exponential of the mean. So the weight is what makes up for that over some queries of the prompt
that are asked behind its end: `sum_i p_i / sum_i (exp(l_i) / Z_i)`, with `p_i` the attention of
query `i` to the group's tokens, `l_i` its logit on their mean key, and `Z_i` the denominator of its
softmax over all tokens. A group of equal keys weighs m. Shape letters are those of `mmkv.scores`; M
slots a head.

Related: Attention Matching, arXiv 2602.16284, fits one bias per kept key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mmkv.layer_inputs import LayerInputs
from mmkv.scores.attention import tile

# A fitted weight is at most so many times the number of tokens, and at least that part of it.
_MOST = math.log(4)


def sums(x: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Sums over tokens of x [B, H, N, ...], each into its `slot` [B, H, N]: [B, H, M, ...].

    A slot of M, their number, is none.
    """
    total = x.new_zeros(*x.shape[:2], slots + 1, *x.shape[3:])
    at = slot if x.ndim == 3 else slot[..., None].expand_as(x)
    return total.scatter_add_(2, at, x)[:, :, :slots]


def means(pairs: tuple[Tensor, Tensor], slot: Tensor, weight: Tensor, slots: int) -> list[Tensor]:
    """Weighted means of keys and values [B, H, N, D] by slot: [B, H, M, D], in their types.

    Each token's slot is int64 [B, H, N], M, the number of `slots`, for none; its weight is float32
    [B, H, N], 0 for none. Where there are no slots a token is given for empty ones to copy.
    """
    if not slots:
        return [x[:, :, :1] for x in pairs]
    B, H, N, _ = pairs[0].shape
    size = sums(weight, slot, slots).clamp(min=1)[..., None]
    # The tokens of each slot, one bag behind the other; what padding holds may be anything.
    found, order = slot.masked_fill(weight <= 0, slots).sort(dim=-1, stable=True)
    each = torch.arange(slots + 1, device=slot.device).expand(B, H, -1).contiguous()
    row = torch.arange(B * H, device=slot.device).view(B, H, 1)
    starts = (row * N + torch.searchsorted(found, each)).flatten()
    weight = weight.gather(-1, order).flatten()
    made = list[Tensor]()
    for x in pairs:
        if x.transpose(1, 2).is_contiguous():  # as a projection leaves it
            flat = x.transpose(1, 2).reshape(-1, x.shape[-1])
            token = (row // H * N + order) * H + row % H
        else:
            flat, token = x.reshape(-1, x.shape[-1]), row * N + order
        total = embedding_bag(
            token.flatten(), flat.float(), starts, mode="sum", per_sample_weights=weight
        )
        made.append((total.view(B, H, slots + 1, -1)[:, :, :-1] / size).to(x.dtype))
    return made


@dataclass(frozen=True)
class ReferenceQueries:
    """Queries of a prompt, asked behind its end."""

    query: Tensor  # float32 [B, Hq, S, D], times the layer's scale
    present: Tensor  # bool [B, S], False for fillers
    softcap: float | None  # bound of the logits

    @classmethod
    def of(cls, layer: LayerInputs, number: int, remembered: int | None) -> ReferenceQueries | None:
        """`number` of a layer's queries, S, evenly spread up to the last one; None: there is none.

        Padding is none of them, so a padded row has the readers that it has alone. The last
        `remembered` queries are known however a prompt is read; None: all.
        """
        query, valid, rotary = layer.query, layer.valid[:, -layer.query.shape[2] :], layer.rotary
        known = valid.shape[1] if remembered is None else min(remembered, valid.shape[1])
        if number * known == 0:
            return None
        valid = valid[:, -known:]
        count = valid.sum(-1, keepdim=True)
        steps = torch.arange(min(number, known), device=valid.device)
        place = count - 1 - steps * (-(-count // number)).clamp(min=1)
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        at = order.gather(1, place.clamp(min=0)) + query.shape[2] - known
        query = query.gather(2, at[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        if rotary is not None:
            query = rotary.of_tokens(at).moved(query, rotary.ahead(1))
        scale = query.shape[-1] ** -0.5 if layer.scale is None else layer.scale
        present = place >= 0
        query = (query.float() * scale).masked_fill(~present[:, None, :, None], 0.0)
        return cls(query, present, layer.softcap)

    def select_rows(self, batch: Tensor) -> ReferenceQueries:
        """Rows of the batch, which may repeat."""
        batch = batch.to(self.present.device)
        return ReferenceQueries(self.query[batch], self.present[batch], self.softcap)

    def mass(self, keys: Tensor, bias: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """What tokens get of these queries' attention, and what means would with a weight of 1.

        Keys are [B, H, U, D], means [B, H, M, D]; bias [B, H, U] is -inf where there is no token.

        Returns:
            float32 [B, H, U] and [B, H, M], sums over queries and the query heads of a group.
        """
        B, H, U, _ = keys.shape
        keys, means, absent = keys.float(), means.float(), (bias == -math.inf)[:, :, None]
        received = torch.zeros(B, H, U, device=keys.device)
        alone = torch.zeros(B, H, means.shape[2], device=keys.device)
        together = max(1, tile(keys.device) // (self.query.shape[1] * B * U))
        of_groups = self.query.unflatten(1, (H, -1))
        parts = zip(of_groups.split(together, dim=3), self.present.split(together, 1), strict=True)
        for query, present in parts:
            rows = query.flatten(2, 3)
            counted = present[:, None, None].expand(-1, 1, query.shape[2], -1).flatten(2)[..., None]
            # What padding holds may be anything, NaN included.
            logits = (self._logits(rows, keys) + bias[:, :, None]).masked_fill_(absent, -math.inf)
            total = logits.logsumexp(-1, keepdim=True)
            received += (logits - total).exp().mul(counted).sum(2)
            alone += (self._logits(rows, means) - total).exp().mul(counted).sum(2)
        return received, alone

    def _logits(self, rows: Tensor, keys: Tensor) -> Tensor:
        logits = rows @ keys.mT
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def log_weights(
    slot: Tensor,
    slots: int,
    there: Tensor,
    keys: Tensor,
    bias: Tensor | None,
    means: Tensor,
    queries: ReferenceQueries | None,
) -> Tensor:
    """What attention adds to the logit of each slot: float32 [B, H, M], 0 where it is empty.

    The logarithm of how many tokens it stands for or, fitted, of what they weigh together. A token
    that stays alone has the bias it had.

    Args:
        slot: int64 [B, H, U], of each token; M, the number of `slots`, where it is in none.
        there: bool [B, H, U], where there is a token.
        keys: [B, H, U, D], of the tokens.
        bias: float32 [B, H, U], added to their logits so far; None: nothing.
        means: [B, H, M, D], the keys of the slots.
        queries: what weights are fitted to; None: the tokens' own weights are added up.
    """
    bias = torch.zeros(there.shape, device=keys.device) if bias is None else bias
    bias = bias.masked_fill(~there, -math.inf)
    whole = sums(bias.exp(), slot, slots)
    found = added_up = whole.log()
    if queries is not None and slots:
        received, alone = queries.mass(keys, bias, means)
        mass, tiny = sums(received, slot, slots), torch.finfo(torch.float32).tiny
        several = sums(there.float(), slot, slots) > 1
        fitted = (mass.log() - alone.log()).clamp(added_up - _MOST, added_up + _MOST)
        found = torch.where(several & (mass > tiny) & (alone > tiny), fitted, added_up)
    return found.masked_fill(whole == 0, 0.0)
