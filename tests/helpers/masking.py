"""The reference of the main oracle: a full cache in which evicted keys are masked.

Written to be read, not to be fast. It shares no code with the package: a plain model with
transformers' own DynamicCache, and an attention function that is told, per layer and head, which
keys it may see.
"""

from __future__ import annotations

import itertools
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
        visible = allowed[module.layer_idx]  # [B, H, q, S]
        plain = key, value
        edited = _state["edited"][module.layer_idx]
        if edited is not None:
            n = edited[0].shape[2]
            key = torch.cat([edited[0], key[:, :, n:]], dim=2)
            value = torch.cat([edited[1], value[:, :, n:]], dim=2)
        if _state["bits"] is not None:
            # The tokens of a new turn are whole until they are stored.
            n = S if query.shape[2] == 1 else S - query.shape[2]
            key = torch.cat([fake_quantise(key[:, :, :n], _state["bits"]), key[:, :, n:]], dim=2)
            stored = fake_quantise(value[:, :, :n], _state["bits"])
            value = torch.cat([stored, value[:, :, n:]], dim=2)
        if _state["inv_freq"] is not None:
            key = naive_reposition(key, visible[:, :, -1], _state["inv_freq"])
        if (groups := _state["groups"][module.layer_idx]) is not None:
            pairs = [naive_means(x, *groups[:2]) for x in plain]
            if _state["bits"] is not None:
                pairs = [fake_quantise(x, _state["bits"]) for x in pairs]
            key, value = (torch.cat(x, 2) for x in zip(pairs, (key, value), strict=True))
            bias = groups[2][:, :, None].expand(-1, -1, query.shape[2], -1)
            visible = torch.cat([bias > -math.inf, visible], dim=-1)
        attention_mask = None
    else:
        groups = None
    out = torch.zeros(B, query.shape[1], query.shape[2], D, dtype=query.dtype)
    seen: list[Tensor] = []
    for h in range(query.shape[1]):
        logits = query[:, h] @ key[:, h // G].transpose(-1, -2) * scale
        if attention_mask is not None:
            logits = logits + attention_mask[:, 0, :, :S]
        if groups is not None:
            logits[..., : bias.shape[-1]] += bias[:, h // G]
        if allowed is not None:
            logits = logits.masked_fill(~visible[:, h // G], -math.inf)
        weights = logits.softmax(-1)
        out[:, h] = weights @ value[:, h // G]
        seen.append(weights)
    if allowed is not None and _state["record"] is not None:
        _state["record"][-1].append(torch.stack(seen, dim=1))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("test_masked", _masked_attention)
AttentionMaskInterface.register("test_masked", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def held_by(cache: Any, layer: int) -> Tensor:
    """`cache.kept(layer)`, with `cache.groups(layer)` and their biases as attribute `groups`."""
    kept = cache.kept(layer).clone()
    weights, member = cache.groups(layer)
    kept.groups = None
    if weights.numel():
        held = cache.layers[layer].dense()
        bias = torch.full(weights.shape, -math.inf)
        for b, h in itertools.product(*map(range, weights.shape[:2])):
            mine = held.bias[b, h][(held.weights[b, h] > 1) & (held.positions[b, h] >= 0)]
            bias[b, h, : len(mine)] = mine
        kept.groups = weights.clone(), member.clone(), bias
    return kept


def pairs_of(held: Tensor) -> Tensor:
    """How many pairs a layer holds of each head, groups included: int64 [B, H]."""
    groups = getattr(held, "groups", None)
    exact = (held >= 0).sum(-1)
    return exact if groups is None else exact + (groups[0] > 0).sum(-1)


def naive_means(x: Tensor, weights: Tensor, member: Tensor) -> Tensor:
    """The mean of each group's tokens of x [B, H, S, D]: [B, H, n, D]."""
    B, H, n = weights.shape
    means = torch.zeros(B, H, n, x.shape[-1], dtype=x.dtype)
    for b in range(B):
        for h in range(H):
            for g in range(n):
                tokens = (member[b, h] == g).nonzero()[:, 0]
                assert len(tokens) == weights[b, h, g]
                if len(tokens):
                    means[b, h, g] = x[b, h, tokens].mean(0)
    return means


def allowed_from(kept: list[Tensor], seen: int, q: int = 1) -> list[Tensor]:
    """Positions kept by each layer [B, H, n] -> bool [B, H, q, seen + q] for q tokens more.

    Each of them sees what was kept, those before it, and itself.
    """
    masks = []
    for positions in kept:
        B, H, _ = positions.shape
        old = torch.zeros(B, H, seen + 1, dtype=torch.bool)
        old.scatter_(-1, positions.masked_fill(positions < 0, seen), True)
        new = torch.ones(q, q, dtype=torch.bool).tril().expand(B, H, q, q)
        masks.append(torch.cat([old[:, :, None, :seen].expand(B, H, q, seen), new], dim=-1))
    return masks


def masked_logits(
    model: torch.nn.Module,
    inputs: dict[str, Tensor],
    feeds: Tensor | list[dict[str, Tensor]],
    kept: list[list[Tensor]],
    merge: Any = None,
    reposition: bool = False,
    record: list[list[Tensor]] | None = None,
    bits: int | None = None,
    postpone: int = 0,
) -> Tensor:
    """Last-token logits [1 + F, B, V] of the prompt and of each of F feeds behind it.

    `feeds` are model inputs of q >= 1 tokens each, or generated tokens [B, T], of which the last is
    never fed. `kept[t][layer]` is what the compressed cache held after the prompt (t = 0) and after
    each feed; a feed of more than one token is a new turn, after which it evicts (and merges).
    `record` receives each feed's attention weights, [layer][B, Hq, q, S].
    With `postpone`, pairs are merged after so many feeds, not after the prompt.
    With `bits`, every stored key and value is read as its code in so many bits.
    """
    if isinstance(feeds, Tensor):
        feeds = [{"input_ids": feeds[:, t : t + 1]} for t in range(feeds.shape[1] - 1)]
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation_internal = "test_masked"
    layers = range(len(decoder.layers))
    nothing = [None for _ in layers]
    _state.update(allowed=None, edited=[*nothing], groups=nothing, record=record, bits=bits)
    _state["inv_freq"] = decoder.rotary_emb.inv_freq if reposition else None
    mask = inputs["attention_mask"]
    try:
        with torch.no_grad():
            out = model(**inputs, position_ids=_positions(mask), use_cache=True)
            cache = out.past_key_values
            logits = [out.logits[:, -1]]
            averages = merge is not None and merge.name != "groups"
            if averages and not postpone:
                H = kept[0][0].shape[1]
                candidates = mask.bool()[:, None].expand(-1, H, -1)
                _merge_all(cache, kept[0], [candidates for _ in layers], merge.name)
            for t, feed in enumerate(feeds):
                q, seen = feed["input_ids"].shape[1], mask.shape[1]
                _state["allowed"] = allowed_from(kept[t], seen, q)
                _state["groups"] = [getattr(k, "groups", None) for k in kept[t]]
                if record is not None:
                    record.append([])
                mask = torch.cat([mask, torch.ones_like(mask[:, :1]).expand(-1, q)], dim=1)
                out = model(
                    **feed,
                    attention_mask=mask,
                    position_ids=_positions(mask)[:, -q:],
                    past_key_values=cache,
                    use_cache=True,
                )
                logits.append(out.logits[:, -1])
                if averages and (q > 1 or t + 1 == postpone):
                    last = [m[:, :, -1] for m in _state["allowed"]]
                    _merge_all(cache, kept[t + 1], last, merge.name)
    finally:
        decoder.config._attn_implementation_internal = before
        _state.update(allowed=None, inv_freq=None, record=None, bits=None)
    return torch.stack(logits)


def _merge_all(cache: Any, kept: list[Tensor], candidates: list[Tensor], how: str) -> None:
    """Merge every layer's candidates into what it keeps, on top of earlier merges."""
    for i, layer in enumerate(cache.layers):
        keys, values = layer.keys.clone(), layer.values.clone()
        edited = _state["edited"][i]
        if edited is not None:
            n = edited[0].shape[2]
            keys[:, :, :n], values[:, :, :n] = edited
        _state["edited"][i] = naive_merge(keys, values, kept[i], candidates[i], how)


def fake_quantise(x: Tensor, bits: int, group: int = 64) -> Tensor:
    """Each group of a token's numbers rounded to the nearest of 2 ** bits equally spaced ones.

    The spaces reach from the group's smallest number to its largest, but none is below 1 / 20,000,
    and a group that spans less than 1 / 10,000 is its smallest number. Space and zero point are
    kept in float16.
    """
    D = x.shape[-1]
    parts = x.split(group if D % group == 0 else D, dim=-1)
    return torch.cat([_fake_quantise_group(part, 2**bits - 1) for part in parts], dim=-1)


def _fake_quantise_group(x: Tensor, most: int) -> Tensor:
    exact = x.float()
    low, high = exact.min(-1, keepdim=True).values, exact.max(-1, keepdim=True).values
    per_number = (most / (high - low)).clamp(max=20_000)
    per_number[high - low <= 1e-4] = 1.0
    zero = -low * per_number
    code = (exact * per_number + zero).round().clamp(0, most)
    space = 1 / per_number
    return (code.to(x.dtype) - zero.half().to(x.dtype)) * space.half().to(x.dtype)


def naive_reposition(keys: Tensor, visible: Tensor, inv_freq: Tensor) -> Tensor:
    """Turn each visible key to its place counted back from the newest, one pair at a time."""
    keys, half = keys.clone(), keys.shape[-1] // 2
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            held = visible[b, h].nonzero()[:, 0].tolist()
            for steps_back, p in enumerate(reversed(held)):
                turn = (held[-1] - p) - steps_back
                x = torch.complex(keys[b, h, p, :half], keys[b, h, p, half:])
                x = x * torch.polar(torch.ones_like(inv_freq), turn * inv_freq)
                keys[b, h, p] = torch.cat([x.real, x.imag])
    return keys


def naive_merge(
    keys: Tensor, values: Tensor, kept: Tensor, candidates: Tensor, how: str
) -> tuple[Tensor, Tensor]:
    """Average every evicted candidate into its anchor, one at a time; others stay as they are."""
    merged_keys, merged_values = keys.clone(), values.clone()
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            anchors = [p for p in kept[b, h].tolist() if p >= 0]
            groups = {p: [p] for p in anchors}
            for j in range(keys.shape[2]):
                if not anchors or not candidates[b, h, j] or j in groups:
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
