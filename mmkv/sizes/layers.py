"""Layer sizes by depth alone, and `fit`, which rounds sizes to whole tokens of a given sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from mmkv.option_types import at_least
from mmkv.parts import Layers, SizeInputs, register_part

# Sizes closer than this to a whole number are rounded to it, so that rounding errors of floats
# neither cost a layer a token nor decide a tie.
NOISE = 1e-6


@register_part("uniform")
@dataclass(frozen=True, kw_only=True)
class UniformLayers(Layers):
    """All layers keep the same number of tokens."""

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return sizes that differ by one token at most."""
        row_sizes = zip(rows.totals, rows.lengths, strict=True)
        return [uniform(rows.n_layers, total, max_size=length) for total, length in row_sizes]


@register_part("pyramid")
@dataclass(frozen=True, kw_only=True)
class PyramidLayers(Layers):
    """Sizes fall in equal steps with depth (PyramidKV, arXiv 2406.02069, section 4.2).

    Pinned tokens come on top of the series, as in the paper's own code.

    Options:
        beta: the last layer's size is the mean divided by this; 1 or more.
    """

    beta: Annotated[float, partial(at_least, 1)] = 20.0

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return each row's pinned tokens plus an arithmetic series."""
        L, sizes = rows.n_layers, list[list[float]]()
        for total, length, pinned in zip(rows.totals, rows.lengths, rows.pinned, strict=True):
            budget, bound = total - L * pinned, length - pinned
            sizes.append([pinned + n for n in pyramid(L, budget, beta=self.beta, max_size=bound)])
        return sizes


def fit(sizes: Sequence[float], total: int, *, floor: int = 0, max_size: int) -> list[int]:
    """Return sizes rounded to whole tokens within bounds, of sum exactly `total`.

    Sizes are clipped to the bounds; then the difference to `total` is split equally among the
    layers that are not at a bound (the smallest change in the least-squares sense), and the largest
    fractions are rounded up. The order of the sizes by value is preserved.

    Args:
        sizes: `[L]`, target tokens per layer, whole or not.
        total: tokens to spend over all layers.
        floor: fewest tokens of a layer.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, between `floor` and `max_size`, of sum `total`.

    Raises:
        ValueError: no sizes within the bounds have the sum `total`, or a size is NaN.
    """
    n_layers = len(sizes)
    if n_layers < 1:
        raise ValueError("at least one layer is needed, got none")
    if floor < 0:
        raise ValueError(f"floor must not be negative, got {floor}")
    if n_layers * floor > total:
        raise ValueError(
            f"a total of {total} tokens is below the {n_layers * floor} that must be kept "
            f"({n_layers} layers of {floor})"
        )
    if total > n_layers * max_size:
        raise ValueError(
            f"a total of {total} tokens is above the {n_layers * max_size} there are "
            f"({n_layers} layers of {max_size})"
        )
    if any(math.isnan(size) for size in sizes):
        raise ValueError(f"sizes must be numbers, got {list(sizes)}")
    if sum(sizes) == total and all(n == int(n) and floor <= n <= max_size for n in sizes):
        return [int(n) for n in sizes]
    targets = [float(min(max(size, floor), max_size)) for size in sizes]

    def shifted(by: float) -> list[float]:
        return [min(max(target + by, floor), max_size) for target in targets]

    low, high = float(floor - max_size), float(max_size - floor)
    for _ in range(100):  # far beyond float64's precision
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shifted(middle)) <= total else (low, middle)
    reals = shifted(low)
    rounded = [math.floor(real + NOISE) for real in reals]
    # Among equal fractions the larger target, as clipping may have made different targets equal.
    by_fraction = sorted(
        range(n_layers),
        key=lambda layer: (-round((reals[layer] - rounded[layer]) / NOISE), -sizes[layer]),
    )
    for layer in by_fraction[: total - sum(rounded)]:
        rounded[layer] += 1
    return rounded


def uniform(n_layers: int, total: int, *, max_size: int) -> list[int]:
    """Return equal sizes of layers; the first layers get the remainder.

    Args:
        n_layers: number of layers.
        total: tokens to spend over all layers.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, of sum `total`.

    Raises:
        ValueError: `total` does not fit into the layers.

    Source: H2O, arXiv 2306.14048, and SnapKV, arXiv 2404.14469: one budget for all layers.
    """
    return fit([total / n_layers] * n_layers, total, max_size=max_size)


def pyramid(n_layers: int, total: int, *, beta: float = 20, max_size: int) -> list[int]:
    """Return sizes that fall in equal steps from the first layer to the last.

    Args:
        n_layers: number of layers.
        total: tokens to spend over all layers, beyond the window that every layer keeps.
        beta: the last layer has the mean size divided by `beta`, unless the first layer would
            exceed `max_size`: then the first has `max_size`, and the last is raised.
        max_size: most tokens of a layer, without the window.

    Returns:
        `[L]`, tokens per layer, not increasing, of sum `total`.

    Raises:
        ValueError: `total` does not fit into the layers or `beta` is below 1.

    Source: PyramidKV, arXiv 2406.02069, section 4.2; see `mmkv.policies.pyramidkv` for its code.
    """
    if not beta >= 1:
        raise ValueError(f"beta must be at least 1, got {beta}")
    mean = total / n_layers
    last = mean / beta
    first = 2 * mean - last
    if first > max_size:
        first, last = float(max_size), 2 * mean - max_size
    step = (first - last) / max(n_layers - 1, 1)
    return fit([first - step * layer for layer in range(n_layers)], total, max_size=max_size)
