"""SnapKV: keep what the prompt's last queries attend to, pooled over neighbouring keys.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469,
section 4. The defaults are those of its LongBench configuration; the classes in the authors' code,
https://github.com/FasterDecoding/SnapKV, default to a window of 64 and average pooling over 5. That
code repeats keys, so each query head keeps its own tokens; here the query heads of a group keep the
same tokens, by their mean score.
"""

from dataclasses import dataclass

from mmkv.policy import Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention


@register_policy("snapkv", aliases=("uniform",))
@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keep the observation window and what it attends to; generated tokens stay."""

    paper = "SnapKV, arXiv 2404.14469"
    score: Score = WindowAttention(window=32, kernel_size=7, pooling="max")
