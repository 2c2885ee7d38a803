"""A context as a safetensors file: what its cache holds, and a header that is checked."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from mmkv import adapters, digest
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.evict import evict
from mmkv.cache.phases import Decoding
from mmkv.cache.prompt_kv import PromptKV
from mmkv.cache.token_masks import HOSTED, MASKS, TokenMasks

FORMAT, VERSION = "mmkv-context", 2
_DENSE = ("keys", "values", "positions", "scores", "weights", "bias", "group_index")
_SEEN = ("input_ids", "attention_mask")

# What a file says of a context beside its tensors; lists have an entry for each row, or, as "sizes"
# and "learned", for each layer.
_ABOUT: dict[str, tuple[type, type | None]] = {
    "version": (int, None),
    "plan": (str, None),
    "weights": (str, None),
    "seen": (int, None),
    "lengths": (list, int),
    "windows": (list, int),
    "anchored": (list, int),
    "floors": (list, int),
    "inner": (list, int),
    "granted": (list, float),
    "sizes": (list, list),
    "task": (str, None),
    "learned": (list, float),
}


def save(
    path: str | os.PathLike[str], model: Any, cache: CompressedCache, inputs: dict[str, Tensor]
) -> None:
    """Write a context; `load` reads it. Arguments are those of `mmkv.Context`.

    Raises:
        ValueError: some layers have linear attention, or heads are spread over processes.
    """
    _check_whole(model)
    prompt = cache.prompt
    assert prompt is not None
    windows = _windows(cache)
    if len(cache.compressed) + len(windows) != len(cache.layers):
        raise ValueError(
            "a context of a model with linear-attention layers cannot be saved: ask while it is "
            "in memory"
        )
    tensors = {f"inputs.{name}": x for name, x in inputs.items()}
    tensors |= {f"prompt.{name}": getattr(prompt, name) for name in MASKS}
    sizes: list[list[int]] = []
    for i, layer in enumerate(cache.compressed):
        kept = layer.keeping()
        held = kept.dense()
        found = {name: getattr(held, name) for name in _DENSE}
        found |= {"retained": kept.retained, "error": kept.error}
        tensors |= {f"layers.{i}.{k}": x for k, x in found.items() if x is not None}
        sizes.append(kept.sizes)
    for i, window in windows.items():
        assert window.keys is not None
        assert window.values is not None
        tensors |= {f"windows.{i}.keys": window.keys, f"windows.{i}.values": window.values}
    about = {
        "version": VERSION,
        "plan": _plan(cache),
        "weights": _digest(model),
        "seen": cache.get_seq_length(),
        **{name: getattr(prompt, name) for name in HOSTED},
        "sizes": sizes,
        "task": cache.plan.task,
        "learned": cache.plan.learned or [],
    }
    held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    save_file(held, os.fspath(path), {FORMAT: json.dumps(about)})


def load(path: str | os.PathLike[str], model: Any) -> tuple[CompressedCache, dict[str, Tensor]]:
    """Cache and inputs of a context that `save` wrote, for the model that read it.

    Raises:
        ValueError: no context, or one of another model, policy or budget; the message names the
            file. Or the model's heads are spread over processes.
    """
    _check_whole(model)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = _about((file.metadata() or {}).get(FORMAT))
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name).to(model.device) for name in names}
        return _restored(model, about, tensors)
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"context {os.fspath(path)}: unreadable: {error}") from None
    except ValueError as error:
        raise ValueError(f"context {os.fspath(path)}: {error}") from None


def _about(text: str | None) -> dict[str, Any]:
    """The header of a file, checked.

    Raises:
        ValueError: there is none, or it is not what `save` writes.
    """
    if text is None:
        raise ValueError("it holds no context")
    found = json.loads(text)
    if not isinstance(found, dict) or found.keys() != _ABOUT.keys():
        raise ValueError(f"its header has not the entries {', '.join(_ABOUT)}")
    for name, (kind, of) in _ABOUT.items():
        value = found[name]
        fits = isinstance(value, kind) and (
            of is None or all(isinstance(x, of) and not isinstance(x, bool) for x in value)
        )
        if not fits:
            raise ValueError(f"its header says {name}={str(value)[:40]}")
    if found["version"] != VERSION:
        raise ValueError(f"version {found['version']}, expected {VERSION}")
    rows = {len(found[name]) for name in HOSTED}
    rows |= {len(x) for x in found["sizes"]}
    if len(rows) != 1 or 0 in rows:
        raise ValueError("its header does not say the same number of rows everywhere")
    return found


def _restored(
    model: Any, about: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[CompressedCache, dict[str, Tensor]]:
    """Cache and inputs of a context, from what a file holds.

    Raises:
        ValueError: it is another model's, or was made under another wrap.
        KeyError: a tensor is missing.
    """
    attachment = attachment_of(model)
    cache = CompressedCache(attachment.parts.config, attachment.plan)
    if about["plan"] != _plan(cache):
        raise ValueError(
            f"it was read with {_difference(about['plan'], _plan(cache))} now: wrap it as it was"
        )
    if about["weights"] != _digest(model):
        raise ValueError("it was read by a model with other weights or adapters")
    config, T, B = attachment.parts.config, about["seen"], len(about["lengths"])
    H, D = adapters.shape(config)["num_key_value_heads"], adapters.head_dim(config)
    if len(about["sizes"]) != len(cache.compressed):
        raise ValueError(f"{len(about['sizes'])} layers, expected {len(cache.compressed)}")
    learned = about["learned"]
    if learned and not (len(learned) == len(cache.layers) and all(0 <= x <= 1 for x in learned)):
        raise ValueError(f"its header says learned={str(learned)[:40]}")
    cache.plan = replace(cache.plan, task=about["task"], learned=tuple(learned) or None)
    cache.sizes_learned = True
    inputs = {k.removeprefix("inputs."): x for k, x in tensors.items() if k.startswith("inputs.")}
    masks = {name: tensors[f"prompt.{name}"] for name in MASKS}
    for name, x in {**{n: inputs[n] for n in _SEEN}, **masks}.items():
        if x.shape != (B, T) or (name in MASKS and x.dtype != torch.bool):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected [{B}, {T}]")
    hosted = {name: about[name] for name in HOSTED}
    prompt = TokenMasks(**masks, **hosted)
    for i, (layer, sizes) in enumerate(zip(cache.compressed, about["sizes"], strict=True)):
        found = {k: tensors.get(f"layers.{i}.{k}") for k in (*_DENSE, "retained", "error")}
        keys, positions = found["keys"], found["positions"]
        if keys is None or positions is None or found["values"] is None:
            raise KeyError(f"layers.{i}.keys")
        U = keys.shape[2] if keys.ndim == 4 else -1
        if keys.shape != (B, H, U, D) or found["values"].shape[:3] != (B, H, U):
            raise ValueError(
                f"layer {i} holds keys {tuple(keys.shape)}, expected [{B}, {H}, n, {D}]"
            )
        if positions.shape != (B, H, U) or not bool(((positions >= -1) & (positions < T)).all()):
            raise ValueError(f"layer {i} holds positions out of place")
        held = PromptKV(**{k: found[k] for k in _DENSE})  # type: ignore[arg-type]
        with torch.no_grad():
            layer.state = evict(held, cache.plan, prompt, prompt.lengths, 0, i)
        layer.state.sizes = sizes
        layer.state.retained, layer.state.error = found["retained"], found["error"]
        layer.seen, layer.is_initialized = T, True
    for i, window in _windows(cache).items():
        _fill(
            window, i, tensors[f"windows.{i}.keys"], tensors[f"windows.{i}.values"], rows=B, seen=T
        )
    cache.prompt, cache.phase = prompt, Decoding()
    return cache, inputs


def _windows(cache: CompressedCache) -> dict[int, DynamicSlidingWindowLayer]:
    """The layers that hold their last tokens alone, as the model has it, by their index."""
    layers = enumerate(cache.layers)
    return {i: x for i, x in layers if isinstance(x, DynamicSlidingWindowLayer)}


def _fill(
    window: DynamicSlidingWindowLayer, i: int, keys: Tensor, values: Tensor, *, rows: int, seen: int
) -> None:
    """Give layer `i` the last of the tokens seen, [B, H, window - 1 or fewer, D].

    Raises:
        ValueError: they are not as many.
    """
    last = min(seen, window.sliding_window - 1)
    for x in (keys, values):
        if x.ndim != 4 or (x.shape[0], x.shape[2]) != (rows, last):
            raise ValueError(
                f"layer {i} holds a window {tuple(x.shape)}, expected [{rows}, heads, {last}, n]"
            )
    window.lazy_initialization(keys, values)
    window.keys, window.values, window.cumulative_length = keys, values, seen


def _plan(cache: CompressedCache) -> str:
    """Policy with all its options, budget and type, as one line."""
    plan = cache.plan
    known = {
        "policy": plan.policy.name,
        **plan.policy.flat(),
        "budget": plan.budget,
        "kv_dtype": plan.kv_dtype,
    }
    return json.dumps(known, default=str, sort_keys=True)


def _difference(there: str, here: str) -> str:
    """The first entry in which two plans differ, and its values, which may be long."""
    before, now = json.loads(there), json.loads(here)
    if not isinstance(before, dict):
        raise ValueError(f"its header says plan={there[:40]}")
    names = [x for x in ("policy", "budget", *now, *before) if before.get(x) != now.get(x)]
    name = names[0] if names else "policy"
    old, new = (f"{name}={plan.get(name)}"[:60] for plan in (before, now))
    return f"{old}, and the model is wrapped with {new}"


def _digest(model: Any) -> str:
    return digest.of_model(model, attachment_of(model).parts.config)


def _check_whole(model: Any) -> None:
    attachment = attachment_of(model)
    if (ranks := attachment.parts.ranks) > 1:
        raise ValueError(
            f"this model's heads are spread over {ranks} processes, each of which holds a part of "
            "a context: ask while it is in memory, or save and load it with the model in one "
            "process"
        )
