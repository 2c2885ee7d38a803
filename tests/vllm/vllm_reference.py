"""Greedy tokens of transformers' model with compressed heads: each head's attention written out.

The prompt is read up to a boundary, where each small head keeps its pairs; all later tokens attend
to these. Pairs are chosen by mmkv's policies for one head alone, none of it by the plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from mmkv.cache.prompt_kv import PromptKV, ReferenceQueries
from mmkv.cache.selection import Ranking
from mmkv.layer_inputs import LayerInputs, Rotary
from mmkv.merge.groups import MergeIntoGroups
from mmkv.scores import window_attention
from mmkv.scores.observers import Observers
from mmkv.sizes.profiled import proportional

Pairs = tuple[Tensor, Tensor, Tensor]  # keys and values [M, D], logarithms of weights [M]
NAME = "mmkv_reference"


class Reference:
    """A model of transformers, loaded with `attn_implementation=NAME`, and the heads' shares.

    Args:
        model: the model.
        shares: the share of the prompt that each head keeps, by layer and head.
        keep: chooses a head's pairs: `condense` or `snapkv`.
        least: a head keeps at least so many tokens, as a mean over all.
        always: tokens that are always kept.
        block: tokens of a block: sizes are the prompt's less a number of blocks.
        codes: bytes of a slot, and of a pair in 8 bits, of which a block then holds as many as fit.
    """

    def __init__(
        self,
        model: Any,
        shares: dict[tuple[int, int], float],
        keep: Callable[..., Pairs],
        *,
        least: float = 0,
        always: int = 1,
        block: int = 16,
        codes: list[int] | None = None,
    ) -> None:
        self.model, self.shares, self.keep = model, shares, keep
        self.least, self.always, self.block, self.codes = least, always, block, codes
        self.kept: dict[tuple[int, int], Pairs] = {}
        self.boundary = 0

    def size(self, share: float, tokens: int) -> tuple[int, int]:
        """Return how many pairs a head keeps of a prompt, and how many of them in 8 bits."""
        target, shares = math.ceil(share * tokens), list(self.shares.values())
        if self.least * len(shares) > sum(shares) * tokens:
            total = len(shares) * min(self.least, tokens)
            sizes = proportional(shares, total, tokens)
            target = max(target, round(sizes[shares.index(share)]))
        slot, code = self.codes or (1, 1)
        fit, (whole, rest) = self.block * slot // code, divmod(tokens, self.block)
        blocks = max(0, math.ceil((target - rest) / fit - 0.5))
        least = tokens if target == tokens else min(tokens, max(self.always, 0.75 * target))
        while blocks * fit + rest < least and blocks < whole:
            blocks += 1
        if blocks >= whole:  # none is freed
            return tokens, 0
        kept = min(tokens, blocks * fit + rest)
        return kept, 0 if self.codes is None else kept - rest

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        layer, (T, D), n = module.layer_idx, key.shape[2:], query.shape[2]
        group = query.shape[1] // key.shape[1]
        outputs = []
        for h in range(key.shape[1]):
            q, k, v = query[0, h * group : (h + 1) * group], key[0, h], value[0, h]
            bias = torch.zeros(T)
            if self.boundary < T and (layer, h) in self.kept:
                keys, values, weights = self.kept[layer, h]
                k, v = (torch.cat([x, y[self.boundary :]]) for x, y in ((keys, k), (values, v)))
                bias = torch.cat([weights, torch.zeros(T - self.boundary)])
            elif self.boundary == T:
                size, coded = self.size(self.shares[layer, h], T)
                kept = k, v, torch.zeros(T)
                if size < T:
                    weight = module.o_proj.weight[:, h * group * D : (h + 1) * group * D]
                    weight = weight.unflatten(1, (group, D)).transpose(0, 1)
                    kept = self.keep(q, k, v, scale, size, weight, self.rotary(T))
                if size < T or coded:
                    self.kept[layer, h] = in_8_bits(*kept, coded)
            logits = q @ k.T * scale + bias
            later = torch.ones(n, len(k), dtype=torch.bool).triu(len(k) - n + 1)
            outputs.append(logits.masked_fill(later, -torch.inf).softmax(-1) @ v)
        return torch.cat(outputs).transpose(0, 1)[None].contiguous()

    def rotary(self, tokens: int) -> Rotary:
        embedding = self.model.get_decoder().rotary_emb
        cos, sin = embedding(torch.zeros(1), torch.arange(tokens)[None])
        return Rotary(cos, sin, embedding.inv_freq)

    @torch.no_grad()
    def generate(
        self, ids: list[int], n: int, boundary: int | None = None, **inputs: Any
    ) -> list[int]:
        """Return n tokens; the prompt is compressed at its end, or at a boundary before."""
        self.kept, self.boundary = {}, len(ids)
        if boundary is not None:
            self.boundary = boundary
        active[:] = [self]
        cache, out, new = DynamicCache(), list[int](), torch.tensor([ids])
        if 0 < self.boundary < len(ids):
            self.model(new[:, : self.boundary], past_key_values=cache, logits_to_keep=1, **inputs)
            new, inputs = new[:, self.boundary :], {}
        for _ in range(n):
            logits = self.model(new, past_key_values=cache, logits_to_keep=1, **inputs).logits
            new, inputs = logits[:, -1].argmax(-1, keepdim=True), {}
            out.append(int(new))
        return out


def in_8_bits(keys: Tensor, values: Tensor, weights: Tensor, n: int) -> Pairs:
    """Return pairs of which the first n are in 8 bits, and their weights in 16."""
    keys, values, weights = keys.clone(), values.clone(), weights.clone()
    for i in range(n):
        keys[i], values[i] = _rounded(keys[i]), _rounded(values[i])
        weights[i] = weights[i].half()
    return keys, values, weights


def _rounded(x: Tensor) -> Tensor:
    """Return a vector of whole multiples of steps, one of each 64 numbers, or of all."""
    parts = []
    for part in x.split(64 if len(x) % 64 == 0 else len(x)):
        farthest = part.max() if part.max() > -part.min() else part.min()
        step = (farthest / -128).half().float()
        parts.append((part / step).round().clamp(-128, 127) * step)
    return torch.cat(parts)


active: list[Reference] = []


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    return active[0].attend(module, query, key, value, scaling), None


AttentionInterface.register(NAME, _attention)


def snapkv(
    q: Tensor, k: Tensor, v: Tensor, scale: float, size: int, weight: Tensor, rotary: Rotary
) -> Pairs:
    """The window's tokens, and those of most attention of its queries, pooled."""
    window = 32
    score = window_attention(
        q[None], k[None, None], window=window, kernel_size=7, pooling="max", scale=scale
    )[0, 0]
    best = score.argsort(descending=True, stable=True)[: size - window]  # pooled scores tie
    at = torch.cat([best.sort().values, torch.arange(len(k) - window, len(k))])
    return k[at], v[at], torch.zeros(size)


def condense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, size: int, weight: Tensor, rotary: Rotary
) -> Pairs:
    """The tokens of highest rank by observers, and weighted groups of all others."""
    N = len(k)
    layer = LayerInputs(
        query=q[None],
        key=k[None, None],
        value=v[None, None],
        valid=torch.ones(1, N, dtype=torch.bool),
        scale=scale,
        rotary=rotary,
        weight=lambda: weight,
    )
    always = torch.zeros(N, dtype=torch.bool)
    always[:1] = True
    rank = Observers()(layer).masked_fill(always, torch.inf)
    kv = PromptKV(k[None, None], v[None, None], torch.arange(N)[None, None])
    kv.reference = ReferenceQueries.of(layer, layer.valid, 16, None)
    none = torch.zeros(1, 1, N, dtype=torch.bool)
    ranking = Ranking(rank, torch.full((1, 1), size), none, ~none)
    kept = MergeIntoGroups()(kv, ranking)
    assert kept.keys is not None
    assert kept.values is not None
    assert kept.log_weights is not None
    return kept.keys[0, 0], kept.values[0, 0], kept.log_weights[0, 0]
