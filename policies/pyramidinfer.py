"""PyramidInfer: recency-weighted window attention, the kept fraction decaying with depth.

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
arXiv 2405.12532, section 3.
"""

from dataclasses import dataclass

from mmkv.parts.scoring import WindowAttention
from mmkv.parts.sizing import GeometricLayers
from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy


@register_policy("pyramidinfer")
@dataclass(frozen=True, kw_only=True)
class PyramidInfer(Policy):
    """Later queries of the window weigh more; layer sizes fall geometrically with depth."""

    paper = "PyramidInfer, arXiv 2405.12532"
    score: Score = WindowAttention(window=32, pooling=None, recency_weighted=True)
    layers: Layers = GeometricLayers(decay=0.9)
