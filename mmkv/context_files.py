"""Save and load a context as safetensors: tensors of its cache, and a header, all checked.

Kept pairs are stored as the cache holds them, without empty slots (`mmkv.cache.packed`). Masks,
lengths and pinned tokens are not stored: they follow from the input ids.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from mmkv import digest
from mmkv.attach.attachment import Attachment, attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.forward_pass import Decoding
from mmkv.cache.layer import CompressedLayer
from mmkv.cache.packed import Spec, check_rows, layout, packed, unpacked

FORMAT, VERSION = "mmkv-context", 9
# The entries of a header, with their types.
_HEADER = {
    "version": int,
    "plan": dict,
    **dict.fromkeys(("weights", "dtype", "lead", "task", "digest"), str),
    **dict.fromkeys(("roles", "pictures", "learned"), list),
}
# The most pictures that a file may state: chat templates may count them.
_MAX_PICTURES = 10_000
_INTEGERS = (torch.int64, torch.int32)
# Inputs per token, [B, T], with their largest value (of ids it depends on the model).
TOKENWISE = {"input_ids": 0, "attention_mask": 1, "token_type_ids": 2, "mm_token_type_ids": 2}
# Inputs per picture or video.
GRIDS = {
    "image_grid_thw": Spec((None, 3), _INTEGERS, 1),
    "video_grid_thw": Spec((None, 3), _INTEGERS, 1),
    "second_per_grid_ts": Spec((None,), low=1e-6),
}


def save(
    path: str | os.PathLike[str],
    model: Any,
    weights: str,
    cache: CompressedCache,
    inputs: dict[str, Tensor],
    chat: dict[str, Any],
) -> None:
    """Write a context; `load` reads it. Arguments are those of `mmkv.Context`."""
    _check_one_process(model)
    tensors = {f"inputs.{name}": x for name, x in inputs.items()}
    for start, layer in _by_name(cache):
        pair: Any = {"keys": layer.keys, "values": layer.values}
        held = packed(layer.keeping()) if isinstance(layer, CompressedLayer) else pair
        tensors |= {start + name: x for name, x in held.items()}
    header: dict[str, Any] = {
        "version": VERSION,
        "plan": _plan(cache.plan),
        "weights": weights,
        "dtype": str(attachment_of(model).parts.dtype),
        **chat,
        "task": cache.plan.task,
        "learned": cache.plan.learned or [],
    }
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    header["digest"] = digest.of_tensors(tensors, json.dumps(header, sort_keys=True))
    try:
        save_file(tensors, os.fspath(path), {FORMAT: json.dumps(header)})
    except (OSError, SafetensorError) as error:
        folder = Path(path).parent
        why = error if folder.is_dir() else f"there is no folder {folder}"
        raise ValueError(f"context {os.fspath(path)}: cannot be written: {why}") from None


def load(
    path: str | os.PathLike[str], model: Any
) -> tuple[CompressedCache, dict[str, Tensor], dict[str, Any], str]:
    """Return cache, inputs, chat state and weights of a context; errors name the file."""
    _check_one_process(model)
    attachment = attachment_of(model)
    attachment.complete_plan()
    try:
        if os.path.isdir(path):
            raise IsADirectoryError("it is a folder, not a file")
        with safe_open(os.fspath(path), framework="pt") as file:
            header = _read_header((file.metadata() or {}).get(FORMAT))
            _check_model(header, attachment)
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        written = header.pop("digest")
        if written != digest.of_tensors(tensors, json.dumps(header, sort_keys=True)):
            raise ValueError("damaged: its content is not what was written")
        chat = {name: tuple(header[name]) for name in ("roles", "pictures")}
        chat["lead"] = header["lead"]
        return *_restored(attachment, header, tensors), chat, header["weights"]
    except (OSError, SafetensorError, ValueError) as error:
        prefix = "" if isinstance(error, ValueError) else "unreadable: "
        raise ValueError(f"context {os.fspath(path)}: {prefix}{error}") from None


def _read_header(text: str | None) -> dict[str, Any]:
    if text is None:
        raise ValueError("it holds no context")
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    version = header.get("version") if isinstance(header, dict) else header
    if version != VERSION:
        raise ValueError(f"version {str(version)[:40]}, expected {VERSION}: read the prompt again")
    if header.keys() != _HEADER.keys():
        raise ValueError(f"its header must have the entries {', '.join(_HEADER)}")
    if wrong := [name for name, expected in _HEADER.items() if type(header[name]) is not expected]:
        raise _wrong(header, *wrong)
    roles, pictures = header["roles"], header["pictures"]
    valid = all(type(x) is str for x in roles) and all(type(x) is int and x >= 0 for x in pictures)
    if not valid or len(roles) != len(pictures) or sum(pictures) > _MAX_PICTURES:
        raise _wrong(header, "roles", "pictures")
    return header


def _wrong(header: dict[str, Any], *names: str) -> ValueError:
    entries = ", ".join(f"{name}={str(header[name])[:40]}" for name in names)
    return ValueError(f"its header has invalid entries: {entries}")


def _check_model(header: dict[str, Any], attachment: Attachment) -> None:
    """Check that a context was read by this model, wrapped in the same way."""
    model, dtype = attachment.model, attachment.parts.dtype
    if header["dtype"] != str(dtype):
        raise ValueError(
            f"it was read in {header['dtype'][:40]}, and the model is in {dtype}: load the "
            "model in that dtype, or read the prompt again"
        )
    try:
        weights = digest.of_model(model, attachment.parts.config)
    except NotImplementedError:
        raise ValueError(
            "this model's weights are offloaded, so they cannot be compared with those that read "
            "it: load the model without offloading"
        ) from None
    if header["weights"] != weights:
        raise ValueError("it was read by a model with other weights or adapters: load that model")
    now, stored = _plan(attachment.plan), header["plan"]
    for name in ("policy", "memory", "budget", *now, *stored):
        if stored.get(name) != now.get(name):
            raise ValueError(
                f"it was read with {_shown(stored, name)}, and the model is wrapped with "
                f"{_shown(now, name)} now: give the policy, size and options that it was read with"
            )


def _shown(plan: dict[str, Any], name: str) -> str:
    """Return an entry of `_plan` as text; the budget in place of a memory that is not set."""
    if name == "memory" and plan.get(name) is None:
        name = "budget"
    return f"{name}={plan.get(name)}"[:60]


def _restored(
    attachment: Attachment, header: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[CompressedCache, dict[str, Tensor]]:
    """Return the cache and inputs of a context from the header and tensors of a file."""
    model: Any = attachment.model
    parts, device = attachment.parts, model.device
    cache = CompressedCache(parts.config, attachment.plan)
    inputs, pictured = _inputs(attachment, tensors)
    (B, T), L = pictured.shape, len(cache.compressed)
    masks = TokenMasks.of(
        cache.plan,
        inputs["attention_mask"].bool(),
        pictured if parts.image_token_ids else None,
        n_layers=L,
    )
    masks.check_ends()
    task, shares = header["task"], header["learned"]
    valid = all(type(x) is float and 0 <= x <= 1 for x in shares)
    valid = valid and len(shares) in (0, L) and math.isclose(sum(shares or [1.0]), 1.0)
    if not valid or (cache.plan.sampling is None and (task or shares)):
        raise _wrong(header, "task", "learned")
    cache.plan = replace(cache.plan, task=task, learned=tuple(shares) or None)
    dtypes: tuple[torch.dtype, ...] = (parts.dtype,)
    if torch.is_autocast_enabled(device.type):
        dtypes += (torch.get_autocast_dtype(device.type),)
    for i, (start, layer) in enumerate(_by_name(cache)):
        (H, D), found = parts.pair_shape(i), _named(tensors, start)
        if isinstance(layer, CompressedLayer):
            _take(tensors, start, layout(cache.plan, masks, (H, D), dtypes, found))
            check_rows(cache.plan, masks, found)
            found = {name: x.to(device) for name, x in found.items()}
            layer.state = unpacked(cache.plan, masks, found)
            layer.seen, layer.is_initialized = T, True
        else:
            spec = Spec((B, H, min(T, layer.sliding_window - 1), D), dtypes)
            _take(tensors, start, {"keys": spec, "values": spec})
            keys, values = found["keys"].to(device), found["values"].to(device)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values, layer.cumulative_length = keys, values, T
    if tensors:
        raise ValueError(f"{min(tensors)[:60]!r} is in no context of this model")
    moved = {name: x.to(device) for name, x in vars(masks).items() if isinstance(x, Tensor)}
    cache.masks, cache.phase, cache.sizes_learned = replace(masks, **moved), Decoding(), True
    inputs = {name: x.to(device) for name, x in inputs.items()}
    cache.ids = inputs["input_ids"]
    return cache, inputs


def _inputs(attachment: Attachment, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the checked inputs per token and picture, removed from `tensors`, and a mask of the
    tokens of pictures, bool [B, T]."""
    model: Any = attachment.model
    images = attachment.parts.image_token_ids
    names = {"attention_mask", *_named(tensors, "inputs.")}
    ids = tensors.get("inputs.input_ids", torch.empty(0, device="cpu"))
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError("it lacks input_ids [B, T]")
    last_id = max([len(model.get_input_embeddings().weight) - 1, *images])
    specs = {k: Spec(tuple(ids.shape), _INTEGERS, 0, largest) for k, largest in TOKENWISE.items()}
    specs = {**specs, "input_ids": replace(specs["input_ids"], high=last_id), **GRIDS}
    inputs = _take(tensors, "inputs.", {k: x for k, x in specs.items() if k in names})
    pictured = attachment.parts.is_image(ids)
    token_types = inputs.get("mm_token_type_ids")
    if token_types is not None and not torch.equal(token_types > 0, pictured):
        raise ValueError("inputs.mm_token_type_ids are not those of its pictures")
    grid_names = ("image_grid_thw", "video_grid_thw")
    grids = [row for name in grid_names if name in inputs for row in inputs[name].tolist()]
    if grids or "image_grid_thw" in signature(type(model).forward).parameters:
        tokens, patches = int(pictured.sum()), sum(map(math.prod, grids))
        vision = getattr(model.config, "vision_config", None)
        merged: int = getattr(vision, "spatial_merge_size", 0) ** 2
        if patches != tokens * merged:
            raise ValueError(f"its grids have {patches} patches for {tokens} tokens of pictures")
    if grids:
        on_device = {name: x.to(model.device) for name, x in inputs.items()}
        try:
            model._prepare_position_ids_for_generation(on_device["input_ids"], on_device)
        except Exception as error:  # models raise errors of every type for wrong grids
            why = " ".join(str(error).split())
            raise ValueError(f"its grids are not those of its pictures: {why}") from None
    return inputs, pictured


