"""Local attention: keep only the most recent tokens (sliding-window baseline)."""

from dataclasses import dataclass

from mmkv.decode.victims import Fixed
from mmkv.policy import Decode, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.position import Recency


@register_policy("local")
@dataclass(frozen=True, kw_only=True)
class Local(Policy):
    """Keep the most recent tokens; in decode steps drop the oldest."""

    paper = "baseline"
    score: Score = Recency()
    decode: Decode = Fixed()
