"""Condense: keep a pair of each important token, and merge all others into weighted groups.

The prompt is cut into runs, and each query observes all tokens of its run as if it came after the
prompt. A token's score is the largest change of any observer's output if the token were dropped.
Tokens with the highest scores keep pairs of their own. The others are merged into groups, in whose
means each token counts as much as its score; the weight of a group gives it the attention that its
tokens had, so every token stays in the softmax. Related: KeepKV, arXiv 2504.09936, and LOOK-M,
arXiv 2406.18139 (merging); KVzip, arXiv 2505.23416 (observers); ToMe, arXiv 2210.09461, and
Attention Matching, arXiv 2602.16284 (weights).
"""

from dataclasses import dataclass

from mmkv.merge.groups import MergeIntoGroups
from mmkv.policy import Heads, Merge, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.observers import Observers
from mmkv.sizes.profiled import RetrievalHeads


@register_policy("condense")
@dataclass(frozen=True, kw_only=True)
class Condense(Policy):
    """Keep the most important tokens, weighted groups of all others, and generated tokens."""

    paper = "mmkv"
    score: Score = Observers()
    heads: Heads = RetrievalHeads()
    merge: Merge | None = MergeIntoGroups()
    sinks: int = 1
    least: int = 64
