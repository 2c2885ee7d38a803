"""What repeating a prompt asks of its tokens.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv 2505.23416, section 3. Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.scores import window_rows
from mmkv.tiling import tile
from mmkv.value_scores import head_output_norms


@torch.no_grad()
def most_attention(layer: LayerInputs, *, outputs: bool = False) -> Tensor:
    """The most attention that any of the Q last tokens' queries pays to each token.

    Args:
        layer: what an attention had to work with, of which Q < N.
        outputs: weigh it by `||W_O v|| / ||h||`, what it adds to the residual stream beside the
            attention's input at the query, `layer.hidden`.

    Returns:
        float32 `[B, H, N]`, 0 for padding; in [0, 1] without `outputs`.
    """
    (B, Hq, Q, _), (H, N) = layer.query.shape, layer.key.shape[1:3]
    most = torch.zeros(B, H, Hq // H, N, device=layer.key.device)
    per_query = None
    if outputs:
        assert layer.hidden is not None
        per_query = 1 / layer.hidden.float().norm(dim=-1).clamp(min=torch.finfo().tiny)
        per_query = per_query.masked_fill(~layer.valid[:, -Q:], 0.0)[:, None, None, :, None]
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
        if per_query is not None:
            attention = attention * per_query[:, :, :, start:stop]
        most[..., :last] = most[..., :last].maximum(attention.amax(3))
    if outputs:
        most = most * head_output_norms(layer, N, 2)
    return most.amax(2)
