"""VL-Cache: keep what the text after a picture attends to; layers of dense attention keep more.

Tu et al., "VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Model
Inference Acceleration", arXiv 2410.23317, section 4. There is no public code. The paper does not
cover prompts without text after a picture; here all queries of such a prompt observe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.option_types import PositiveShare
from mmkv.parts import SizeInputs, register_part
from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores import accumulated_attention
from mmkv.scores.attention import window_rows

_BLOCK = 64  # queries computed at a time


@register_part("post-vision")
@dataclass(frozen=True, kw_only=True)
class PostVision(Score):
    """Accumulated attention from the text after the last picture (VL-Cache, section 4.2).

    Without such text all queries observe.

    Options:
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    average_heads: bool = False
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the scores; in a later turn only its own queries observe."""
        layer = last_queries(layer)
        return accumulated_attention(layer.query, layer.key, **layer.attention)


@register_part("sparsity")
@dataclass(frozen=True, kw_only=True)
class SparsityLayers(Layers):
    """Layers of sparse attention keep fewer tokens (VL-Cache, arXiv 2410.23317, section 4.1).

    Options:
        threshold: attention below this share of a query's largest counts as 0, in (0, 1].
    """

    threshold: PositiveShare = 0.01
    needs = "measure"

    def check(self, policy: Policy) -> None:
        """Check that the score keeps all queries of a prompt."""
        if policy.queries is not None:
            raise ValueError(
                "layers='sparsity' needs the queries of all text after a picture, which "
                f"score={policy.score.name!r} does not keep: use score='post-vision'"
            )

    def __call__(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return sizes in proportion to density, at least a hundredth of the tokens."""
        assert rows.measured is not None
        dense = rows.measured.double().clamp(min=1e-6)
        shares = dense / dense.sum(-1, keepdim=True)
        return [
            (share * total).clamp(0.01 * length, length).tolist()
            for share, total, length in zip(shares, rows.totals, rows.lengths, strict=True)
        ]

    def measure(self, layer: LayerInputs) -> Tensor:
        """Return the density (1 - the paper's sparsity) of attention from text after the picture.

        Density is the share of visible entries that are at least `threshold` times the largest
        entry of their query: float32 [B]; 0 if no entry is visible.
        """
        layer = last_queries(layer)
        assert layer.mask is not None
        large = seen = torch.zeros(len(layer.query), dtype=torch.float32, device=layer.key.device)
        parts = (x.split(_BLOCK, dim=2) for x in (layer.query, layer.mask))
        for rows, mask in zip(*parts, strict=True):
            n = rows.shape[2]
            attention = window_rows(
                rows,
                layer.key,
                n,
                scale=layer.scale,
                softcap=layer.softcap,
                mask=mask,
                log_weights=layer.log_weights,
            )
            sees = mask[:, :, None].expand(attention.shape)
            limit = self.threshold * attention.amax(-1, keepdim=True)
            large = large + ((attention >= limit) & sees).sum((1, 2, 3, 4))
            seen = seen + sees.sum((1, 2, 3, 4))
        return large / seen.clamp(min=1)


def last_queries(layer: LayerInputs) -> LayerInputs:
    """Return the inputs with only the queries of text after the last picture; a mask hides others.

    In a row without such text (a text prompt, or one that ends in its picture), all observe.
    """
    Q, N = layer.query.shape[2], layer.key.shape[2]
    observing = layer.valid[:, -Q:]
    if layer.image is not None:
        image = layer.image[:, -Q:]
        after = observing & (image.flip(-1).cumsum(-1).flip(-1) == 0)
        observing = torch.where(after.any(-1, keepdim=True), after, observing)
    n = int((Q - observing.int().argmax(-1)).max())
    query, observing = layer.query[:, :, Q - n :], observing[:, Q - n :]
    mask = layer.mask
    if mask is None:
        mask = torch.ones(n, N, dtype=torch.bool, device=layer.key.device).tril(N - n)
        mask = mask.expand(len(query), 1, n, N)
    mask = mask[:, :, -n:] & observing[:, None, :, None] & layer.valid[:, None, None]
    return replace(layer, query=query, mask=mask)


@register_policy("vlcache")
@dataclass(frozen=True, kw_only=True)
class VLCache(Policy):
    """Post-vision attention, layer sizes by its sparsity, a tenth for recent tokens."""

    paper = "VL-Cache, arXiv 2410.23317"
    score: Score = PostVision()
    layers: Layers = SparsityLayers()
    recent: float = 0.1
