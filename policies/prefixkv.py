"""PrefixKV: every layer keeps as many tokens as it needs to retain the same share of importance.

Wang et al., "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need
for Efficient Generation", arXiv 2412.03409, section 3. Online by default: sizes from the prompt at
hand. Offline: `wrap(..., profile=...)` with what `mmkv.calibrate` measured; the authors' code,
https://github.com/THU-MIG/PrefixKV, has only this way.

There the search for sizes stops within 5 tokens of the budget, to which they are scaled; here they
are exact. The first and the last token stay whatever their scores; here `sinks=1` keeps the first.
In each step the entry leaves that lay 25 before the prompt's end in the cache, so the prompt's last
kept tokens go first; here none of the prompt's do, and tokens leave 25 behind the newest.
"""

from dataclasses import dataclass

from mmkv.parts.slots import Ratio
from mmkv.policy import Decode, Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.sizes.retention import PrefixLayers


@register_policy("prefixkv")
@dataclass(frozen=True, kw_only=True)
class PrefixKV(Policy):
    """Head-averaged accumulated attention; equal retention per layer; the prompt's prefix stays."""

    paper = "PrefixKV, arXiv 2412.03409"
    score: Score = AccumulatedAttention(average_heads=True)
    layers: Layers = PrefixLayers()
    decode: Decode = Ratio(distance=25)
