"""What the text behind a picture attends to: importance of tokens, and how sparse a layer is.

Tu et al., "VL-Cache: Sparsity and Modality-Aware KV Cache Compression", arXiv 2410.23317,
section 4. Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.scores import accumulated_attention, window_rows


def post_vision_queries(layer: LayerInputs) -> Tensor:
    """Which queries are of text behind the last image token, bool [B, Q].

    Where none is, all of a row's queries observe: a text prompt, or one that ends in its picture.
    """
    Q = layer.query.shape[2]
    valid = layer.valid[:, -Q:]
    if layer.image is None:
        return valid
    image = layer.image[:, -Q:]
    behind = valid & (image.flip(-1).cumsum(-1).flip(-1) == 0)
    return torch.where(behind.any(-1, keepdim=True), behind, valid)


def last_queries(layer: LayerInputs) -> LayerInputs:
    """The same with the queries behind the picture alone; the others see nothing."""
    observing = post_vision_queries(layer)
    Q, N = layer.query.shape[2], layer.key.shape[2]
    most = int((Q - observing.int().argmax(-1)).max())
    query, observing = layer.query[:, :, Q - most :], observing[:, Q - most :]
    mask = layer.mask
    if mask is None:
        mask = torch.ones(most, N, dtype=torch.bool, device=layer.key.device).tril(N - most)
        mask = mask.expand(len(query), 1, most, N)
    mask = mask[:, :, -most:] & observing[:, None, :, None] & layer.valid[:, None, None]
    return replace(layer, query=query, mask=mask)


@torch.no_grad()
def post_vision_attention(layer: LayerInputs) -> Tensor:
    """Attention that each token receives from the text behind the picture, summed.

    Returns:
        float32 [B, H, N], mean over the query heads of a group.
    """
    layer = last_queries(layer)
    return accumulated_attention(layer.query, layer.key, **layer.attention)


@torch.no_grad()
def density(layer: LayerInputs, threshold: float = 0.01, block: int = 64) -> Tensor:
    """The share of a layer's attention, from the text behind the picture, that is not negligible.

    1 - the paper's sparsity: an entry counts unless it is below `threshold` times the largest of
    its row. Only pairs that a query sees are counted.

    Args:
        layer: what its attention had to work with.
        threshold: share of a row's largest entry, in (0, 1).
        block: queries looked at at a time.

    Returns:
        float32 [B], in (0, 1]; 0 where no query sees anything.
    """
    layer = last_queries(layer)
    assert layer.mask is not None
    large = seen = torch.zeros(len(layer.query), device=layer.key.device)
    options: dict[str, Any] = {"scale": layer.scale, "softcap": layer.softcap, "bias": layer.bias}
    for rows, mask in zip(
        layer.query.split(block, dim=2), layer.mask.split(block, dim=2), strict=True
    ):
        attention = window_rows(rows, layer.key, rows.shape[2], mask=mask, **options)
        sees = mask[:, :, None].expand(attention.shape)
        least = threshold * attention.amax(-1, keepdim=True)
        large = large + ((attention >= least) & sees).sum((1, 2, 3, 4))
        seen = seen + sees.sum((1, 2, 3, 4))
    return large / seen.clamp(min=1)
