"""DefensiveKV: a token is worth what the most demanding of the last queries found in it.

Feng et al., "Taming the Fragility of KV Cache Eviction in LLM Inference", arXiv 2510.13334: the
largest attention, and no less than the mean of these over tokens. All else is as in the authors'
code, https://github.com/FFY0/DefensiveKV: the average over neighbours before the maximum, the norm
of W_O v as each head's share of it, and the tokens that come first. It lets 0.9 of the attention
less that on the `window` tokens before the window come first, where its names speak of the window.

Where heads hold different tokens, in later turns, shares are of the heads' mean norms.
"""

from dataclasses import dataclass

from mmkv.parts.defensive import DefensiveAttention
from mmkv.parts.sizing import AdaptiveHeads
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy


@register_policy("defensive", aliases=("defensivekv",))
@dataclass(frozen=True, kw_only=True)
class Defensive(Policy):
    """Worst-case window attention by output norms; one ranking over the heads of a layer."""

    paper = "DefensiveKV, arXiv 2510.13334"
    score: Score = DefensiveAttention()
    heads: Heads = AdaptiveHeads(alpha=0.0)
