"""Expected Attention: what queries like the prompt's would attend to, if they were asked later.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", arXiv 2510.00636, section 3. Heads share a layer's budget as in the authors' own
comparisons (kvpress: `AdaKVPress(ExpectedAttentionPress(...))`, a fifth of it spread evenly);
`heads="uniform"` is their score alone. Epsilon is the paper's: kvpress' default is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs, turn
from mmkv.parts import NonNegativeFloat, NonNegativeInt, PositiveInt, register_part
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.sizes.heads import AdaptiveHeads


@register_part("expected")
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Score):
    """The attention expected of queries to come, times the value's norm (arXiv 2510.00636).

    Options:
        positions: the mean rotation is that of so many positions behind the prompt; 1 or more.
        skip: how many first tokens are left out of blocks and statistics, and score most.
        epsilon: attention added to every token's, not negative.
    """

    positions: PositiveInt = 512
    skip: NonNegativeInt = 4
    epsilon: NonNegativeFloat = 0.02
    uses_rotary = True
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """`(p + epsilon) * |v|`, with p the attention of a query like the prompt's, asked later.

        With m and S the mean and the covariance of a head's queries before rotary embedding, and R
        the mean rotation of the positions to come, p is the softmax over keys of
        `scale * k'Rm + scale ** 2 * k'RSR'k / 2` (the logarithm of what a normal distribution's
        exponential is in the mean), averaged over the query heads of a group. The first `skip`
        tokens of a row are in none of these; they score as their head's highest. As in kvpress,
        without the softcap that some layers have.
        """
        (B, Hq, Q, D), (H, N) = layer.query.shape, layer.key.shape[1:3]
        factor, valid = D**-0.5 if layer.scale is None else layer.scale, layer.valid
        counted = valid & (valid.cumsum(-1) > self.skip)
        mean, spread = _statistics(layer.plain_query.float(), counted[:, N - Q :])
        if layer.rotary is not None:
            # A mean of rotations is linear, so it is applied as one rotation is.
            ahead = layer.rotary.mean_ahead(self.positions)
            mean = turn(mean[:, :, None], *ahead)[:, :, 0]
            spread = turn(turn(spread, *ahead).mT, *ahead)
        k = layer.key.float().masked_fill(~valid[:, None, :, None], 0.0)
        expected = torch.zeros(B, H, N, device=k.device)
        # One query head of each group at a time: what is in flight is as large as the keys.
        means, spreads = (x.unflatten(1, (H, -1)).unbind(2) for x in (mean, spread))
        for m, s in zip(means, spreads, strict=True):
            logits = factor * (k @ m[..., None])[..., 0]
            logits += factor**2 / 2 * ((k @ s) * k).sum(-1)
            if layer.bias is not None:
                logits += layer.bias
            # Finite, as a row of nothing that counts must stay finite.
            logits.masked_fill_(~counted[:, None], torch.finfo(logits.dtype).min)
            expected += logits.softmax(-1)
        found = (expected * (H / Hq) + self.epsilon) * layer.value.float().norm(dim=-1)
        found = found.masked_fill(~counted[:, None], 0.0)
        first = (valid & ~counted)[:, None]
        return torch.where(first, found.amax(-1, keepdim=True), found)


def _statistics(query: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[B, Hq, D]` and covariance `[B, Hq, D, D]` of the queries `[B, Hq, Q, D]` counted."""
    n = counted.sum(-1).clamp(min=1)[:, None, None]
    absent = ~counted[:, None, :, None]
    # What padding holds may be anything, NaN included.
    query = query.masked_fill(absent, 0.0)
    mean = query.sum(2) / n
    apart = (query - mean[:, :, None]).masked_fill(absent, 0.0)
    return mean, apart.mT @ apart / n[..., None]


@register_policy("expected")
@dataclass(frozen=True, kw_only=True)
class Expected(Policy):
    """Keep 4 sinks and what later queries are expected to read; generated tokens stay."""

    paper = "Expected Attention, arXiv 2510.00636"
    score: Score = ExpectedAttention()
    heads: Heads = AdaptiveHeads(alpha=0.2)
    sinks: int = 4
