"""PyramidInfer: recency-weighted window attention; layer sizes shrink with depth.

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
arXiv 2405.12532, section 3. There, tokens that a layer drops are not computed in later layers; here
each layer chooses among all tokens. In the authors' code, https://github.com/mutonix/pyramidinfer,
the window is a fifth of the prompt and sizes fall along a cosine; here it is the last 32 queries,
and sizes fall by one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv.option_types import PositiveShare
from mmkv.parts import SizeInputs, register_part
from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention
from mmkv.sizes.layers import fit


@register_part("geometric")
@dataclass(frozen=True, kw_only=True)
class GeometricLayers(Layers):
    """Sizes fall by one factor with depth (PyramidInfer, arXiv 2405.12532, section 3).

    Options:
        decay: each layer's size as a share of the one before, in (0, 1].
    """

    decay: PositiveShare = 0.9

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return a geometric series for each row."""
        L, decay = rows.n_layers, self.decay
        row_sizes = zip(rows.totals, rows.lengths, strict=True)
        return [geometric(L, total, decay=decay, max_size=length) for total, length in row_sizes]


def geometric(n_layers: int, total: int, *, decay: float, max_size: int) -> list[int]:
    """Return sizes that shrink by the same factor from each layer to the next.

    Layers whose share exceeds `max_size` keep `max_size`, and the series starts after them.

    Args:
        n_layers: number of layers.
        total: tokens to spend over all layers.
        decay: size of a layer over that of the one before, in (0, 1].
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, not increasing, of sum `total`.

    Raises:
        ValueError: `total` does not fit into the layers or `decay` is out of range.

    Source: PyramidInfer, arXiv 2405.12532, section 3; the paper lets the fraction decay with depth
    but spends no fixed total, so the series is scaled to spend it.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}")
    for full in range(n_layers):
        series = [decay**layer for layer in range(n_layers - full)]
        first = (total - full * max_size) / sum(series)
        if first <= max_size:
            sizes = [float(max_size)] * full + [first * term for term in series]
            return fit(sizes, total, max_size=max_size)
    return fit([float(max_size)] * n_layers, total, max_size=max_size)


@register_policy("pyramidinfer")
@dataclass(frozen=True, kw_only=True)
class PyramidInfer(Policy):
    """Later queries of the window weigh more; layer sizes fall geometrically with depth."""

    paper = "PyramidInfer, arXiv 2405.12532"
    score: Score = WindowAttention(window=32, pooling=None, recency_weighted=True)
    layers: Layers = GeometricLayers(decay=0.9)
