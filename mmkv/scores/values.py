"""Terms of values and of key diversity in scores by attention.

Shape letters and padding are those of `mmkv.scores`; G query heads read one key-value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.scores.attention import window_rows
from mmkv.tensors import tile

_TINY = torch.finfo(torch.float32).tiny


@torch.no_grad()
def value_norms(layer: LayerInputs, n: int) -> Tensor:
    """Return `||v||_1` of the first n tokens: float32 `[B, H, n]`, 0 for padding.

    Source: VATP, arXiv 2406.12335, section 3.
    """
    norms = layer.value[:, :, :n].float().abs().sum(-1)
    return norms.masked_fill(~layer.valid[:, None, :n], 0.0)


def output_norms(layer: LayerInputs, n: int) -> Tensor:
    """Return `||W_O v||_1` of the first n tokens, mean over query heads: float32 [B, H, n]."""
    return head_output_norms(layer, n, 1).mean(2)


def head_output_norms(layer: LayerInputs, n: int, p: int) -> Tensor:
    """Return the p-norm of `W_O v` of the first n tokens by query head: float32 [B, H, G, n]."""
    B, H, _, _ = layer.value.shape
    value = layer.value[:, :, :n].float().masked_fill(~layer.valid[:, None, :n, None], 0.0)
    weight = layer.output_weight.float().unflatten(1, (H, -1))  # [1 or B, H, G, hidden, Dv]
    G, hidden = weight.shape[2:4]
    norms = value.new_zeros(B, H, G, n)
    size = max(1, tile(value.device) // (B * H * hidden))
    for start in range(0, n, size):
        part = value[:, :, start : start + size]
        for g in range(G):
            output = part @ weight[:, :, g].mT
            norms[:, :, g, start : start + size] = output.norm(p, dim=-1)
    return norms


@torch.no_grad()
def residuals(layer: LayerInputs, last: int, weights: Tensor | None = None) -> Tensor:
    """Return the squared change of the last queries' outputs without each token, summed.

    With p the attention of query i on token j, and o_i the query's output, it is the sum over i of
    `(p_ij / (1 - p_ij)) ** 2 * |v_j - o_i| ** 2`. A query that sees only one token adds nothing.

    Padding among the `last` queries is left out; the others have `weights` `[last]`, or 1.

    Returns:
        float32 `[B, H, G, N]`, 0 for padding.

    Source: DropKV, https://openreview.net/forum?id=MqfNzH3TVH (kvpress pull request 285, which
    bounds 1 - p from below; here the token with most of a query's attention is left out of the sums
    instead, so that 1 - p and v - o keep their precision).
    """
    (B, Hq, Q, _), (H, N) = layer.query.shape, layer.key.shape[1:3]
    G, device, valid = Hq // H, layer.key.device, layer.valid
    absent = ~valid[:, None, :, None]
    key, value = (x.float().masked_fill(absent, 0.0) for x in (layer.key, layer.value))
    # Less their mean, so that differences of nearly equal values keep their precision.
    value = value - value.sum(2, keepdim=True) / valid.sum(-1).clamp(min=1)[:, None, None, None]
    value = value[:, :, None]  # [B, H, 1, N, Dv]
    squares = (value * value).sum(-1)[..., None, :]
    position = torch.arange(N, device=device)
    scores = torch.zeros(B, H, G, N, dtype=torch.float32, device=device)
    block = max(1, tile(device) // (B * Hq * N))
    for start in range(Q - last, Q, block):
        stop = min(start + block, Q)
        at = position[N - Q :][start:stop]
        allowed = (position <= at[:, None]) if layer.mask is None else layer.mask[:, 0, start:stop]
        allowed = (allowed & valid[:, None] & valid[:, at][..., None])[:, None]  # [B, 1, n, N]
        rows = layer.query[:, :, start:stop]
        p = window_rows(
            rows,
            key,
            stop - start,
            scale=layer.scale,
            softcap=layer.softcap,
            mask=allowed,
            log_weights=layer.log_weights,
        )
        p_max, top = p.max(-1, keepdim=True)
        p.scatter_(-1, top, 0.0)
        others, others_sum = p @ value, p.sum(-1, keepdim=True)
        top_value = value.expand(B, H, G, N, -1)
        top_value = top_value.gather(3, top.expand(*top.shape[:-1], value.shape[-1]))
        mean_of_others = others / others_sum.clamp(min=_TINY)
        top_change = p_max * (top_value - mean_of_others).norm(dim=-1, keepdim=True)
        output = others + p_max * top_value
        change = squares - 2 * (output @ value.mT) + (output * output).sum(-1, keepdim=True)
        change = change.clamp(min=0) * (p / (1 - p)) ** 2
        change.scatter_(-1, top, (top_change**2).masked_fill(others_sum == 0, 0.0))
        change.masked_fill_(~allowed[:, None], 0.0)
        if weights is not None:
            change *= weights[start - (Q - last) : stop - (Q - last), None]
        scores += change.sum(3)
    return scores


@torch.no_grad()
def with_first(score: Tensor, attention: Tensor, first: Tensor) -> Tensor:
    """Return scores in which the `first` tokens by attention rank before all others.

    Score and attention are float32 `[B, H, n]`, attention not negative; `first` is int `[B]`, none
    if below 1.

    Source: CriticalKV, arXiv 2502.03805, algorithm 1; as in its code, half of the budget includes
    the window.
    """
    rank = attention.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    best = score.amax(-1, keepdim=True) + 1
    return torch.where(rank < first[:, None, None], best + attention, score)


@torch.no_grad()
def mixkv_score(score: Tensor, layer: LayerInputs) -> Tensor:
    """Return a score by attention, mixed with the value's norm and the key's dissimilarity.

    `r * d + (1 - r) * (a + u)`: a is the score, u the value's L2 norm, d minus the key's similarity
    to the mean of the normalised keys; u and d are shifted to a minimum of 0 and scaled to the mean
    of a; r is the mean similarity of two of the head's keys.

    The score and the result are float32 `[B, H, n]`, of the first n tokens, which the later ones
    observe; 0 for padding.

    Source: MixKV, arXiv 2510.20707, section 3. Its released code reads r from a file of means over
    samples, which is not released; here r is computed from the prompt, by the same code's formula.
    """
    n, valid = score.shape[2], layer.valid
    counted = valid[:, None, :n]
    n_counted = counted.sum(-1, keepdim=True).clamp(min=1)

    def scaled(x: Tensor) -> Tensor:
        low = x.masked_fill(~counted, torch.inf).amin(-1, keepdim=True)
        high = x.masked_fill(~counted, -torch.inf).amax(-1, keepdim=True)
        x = ((x - low) / (high - low).clamp(min=_TINY)).masked_fill(~counted, 0.0)
        return x * mean / (x.sum(-1, keepdim=True) / n_counted).clamp(min=_TINY)

    mean = score.masked_fill(~counted, 0.0).sum(-1, keepdim=True) / n_counted
    unit, mean_unit = normalised_keys(layer.key, valid)
    dissimilarity = -(unit[:, :, :n] * mean_unit).sum(-1)
    norms = layer.value[:, :, :n].float().norm(dim=-1)
    n_valid = valid.sum(-1)[:, None, None]
    similarity = (n_valid * (mean_unit * mean_unit).sum(-1) - 1) / (n_valid - 1).clamp(min=1)
    scores = similarity * scaled(dissimilarity) + (1 - similarity) * (score + scaled(norms))
    return scores.masked_fill(~counted, 0.0)


def normalised_keys(key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys of length 1, float32 `[B, H, N, D]`, 0 for padding; and their mean."""
    unit = torch.nn.functional.normalize(key.float(), dim=-1)
    # Padding may hold any values; a key that overflowed has no direction.
    unit = unit.masked_fill(~valid[:, None, :, None], 0.0).nan_to_num(nan=0.0)
    number = valid.sum(-1).clamp(min=1)[:, None, None, None]
    return unit, unit.sum(2, keepdim=True) / number
