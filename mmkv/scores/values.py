"""What values, and how keys differ, add to a score by attention.

Shape letters and padding are those of `mmkv.scores`; G query heads read one key-value head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from mmkv.layer_inputs import LayerInputs
from mmkv.scores.attention import tile, window_rows

Pooling = Literal["avg", "max"]
_TINY = torch.finfo(torch.float32).tiny


@torch.no_grad()
def value_norms(layer: LayerInputs, n: int) -> Tensor:
    """`||v||_1` of the first n tokens: float32 `[B, H, n]`, 0 for padding.

    Source: VATP, arXiv 2406.12335, section 3.
    """
    norms = layer.value[:, :, :n].float().abs().sum(-1)
    return norms.masked_fill(~layer.valid[:, None, :n], 0.0)


def output_norms(layer: LayerInputs, n: int) -> Tensor:
    """`||W_O v||_1` of the first n tokens, mean over a group's query heads: float32 [B, H, n]."""
    return head_output_norms(layer, n, 1).mean(2)


def head_output_norms(layer: LayerInputs, n: int, p: int) -> Tensor:
    """The p-norm of `W_O v` of the first n tokens for each query head, float32 [B, H, G, n].

    0 for padding.
    """
    B, H, _, _ = layer.value.shape
    value = layer.value[:, :, :n].float().masked_fill(~layer.valid[:, None, :n, None], 0.0)
    weight = layer.output_weight.float().unflatten(1, (H, -1))  # [1 or B, H, G, hidden, Dv]
    G, hidden = weight.shape[2:4]
    found = value.new_zeros(B, H, G, n)
    size = max(1, tile(value.device) // (B * H * hidden))
    for start in range(0, n, size):
        part = value[:, :, start : start + size]
        for g in range(G):
            output = part @ weight[:, :, g].mT
            found[:, :, g, start : start + size] = output.norm(p, dim=-1)
    return found


@torch.no_grad()
def window_residuals(
    layer: LayerInputs,
    window: int,
    kernel_size: int,
    pooling: Pooling | None,
    weights: Tensor | None = None,
) -> Tensor:
    """`residuals` of the last queries, pooled as by `window_attention`: `[B, H, N - window]`."""
    n = layer.key.shape[2] - window
    found = residuals(layer, window, weights)[..., :n]
    if pooling is not None:  # the 0 of padding acts as either pooling's edge
        flat, pool = found.flatten(0, 2), avg_pool1d if pooling == "avg" else max_pool1d
        found = pool(flat, kernel_size, stride=1, padding=kernel_size // 2).view_as(found)
    return found.mean(2).masked_fill(~layer.valid[:, None, :n], 0.0)


@torch.no_grad()
def residuals(layer: LayerInputs, last: int, weights: Tensor | None = None) -> Tensor:
    """What the last queries would lose without a token: squared changes of their outputs, summed.

    With p the attention of query i on token j, and o what the query reads, the sum over i of
    `(p_ij / (1 - p_ij)) ** 2 * |v_j - o_i| ** 2`. A query that sees one token alone adds nothing.

    Padding among the `last` queries does not count, the others count `weights` `[last]`, or 1.

    Returns:
        float32 `[B, H, G, N]`, 0 for padding.

    Source: DropKV, https://openreview.net/forum?id=MqfNzH3TVH (kvpress pull request 285, which
    bounds 1 - p from below; here the token that has most of a query's attention is taken out of the
    sums instead, so that 1 - p and v - o keep their digits).
    """
    (B, Hq, Q, _), (H, N) = layer.query.shape, layer.key.shape[1:3]
    G, device, valid = Hq // H, layer.key.device, layer.valid
    options: dict[str, Any] = {"scale": layer.scale, "softcap": layer.softcap, "bias": layer.bias}
    absent = ~valid[:, None, :, None]
    key, value = (x.float().masked_fill(absent, 0.0) for x in (layer.key, layer.value))
    # About their mean: differences of nearly equal values keep their digits.
    value = value - value.sum(2, keepdim=True) / valid.sum(-1).clamp(min=1)[:, None, None, None]
    value = value[:, :, None]  # [B, H, 1, N, Dv]
    squares = (value * value).sum(-1)[..., None, :]
    place = torch.arange(N, device=device)
    found = torch.zeros(B, H, G, N, device=device)
    block = max(1, tile(device) // (B * Hq * N))
    for start in range(Q - last, Q, block):
        stop = min(start + block, Q)
        at = place[N - Q :][start:stop]
        allowed = (place <= at[:, None]) if layer.mask is None else layer.mask[:, 0, start:stop]
        allowed = (allowed & valid[:, None] & valid[:, at][..., None])[:, None]  # [B, 1, n, N]
        rows = layer.query[:, :, start:stop]
        p = window_rows(rows, key, stop - start, mask=allowed, **options)
        most, first = p.max(-1, keepdim=True)
        p.scatter_(-1, first, 0.0)
        others, rest = p @ value, p.sum(-1, keepdim=True)
        chosen = value.expand(B, H, G, N, -1)
        chosen = chosen.gather(3, first.expand(*first.shape[:-1], value.shape[-1]))
        alone = most * (chosen - others / rest.clamp(min=_TINY)).norm(dim=-1, keepdim=True)
        out = others + most * chosen
        lost = squares - 2 * (out @ value.mT) + (out * out).sum(-1, keepdim=True)
        lost = lost.clamp(min=0) * (p / (1 - p)) ** 2
        lost.scatter_(-1, first, (alone**2).masked_fill(rest == 0, 0.0))
        lost.masked_fill_(~allowed[:, None], 0.0)
        if weights is not None:
            lost *= weights[start - (Q - last) : stop - (Q - last), None]
        found += lost.sum(3)
    return found


@torch.no_grad()
def with_first(score: Tensor, attention: Tensor, first: Tensor) -> Tensor:
    """A score in which the `first` tokens by attention stand before all others, by attention.

    Both are float32 `[B, H, n]`, attention not negative; `first` is int `[B]`, below 1: none.

    Source: CriticalKV, arXiv 2502.03805, algorithm 1. As in its code, half of the budget counts the
    window.
    """
    rank = attention.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best = score.amax(-1, keepdim=True) + 1
    return torch.where(rank < first[:, None, None], best + attention, score)


@torch.no_grad()
def mixed(score: Tensor, layer: LayerInputs) -> Tensor:
    """A score by attention, mixed with the value's norm and with how unlike others a key is.

    `r * d + (1 - r) * (a + u)`: a is the score, u the value's L2 norm, d minus the key's similarity
    to the mean of the normalised keys, both scaled from 0 (the least) so that their mean is that of
    a; r is the mean similarity of two of the head's keys.

    The score is float32 `[B, H, n]`, of the first n tokens, as those behind them observe; so is
    what is returned, 0 for padding.

    Source: MixKV, arXiv 2510.20707, section 3. Its released code reads r from a file of means over
    samples that it does not hold; here it is this prompt's, by the formula that the code has for
    that.
    """
    n, valid = score.shape[2], layer.valid
    front = valid[:, None, :n]
    number = front.sum(-1, keepdim=True).clamp(min=1)

    def scaled(x: Tensor) -> Tensor:
        least = x.masked_fill(~front, torch.inf).amin(-1, keepdim=True)
        most = x.masked_fill(~front, -torch.inf).amax(-1, keepdim=True)
        x = ((x - least) / (most - least).clamp(min=_TINY)).masked_fill(~front, 0.0)
        return x * mean / (x.sum(-1, keepdim=True) / number).clamp(min=_TINY)

    mean = score.masked_fill(~front, 0.0).sum(-1, keepdim=True) / number
    unit, middle = normalised_keys(layer.key, valid)
    unlike = -(unit[:, :, :n] * middle).sum(-1)
    norms = layer.value[:, :, :n].float().norm(dim=-1)
    every = valid.sum(-1)[:, None, None]
    similarity = (every * (middle * middle).sum(-1) - 1) / (every - 1).clamp(min=1)
    found = similarity * scaled(unlike) + (1 - similarity) * (score + scaled(norms))
    return found.masked_fill(~front, 0.0)


def normalised_keys(key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of length 1, float32 `[B, H, N, D]`, 0 for padding, and their mean `[B, H, 1, D]`."""
    unit = torch.nn.functional.normalize(key.float(), dim=-1)
    # What padding holds may be anything; a key that overflowed has no direction.
    unit = unit.masked_fill(~valid[:, None, :, None], 0.0).nan_to_num(nan=0.0)
    number = valid.sum(-1).clamp(min=1)[:, None, None, None]
    return unit, unit.sum(2, keepdim=True) / number
