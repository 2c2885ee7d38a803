"""PrefixKV: every layer keeps as many tokens as it needs to retain the same share of importance.

Wang et al., "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need
for Efficient Generation", arXiv 2412.03409, section 3. Online by default: sizes from the prompt at
hand. Offline: `wrap(..., profile=...)` with what `mmkv.calibrate` measured.
"""

from dataclasses import dataclass

from mmkv.parts.decoding import Ratio
from mmkv.parts.scoring import AccumulatedAttention
from mmkv.parts.sizing import PrefixLayers
from mmkv.policy import Decode, Layers, Policy, Score
from mmkv.registry import register_policy


@register_policy("prefixkv")
@dataclass(frozen=True, kw_only=True)
class PrefixKV(Policy):
    """Head-averaged accumulated attention; equal retention per layer; the prompt's prefix stays."""

    paper = "PrefixKV, arXiv 2412.03409"
    score: Score = AccumulatedAttention(average_heads=True)
    layers: Layers = PrefixLayers()
    decode: Decode = Ratio(distance=25)
