"""SqueezeAttention: layers that change the residual stream little keep fewer tokens.

Wang et al., "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal
Budget", arXiv 2404.04793, algorithm 1. It sizes layers; `base` chooses the tokens. As in the paper
the layers in the cluster of the highest similarity get `p` times the mean size; the authors' code,
https://github.com/hetailang/SqueezeAttention, gives them a share of the prompt (`KV_class3`), and
assumes that prompts of Mistral models have 8,000 tokens; here the real length is used.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

from mmkv.decode.victims import Fixed
from mmkv.policy import Decode, Layers, Policy, Score
from mmkv.registry import policy_class, register_policy
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.sizes.squeeze import SqueezeLayers


@register_policy("squeeze", aliases=("squeezeattention",))
@dataclass(frozen=True, kw_only=True)
class Squeeze(Policy):
    """Another policy (`base`) with layer sizes by the cosine similarity around attention.

    Options:
        base: the policy that chooses the tokens.
    """

    paper = "SqueezeAttention, arXiv 2404.04793"
    base: Literal["h2o", "local", "streaming"] = "h2o"
    score: Score = AccumulatedAttention()
    recent: float = 0.5
    layers: Layers = SqueezeLayers(p=0.35)
    decode: Decode = Fixed()
    derived = ("score", "decode")  # set by the base

    @classmethod
    def start(cls, **options: Any) -> Self:
        """Return the policy with the base's score, decoding, sinks and recent tokens."""
        base = policy_class(options.get("base", "h2o"))()
        of_base = {k: getattr(base, k) for k in ("score", "decode", "sinks", "recent")}
        return cls(**{**of_base, **options})
