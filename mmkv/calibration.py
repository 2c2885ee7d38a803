"""Calibration: measure the layer sizes of a profile over a few samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tqdm.auto import tqdm

from mmkv import adapters
from mmkv.profiles import CLOSE, Profile, model_shape
from mmkv.registry import get_policy
from mmkv.wrapping import wrapped


def calibrate(
    model: Any,
    samples: Iterable[Mapping[str, Any]],
    policy: str = "prefixkv",
    budget: float = 0.5,
    **policy_options: Any,
) -> Profile:
    """Average a policy's per-layer kept fractions over samples.

    Args:
        model: not wrapped; it is wrapped for the length of the call.
        samples: what `model(**sample)` takes, such as a processor returns; each row of a batch
            counts as a sample.
        policy: one whose layer sizes depend on the prompt: prefixkv, xkv, squeeze.
        budget: a fraction in (0, 1).
        policy_options: override the policy's defaults.

    Returns:
        A profile for `mmkv.wrap(model, profile=...)`.

    Raises:
        ValueError: no samples, or a policy whose sizes do not depend on the prompt.
    """
    chosen = get_policy(policy, **policy_options)
    if not chosen.layers.needs:
        raise ValueError(
            f"policy {chosen.name!r} sizes its layers without looking at the prompt "
            f"(layers={chosen.layers.name!r}): there is nothing to calibrate"
        )
    config = adapters.find(model).config
    rows: list[list[float]] = []
    asked = None if chosen.retention is not None else budget
    with wrapped(model, chosen, asked), torch.no_grad():
        for sample in tqdm(samples, desc="calibrate", leave=False, disable=None):
            cache = model(**sample, use_cache=True).past_key_values
            for row, length in enumerate(cache.lengths):
                rows.append([x.keeping().sizes[row] / length for x in cache.compressed])
    if not rows:
        raise ValueError("calibrate: no samples")
    mean = tuple(sum(layer) / len(rows) for layer in zip(*rows, strict=True))
    spent = sum(mean) / len(mean)
    return Profile(
        mean,
        # Sizes are whole tokens: what is spent differs from what was asked for by less than one.
        budget=spent if asked is None or abs(spent - asked) > CLOSE else asked,
        policy=chosen.name,
        samples=len(rows),
        model=model_shape(config),
    )
