"""PyramidKV: SnapKV with larger layers at the bottom and smaller ones at the top.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
arXiv 2406.02069, section 3. The official code adds the window on top of each layer's size; here it
counts inside, so that the total is what was asked for.
"""

from dataclasses import dataclass

from mmkv.policy import Layers, Policy, Pooling, Score
from mmkv.registry import register_policy


@register_policy("pyramidkv", aliases=("pyramid",))
@dataclass(frozen=True, kw_only=True)
class PyramidKV(Policy):
    """SnapKV's score, layer sizes falling arithmetically with depth."""

    paper = "PyramidKV, arXiv 2406.02069"
    score: Score = "window"
    window: int = 8
    kernel_size: int = 7
    pooling: Pooling | None = "max"
    layers: Layers = "pyramid"
    beta: float = 20.0
