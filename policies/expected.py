"""Expected Attention: what queries like the prompt's would attend to, if they were asked later.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", arXiv 2510.00636, section 3. Heads share a layer's budget as in the authors' own
comparisons (kvpress: `AdaKVPress(ExpectedAttentionPress(...))`, a fifth of it spread evenly);
`heads="uniform"` is their score alone. Epsilon is the paper's: kvpress' default is 0.
"""

from dataclasses import dataclass

from mmkv.parts.key_scoring import ExpectedAttention
from mmkv.parts.sizing import AdaptiveHeads
from mmkv.policy import Heads, Policy, Score
from mmkv.registry import register_policy


@register_policy("expected")
@dataclass(frozen=True, kw_only=True)
class Expected(Policy):
    """Keep 4 sinks and what later queries are expected to read; generated tokens stay."""

    paper = "Expected Attention, arXiv 2510.00636"
    score: Score = ExpectedAttention()
    heads: Heads = AdaptiveHeads(alpha=0.2)
    sinks: int = 4
