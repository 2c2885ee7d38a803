"""Calibration: measure a profile, of layer sizes or of visual heads, over a few samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from mmkv import adapters, visual_heads
from mmkv.budgets import number
from mmkv.calls import cache_in
from mmkv.forcing import checked_inputs
from mmkv.planning import comparing
from mmkv.policy import Policy
from mmkv.profiles import CLOSE, Profile
from mmkv.registry import exact_share, get_policy
from mmkv.sizes.profiled import VisualHeads
from mmkv.terminal import bar
from mmkv.wrapping import wrapped


@comparing()
def calibrate(
    model: Any,
    samples: Iterable[Mapping[str, Any]],
    policy: str = "prefixkv",
    budget: float | str = 0.5,
    **policy_options: Any,
) -> Profile:
    """Measure a profile over samples.

    It holds the mean of a policy's kept fractions by layer; or, for heads="visual" (sparsemm), how
    visual each head is (see `mmkv.visual_heads.measure` for image regions in samples).

    Args:
        model: not wrapped; it is wrapped for the length of the call.
        samples: inputs for `model(**sample)`, such as a processor returns; each row of a batch
            counts as a sample.
        policy: one whose layer sizes depend on the prompt: prefixkv, xkv, squeeze; or sparsemm.
        budget: a fraction in (0, 1), or as text "50%"; measurements of heads do not depend on it.
        policy_options: override the policy's defaults, of which `least` is 0 here.

    Returns:
        A profile for `mmkv.wrap(model, profile=...)`.

    Raises:
        ValueError: there are no samples, one is not a mapping of inputs, or the policy's sizes do
            not depend on the prompt.
    """
    chosen = measurable(policy, **policy_options)
    parts = adapters.find(model)
    if parts.ranks > 1:
        raise ValueError(
            f"calibrate measures all heads, and those of this model are spread over {parts.ranks} "
            "processes: measure it in one, with device_map='auto'"
        )
    shape = adapters.shape(parts.config)
    if isinstance(chosen.heads, VisualHeads):
        scores, n = visual_heads.measure(model, _checked(samples), chosen)
        return Profile(visual=scores, samples=n, policy=chosen.name, model=shape)
    rows: list[list[float]] = []
    target = None if chosen.layers.retention is not None else number(budget)
    if isinstance(target, int):
        raise ValueError(f"budget={budget!r}: a profile keeps a fraction, such as 0.5 or '50%'")
    with wrapped(model, chosen, target), torch.no_grad():
        for sample in _checked(samples):
            cache = cache_in(model(**sample, use_cache=True))
            for row, length in enumerate(cache.lengths):
                rows.append([x.keeping().sizes[row] / length for x in cache.compressed])
    if not rows:
        raise ValueError("calibrate: no samples")
    mean = tuple(sum(layer) / len(rows) for layer in zip(*rows, strict=True))
    mean_size = sum(mean) / len(mean)
    # Sizes are whole tokens, so their mean may differ from the budget by less than one token.
    size = mean_size if target is None or abs(mean_size - target) > CLOSE else target
    return Profile(mean, budget=size, samples=len(rows), policy=chosen.name, model=shape)


def measurable(policy: str, **options: Any) -> Policy:
    """Return the policy of a calibration, with its options.

    Raises:
        ValueError: the policy's sizes do not depend on the prompt.
    """
    chosen = get_policy(policy, **exact_share(policy) | options)
    if chosen.layers.learns:
        raise ValueError(
            "calibrate averages the sizes of all samples, and allocation='sampled' those of the "
            "first: use allocation='one-pass'"
        )
    if not (chosen.layers.needs or isinstance(chosen.heads, VisualHeads)):
        raise ValueError(
            f"policy {chosen.name!r} sizes its layers without looking at the prompt "
            f"(layers={chosen.layers.name!r}): there is nothing to calibrate; use prefixkv, xkv, "
            "squeeze or sparsemm"
        )
    return chosen


def _checked(samples: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the checked samples, with a progress bar; in a pipe, a line now and then."""
    total = len(samples) if isinstance(samples, Sized) else None
    with bar(total) as advance:
        for i, sample in enumerate(samples):
            yield checked_inputs(sample, i, "calibrate")
            advance(1, "calibrate")
