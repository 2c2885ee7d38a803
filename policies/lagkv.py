"""LagKV: tokens whose channels spread widely, measured by the block of tokens that follows.

Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
arXiv 2504.04704, section 3; sinks (4) and block size (128) as in kvpress (`LagKVPress`), which
scores the whole prompt at once. The authors' code (16 and 1,024 by default,
https://github.com/AI-Lab-China-Merchants-Bank/LagKV) compresses block after block and never looks
again at what it kept; here a later turn cuts all that is held into blocks anew. A prompt of
fewer than two blocks is left whole there; here its last tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.parts import NonNegativeInt, at_least, register_part
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy


@register_part("lag-relative")
@dataclass(frozen=True, kw_only=True)
class LagRelative(Score):
    """Channels that spread more than those of the next block (LagKV, arXiv 2504.04704, section 3).

    Options:
        lag: tokens of a block; 2 or more.
        skip: how many first tokens are left out of blocks and statistics, and score most.
    """

    lag: Annotated[int, partial(at_least, 2)] = 128
    skip: NonNegativeInt = 4
    queries = 0
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Ranks within blocks, in [0, 2]; the last tokens score most.

        A row's tokens behind the first `skip` are cut into blocks of `lag`. A block's keys (and
        values) are scaled, channel by channel, to the least and the most of the next block; the
        softmax over the block of the standard deviation over channels is averaged over keys and
        values, and a token scores its rank in its block over `lag`. Behind the last block that has
        a next one all score more than 1, the newest most, and so do the first `skip`: these the
        paper always keeps. A channel that is the same throughout the next block counts as 0; in the
        authors' code it is no number there.
        """
        (B, H, N), valid, lag, skip = layer.key.shape[:3], layer.valid, self.lag, self.skip
        # Each row's tokens from the left, so that its blocks are those it has alone.
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        number = valid.sum(-1, keepdim=True)
        blocks = (number - skip).clamp(min=0) // lag - 1  # those with a next one
        place = torch.arange(N, device=valid.device).expand(B, N)
        newest = 1 + (place + 1) / number.clamp(min=1)
        found = torch.where(place < skip, 2.0, newest)[:, None].repeat(1, H, 1)
        n = (N - skip) // lag
        if n > 1:
            ordered = (_in_order(x, order)[:, :, skip:] for x in (layer.key, layer.value))
            keys, values = (_spread(x[:, :, : n * lag].unflatten(2, (n, lag))) for x in ordered)
            rank = (keys + values).argsort(dim=-1, stable=True).argsort(dim=-1).flatten(2) / lag
            whole = slice(skip, skip + (n - 1) * lag)
            inside = (place < skip + blocks.clamp(min=0) * lag)[:, None, whole]
            found[..., whole] = torch.where(inside, rank, found[..., whole])
        back = order.argsort(dim=-1)[:, None].expand(B, H, N)
        return found.gather(-1, back).masked_fill(~valid[:, None], 0.0)


def _spread(x: Tensor) -> Tensor:
    """Of tokens in blocks `[B, H, n, lag, D]`: `[B, H, n - 1, lag]`, the last block has no next."""
    least, most = x[:, :, 1:].aminmax(dim=3, keepdim=True)
    size = most - least
    scaled = ((x[:, :, :-1] - least) / size).masked_fill(size == 0, 0.0)
    return scaled.std(dim=-1).softmax(dim=-1)


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """`x` `[B, H, N, D]` with the tokens in `order` `[B, N]`, float32."""
    at = order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, at).float()


@register_policy("lagkv")
@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Keep 4 sinks, the last block and as many of each other one; generated tokens stay."""

    paper = "LagKV, arXiv 2504.04704"
    score: Score = LagRelative()
    sinks: int = 4
