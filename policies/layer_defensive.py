"""Layer-DefensiveKV: DefensiveKV's score, one ranking over the heads of all layers.

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv 2510.13334. In the
authors' code the window also competes with other layers' tokens; here every head keeps it.
"""

from dataclasses import dataclass

from mmkv.policies.defensive import Defensive
from mmkv.policy import Heads
from mmkv.registry import register_policy
from mmkv.sizes.heads import GlobalHeads


@register_policy("layer-defensive", aliases=("layer-defensivekv",))
@dataclass(frozen=True, kw_only=True)
class LayerDefensive(Defensive):
    """DefensiveKV with one ranking over all heads of all layers."""

    heads: Heads = GlobalHeads()
