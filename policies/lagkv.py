"""LagKV: keep tokens whose channels vary most, relative to the next block of tokens.

Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
arXiv 2504.04704, section 3; sinks (4) and block size (128) as in kvpress (`LagKVPress`), which
scores the whole prompt at once. The authors' code (16 and 1,024 by default,
https://github.com/AI-Lab-China-Merchants-Bank/LagKV) compresses block after block and never scores
kept tokens again; here a later turn cuts all kept tokens into new blocks. A prompt of fewer than
two blocks is not compressed there; here its last tokens are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.option_types import NonNegativeInt, at_least
from mmkv.parts import register_part
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy
from mmkv.tensors import rows


@register_part("lag-relative")
@dataclass(frozen=True, kw_only=True)
class LagRelative(Score):
    """Variation of channels relative to the next block (LagKV, arXiv 2504.04704, section 3).

    Options:
        lag: number of tokens in a block; 2 or more.
        skip: how many first tokens are in no block and score highest.
    """

    lag: Annotated[int, partial(at_least, 2)] = 128
    skip: NonNegativeInt = 4
    queries = 0
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return ranks within blocks, in [0, 2]; the last tokens score highest.

        A row's tokens after the first `skip` are cut into blocks of `lag`. Each channel of a
        block's keys, and of its values, is scaled by the channel's minimum and maximum in the next
        block. A token's variation is the standard deviation over its channels, after a softmax over
        the block, averaged over key and value. Its score is its rank by variation within the block,
        divided by `lag`. The first `skip` tokens, and all tokens after the last block that has a
        next block, score above 1, the newest highest: the paper always keeps them. A channel that
        is constant in the next block counts as 0; in the authors' code it is NaN.
        """
        (B, H, N), valid, lag, skip = layer.key.shape[:3], layer.valid, self.lag, self.skip
        # Padding is moved to the end, so that a row has the same blocks as without a batch.
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        length = valid.sum(-1, keepdim=True)
        blocks = (length - skip).clamp(min=0) // lag - 1  # that have a next block
        position = torch.arange(N, device=valid.device).expand(B, N)
        newest = 1 + (position + 1).float() / length.clamp(min=1)
        scores = torch.where(position < skip, 2.0, newest)[:, None].repeat(1, H, 1)
        n = (N - skip) // lag
        if n > 1:
            ordered = (rows(x, order[:, None, skip:]).float() for x in (layer.key, layer.value))
            keys, values = (_spread(x[:, :, : n * lag].unflatten(2, (n, lag))) for x in ordered)
            rank = (keys + values).argsort(dim=-1, stable=True).argsort(dim=-1).flatten(
                2
            ).float() / lag
            ranked = slice(skip, skip + (n - 1) * lag)
            inside = (position < skip + blocks.clamp(min=0) * lag)[:, None, ranked]
            scores[..., ranked] = torch.where(inside, rank, scores[..., ranked])
        back = order.argsort(dim=-1)[:, None].expand(B, H, N)
        return scores.gather(-1, back).masked_fill(~valid[:, None], 0.0)


def _spread(x: Tensor) -> Tensor:
    """Return variations in blocks `[B, H, n, lag, D]`, by the next block: `[B, H, n - 1, lag]`."""
    low, high = x[:, :, 1:].aminmax(dim=3, keepdim=True)
    span = high - low
    scaled = ((x[:, :, :-1] - low) / span).masked_fill(span == 0, 0.0)
    return scaled.std(dim=-1).softmax(dim=-1)


@register_policy("lagkv")
@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Keep 4 sinks, the last block and an equal share of other blocks; generated tokens stay."""

    paper = "LagKV, arXiv 2504.04704"
    score: Score = LagRelative()
    sinks: int = 4
