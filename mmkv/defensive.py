"""The most that any query of the window found in a token, by what the token adds to the output.

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv 2510.13334, and its
code, https://github.com/FFY0/DefensiveKV. Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from mmkv.layer_inputs import LayerInputs
from mmkv.scores import window_rows
from mmkv.value_scores import output_norms

_TINY = torch.finfo(torch.float32).tiny


@torch.no_grad()
def defensive_scores(
    layer: LayerInputs, *, window: int, kernel_size: int, share: float = 0.9
) -> Tensor:
    """Worst-case attention of the window, times each head's share of the token's output norm.

    Args:
        layer: what its attention had to work with, `output_weight` included.
        window: how many last queries observe, below N.
        kernel_size: odd width of the average over neighbouring keys, which leaves each query's sum
            over keys as it is.
        share: the tokens of a head that make up this share of its attention, less what the last
            `window` of them receive, score as much as the layer's best; not more of them than
            `layer.size` leaves beside the window.

    Returns:
        float32 `[B, H, N]`; 0 for the window, which stays, and for padding.
    """
    B, N = layer.key.shape[0], layer.key.shape[2]
    M = N - window
    valid = layer.valid
    seen = valid[:, None, :M]  # [B, 1, M]
    attention = window_rows(layer.query, layer.key, window, **layer.attention)[..., :M]
    mean = attention.mean(2).sum(2)  # [B, H, M]
    mean = mean / valid[:, -window:].sum(-1).clamp(min=1)[:, None, None]

    flat = attention.flatten(0, 2)  # [B * H * G, window, M]
    near = avg_pool1d(flat, kernel_size, stride=1, padding=kernel_size // 2).view_as(attention)
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
    forced = _first_share(mean, share - bias)
    if layer.size is not None:
        forced = forced.minimum((layer.size.int() - window).clamp(min=0)[:, None])
    rank = mean.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    scores = torch.where((rank < forced[..., None]) & seen, best, scores)
    return torch.nn.functional.pad(scores, (0, window))


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
