"""Layer sizes by how much each layer changes the residual stream (SqueezeAttention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mmkv.option_types import PositiveShare
from mmkv.parts import Layers, SizeInputs, register_part
from mmkv.sizes.layers import fit, uniform


@register_part("squeeze")
@dataclass(frozen=True, kw_only=True)
class SqueezeLayers(Layers):
    """Layers that change the residual stream least keep fewer tokens (SqueezeAttention, section 3).

    Options:
        p: the size of these layers as a share of the mean size, in (0, 1].
    """

    p: PositiveShare = 0.35
    needs = "similarity"

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return sizes by clusters of similarity; NaN, from an overflow, counts as 0."""
        assert rows.measured is not None
        similarity = rows.measured.nan_to_num(nan=0.0)
        row_sizes = zip(similarity, rows.totals, rows.lengths, strict=True)
        return [squeeze(x, total, p=self.p, max_size=length) for x, total, length in row_sizes]


def squeeze(
    similarity: Tensor | Sequence[float], total: int, *, p: float = 0.35, max_size: int
) -> list[int]:
    """Return sizes with `p` times the mean for layers that change the residual stream least.

    The other layers share the tokens freed equally.

    Args:
        similarity: `[L]`, cosine similarity of the residual stream before and after each layer's
            attention block (`residual_similarity`, mean over rows).
        total: tokens to spend over all layers.
        p: size of a layer in the cluster of the highest similarity, as a fraction of the mean.
        max_size: most tokens of a layer.

    Returns:
        `[L]`, tokens per layer, of sum `total`; uniform if fewer than 3 similarities differ.

    Raises:
        ValueError: `total` does not fit into the layers, `p` is outside (0, 1], or a similarity is
            not finite.

    Source: SqueezeAttention, arXiv 2404.04793, algorithm 1: k-means with 3 clusters (here exact).
    """
    values = torch.as_tensor(similarity, dtype=torch.float64, device="cpu").detach()
    if values.ndim != 1 or not len(values):
        raise ValueError(f"similarity must be [L], got {tuple(values.shape)}")
    if not bool(values.isfinite().all()):
        raise ValueError(f"similarity must be finite, got {values.tolist()}")
    if not 0 < p <= 1:
        raise ValueError(f"p must be in (0, 1], got {p}")
    n_layers = len(values)
    if len(values.unique()) < 3:
        return uniform(n_layers, total, max_size=max_size)

    cut = values >= _highest_cluster(values.numpy())
    n_cut = int(cut.sum())
    mean = total / n_layers
    rest = (total - n_cut * p * mean) / max(n_layers - n_cut, 1)
    return fit([p * mean if c else rest for c in cut.tolist()], total, max_size=max_size)


def _highest_cluster(values: NDArray[np.float64]) -> float:
    """Return the least value of the highest of 3 clusters, optimal by the k-means objective.

    In one dimension clusters are intervals, so all pairs of cuts are tried. Squares within clusters
    are least where the sum of (cluster's sum) ** 2 / size, of centred values, is largest.
    """
    ordered, n = np.sort(values), len(values)
    sums = np.concatenate([[0.0], np.cumsum(ordered - ordered.mean())])
    i, j = 1 + np.array(np.triu_indices(n - 1, 1))
    between = sums[i] ** 2 / i + (sums[j] - sums[i]) ** 2 / (j - i) + sums[j] ** 2 / (n - j)
    return float(ordered[j[between.argmax()]])


@torch.no_grad()
def residual_similarity(before: Tensor, after: Tensor, valid: Tensor) -> Tensor:
    """Return the mean cosine similarity of the residual stream before and after attention.

    Both are `[B, N, hidden]`, after with attention's output added; `valid` is bool `[B, N]`.

    Returns:
        float32 `[B]`, in [-1, 1], high if the layer changes the stream little; 0 for a row of
        padding.

    Source: SqueezeAttention, arXiv 2404.04793, section 3.
    """
    similarity = F.cosine_similarity(before.float(), after.float(), dim=-1)  # [B, N]
    similarity = similarity.masked_fill(~valid, 0.0)
    return similarity.sum(-1) / valid.sum(-1).clamp_min(1)
