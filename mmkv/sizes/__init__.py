"""Who gets how much: the sizes of layers, and of a layer's heads; formula and part together.

A budget is what is kept. Every formula spends its `total` exactly, so that no comparison is won by
a larger cache, and settles ties the same way each time, the lowest index first. Inputs may be on
any device; the arithmetic is float64 and done there, so that only sizes come to the host. Shape
letters are those of `mmkv.scores`.
"""

from mmkv.sizes.heads import adaptive_heads
from mmkv.sizes.layers import fit, geometric, pyramid, uniform
from mmkv.sizes.retention import pooled, prefix
from mmkv.sizes.squeeze import squeeze

__all__ = [
    "adaptive_heads",
    "fit",
    "geometric",
    "pooled",
    "prefix",
    "pyramid",
    "squeeze",
    "uniform",
]
