"""Ada-KV on SnapKV: a layer's size is split among its heads by the spread of their attention.

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference", arXiv 2407.11550v1, algorithms 2 and 3. alpha = 0.5 as in the paper; the command line of
the authors' code, https://github.com/FFY0/AdaKV, defaults to 0.2. The code rounds each head's size
separately, so a layer may miss its total by some tokens; here totals are exact. With grouped heads
the code averages over a group before pooling; here, as in SnapKV, each query head is pooled first.
"""

from dataclasses import dataclass

from mmkv.policies.snapkv import SnapKV
from mmkv.policy import Heads
from mmkv.registry import register_policy
from mmkv.sizes.heads import AdaptiveHeads


@register_policy("adakv", aliases=("ada", "ada-snapkv"))
@dataclass(frozen=True, kw_only=True)
class AdaSnapKV(SnapKV):
    """SnapKV with adaptive head sizes."""

    paper = "Ada-KV, arXiv 2407.11550"
    heads: Heads = AdaptiveHeads(alpha=0.5)
