"""Random: any tokens, the same ones each time. The baseline that every score must be above."""

from dataclasses import dataclass

from mmkv.parts.key_scoring import Noise
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy


@register_policy("random")
@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Keep a random set of each head's tokens; generated tokens stay."""

    paper = "baseline"
    score: Score = Noise()
