"""Profiles of cost curves that nobody measured."""

import math
import random

from mmkv import adapters
from mmkv.profiles import Profile
from mmkv.sizes.profiled import Curves

LEVELS = (0.1, 0.2, 0.5, 1.0)


def made_up(seed: int = 0, layers: int = 3, heads: int = 2) -> Curves:
    """Curves that differ by some orders of magnitude, with noise that rises."""
    rng = random.Random(seed)
    costs = []
    for _ in range(layers):
        scales = [10 ** rng.uniform(-4, 0) for _ in range(heads)]
        costs.append(
            tuple(
                (*(s * math.exp(-5 * r) * rng.uniform(0.7, 1.3) for r in LEVELS[:-1]), 0.0)
                for s in scales
            )
        )
    return Curves(LEVELS, tuple(costs))


def profile_of(model, seed: int = 0) -> Profile:
    config = model.get_decoder().config
    curves = made_up(seed, config.num_hidden_layers, config.num_key_value_heads)
    return Profile(policy="condense", samples=1, model=adapters.shape(config), curves=curves)