def _named(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `start`, by the rest of their names."""
    return {k.removeprefix(start): x for k, x in tensors.items() if k.startswith(start)}


def _take(tensors: dict[str, Tensor], start: str, specs: dict[str, Spec]) -> dict[str, Tensor]:
    """Remove tensors whose names begin with `start`; return them, checked, by the rest."""
    found = _named(tensors, start)
    if different := specs.keys() ^ found.keys():
        raise ValueError(f"missing or unexpected: {start}{', '.join(sorted(different))[:60]}")
    for name, spec in specs.items():
        spec.check(start + name, tensors.pop(start + name))
    return found


def _by_name(cache: CompressedCache) -> Iterator[tuple[str, Any]]:
    """Yield each layer of a cache with the start of its tensors' names."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            yield f"layers.{i}.", layer
        elif isinstance(layer, DynamicSlidingWindowLayer):
            yield f"windows.{i}.", layer
        else:
            raise ValueError(
                "a context of a model with linear-attention layers cannot be saved: ask while it "
                "is in memory"
            )


def _plan(plan: CacheConfig) -> dict[str, Any]:
    """Return the fields of a plan that a cache depends on, as plain JSON values."""
    fields = {"policy": plan.policy.name, **plan.policy.flat()}
    fields |= {"budget": plan.budget, "kv_dtype": plan.kv_dtype}
    fields |= {"fractions": plan.fractions} if plan.fractions else {}
    fields |= {"evict_chunks": True} if plan.evict_chunks else {}
    fields |= {} if plan.allotment is None else {"memory": float(plan.allotment.memory)}
    fields |= {} if plan.table is None else {"table": asdict(plan.table)}
    return json.loads(json.dumps(fields, default=str))


def _check_one_process(model: Any) -> None:
    attachment = attachment_of(model)
    if (ranks := attachment.parts.ranks) > 1:
        raise ValueError(
            f"this model's heads are spread over {ranks} processes, each of which holds a part of "
            "a context: ask while it is in memory, or save and load it with the model in one "
            "process"
        )
