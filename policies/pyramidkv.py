"""PyramidKV: SnapKV with larger layers at the bottom and smaller ones at the top.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
arXiv 2406.02069, section 4.2. As in the paper and its code, every layer keeps the window (and other
pinned tokens), and only the rest of the budget falls with depth: with a mean of 64 and a window of
8 the last layer keeps 8 + 56 / 20 = 10.8. The first layer keeps at most all tokens. The window is
part of the budget, and the total is spent exactly.

The official code (KVCache-Factory) rounds its step from layer to layer down to a whole number, so
that with a budget of 64 its 32 layers keep 71.5 on average. For prompts below
2 * (mean - window) tokens it keeps the same number in every layer; here only what exceeds a layer's
tokens moves to later layers. In kvpress the window's part of the budget falls with depth too.
"""

from dataclasses import dataclass

from mmkv.policy import Layers, Policy, Score
from mmkv.registry import register_policy
from mmkv.scores.window import WindowAttention
from mmkv.sizes.layers import PyramidLayers


@register_policy("pyramidkv", aliases=("pyramid",))
@dataclass(frozen=True, kw_only=True)
class PyramidKV(Policy):
    """SnapKV's score, with layer sizes that fall in equal steps with depth."""

    paper = "PyramidKV, arXiv 2406.02069"
    score: Score = WindowAttention(window=8, kernel_size=7, pooling="max")
    layers: Layers = PyramidLayers(beta=20.0)
