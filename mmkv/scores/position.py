"""Score by position: the newest tokens stay (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.parts import Score, register_part

if TYPE_CHECKING:
    from mmkv.layer_inputs import LayerInputs


@register_part("recency")
@dataclass(frozen=True, kw_only=True)
class Recency(Score):
    """A token's place in its row: the newest tokens stay (StreamingLLM, arXiv 2309.17453)."""

    queries = 0
    average_heads = True
    ranks = False
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return one ranking for all heads, float32 `[B, 1, N]`."""
        return recency(layer.valid)


@torch.no_grad()
def recency(valid: Tensor) -> Tensor:
    """Return each token's place in its row as its score, 1 for the first, and 0 for padding.

    Args:
        valid: bool `[B, N]`, False for padding.

    Returns:
        float32 `[B, 1, N]`, one ranking for all heads.

    Raises:
        ValueError: `valid` is not a bool `[B, N]`.

    Source: StreamingLLM, arXiv 2309.17453, section 3.2, without its sinks.
    """
    if valid.ndim != 2 or valid.dtype != torch.bool:
        raise ValueError(f"valid must be a bool [B, N], got {valid.dtype} {tuple(valid.shape)}")
    return (valid.cumsum(-1) * valid).float()[:, None]
