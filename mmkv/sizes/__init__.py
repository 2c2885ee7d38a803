"""Sizes of layers and of a layer's heads: each file holds a formula and the part that uses it.

A budget is the number or share of tokens kept. Every formula with a `total` spends it exactly, so
that all policies are compared at the same cache size, and breaks ties by the lowest index. Scores
may be on any device; only sizes are sent to the host. Shape letters are those of `mmkv.scores`.
"""

from mmkv.sizes.heads import adaptive_heads
from mmkv.sizes.layers import fit, pyramid, uniform
from mmkv.sizes.retention import pooled, prefix
from mmkv.sizes.squeeze import squeeze

__all__ = [
    "adaptive_heads",
    "fit",
    "pooled",
    "prefix",
    "pyramid",
    "squeeze",
    "uniform",
]
