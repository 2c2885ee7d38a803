"""SqueezeAttention: layers that change the residual stream little get a small cache.

Wang et al., "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal
Budget", arXiv 2404.04793, algorithm 1. It sizes layers; which tokens stay is the affair of `base`.
The official code assumes a prompt of 8,000 tokens for Mistral; here it is the prompt's own length.
"""

from dataclasses import dataclass
from typing import Literal

from mmkv.policy import Decode, Layers, Policy, Score
from mmkv.registry import policy_class, register_policy


@register_policy("squeeze", aliases=("squeezeattention",))
@dataclass(frozen=True, kw_only=True)
class Squeeze(Policy):
    """A sequence policy (`base`) with layer sizes from the cosine similarity around attention."""

    paper = "SqueezeAttention, arXiv 2404.04793"
    base: Literal["h2o", "local", "streaming"] = "h2o"
    score: Score = "accumulated"  # score and decode are always the base's
    decode: Decode = "fixed"
    sinks: int = -1  # -1: the base's
    recent: float = -1.0
    layers: Layers = "squeeze"
    p: float = 0.35

    def __post_init__(self) -> None:
        """Take from the base what makes it that policy."""
        base = policy_class(self.base)()
        for field in ("score", "decode"):
            object.__setattr__(self, field, getattr(base, field))
        for field in ("sinks", "recent"):
            if getattr(self, field) == -1:
                object.__setattr__(self, field, getattr(base, field))
        super().__post_init__()

    def reads(self, option: str) -> bool:
        """Score and decoding are the base's: setting them here would do nothing."""
        return option not in ("score", "decode") and super().reads(option)
