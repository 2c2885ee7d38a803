"""KVzip+: KVzip's attention, times the norm of what it adds to the residual stream.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", arXiv 2601.07891, and
https://github.com/NVIDIA/kvpress, `kvzip_press.py`: A_ij ||W_O v_j|| / ||h_i|| of each query head,
where h_i, as in that code, is the input of the attention block, after its layer norm.
"""

from dataclasses import dataclass

from mmkv.policies.kvzip import KVzip, Repetition
from mmkv.policy import Score
from mmkv.registry import register_policy


@register_policy("kvzip-plus")
@dataclass(frozen=True, kw_only=True)
class KVzipPlus(KVzip):
    """KVzip with attention weighted by what it adds to the residual stream."""

    paper = "KVzap, arXiv 2601.07891"
    score: Score = Repetition(outputs=True)
