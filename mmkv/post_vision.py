"""What the text behind a picture attends to: importance of tokens, and how sparse a layer is.

Tu et al., "VL-Cache: Sparsity and Modality-Aware KV Cache Compression", arXiv 2410.23317,
section 4. Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs
from mmkv.scores import accumulated_attention, autocast_off


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
    (B, _, Q, D), (H, N) = layer.query.shape, layer.key.shape[1:3]
    mask = layer.mask
    assert mask is not None
    large = seen = torch.zeros(B, device=layer.key.device)
    scale = D**-0.5 if layer.scale is None else layer.scale
    key = layer.key.float()[:, :, None].mT
    with autocast_off(layer.key):
        for start in range(0, Q, block):
            rows = layer.query[:, :, start : start + block].float() * scale
            sees = mask[:, :, start : start + block].expand(B, H, -1, N)[:, :, None]
            logits = rows.unflatten(1, (H, -1)) @ key
            if layer.softcap is not None:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            if layer.bias is not None:
                logits = logits + layer.bias[:, :, None, None]
            logits = logits.masked_fill(~sees, -torch.inf)
            least = logits.amax(-1, keepdim=True) + math.log(threshold)
            large = large + ((logits >= least) & sees).sum((1, 2, 3, 4))
            seen = seen + sees.expand(logits.shape).sum((1, 2, 3, 4))
    return large / seen.clamp(min=1)
