"""PrefixKV: layer sizes such that every layer retains the same share of its attention.

Wang et al., "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need
for Efficient Generation", arXiv 2412.03409, section 3. Online by default: sizes are computed for
each prompt. Offline: `wrap(..., profile=...)` with a profile of `mmkv.calibrate`; the authors'
code, https://github.com/THU-MIG/PrefixKV, is offline only.

Their search for sizes stops within 5 tokens of the budget and then scales them; here sizes are
exact. They always keep the first and the last token; here `sinks=1` keeps the first. Each of their
decode steps drops the cache's entry 25 before the prompt's end, so the prompt's last kept tokens go
first; here a step drops the token 25 before the newest, and never a token of the prompt.
"""

from dataclasses import dataclass

from mmkv.decode.slots import Ratio
from mmkv.policy import Decode, Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.sizes.retention import PrefixLayers


@register_policy("prefixkv")
@dataclass(frozen=True, kw_only=True)
class PrefixKV(Policy):
    """Head-averaged accumulated attention; equal retention per layer; kept prompt tokens stay."""

    paper = "PrefixKV, arXiv 2412.03409"
    score: Score = AccumulatedAttention(average_heads=True)
    layers: Layers = PrefixLayers()
    decode: Decode = Ratio(distance=25)
