"""Random: any tokens, the same ones each time. The baseline that every score must be above."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.parts import NonNegativeInt, register_part
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy

# Multiplier of a common integer hash; products of 32-bit numbers with it stay below 2 ** 63.
_MIX = 0x45D9F3B
_BITS = 2**32 - 1


@register_part("noise")
@dataclass(frozen=True, kw_only=True)
class Noise(Score):
    """Chance: the line that every other score must be above.

    Options:
        seed: another one gives other noise; 0 or more.
    """

    seed: NonNegativeInt = 0
    queries = 0

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Uniform in (0, 1): the same each time, and for a row of a batch what it is alone.

        A hash of the seed, the layer, the head, how many tokens the row has and the token's place
        among them. So it does not read or move torch's generators, and a later turn draws anew.
        """
        valid, device = layer.valid, layer.valid.device
        place = (valid.cumsum(-1) - 1).clamp(min=0)[:, None]
        number = valid.sum(-1)[:, None, None]
        head = torch.arange(layer.key.shape[1], device=device)[:, None]
        if layer.head is not None:
            head = layer.head.to(device)[:, None, None]
        found = torch.full_like(place, self.seed & _BITS)
        for x in (torch.full_like(place, layer.layer_idx), head, number, place):
            found = _hash(found ^ _hash(x + 1))
        found = (found >> 8).float().add_(0.5) / 2**24
        return found.masked_fill(~valid[:, None], 0.0)


def _hash(x: Tensor) -> Tensor:
    """Every bit of a number below 2 ** 32 changes about half of the result's; int64 in and out."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * _MIX & _BITS
    return (x >> 16) ^ x


@register_policy("random")
@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep a random set of each head's tokens; generated tokens stay."""

    paper = "baseline"
    score: Score = Noise()
