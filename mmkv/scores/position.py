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
    """A token's position: the newest tokens stay (StreamingLLM, arXiv 2309.17453)."""

    queries = 0
    average_heads = True
    ranks = False
    by_head = True

    def __call__(self, layer: LayerInputs) -> Tensor:
        """Return one ranking for all heads, float32 `[B, 1, N]`."""
        return recency(layer.valid)


@torch.no_grad()
def recency(valid: Tensor) -> Tensor:
    """Return each token's position in the prompt as its score: `s_j = j`, and 0 for padding.

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
    position = torch.arange(valid.shape[1], dtype=torch.float32, device=valid.device)
    return (position * valid)[:, None]
