"""Profiles of copy scores that nobody measured."""

import random

from mmkv import adapters
from mmkv.profiles import Profile


def profile_of(model, seed: int = 0) -> Profile:
    """Copy scores that differ from head to head."""
    config, rng = model.get_decoder().config, random.Random(seed)
    H, L = config.num_key_value_heads, config.num_hidden_layers
    scores = tuple(tuple(rng.uniform(0.05, 1) for _ in range(H)) for _ in range(L))
    return Profile(policy="condense", samples=1, model=adapters.shape(config), retrieval=scores)
