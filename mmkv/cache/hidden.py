"""What an attention mask hides of tokens that a cache has seen, and what it cannot hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from mmkv.cache.layer import CompressedLayer, KeptKV
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.token_masks import TokenMasks


def tokens_known(prompt: TokenMasks | None, seen: int) -> Tensor | None:
    """Which of all tokens seen count, bool [B, seen]; None before the first prompt."""
    if prompt is None:
        return None
    valid = prompt.valid
    return torch.cat([valid, valid.new_ones(len(valid), seen - valid.shape[1])], dim=1)


def hides(layers: Sequence[Any], known: Tensor, earlier: Tensor) -> bool:
    """Whether a mask of earlier tokens hides any that is known.

    Args:
        layers: of the cache.
        known: bool [B, seen], see `tokens_known`.
        earlier: bool [B, seen], the mask.

    Raises:
        ValueError: it shows a token that was masked when it came: it was not kept; or it hides a
            token that a group stands for, or that is in the state of a linear layer.
    """
    hidden, shown = known & ~earlier, earlier & ~known
    any_hidden, any_shown = torch.stack([hidden.any(), shown.any()]).tolist()
    if any_shown:
        row, position = shown.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask shows row {row} its token {position}, which was padding or masked "
            "when it was read and is gone: keep masking it, or start a new cache"
        )
    if not any_hidden:
        return False
    if any(isinstance(x, LinearAttentionLayer) for x in layers):
        raise ValueError(
            "attention_mask hides tokens of an earlier pass, which are in the state of linear "
            "attention: keep showing them, or start a new cache"
        )
    states = [x.state for x in layers if isinstance(x, CompressedLayer)]
    if any(isinstance(x, PromptKV) for x in states):
        raise ValueError(
            "the attention_mask of a later chunk hides tokens of an earlier chunk of the same "
            "prompt: mask them in every chunk"
        )
    for state in states:
        group_index = state.group_index if isinstance(state, KeptKV) else None
        if group_index is None:
            continue
        grouped = hidden.to(group_index.device)[:, : group_index.shape[-1]] & (
            group_index >= 0
        ).any(1)
        if bool(grouped.any()):
            row, position = grouped.nonzero()[0].tolist()
            raise ValueError(
                f"attention_mask hides row {row} its token {position}, which a group holds "
                "together with others: keep showing it, or start a new cache"
            )
    return True
