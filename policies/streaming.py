"""StreamingLLM: keep a few first tokens (attention sinks) and the most recent ones.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453,
section 3. The paper numbers positions inside the cache, so that a stream has no end; here tokens
keep their positions, and a stream ends at the model's `max_position_embeddings`.
"""

from dataclasses import dataclass

from mmkv.decode.victims import Fixed
from mmkv.policy import Decode, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.position import Recency


@register_policy("streaming", aliases=("streamingllm",))
@dataclass(frozen=True, kw_only=True)
class Streaming(Policy):
    """Keep 4 sinks and the most recent tokens; in decode steps drop the oldest other one."""

    paper = "StreamingLLM, arXiv 2309.17453"
    score: Score = Recency()
    sinks: int = 4
    decode: Decode = Fixed()
