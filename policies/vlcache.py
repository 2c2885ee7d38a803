"""VL-Cache: what the text behind a picture attends to, and more for layers that attend widely.

Tu et al., "VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Model
Inference Acceleration", arXiv 2410.23317, section 4. There is no public code. The paper does not
say what a prompt without text behind a picture does; here all its queries observe.
"""

from dataclasses import dataclass

from mmkv.parts.pictures import PostVision, SparsityLayers
from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy


@register_policy("vlcache")
@dataclass(frozen=True, kw_only=True)
class VLCache(Policy):
    """Post-vision attention, layer sizes by its sparsity, a tenth for recent tokens."""

    paper = "VL-Cache, arXiv 2410.23317"
    score: Score = PostVision()
    layers: Layers = SparsityLayers()
    recent: float = 0.1
