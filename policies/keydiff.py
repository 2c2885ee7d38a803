"""KeyDiff: the tokens whose keys are least like the others stay; no attention is looked at.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", arXiv 2504.15364, section 3. The paper evicts after each block
of a prompt, which `wrap(..., evict_chunks=True)` does; by default all tokens compete once, as with
kvpress' `KeyDiffPress`.
"""

from dataclasses import dataclass

from mmkv.parts.key_scoring import KeyDifference
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy


@register_policy("keydiff")
@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keep the keys least like their mean; generated tokens stay."""

    paper = "KeyDiff, arXiv 2504.15364"
    score: Score = KeyDifference()
