"""DefensiveKV: a token's score is the largest attention that any of the last queries pays to it.

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv 2510.13334. A score
is at least the mean of these maxima over all tokens. As in the authors' code,
https://github.com/FFY0/DefensiveKV, attention is averaged over neighbouring keys before the maximum
and multiplied by the head's share of the norms of W_O v. The tokens that make up 0.9 of a head's
attention are kept first. As in that code, the 0.9 is lowered by the attention on the `window`
tokens before the window; the names of its variables suggest that the window itself was meant.

In later turns heads hold different tokens, and shares are computed from the heads' mean norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from mmkv.layer_inputs import LayerInputs
from mmkv.option_types import PositiveInt, Share
from mmkv.parts import register_part
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.attention import window_rows
from mmkv.scores.values import output_norms
from mmkv.sizes.heads import AdaptiveHeads

_TINY = torch.finfo(torch.float32).tiny


@register_part("defensive")
@dataclass(frozen=True, kw_only=True)
class DefensiveAttention(Score):
    """The largest attention of any of the last queries (DefensiveKV, arXiv 2510.13334).

    Options:
        window: how many last queries observe; their own tokens are pinned.
        kernel_size: attention is averaged over this many neighbouring keys, an odd number.
        mass: tokens that make up this share of a head's attention, in [0, 1], are kept first.
    """

    window: PositiveInt = 32
    kernel_size: PositiveInt = 5
    mass: Share = 0.9

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size}: expected an odd number")

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the largest attention, times each head's share of the token's output norm.

        Averaging over neighbouring keys preserves each query's sum over keys. The tokens that make
        up the share `mass` of a head's attention get the layer's highest score. `mass` is lowered
        by the attention on the last `window` tokens before the window, and `layer.size` bounds the
        number of these tokens. The window's tokens are pinned and score 0.
        """
        B, window, valid = layer.key.shape[0], self.window, layer.valid
        M = layer.key.shape[2] - window
        valid_keys = valid[:, None, :M]  # [B, 1, M]
        attention = window_rows(layer.query, layer.key, window, **layer.attention)[..., :M]
        mean = attention.mean(2).sum(2)  # [B, H, M]
        mean = mean / valid[:, -window:].sum(-1).clamp(min=1)[:, None, None]

        flat, kernel = attention.flatten(0, 2), self.kernel_size  # [B * H * G, window, M]
        averaged = avg_pool1d(flat, kernel, stride=1, padding=kernel // 2).view_as(attention)
        averaged = averaged * valid_keys[:, None, None]  # none for padding
        old, new = (x.sum(-1, keepdim=True) for x in (attention, averaged))
        worst = (averaged * (old / new.clamp(min=_TINY))).amax((2, 3))  # [B, H, M]
        mean_worst = worst.sum(-1, keepdim=True) / valid_keys.sum(-1, keepdim=True).clamp(min=1)
        scores = worst.maximum(mean_worst) * _norm_shares(layer, M)
        scores = scores.masked_fill(~valid_keys, 0.0)

        latest = valid_keys & (valid_keys.flip(-1).cumsum(-1).flip(-1) <= window)
        bias = _of_layer((mean * latest).sum(-1), layer).mean(1)  # [B or B / H]
        bias = bias.repeat_interleave(B // len(bias))[:, None, None]
        best = _of_layer(scores.amax(-1), layer).amax(1)
        best = best.repeat_interleave(B // len(best))[:, None, None]
        forced = _first_share(mean, self.mass - bias)
        if layer.size is not None:
            forced = forced.minimum((layer.size.int() - window).clamp(min=0)[:, None])
        rank = mean.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        scores = torch.where((rank < forced[..., None]) & valid_keys, best, scores)
        return pad(scores, (0, window))


def _norm_shares(layer: LayerInputs, n: int) -> Tensor:
    """Return each head's share of a token's output norms over all heads: [B, H, n].

    If heads hold different tokens, norms are divided by the sum of the heads' mean norms.
    """
    norms = output_norms(layer, n)
    if layer.head is None:
        return norms / norms.sum(1, keepdim=True).clamp(min=_TINY)
    mean = norms.sum(-1) / layer.valid[:, None, :n].sum(-1).clamp(min=1)
    total = _of_layer(mean, layer).sum(1, keepdim=True)  # [B / H, 1]
    return norms / total.repeat_interleave(len(norms) // len(total), 0)[..., None].clamp(min=_TINY)


def _of_layer(x: Tensor, layer: LayerInputs) -> Tensor:
    """Return values [B, H] with all heads of a layer in one row, also if each head is a row."""
    if layer.head is None or layer.weight is None:
        return x
    return x.view(-1, layer.weight().shape[0] // layer.query.shape[1])


def _first_share(mean: Tensor, share: Tensor) -> Tensor:
    """Return how many of a head's largest entries sum to less than `share` of all: [B, H]."""
    ordered = mean.sort(dim=-1, descending=True).values
    reached = (ordered / ordered.sum(-1, keepdim=True).clamp(min=_TINY)).cumsum(-1) >= share
    return torch.where(reached.any(-1), (~reached).sum(-1), 0)


@register_policy("defensive", aliases=("defensivekv",))
@dataclass(frozen=True, kw_only=True)
class Defensive(Policy):
    """Largest window attention times output norms; one ranking over the heads of a layer."""

    paper = "DefensiveKV, arXiv 2510.13334"
    score: Score = DefensiveAttention()
    heads: Heads = AdaptiveHeads(alpha=0.0)
