"""LOOK-M: image tokens are evicted before text, and evicted pairs are averaged into kept ones.

Wan et al., "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context
Inference", arXiv 2406.18139, section 3. An evicted pair is averaged into the kept pair whose key is
most similar (cosine). Recent tokens get half of the size. Its code,
https://github.com/SUSTechBruce/LOOK-M, keeps all text even if that is more than the budget; here,
as in the paper, text competes too once no image token is left. The code does not compress a prompt
without pictures; here accumulated attention alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmkv.merge.neighbours import MergeByFeature
from mmkv.parts import register_part
from mmkv.policy import Merge, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.accumulated import AccumulatedAttention

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs

# The paper adds the largest score to the scores of text. Multiplying the scores of image tokens by
# this power of two ranks them below all text as well, and rounds nothing.
_BEHIND_TEXT = 2.0**-64


@register_part("text-first")
@dataclass(frozen=True, kw_only=True)
class TextFirst(AccumulatedAttention):
    """Accumulated attention that ranks image tokens below all text (LOOK-M, section 3.2).

    Image tokens are found by their ids; if the model gets embeddings alone, all count as text.

    Options:
        value: how a token's value counts, as for "accumulated".
        average_heads: rank tokens once per layer, by the mean over heads.
    """

    def check(self, policy: Policy) -> None:
        """Check that decoding does not drop tokens by attention alone."""
        super().check(policy)
        if policy.decode.name == "fixed":
            raise ValueError(
                "score='text-first' evicts image tokens before text, but decode='fixed' drops both "
                "alike: use decode='ratio' or 'grow', or score='accumulated'"
            )

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return the scores; those of image tokens are below all others."""
        scores = super().__call__(layer)
        if layer.image is None:
            return scores
        return scores * torch.where(layer.image.to(scores.device), _BEHIND_TEXT, 1.0)[:, None]


@register_policy("lookm", aliases=("look-m",))
@dataclass(frozen=True, kw_only=True)
class LookM(Policy):
    """Accumulated attention, text before images; evicted pairs are merged by similar keys."""

    paper = "LOOK-M, arXiv 2406.18139"
    score: Score = TextFirst()
    recent: float = 0.5
    merge: Merge | None = MergeByFeature()
