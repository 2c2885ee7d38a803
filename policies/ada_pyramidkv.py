"""Ada-KV on PyramidKV: PyramidKV's layer sizes, split among heads by the spread of attention.

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", arXiv 2407.11550, section 4 (Ada-Pyramid).
"""

from dataclasses import dataclass

from mmkv.policies.pyramidkv import PyramidKV
from mmkv.policy import Heads
from mmkv.registry import register_policy
from mmkv.sizes.heads import AdaptiveHeads


@register_policy("ada-pyramidkv", aliases=("ada-pyramid",))
@dataclass(frozen=True, kw_only=True)
class AdaPyramidKV(PyramidKV):
    """PyramidKV with adaptive head sizes."""

    paper = "Ada-KV, arXiv 2407.11550"
    heads: Heads = AdaptiveHeads(alpha=0.5)
