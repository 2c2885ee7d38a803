"""Key norm: keep the tokens with the shortest keys, which tend to get much attention.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
arXiv 2406.11430, section 3. Its code, https://github.com/alessiodevoto/l2compress, can leave some
layers whole (`skip_layers`, none by default) and by default leaves caches of fewer than 2,048
tokens whole; here, as in kvpress (`KnormPress`), all layers and lengths are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.parts import register_part
from mmkv.policy import Policy, Score
from mmkv.registry import register_policy


@register_part("key-norm")
@dataclass(frozen=True, kw_only=True)
class KeyNorm(Score):
    """Keys of small norm, which tend to get much attention (arXiv 2406.11430, section 3)."""

    queries = 0
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return `1 / |k|`, which ranks as the paper's `-|k|` and is not negative."""
        return (1 / layer.key.float().norm(dim=-1)).masked_fill(~layer.valid[:, None], 0.0)


@register_policy("knorm")
@dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """Keep the keys of smallest norm; generated tokens stay."""

    paper = "L2 norm, arXiv 2406.11430"
    score: Score = KeyNorm()
