"""XKV: layer sizes of the largest mean retention, computed before the prefill.

Li et al., "XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference",
arXiv 2412.05896, section IV. Its greedy loop adds one token at a time; because each layer's
retention is concave, this equals one sort of the pooled scores. Its sampling, where the first
requests of a task size the layers for all others, is `allocation="sampled"`. The authors' code,
https://github.com/CN-LWZ/XKV, averages sizes in tokens and keeps the window in addition; here
shares of the budget are averaged, for prompts of any length, and the window is part of the budget.
"""

from dataclasses import dataclass

from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention
from mmkv.sizes.retention import PooledLayers


@register_policy("xkv")
@dataclass(frozen=True, kw_only=True)
class XKV(Policy):
    """SnapKV's score with a short window; layer sizes by pooled scores after a mini-prefill."""

    paper = "XKV, arXiv 2412.05896"
    score: Score = WindowAttention(window=8, kernel_size=7, pooling="avg")
    layers: Layers = PooledLayers(allocation="mini-prefill")
