"""Parts and a policy as another package would add them, without touching the core.

Its metadata would hold:

    [project.entry-points."mmkv.parts"]
    value-norm = "acme:ValueNorm"
    plain-keys = "acme:PlainKeys"
    profile = "acme:HeadProfile"

    [project.entry-points."mmkv.policies"]
    acme = "acme:Acme"
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv.parts import Heads, Score, register_part
from mmkv.policy import Policy
from mmkv.registry import register_policy
from mmkv.scores import window_attention


@register_part("value-norm")
@dataclass(frozen=True, kw_only=True)
class ValueNorm(Score):
    """Attention of the last queries times how far a value moves the residual stream: ||W_O v||.

    Options:
        window: how many last queries observe.
    """

    window: int = 8

    def __call__(self, layer):
        """[B, H, N], the mean over a group's query heads."""
        B, H = layer.key.shape[:2]
        options = {"window": self.window, "kernel_size": 1, "pooling": None, **layer.attention}
        paid = window_attention(layer.query, layer.key, **options)
        weight = layer.output_weight.float().unflatten(1, (H, -1))  # [., H, G, hidden, D]
        moved = torch.einsum("bhgcd,bhnd->bhgnc", weight.expand(B, *weight.shape[1:]), layer.value)
        size = moved.norm(dim=-1).mean(2)
        return torch.nn.functional.pad(paid, (0, self.window)) * size


@register_part("plain-keys")
@dataclass(frozen=True, kw_only=True)
class PlainKeys(Score):
    """Keys unlike the mean key, before rotary embedding: position does not count."""

    uses_rotary = True

    def __call__(self, layer):
        """[B, H, N]."""
        keys, real = layer.plain_key, layer.valid[:, None, :, None]
        mean = (keys * real).sum(2, keepdim=True) / real.sum(2, keepdim=True)
        return 1 - torch.cosine_similarity(keys, mean, dim=-1)


@register_part("profile")
@dataclass(frozen=True, kw_only=True)
class HeadProfile(Heads):
    """Heads keep shares that were measured before.

    Options:
        first: the share of a layer's size that its first head takes; the others are equal.
    """

    first: float = 0.5

    def __call__(self, scores, totals, *, layer_idx):
        """[B, H]."""
        H, sizes = scores.shape[1], []
        offered = (scores > -torch.inf).any(1).sum(-1).tolist()
        for total, C in zip(totals.tolist(), offered, strict=True):
            lead = min(round(self.first * total), C)
            rest = [min((total - lead + i) // (H - 1), C) for i in range(H - 1)]
            sizes.append([total - sum(rest), *rest])
        return torch.tensor(sizes)


@register_policy("acme")
@dataclass(frozen=True, kw_only=True)
class Acme(Policy):
    """All of it together."""

    score: Score = ValueNorm(window=6)
    heads: Heads = HeadProfile(first=0.6)
