"""LOOK-M: text stays, image tokens leave first, and what leaves is averaged into what stays.

Wan et al., "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context
Inference", arXiv 2406.18139, section 3, with averaged merging, into the kept key of highest cosine
similarity. Half of the size is recent tokens. Its code,
https://github.com/SUSTechBruce/LOOK-M, keeps all text even where that is more than the budget;
here, as in the paper, text competes too once no image token is left. Of a prompt without pictures,
which the code leaves whole, the accumulated attention alone decides.
"""

from dataclasses import dataclass

from mmkv.merge.neighbours import MergeByFeature
from mmkv.policy import Merge, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.accumulated import AccumulatedAttention


@register_policy("lookm", aliases=("look-m",))
@dataclass(frozen=True, kw_only=True)
class LookM(Policy):
    """Accumulated attention, text before images; evicted pairs are merged by similar keys."""

    paper = "LOOK-M, arXiv 2406.18139"
    score: Score = AccumulatedAttention()
    recent: float = 0.5
    merge: Merge | None = MergeByFeature()
    text_prior: bool = True
