"""The reference of the main oracle: a full cache in which evicted keys are masked.

Written to be read, not to be fast. It shares no code with the package: a plain model with
transformers' own DynamicCache, and an attention function that is told, per layer and head, which
keys it may see.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_state: dict[str, Any] = {}


def _masked_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    B, H, S, D = key.shape
    G = query.shape[1] // H
    scale = D**-0.5 if scaling is None else scaling
    allowed = _state["allowed"]
    if allowed is not None:
        visible = allowed[module.layer_idx]  # [B, H, S]
        edit = _state.get("edit")
        if edit is not None:
            key, value = edit(module.layer_idx, key, value)
        if _state.get("inv_freq") is not None:
            key = naive_reposition(key, visible, _state["inv_freq"])
        attention_mask = None
    seen: list[Tensor] = []
    out = torch.zeros(B, query.shape[1], query.shape[2], D)
    for h in range(query.shape[1]):
        logits = query[:, h] @ key[:, h // G].transpose(-1, -2) * scale
        if attention_mask is not None:
            logits = logits + attention_mask[:, 0, :, :S]
        if allowed is not None:
            logits = logits.masked_fill(~visible[:, h // G, None, :], -math.inf)
        weights = logits.softmax(-1)
        out[:, h] = weights @ value[:, h // G]
        seen.append(weights)
    if allowed is not None and _state.get("record") is not None:
        _state["record"][-1].append(torch.stack(seen, dim=1))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("test_masked", _masked_attention)
AttentionMaskInterface.register("test_masked", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def allowed_from(kept: list[Tensor], seen: int) -> list[Tensor]:
    """Positions kept by each layer [B, H, n] -> bool [B, H, seen + 1]; the newest sees itself."""
    masks = []
    for positions in kept:
        B, H, _ = positions.shape
        mask = torch.zeros(B, H, seen + 2, dtype=torch.bool)
        mask.scatter_(-1, positions.masked_fill(positions < 0, seen + 1), True)
        mask[..., seen] = True
        masks.append(mask[..., : seen + 1])
    return masks


def masked_logits(
    model: torch.nn.Module,
    inputs: dict[str, Tensor],
    tokens: Tensor,
    kept: list[list[Tensor]],
    merge: str | None = None,
    reposition: bool = False,
    record: list[list[Tensor]] | None = None,
) -> Tensor:
    """Logits [1 + T - 1, B, V] of the prompt's last token and of T - 1 teacher-forced tokens.

    `kept[t][layer]` is what the compressed cache held after the prefill (t = 0) and each step.
    `record` receives each decode step's attention weights, [layer][B, Hq, 1, S].
    """
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation_internal = "test_masked"
    _state.update(allowed=None, edit=None)
    _state["record"] = record
    _state["inv_freq"] = decoder.rotary_emb.inv_freq if reposition else None
    mask = inputs["attention_mask"]
    try:
        with torch.no_grad():
            out = model(**inputs, position_ids=_positions(mask), use_cache=True)
            cache = out.past_key_values
            logits = [out.logits[:, -1]]
            N = mask.shape[1]
            merged = None
            if merge is not None:
                merged = [
                    naive_merge(x.keys.clone(), x.values.clone(), kept[0][i], mask.bool(), merge)
                    for i, x in enumerate(cache.layers)
                ]

                def edit(i: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
                    key, value = key.clone(), value.clone()
                    key[:, :, :N], value[:, :, :N] = merged[i]
                    return key, value

                _state["edit"] = edit
            for t in range(tokens.shape[1] - 1):
                _state["allowed"] = allowed_from(kept[t], N + t)
                if record is not None:
                    record.append([])
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
                out = model(
                    input_ids=tokens[:, t : t + 1],
                    attention_mask=mask,
                    position_ids=_positions(mask)[:, -1:],
                    past_key_values=cache,
                    use_cache=True,
                )
                logits.append(out.logits[:, -1])
    finally:
        decoder.config._attn_implementation_internal = before
        _state.update(allowed=None, edit=None, inv_freq=None, record=None)
    return torch.stack(logits)


def naive_reposition(keys: Tensor, visible: Tensor, inv_freq: Tensor) -> Tensor:
    """Turn each visible key to its place counted back from the newest, one pair at a time."""
    keys, half = keys.clone(), keys.shape[-1] // 2
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            held = visible[b, h].nonzero()[:, 0].tolist()
            for steps_back, p in enumerate(reversed(held)):
                turn = (held[-1] - p) - steps_back
                x = torch.complex(keys[b, h, p, :half], keys[b, h, p, half:])
                x = x * torch.polar(torch.ones(half), turn * inv_freq)
                keys[b, h, p] = torch.cat([x.real, x.imag])
    return keys


def naive_merge(
    keys: Tensor, values: Tensor, kept: Tensor, valid: Tensor, how: str
) -> tuple[Tensor, Tensor]:
    """Average every evicted pair into its anchor, one token at a time; others stay as they are."""
    merged_keys, merged_values = keys.clone(), values.clone()
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            anchors = [p for p in kept[b, h].tolist() if p >= 0]
            groups = {p: [p] for p in anchors}
            for j in range(keys.shape[2]):
                if not valid[b, j] or j in groups:
                    continue
                if how == "position":
                    best = min(anchors, key=lambda p: (abs(p - j), p))
                else:
                    similarity = torch.cosine_similarity(keys[b, h, anchors], keys[b, h, j], dim=-1)
                    best = anchors[int(similarity.argmax())]
                groups[best].append(j)
            for p, members in groups.items():
                merged_keys[b, h, p] = keys[b, h, members].mean(0)
                merged_values[b, h, p] = values[b, h, members].mean(0)
    return merged_keys, merged_values


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)
