"""DefensiveKV: a token is worth what the most demanding of the last queries found in it.

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv 2510.13334: the
largest attention, and no less than the mean of these over tokens. All else is as in the authors'
code, https://github.com/FFY0/DefensiveKV: the average over neighbours before the maximum, the norm
of W_O v as each head's share of it, and the tokens that come first. It lets 0.9 of the attention
less that on the `window` tokens before the window come first, where its names speak of the window.

Where heads hold different tokens, in later turns, shares are of the heads' mean norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from mmkv.layer_inputs import LayerInputs
from mmkv.parts import PositiveInt, Share, register_part
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.attention import window_rows
from mmkv.scores.values import output_norms
from mmkv.sizes.heads import AdaptiveHeads

_TINY = torch.finfo(torch.float32).tiny


@register_part("defensive")
@dataclass(frozen=True, kw_only=True)
class DefensiveAttention(Score):
    """The most that any of the last queries found in a token (DefensiveKV, arXiv 2510.13334).

    Options:
        window: how many last queries observe; their own tokens are always kept.
        kernel_size: attention is averaged over this many neighbouring keys, an odd number.
        mass: tokens that make up this share of a head's attention, in [0, 1], come first.
    """

    window: PositiveInt = 32
    kernel_size: PositiveInt = 5
    mass: Share = 0.9

    @property
    def uses_size(self) -> bool:
        """How many tokens may be forced in."""
        return True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size}: expected an odd number")

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Worst-case attention, times each head's share of the token's output norm.

        The average over neighbouring keys leaves each query's sum over keys as it is. The tokens of
        a head that make up the share `mass` of its attention, less what the last `window` of them
        receive, score as much as the layer's best; not more of them than `layer.size` leaves beside
        the window. The window's own tokens, which stay, score 0.
        """
        B, window, valid = layer.key.shape[0], self.window, layer.valid
        M = layer.key.shape[2] - window
        seen = valid[:, None, :M]  # [B, 1, M]
        attention = window_rows(layer.query, layer.key, window, **layer.attention)[..., :M]
        mean = attention.mean(2).sum(2)  # [B, H, M]
        mean = mean / valid[:, -window:].sum(-1).clamp(min=1)[:, None, None]

        flat, kernel = attention.flatten(0, 2), self.kernel_size  # [B * H * G, window, M]
        near = avg_pool1d(flat, kernel, stride=1, padding=kernel // 2).view_as(attention)
        near = near * seen[:, None, None]  # what spreads beyond the edges is lost
        old, new = (x.sum(-1, keepdim=True) for x in (attention, near))
        worst = (near * (old / new.clamp(min=_TINY))).amax((2, 3))  # [B, H, M]
        usual = worst.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
        scores = worst.maximum(usual) * _norm_shares(layer, M)
        scores = scores.masked_fill(~seen, 0.0)

        latest = seen & (seen.flip(-1).cumsum(-1).flip(-1) <= window)
        bias = _of_layer((mean * latest).sum(-1), layer).mean(1)  # [B or B / H]
        bias = bias.repeat_interleave(B // len(bias))[:, None, None]
        best = _of_layer(scores.amax(-1), layer).amax(1)
        best = best.repeat_interleave(B // len(best))[:, None, None]
        forced = _first_share(mean, self.mass - bias)
        if layer.size is not None:
            forced = forced.minimum((layer.size.int() - window).clamp(min=0)[:, None])
        rank = mean.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        scores = torch.where((rank < forced[..., None]) & seen, best, scores)
        return pad(scores, (0, window))


def _norm_shares(layer: LayerInputs, n: int) -> Tensor:
    """What of a token's output norms, added up over heads, is each head's: [B, H, n].

    Where heads hold different tokens, of the sum of the heads' mean norms.
    """
    norms = output_norms(layer, n)
    if layer.head is None:
        return norms / norms.sum(1, keepdim=True).clamp(min=_TINY)
    mean = norms.sum(-1) / layer.valid[:, None, :n].sum(-1).clamp(min=1)
    total = _of_layer(mean, layer).sum(1, keepdim=True)  # [B / H, 1]
    return norms / total.repeat_interleave(len(norms) // len(total), 0)[..., None].clamp(min=_TINY)


def _of_layer(x: Tensor, layer: LayerInputs) -> Tensor:
    """What is known of each head, [B, H]; where each is a row, those of a layer side by side."""
    if layer.head is None or layer.weight is None:
        return x
    return x.view(-1, layer.weight().shape[0] // layer.query.shape[1])


def _first_share(mean: Tensor, share: Tensor) -> Tensor:
    """How many of a head's largest entries come before their sum reaches a share of all: [B, H]."""
    ordered = mean.sort(dim=-1, descending=True).values
    reached = (ordered / ordered.sum(-1, keepdim=True).clamp(min=_TINY)).cumsum(-1) >= share
    return torch.where(reached.any(-1), (~reached).sum(-1), 0)


@register_policy("defensive", aliases=("defensivekv",))
@dataclass(frozen=True, kw_only=True)
class Defensive(Policy):
    """Worst-case window attention by output norms; one ranking over the heads of a layer."""

    paper = "DefensiveKV, arXiv 2510.13334"
    score: Score = DefensiveAttention()
    heads: Heads = AdaptiveHeads(alpha=0.0)
