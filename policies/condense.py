"""Condense: what matters exactly, and a weighted summary of the rest.

Every query of the prompt observes its chunk as if asked at the prompt's end; what some
observer would miss most stays as it is, and groups that weigh in attention what their tokens do
stand for all others. Nothing leaves the softmax. Close to: KeepKV, arXiv 2504.09936, and LOOK-M,
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
    """Keep what any part of the prompt needs, and groups of all else; generated tokens stay."""

    paper = "mmkv"
    score: Score = Observers()
    heads: Heads = RetrievalHeads()
    merge: Merge | None = MergeIntoGroups()
    sinks: int = 1
    least: int = 64
