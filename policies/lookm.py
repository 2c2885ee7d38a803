"""LOOK-M: image tokens are evicted before text, and evicted pairs are averaged into kept ones.

Wan et al., "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context
Inference", arXiv 2406.18139, section 3, with averaged merging, into the kept key of highest cosine
similarity. Half of the size is recent tokens. Its code, https://github.com/SUSTechBruce/LOOK-M,
keeps all text even if that is more than the budget; here, as in the paper, text competes too once
no image token is left. A prompt without pictures, which the code does not compress, is evicted by
accumulated attention alone.
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
