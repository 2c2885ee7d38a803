"""H2O: keep heavy hitters, the tokens with the most attention so far, and the most recent ones.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", arXiv 2306.14048, section 4. Each gets half of the budget. The paper's algorithm 1 drops
a token a step from the first on; here, as in the authors' code,
https://github.com/FMInference/H2O, a prompt's tokens compete once, when all its queries have been
seen.
"""

from dataclasses import dataclass

from mmkv.decode.victims import Fixed
from mmkv.policy import Decode, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.accumulated import AccumulatedAttention


@register_policy("h2o")
@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keep heavy hitters and recent tokens; in decode steps drop the least attended older one."""

    paper = "H2O, arXiv 2306.14048"
    score: Score = AccumulatedAttention()
    recent: float = 0.5
    decode: Decode = Fixed()
