"""Expected Attention: a token's score is the attention that later queries are expected to pay it.

Later queries are assumed to be normally distributed, with the prompt's mean and covariance.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", arXiv 2510.00636, section 3. Head sizes are Ada-KV's with a fifth of the budget
split equally, as in the authors' own comparisons (kvpress:
`AdaKVPress(ExpectedAttentionPress(...))`); `heads="uniform"` gives all heads the same size. Epsilon
is the paper's; kvpress defaults to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs, rotate
from mmkv.option_types import NonNegativeFloat, NonNegativeInt, PositiveInt
from mmkv.parts import register_part
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.attention import scale_of
from mmkv.sizes.heads import AdaptiveHeads


@register_part("expected")
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Score):
    """The attention expected of queries to come, times the value's norm (arXiv 2510.00636).

    Options:
        positions: over how many positions after the prompt rotations are averaged; 1 or more.
        skip: how many first tokens are left out of the statistics, and score highest.
        epsilon: added to the attention of every token, not negative.
    """

    positions: PositiveInt = 512
    skip: NonNegativeInt = 4
    epsilon: NonNegativeFloat = 0.02
    uses_rotary = True
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return `(p + epsilon) * |v|`, with p the expected attention of later queries.

        With m and S the mean and the covariance of a head's queries before rotary embedding, and R
        the mean rotation of the positions to come, p is the softmax over keys of
        `scale * k'Rm + scale ** 2 * k'RSR'k / 2` (the logarithm of the mean exponential of normally
        distributed logits), averaged over the query heads of a group. The first `skip` tokens of a
        row are left out of all of these; they get their head's highest score. As in kvpress, the
        softcap of some layers is ignored.
        """
        (B, Hq, Q, D), (H, N) = layer.query.shape, layer.key.shape[1:3]
        factor, valid = scale_of(D, layer.scale), layer.valid
        counted = valid & (valid.cumsum(-1) > self.skip)
        observed = counted[:, N - Q :]
        n, absent = observed.sum(-1).clamp(min=1)[:, None, None], ~observed[:, None, :, None]
        # Padding may hold any values, NaN included.
        query = layer.plain_query.masked_fill(absent, 0.0)
        mean = query.sum(2) / n  # [B, Hq, D]
        centred = (query - mean[:, :, None]).masked_fill(absent, 0.0)
        covariance = centred.mT @ centred / n[..., None]  # [B, Hq, D, D]
        if layer.rotary is not None:
            # A mean of rotations is linear, so it is applied like a rotation.
            ahead = layer.rotary.mean_ahead(self.positions)
            mean = rotate(mean[:, :, None], *ahead)[:, :, 0]
            covariance = rotate(rotate(covariance, *ahead).mT, *ahead)
        k = layer.key.float().masked_fill(~valid[:, None, :, None], 0.0)
        expected = torch.zeros(B, H, N, dtype=torch.float32, device=k.device)
        # One query head of each group at a time, so that tensors are as large as the keys.
        means, covariances = (x.unflatten(1, (H, -1)).unbind(2) for x in (mean, covariance))
        for m, s in zip(means, covariances, strict=True):
            logits = factor * (k @ m[..., None])[..., 0]
            logits += factor**2 / 2 * ((k @ s) * k).sum(-1)
            if layer.log_weights is not None:
                logits += layer.log_weights
            # Finite, so that a row without counted tokens stays finite.
            logits.masked_fill_(~counted[:, None], torch.finfo(logits.dtype).min)
            expected += logits.softmax(-1)
        scores = (expected * (H / Hq) + self.epsilon) * layer.value.float().norm(dim=-1)
        scores = scores.masked_fill(~counted[:, None], 0.0)
        first = (valid & ~counted)[:, None]
        return torch.where(first, scores.amax(-1, keepdim=True), scores)


@register_policy("expected")
@dataclass(frozen=True, kw_only=True)
class Expected(Policy):
    """Keep 4 sinks and what later queries are expected to attend to; generated tokens stay."""

    paper = "Expected Attention, arXiv 2510.00636"
    score: Score = ExpectedAttention()
    heads: Heads = AdaptiveHeads(alpha=0.2)
    sinks: int = 4
