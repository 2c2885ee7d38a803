"""PyramidInfer: recency-weighted window attention, the kept fraction decaying with depth.

Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
arXiv 2405.12532, section 3. There, tokens that a layer drops are not computed in later layers; here
each layer chooses among all tokens. In the authors' code, https://github.com/mutonix/pyramidinfer,
the window is a fifth of the prompt and sizes fall along a cosine; here it is the last 32 queries,
and sizes fall by one factor.
"""

from dataclasses import dataclass

from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention
from mmkv.sizes.layers import GeometricLayers


@register_policy("pyramidinfer")
@dataclass(frozen=True, kw_only=True)
class PyramidInfer(Policy):
    """Later queries of the window weigh more; layer sizes fall geometrically with depth."""

    paper = "PyramidInfer, arXiv 2405.12532"
    score: Score = WindowAttention(window=32, pooling=None, recency_weighted=True)
    layers: Layers = GeometricLayers(decay=0.9)
