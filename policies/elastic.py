"""ElasticCache: evicted pairs are merged into their nearest kept neighbour.

Liu et al., "Efficient Inference of Vision Instruction-Following Models with Elastic Cache",
arXiv 2407.18121, section 3. Its official code, https://github.com/liuzuyan/ElasticCache, has
two faults that are not repeated here: it takes argsort for a rank, and so keeps a nearly random
set; and the indices of the pairs that it merges are off by the number of sinks. Its decode steps
drop the pair at a fixed index of the cache, as PrefixKV's do (see `mmkv.policies.prefixkv`).
"""

from dataclasses import dataclass

from mmkv.decode.slots import Ratio
from mmkv.merge.neighbours import MergeByPosition
from mmkv.policy import Decode, Merge, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.accumulated import AccumulatedAttention


@register_policy("elastic")
@dataclass(frozen=True, kw_only=True)
class Elastic(Policy):
    """Head-averaged accumulated attention, equal layers, merging by position."""

    paper = "ElasticCache, arXiv 2407.18121"
    score: Score = AccumulatedAttention(average_heads=True)
    decode: Decode = Ratio(distance=25)
    merge: Merge | None = MergeByPosition()
