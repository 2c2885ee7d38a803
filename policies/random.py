"""Random: keep random tokens, the same in every run. The lower bound for every score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.option_types import NonNegativeInt
from mmkv.parts import register_part
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy

# Multiplier of a common integer hash; products of 32-bit numbers with it stay below 2 ** 63.
_MIX = 0x45D9F3B
_BITS = 2**32 - 1


@register_part("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Score):
    """Random scores, the lower bound for every other score.

    Options:
        seed: seed of the random numbers; 0 or more.
    """

    seed: NonNegativeInt = 0
    queries = 0

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return uniform numbers in (0, 1), the same in every run, in a batch or alone.

        They are hashes of the seed, the layer, the head, the number of tokens in the row and the
        token's index among them: torch's generators are not used. A later turn draws new numbers.
        """
        valid, device = layer.valid, layer.valid.device
        index = (valid.cumsum(-1) - 1).clamp(min=0)[:, None]
        length = valid.sum(-1)[:, None, None]
        head = torch.arange(layer.key.shape[1], device=device)[:, None]
        if layer.head is not None:
            head = layer.head.to(device)[:, None, None]
        hashed = torch.full_like(index, self.seed & _BITS)
        for x in (torch.full_like(index, layer.layer_idx), head, length, index):
            hashed = _hash(hashed ^ _hash(x + 1))
        hashed = (hashed >> 8).float().add_(0.5) / 2**24
        return hashed.masked_fill(~valid[:, None], 0.0)


def _hash(x: Tensor) -> Tensor:
    """Hash int64 numbers below 2 ** 32: each bit changes about half of the result's bits."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * _MIX & _BITS
    return (x >> 16) ^ x


@register_policy("random")
@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep a random set of each head's tokens; generated tokens stay."""

    paper = "baseline"
    score: Score = Noise()
