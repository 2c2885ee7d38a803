"""What repeating a prompt asks of its tokens.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv 2505.23416, section 3. Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.scores import tile, window_rows


@torch.no_grad()
def most_attention(layer: LayerInputs) -> Tensor:
    """The most attention that any of the Q last tokens' queries pays to each token.

    Args:
        layer: what an attention had to work with, of which Q < N.

    Returns:
        float32 `[B, H, N]`, in [0, 1]; 0 for padding.
    """
    (B, Hq, Q, _), (H, N) = layer.query.shape, layer.key.shape[1:3]
    most = torch.zeros(B, H, N, device=layer.key.device)
    size = max(1, tile(layer.key.device) // (B * Hq * N))
    for start in range(0, Q, size):
        stop = min(start + size, Q)
        last = N - Q + stop
        attention = window_rows(
            layer.query[:, :, start:stop],
            layer.key[:, :, :last],
            stop - start,
            scale=layer.scale,
            softcap=layer.softcap,
            valid=layer.valid[:, :last],
        )
        most[..., :last] = most[..., :last].maximum(attention.amax((2, 3)))
    return most
