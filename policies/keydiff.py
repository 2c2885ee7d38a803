"""KeyDiff: keep the tokens whose keys are least similar to the others; attention is not used.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", arXiv 2504.15364, section 3. The paper evicts after each block
of a prompt, which `wrap(..., evict_chunks=True)` does; by default all tokens compete once, as with
kvpress' `KeyDiffPress`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.parts import register_part
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.values import normalised_keys


@register_part("key-difference")
@dataclass(frozen=True, kw_only=True)
class KeyDifference(Score):
    """Keys unlike the mean of all normalised keys (KeyDiff, arXiv 2504.15364, section 3)."""

    queries = 0
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return `1 - cos(key, mean)` in [0, 2], of keys as the cache stores them."""
        unit, mean = normalised_keys(layer.key, layer.valid)
        similarity = torch.nn.functional.cosine_similarity(unit, mean, dim=-1)
        return (1 - similarity).clamp(min=0).masked_fill(~layer.valid[:, None], 0.0)


@register_policy("keydiff")
@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keep the keys least like their mean; generated tokens stay."""

    paper = "KeyDiff, arXiv 2504.15364"
    score: Score = KeyDifference()
