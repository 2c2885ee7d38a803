"""Queries of a prompt to which the weights of groups are fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs, rotate
from mmkv.tensors import tile


@dataclass(frozen=True)
class ReferenceQueries:
    """Queries of a prompt, rotated to the position after it."""

    query: Tensor  # float32 [B, Hq, S, D], times the layer's scale
    present: Tensor | None  # bool [B, S], False for fillers; None: there are none
    softcap: float | None  # bound of the logits

    @classmethod
    def of(
        cls, layer: LayerInputs, valid: Tensor, number: int, remembered: int | None
    ) -> ReferenceQueries | None:
        """Choose `number` (S) of a layer's queries, evenly spread up to the last; None if none.

        Only the last `remembered` queries (None: all) are used, which are kept however a prompt is
        read. Those not `valid`, bool [B, Q], are left out, so a padded row has the queries that it
        has alone.
        """
        query, n_known = layer.query, valid.shape[1]
        rotation = None if layer.rotary is None else layer.rotary.to_next
        n_known = n_known if remembered is None else min(remembered, n_known)
        if number * n_known == 0:
            return None
        scale = query.shape[-1] ** -0.5 if layer.scale is None else layer.scale
        if not layer.padded:
            step = -(-n_known // number)
            tokens = slice(valid.shape[1] - n_known + (n_known - 1) % step, None, step)
            query = query[:, :, tokens]
            if rotation is not None:
                query = rotate(query, *rotation.of(slice(None), tokens))
            return cls(query.float() * scale, None, layer.softcap)
        total = valid.sum(-1, keepdim=True)
        count = total.clamp(max=n_known)
        step = torch.arange(min(number, n_known), device=valid.device)
        index = count - 1 - step * (-(-count // number)).clamp(min=1)
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        at = order.gather(1, (index + total - count).clamp(min=0))
        query = query.gather(2, at[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        if rotation is not None:
            query = rotate(query, *rotation.of_tokens(at))
        present = index >= 0
        query = (query.float() * scale).masked_fill(~present[:, None, :, None], 0.0)
        return cls(query, present, layer.softcap)

    def attention(self, keys: Tensor, log_weights: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention of tokens, and that of mean keys with a weight of 1 each.

        Keys are [B, H, U, D], means [B, H, M, D]; log_weights [B, H, U] are -inf for no token.

        Returns:
            float32 [B, H, U] and [B, H, M], sums over queries and the query heads of a group.
        """
        B, H, U, _ = keys.shape
        keys, means, absent = keys.float(), means.float(), (log_weights == -math.inf)[:, :, None]
        token_attention = torch.zeros(B, H, U, dtype=torch.float32, device=keys.device)
        mean_attention = token_attention.new_zeros(B, H, means.shape[2])
        n_queries = max(1, tile(keys.device) // (self.query.shape[1] * B * U))
        grouped = self.query.unflatten(1, (H, -1))
        for i, query in enumerate(grouped.split(n_queries, dim=3)):
            rows = query.flatten(2, 3)
            logits, of_means = rows @ keys.mT, rows @ means.mT
            if (cap := self.softcap) is not None:
                logits, of_means = (cap * torch.tanh(x / cap) for x in (logits, of_means))
            # Padding may hold any values, NaN included.
            logits = logits.add_(log_weights[:, :, None]).masked_fill_(absent, -math.inf)
            total = logits.logsumexp(-1, keepdim=True)
            if self.present is not None:
                present = self.present[:, None, None, i * n_queries : (i + 1) * n_queries]
                present = present.expand(-1, 1, query.shape[2], -1).flatten(2)[..., None]
                total.masked_fill_(~present, math.inf)
            token_attention += logits.sub_(total).exp_().sum(2)
            mean_attention += of_means.sub_(total).exp_().sum(2)
        return token_attention, mean_attention
