"""The reference of the main oracle: a full cache in which evicted keys are masked.

Written to be read, not to be fast. It shares no code with the package: a plain model with
transformers' own cache, and an attention function that is told, per layer and head, which earlier
keys it may still see, and the pairs of groups (`test_grouping` compares those with loops).
`masked_logits` feeds a model of the LLaMA family by itself; `seeing` leaves it to the model's own
`generate` or forward, for every class, which finds positions (multimodal ones too) and masks for
itself. Layers with a sliding window are left as they are.
"""

import functools
import math
from collections import defaultdict, deque
from collections.abc import Collection
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, LogitsProcessor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from helpers import few_bits
from helpers.few_bits import Row
from mmkv.cache import compressed
from mmkv.cache import evict as evicting
from mmkv.cache.layer import CompressedLayer

NEW = 6  # tokens generated at a time
# By layer: the positions kept before a pass, pairs that were merged, and rows in few bits; for all:
# where to note attention weights.
_NOTHING = {"kept": {}, "edited": {}, "rows": {}, "record": None}
_state: dict[str, Any] = dict(_NOTHING)


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    G, q, S = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    kept, bias, n = _state["kept"].get(module.layer_idx), None, 0
    if kept is not None:
        key, value, bias = _as_stored(module.layer_idx, kept, key, value, q)
        n = 0 if bias is None else bias.shape[-1]
    key, value = key.repeat_interleave(G, dim=1), value.repeat_interleave(G, dim=1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits[..., :n] += bias.repeat_interleave(G, dim=1)[:, :, None]
    if attention_mask is not None:
        # Not in place: in 16 bits the mask's lowest number would be -inf.
        logits = torch.cat([logits[..., :n], logits[..., n:] + attention_mask[..., :S]], dim=-1)
    if kept is not None:
        gone = ~seen_by(kept, S - q).repeat_interleave(G, dim=1)
        logits[..., n : n + S - q].masked_fill_(gone[:, :, None], -math.inf)
    weights = logits.softmax(-1)
    if kept is not None and _state["record"] is not None:
        _state["record"][-1].append(weights)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _as_stored(layer: int, kept: Tensor, key: Tensor, value: Tensor, q: int):
    """Keys, values and bias as a layer stores them: merged, in few bits, or in groups."""
    plain, groups = (key, value), None
    rows = _state["rows"].get(layer)
    if (edited := _state["edited"].get(layer)) is not None:
        n = edited[0].shape[2]
        key, value = (torch.cat([x, y[:, :, n:]], 2) for x, y in zip(edited, plain, strict=True))
    if rows is not None:
        key, value = key.clone(), value.clone()
        for (b, h), row in rows.items():
            if q == 1:  # the tokens of a new turn are whole until they are stored
                row.add(p := key.shape[2] - 1, (key[b, h, p], value[b, h, p]))
            for p, (k, v) in row.pairs.items():
                key[b, h, p], value[b, h, p] = k, v
    if (groups := getattr(kept, "groups", None)) is None:
        return key, value, None
    pairs = [x.to(key.dtype) for x in groups[4:]]
    for (b, h), row in (rows or {}).items():
        for g, p in enumerate(groups[3][b, h].tolist()):
            if p >= 0:
                for x, number in zip(pairs, row.pairs[p], strict=True):
                    x[b, h, g] = number
    key, value = (torch.cat(x, dim=2) for x in zip(pairs, (key, value), strict=True))
    return key, value, groups[2]


def seen_by(kept: Tensor, seen: int) -> Tensor:
    """Positions kept [B, H, n], -1 as filler -> bool [B, H, seen]."""
    found = torch.zeros(*kept.shape[:2], seen + 1, dtype=torch.bool)
    return found.scatter_(-1, kept.masked_fill(kept < 0, seen), True)[..., :seen]


AttentionInterface.register("test_masked", _attention)
AttentionMaskInterface.register("test_masked", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def held_by(cache: Any, layer: int) -> Tensor:
    """`cache.kept(layer)`, with attribute `groups`: `cache.groups(layer)`, biases and leaders."""
    kept = cache.kept(layer).clone()
    kept.groups = None
    if cache.plan.policy.merge is None:
        return kept
    weights, member = cache.groups(layer)
    if weights.numel():
        held = cache.layers[layer].dense()
        bias = torch.full_like(weights, -math.inf, dtype=torch.float32)
        leaders = torch.full_like(weights, -1)
        pairs = [x.new_zeros(*weights.shape, x.shape[-1]) for x in (held.keys, held.values)]
        mine = (held.weights > 1) & (held.positions >= 0)
        b, h, u = mine.nonzero(as_tuple=True)
        at = b, h, (mine.cumsum(-1) - 1)[b, h, u]
        bias[at], leaders[at] = held.log_weights[b, h, u].to(bias.dtype), held.positions[b, h, u]
        for x, y in zip(pairs, (held.keys, held.values), strict=True):
            x[at] = y[b, h, u]
        numbers = torch.arange(weights.shape[2], device=member.device)[:, None]
        assert torch.equal(weights, (member[:, :, None] == numbers).sum(-1))
        kept.groups = weights.clone(), member.clone(), bias, leaders, *pairs
    return kept


def held_sets(kept: Tensor, row: int = 0) -> list[set[int]]:
    """What each head of a row holds, of positions kept [B, H, n]."""
    return [set(head[head >= 0].tolist()) for head in kept[row]]


def pairs_of(held: Tensor) -> Tensor:
    """How many pairs a layer holds of each head, groups included: int64 [B, H]."""
    groups = getattr(held, "groups", None)
    exact = (held >= 0).sum(-1)
    return exact if groups is None else exact + (groups[0] > 0).sum(-1)


# By layer, what the last calls merged tokens into: positions [B, H, M] and pairs [B, H, M, D].
noted: dict[int, deque[list[Tensor]]] = defaultdict(lambda: deque(maxlen=8))


def _noted(call: Any) -> Any:
    """`evict`, which notes a layer's groups before they are stored in few bits."""

    @functools.wraps(call)
    def evict(prompt_kv: Any, plan: Any, *arguments: Any) -> Any:
        if plan.kv_dtype is None:
            return call(prompt_kv, plan, *arguments)

        def noting(merge: Any, *rest: Any) -> Any:
            kept = merged(merge, *rest)
            if kept.weights is not None:
                positions = prompt_kv.positions.expand(kept.slot.shape)
                places = positions.gather(-1, kept.indices.clamp(min=0))
                places = places.masked_fill(kept.indices < 0, -1)
                noted[arguments[3]].append([places, kept.keys, kept.values])
            return kept

        merged = evicting._merged
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evicting, "_merged", noting)
            return call(prompt_kv, plan, *arguments)

    return evict


compressed.evict = _noted(compressed.evict)


def _before_codes(layer: int, place: int, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The pair of the group that is led from this position and read back as this pair."""
    found = [
        (keys[at], values[at])
        for places, keys, values in noted[layer]
        for at in map(tuple, (places == place).nonzero().tolist())
    ]
    return min(
        found, key=lambda x: sum(float((i - j).norm()) for i, j in zip(x, pair, strict=True))
    )


@contextmanager
def _masked_attention(decoder: torch.nn.Module, **told: Any):
    """A decoder's attention is the reference's, told what it may see."""
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation_internal = "test_masked"
    _state.update(_NOTHING, **told)
    try:
        yield
    finally:
        decoder.config._attn_implementation_internal = before
        _state.update(_NOTHING)


def masked_logits(
    model: torch.nn.Module,
    inputs: dict[str, Tensor],
    feeds: Tensor | list[dict[str, Tensor]],
    kept: list[list[Tensor]],
    merge: Any = None,
    record: list[list[Tensor]] | None = None,
    bits: int | None = None,
    n_first: int = 1,
    rounds: Collection[int] = (),
) -> Tensor:
    """Last-token logits [1 + F, B, V] of the prompt and of each of F feeds behind it.

    `feeds` are model inputs of q >= 1 tokens each, with an `attention_mask` of these where there is
    padding among them, or generated tokens [B, T], of which the last is never fed.
    `kept[t][layer]` is what the compressed cache held after the prompt (t = 0) and after each feed;
    a feed of more than one token is a new turn, after which it evicts (and merges).
    `record` receives each feed's attention weights, [layer][B, Hq, q, S].
    With `bits`, pairs are held in so many bits, the `n_first` first ones exactly; after so many
    feeds as each of `rounds` says, the generated tokens are evicted among the others.
    """
    if isinstance(feeds, Tensor):
        feeds = [{"input_ids": feeds[:, t : t + 1]} for t in range(feeds.shape[1] - 1)]
    decoder = model.get_decoder()
    mask = inputs["attention_mask"]
    told = {"edited": {}, "rows": {}, "record": record}
    with _masked_attention(decoder, **told), torch.no_grad():
        out = model(**inputs, position_ids=_positions(mask), use_cache=True)
        # Releases differ in what they call it.
        name, cache = next((k, x) for k, x in out.items() if isinstance(x, Cache))
        logits = [out.logits[:, -1]]
        averages = merge is not None and merge.name != "groups"
        if averages:
            everything = mask.bool()[:, None].expand(-1, kept[0][0].shape[1], -1)
            everywhere = [everything for _ in kept[0]]
            _merge_all(cache, kept[0], everywhere, merge.name, _positions(mask))
        generated = 0
        if bits is not None:
            _store_all(cache, kept[0], bits, n_first, mask.shape[1])
        for t, feed in enumerate(feeds):
            q, seen = feed["input_ids"].shape[1], mask.shape[1]
            _state["kept"] = dict(enumerate(kept[t]))
            if record is not None:
                record.append([])
            new = feed.get("attention_mask", torch.ones_like(mask[:, :1]).expand(-1, q))
            mask = torch.cat([mask, new], dim=1)
            out = model(
                **{k: v for k, v in feed.items() if k != "attention_mask"},
                attention_mask=mask,
                position_ids=_positions(mask)[:, -q:],
                **{name: cache},
                use_cache=True,
            )
            logits.append(out.logits[:, -1])
            if averages and q > 1:
                pad = torch.nn.functional.pad
                there = [pad(seen_by(k, seen), (0, q), value=True) for k in kept[t]]
                there = [x & mask.bool()[:, None] for x in there]
                _merge_all(cache, kept[t + 1], there, merge.name, _positions(mask))
            generated = 0 if q > 1 else generated + 1
            if bits is not None and (q > 1 or t + 1 in rounds):
                newest = min(generated, few_bits.NEWEST)
                _store_all(cache, kept[t + 1], bits, n_first, mask.shape[1] - newest)
            else:
                for layer, rows in _state["rows"].items():
                    for (b, h), row in rows.items():
                        row.drop(set(_places(kept[t + 1][layer], b, h)))
    return torch.stack(logits)


def _merge_all(
    cache: Any, kept: list[Tensor], candidates: list[Tensor], how: str, places: Tensor
) -> None:
    """Merge every layer's candidates into what it keeps, on top of earlier merges."""
    for i, layer in enumerate(cache.layers):
        keys, values = layer.keys.clone(), layer.values.clone()
        if (edited := _state["edited"].get(i)) is not None:
            n = edited[0].shape[2]
            keys[:, :, :n], values[:, :, :n] = edited
        _state["edited"][i] = naive_merge(keys, values, kept[i], candidates[i], how, places)


def _places(kept: Tensor, b: int, h: int) -> list[int]:
    """Return the positions of a head's pairs, groups by their leaders."""
    leaders = [] if kept.groups is None else kept.groups[3][b, h].tolist()
    return [p for p in kept[b, h].tolist() + leaders if p >= 0]


def _store_all(cache: Any, kept: list[Tensor], bits: int, n_first: int, start: int) -> None:
    """Hold every layer's kept pairs in few bits, those from position `start` on exactly."""
    for i, layer in enumerate(cache.layers):
        keys, values = _state["edited"].get(i, (layer.keys, layer.values))
        B, H = keys.shape[:2]
        rows = _state["rows"].setdefault(i, {x: Row(bits, n_first) for x in np.ndindex(B, H)})
        for (b, h), row in rows.items():
            pairs = {p: (keys[b, h, p], values[b, h, p]) for p in _places(kept[i], b, h)}
            if (groups := kept[i].groups) is not None:
                for g, p in enumerate(groups[3][b, h].tolist()):
                    if p >= 0:
                        read = tuple(x[b, h, g] for x in groups[4:])
                        pairs[p] = _before_codes(i, p, read)
            row.evict({p: row.pairs.get(p, pair) for p, pair in pairs.items()}, start)


def naive_merge(
    keys: Tensor, values: Tensor, kept: Tensor, candidates: Tensor, how: str, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Average every evicted candidate into its anchor, one at a time; others stay as they are.

    `places` [B, S] are the tokens' places, between which padding does not count.
    """
    merged_keys, merged_values = keys.clone(), values.clone()
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            anchors = [p for p in kept[b, h].tolist() if p >= 0]
            groups = {p: [p] for p in anchors}
            for j in range(keys.shape[2]):
                if not anchors or not candidates[b, h, j] or j in groups:
                    continue
                if how == "position":
                    at = places[b].tolist()
                    best = min(anchors, key=lambda p: (abs(at[p] - at[j]), p))
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


class Feed(LogitsProcessor):
    """Makes `generate` choose given tokens [B, T]."""

    def __init__(self, tokens: Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids, scores):
        t = input_ids.shape[1] - self.start
        return torch.full_like(scores, -1e9).scatter(1, self.tokens[:, t : t + 1], 0.0)


def generate(model, inputs, new=NEW, **kwargs):
    """Greedy: logits [T, B, V], tokens and the cache."""
    out = model.generate(
        **inputs,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return torch.stack(out.logits), out.sequences[:, -new:], out.past_key_values


@contextmanager
def recorded(model):
    """What each compressed layer held after each of a wrapped model's passes."""
    held: list[dict[int, Tensor]] = []

    def record(module, args, output):
        cache = output.past_key_values
        if cache.expects_prompt and not cache.plan.evict_chunks:
            return  # a chunk of a prompt: nothing is evicted yet
        layers = [i for i, x in enumerate(cache.layers) if isinstance(x, CompressedLayer)]
        held.append({i: held_by(cache, i) for i in layers})

    with model.register_forward_hook(record):
        yield held


def hide(attn, args, kwargs):
    """Put what a layer no longer holds into its mask."""
    kept = _state["kept"].get(attn.layer_idx)
    if kept is None:
        return None
    mask = kwargs["attention_mask"]
    gone = ~seen_by(kept, mask.shape[-1] - mask.shape[-2])
    mask = mask.expand(-1, gone.shape[1], -1, -1).clone()
    mask[..., : gone.shape[-1]].masked_fill_(gone[:, :, None], -math.inf)
    return args, {**kwargs, "attention_mask": mask}


@contextmanager
def seeing(model, held, chunks=1):
    """The plain model, its passes after the prompt's seeing only what was `held` before them."""
    decoder = model.get_decoder()
    kept = iter([{}] * chunks + held)
    with ExitStack() as hooks, _masked_attention(decoder):
        told = decoder.register_forward_pre_hook(lambda *_: _state.update(kept=next(kept)))
        hooks.enter_context(told)
        if decoder.config.model_type == "falcon":  # does not ask for an attention function
            decoder.config._attn_implementation_internal = "eager"
            for layer in decoder.h:
                attn = layer.self_attention
                hooks.enter_context(attn.register_forward_pre_hook(hide, with_kwargs=True))
        yield model


def fed(model, inputs, tokens, **kwargs):
    """`generate` that chooses `tokens`."""
    feed = Feed(tokens, inputs["input_ids"].shape[1])
    return generate(model, inputs, logits_processor=[feed], **kwargs)


def same_run(found, expected, atol=1e-4) -> None:
    """Whether two runs gave the same logits and tokens, and their caches hold the same."""
    (logits, tokens, cache), (wanted, words, plain) = found, expected
    torch.testing.assert_close(logits.cpu(), wanted.cpu(), atol=atol, rtol=0)
    assert torch.equal(tokens.cpu(), words.cpu())
    assert cache.get_seq_length() == plain.get_seq_length()
    for i in range(len(plain.layers)):
        assert cache.kept(i).device == logits.device
        assert torch.equal(cache.kept(i).cpu(), plain.kept(i).cpu())
