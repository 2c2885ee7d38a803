"""LagKV: tokens whose channels spread widely, measured by the block of tokens that follows.

Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
arXiv 2504.04704, section 3; sinks (4) and block size (128) as in kvpress (`LagKVPress`), which
scores the whole prompt at once. The authors' code (16 and 1,024 by default,
https://github.com/AI-Lab-China-Merchants-Bank/LagKV) compresses block after block and never looks
again at what it kept; here a later turn cuts all that is held into blocks anew. A prompt of
fewer than two blocks is left whole there; here its last tokens stay.
"""

from dataclasses import dataclass

from mmkv.parts.key_scoring import LagRelative
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy


@register_policy("lagkv")
@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Keep 4 sinks, the last block and as many of each other one; generated tokens stay."""

    paper = "LagKV, arXiv 2504.04704"
    score: Score = LagRelative()
    sinks: int = 4
