"""MixKV: attention and value norms, mixed with the dissimilarity of keys, head by head.

Liu et al., "Mixing Importance with Diversity: Joint Optimization for KV Cache Compression in Large
Vision-Language Models", arXiv 2510.20707, section 3, on SnapKV with the window and pooling of the
authors' code, https://github.com/xuyang-liu16/MixKV. It pools after the mean over a group's query
heads; here, as in SnapKV, each is pooled first. It reads the similarity of a head's keys from a
file; here it is computed from the prompt. `diversity=True` adds the mix to any window score.
"""

from dataclasses import dataclass

from mmkv.policy import Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention


@register_policy("mixkv")
@dataclass(frozen=True, kw_only=True)
class MixKV(Policy):
    """SnapKV mixed with key dissimilarity, which weighs more the more alike a head's keys are."""

    paper = "MixKV, arXiv 2510.20707"
    score: Score = WindowAttention(window=32, kernel_size=5, pooling="avg", diversity=True)
