"""Layer sizes by how much each layer changes the residual stream (SqueezeAttention)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mmkv.parts import Layers, PositiveShare, SizeInputs, register_part
from mmkv.sizes.layers import fit, uniform


@register_part("squeeze")
@dataclass(frozen=True, kw_only=True)
class SqueezeLayers(Layers):
    """Layers that change the residual stream least keep little (SqueezeAttention, section 3).

    Options:
        p: their size as a share of the mean size, in (0, 1].
    """

    p: PositiveShare = 0.35
    needs = "similarity"

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """By groups of the layers' similarity; one that overflowed changes the stream."""
        assert rows.measured is not None
        known = zip(rows.measured.nan_to_num(nan=0.0), rows.totals, rows.lengths, strict=True)
        return [squeeze(alike, total, p=self.p, max_size=length) for alike, total, length in known]


def squeeze(
    similarity: Tensor | Sequence[float], total: int, *, p: float = 0.35, max_size: int
) -> list[int]:
    """Cut the layers that change the residual stream least to `p` of the mean size.

    What that frees is shared equally by the other layers.

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
    values = torch.as_tensor(similarity).detach().to("cpu").double()
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
    """The least value in the highest of the 3 clusters that k-means looks for, the best ones.

    In one dimension clusters are intervals, so all pairs of cuts are tried: the squares within
    clusters are least where the sum of (cluster's sum) ** 2 / size, of centred values, is largest.
    """
    ordered, n = np.sort(values), len(values)
    sums = np.concatenate([[0.0], np.cumsum(ordered - ordered.mean())])
    i, j = 1 + np.array(np.triu_indices(n - 1, 1))
    between = sums[i] ** 2 / i + (sums[j] - sums[i]) ** 2 / (j - i) + sums[j] ** 2 / (n - j)
    return float(ordered[j[between.argmax()]])


@torch.no_grad()
def residual_similarity(before: Tensor, after: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean cosine similarity of the residual stream `[B, N, hidden]` around an attention block.

    Before it, and after its output was added; `valid` is bool `[B, N]`, False for padding.

    Returns:
        float32 `[B]`, in [-1, 1]; 0 for a row that is all padding. High means that the layer
        changes little.

    Source: SqueezeAttention, arXiv 2404.04793, section 3.
    """
    similarity = F.cosine_similarity(before.float(), after.float(), dim=-1)  # [B, N]
    if valid is None:
        return similarity.mean(-1)
    similarity = similarity.masked_fill(~valid, 0.0)
    return similarity.sum(-1) / valid.sum(-1).clamp_min(1)
