"""Save and load a context as safetensors: tensors of its cache, and a header, all checked.

Kept pairs are stored as the cache holds them, without empty slots (`mmkv.cache.packed`). Masks,
lengths and pinned tokens are not stored: they follow from the input ids.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
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
from mmkv.cache.codes import BITS, group
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.forward_pass import Decoding
from mmkv.cache.group_index import GroupIndex
from mmkv.cache.packed import packed, unpacked

FORMAT, VERSION = "mmkv-context", 6
_TEXTS = ("weights", "dtype", "lead", "task", "digest")
_LISTS = ("roles", "pictures", "learned")
_HEADER = {
    **{"version": int, "plan": dict},
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_LISTS, list),
}
# Their lengths are the number of a layer's slots, and of its pairs held exactly.
_COUNTED, _NONE = ("positions", "exact"), torch.empty(0)
# The most pictures that a file may state: chat templates may count them.
_MAX_PICTURES = 10_000


@dataclass(frozen=True)
class _Spec:
    """Expected shape (None for any length), dtypes and range of a tensor of a file."""

    shape: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    low: float = -math.inf
    high: float = math.inf


_INTEGERS = (torch.int64, torch.int32)
# Inputs per token, [B, T], with their largest value (of ids it depends on the model).
TOKENWISE = {"input_ids": 0, "attention_mask": 1, "token_type_ids": 2, "mm_token_type_ids": 2}
# Inputs per picture or video.
GRIDS = {
    "image_grid_thw": _Spec((None, 3), _INTEGERS, 1),
    "video_grid_thw": _Spec((None, 3), _INTEGERS, 1),
    "second_per_grid_ts": _Spec((None,), low=1e-6),
}


def save(
    path: str | os.PathLike[str],
    model: Any,
    weights: str,
    cache: CompressedCache,
    inputs: dict[str, Tensor],
    opened: dict[str, Any],
) -> None:
    """Write a context; `load` reads it. Arguments are those of `mmkv.Context`."""
    _check_whole(model)
    windows = _sliding_layers(cache)
    if len(cache.compressed) + len(windows) != len(cache.layers):
        raise ValueError(
            "a context of a model with linear-attention layers cannot be saved: ask while it is "
            "in memory"
        )
    tensors = {f"inputs.{name}": x for name, x in inputs.items()}
    for i, layer in zip(cache.ordinal, cache.compressed, strict=True):
        tensors |= {f"layers.{i}.{k}": x for k, x in packed(layer.keeping()).items()}
    for i, window in windows.items():
        pair: Any = {"keys": window.keys, "values": window.values}
        tensors |= {f"windows.{i}.{k}": x for k, x in pair.items()}
    header: dict[str, Any] = {
        "version": VERSION,
        "plan": _plan(cache.plan),
        "weights": weights,
        "dtype": str(model.dtype),
        **opened,
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
    _check_whole(model)
    attachment = attachment_of(model)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            header = _read_header((file.metadata() or {}).get(FORMAT))
            _check_model(header, attachment)
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        written = header.pop("digest")
        if written != digest.of_tensors(tensors, json.dumps(header, sort_keys=True)):
            raise ValueError("damaged: its content is not what was written")
        opened = {name: tuple(header[name]) for name in ("roles", "pictures")}
        opened["lead"] = header["lead"]
        return *_restored(attachment, header, tensors), opened, header["weights"]
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
        raise ValueError(f"version {str(version)[:40]}, expected {VERSION}: read it again")
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
    model: Any = attachment.model
    if header["dtype"] != str(model.dtype):
        raise ValueError(
            f"it was read in {header['dtype'][:40]}, and the model is in {model.dtype}: load the "
            "model in that dtype, or read it again"
        )
    if header["weights"] != digest.of_model(model, attachment.parts.config):
        raise ValueError(
            "it was read by a model with other weights or adapters: load that model (--model)"
        )
    now, stored = _plan(attachment.plan), header["plan"]
    for name in ("policy", "budget", *now, *stored):
        if (was := stored.get(name)) != (here := now.get(name)):
            raise ValueError(
                f"it was read with {f'{name}={was}'[:60]}, and the model is wrapped with "
                f"{f'{name}={here}'[:60]} now: wrap it as it was"
            )


def _restored(
    attachment: Attachment, header: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[CompressedCache, dict[str, Tensor]]:
    """Return the cache and inputs of a context from the header and tensors of a file."""
    model: Any = attachment.model
    parts, device = attachment.parts, model.device
    cache = CompressedCache(parts.config, attachment.plan)
    inputs, pictured = _inputs(attachment, tensors)
    (B, T), L = pictured.shape, len(cache.compressed)
    prompt = TokenMasks.of(
        cache.plan,
        inputs["attention_mask"].bool(),
        pictured if parts.image_token_ids else None,
        n_layers=L,
    )
    prompt.check_ends()
    _check_shares(header, cache.plan, L)
    cache.plan = replace(cache.plan, task=header["task"], learned=tuple(header["learned"]) or None)
    dtypes: tuple[torch.dtype, ...] = (model.dtype,)
    if torch.is_autocast_enabled(device.type):
        dtypes += (torch.get_autocast_dtype(device.type),)
    for i, layer in zip(cache.ordinal, cache.compressed, strict=True):
        stored = _layer(f"layers.{i}.", tensors, cache.plan, prompt, parts.pair_shape(i), dtypes)
        layer.state = unpacked(cache.plan, prompt, {k: x.to(device) for k, x in stored.items()})
        layer.seen, layer.is_initialized = T, True
    for i, window in _sliding_layers(cache).items():
        (heads, dim), last = parts.pair_shape(i), min(T, window.sliding_window - 1)
        spec = _Spec((B, heads, last, dim), dtypes)
        stored = _pop(tensors, f"windows.{i}.", {"keys": spec, "values": spec})
        keys, values = stored["keys"].to(device), stored["values"].to(device)
        window.lazy_initialization(keys, values)
        window.keys, window.values, window.cumulative_length = keys, values, T
    if tensors:
        raise ValueError(f"{min(tensors)[:60]!r} is in no context of this model")
    masks = {name: x.to(device) for name, x in vars(prompt).items() if isinstance(x, Tensor)}
    cache.prompt, cache.phase, cache.sizes_learned = replace(prompt, **masks), Decoding(), True
    inputs = {name: x.to(device) for name, x in inputs.items()}
    cache.ids = inputs["input_ids"]
    return cache, inputs


def _check_shares(header: dict[str, Any], plan: CacheConfig, n_layers: int) -> None:
    """Check the layer shares learned for a task."""
    shares = header["learned"]
    valid = all(type(x) is float and 0 <= x <= 1 for x in shares)
    valid = valid and len(shares) in (0, n_layers) and math.isclose(sum(shares or [1.0]), 1.0)
    if not valid or (plan.sampling is None and (header["task"] or shares)):
        raise _wrong(header, "task", "learned")


def _inputs(attachment: Attachment, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the checked inputs per token and picture, removed from `tensors`, and a mask of the
    tokens of pictures, bool [B, T]."""
    model: Any = attachment.model
    images = attachment.parts.image_token_ids
    names = {x.removeprefix("inputs.") for x in tensors if x.startswith("inputs.")}
    ids = tensors.get("inputs.input_ids", torch.empty(0))
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError("it lacks input_ids [B, T]")
    last_id = max([model.get_input_embeddings().num_embeddings - 1, *images])
    specs = {k: _Spec(tuple(ids.shape), _INTEGERS, 0, largest) for k, largest in TOKENWISE.items()}
    specs = {**specs, "input_ids": replace(specs["input_ids"], high=last_id), **GRIDS}
    names |= {"attention_mask"}
    inputs = _pop(tensors, "inputs.", {k: x for k, x in specs.items() if k in names})
    pictured = torch.isin(ids, torch.tensor(images, dtype=ids.dtype))
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


def _layer(
    start: str,
    tensors: dict[str, Tensor],
    plan: CacheConfig,
    prompt: TokenMasks,
    pair_shape: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
) -> dict[str, Tensor]:
    """Return a layer's checked tensors (`packed`), removed from `tensors`; pair_shape: H, D."""
    (B, T), (H, D), policy = prompt.valid.shape, pair_shape, plan.policy
    names = {x.removeprefix(start) for x in tensors if x.startswith(start)}
    n, x = (len(y) if (y := tensors.get(start + name, _NONE)).ndim else 0 for name in _COUNTED)
    evicted = any(plan.evicting(prompt)) or policy.score.repeats
    has_scores = {"": False, "sum": True, "max": evicted}[policy.score.turn_reduction]
    merges = policy.merge is not None and policy.merge.weighted
    specs = {
        "counts": _Spec((B, H), (torch.int32,), 0, T),
        "sizes": _Spec((B,), (torch.int32,), 1, T),
        "positions": _Spec((n,), (torch.int16, torch.int32), 0, T - 1),
    }
    if plan.kv_dtype is None:
        specs |= {"keys": _Spec((n, D), dtypes), "values": _Spec((n, D), dtypes)}
    else:
        bits = BITS[plan.kv_dtype]
        means = tuple(torch.promote_types(x, torch.float32) for x in dtypes)
        specs |= {
            "codes": _Spec((n, bits // 4, D), (torch.uint8,)),
            "ranges": _Spec((n, 2, 2 * D // group(D)), (torch.float16,)),
            "exact": _Spec((x, 2, D), dtypes),
            "mean": _Spec((B * H, D), means),
            "error": _Spec((B, 2), low=0.0),
        }
    if (has_scores or policy.decode.needs_decode_attention) and not plan.keeps_everything:
        specs["scores"] = _Spec((n,), low=0.0)
    if grouped := merges and n != H * sum(prompt.lengths):
        # The logarithm of a group's weight; weights far from this would overflow.
        specs["bias"] = _Spec((n,), (torch.float16,), low=-32.0, high=32.0)
        specs["group_index"] = _Spec((B, H, None, -(-T // 8)), (torch.uint8,))
    if policy.score.ranks and "retained" in names:
        specs["retained"] = _Spec((B,), low=0.0, high=1.0)
    stored = _pop(tensors, start, specs)
    counts, position = stored["counts"].flatten().long(), stored["positions"].long()
    n_exact = int(counts.clamp(max=max(1, policy.sinks)).sum()) if plan.kv_dtype else 0
    if (int(counts.sum()), n_exact) != (n, x):
        raise ValueError(f"{start}counts sum to {int(counts.sum())} slots, but it has {n}")
    row = torch.arange(B * H).repeat_interleave(counts)
    batch = row // H
    order = row * 2 * T + ~prompt.protected[batch, position] * T + position
    n_required = torch.bincount(row[prompt.pinned[batch, position]], minlength=B * H)
    valid = prompt.valid[batch, position].all() & (order[1:] > order[:-1]).all()
    valid &= (n_required == torch.tensor(prompt.n_pinned).repeat_interleave(H)).all()
    if not bool(valid):
        raise ValueError(f"{start}positions are not kept tokens in stored order")
    if grouped:
        _check_groups(start, stored, row, prompt)
    return stored


def _check_groups(start: str, stored: dict[str, Tensor], row: Tensor, prompt: TokenMasks) -> None:
    """Check that kept tokens lead the groups, and that only groups have weights."""
    position, planes = stored["positions"].long(), stored["group_index"]
    T, w = prompt.valid.shape[1], planes.shape[2]
    if not 1 < w < T.bit_length() + 3:
        raise ValueError(f"{start}group_index has codes of {w} bits")
    leaders = GroupIndex(planes, T).leaders()
    group = leaders.flatten(0, 1)
    R, lead = len(group), group.clamp(min=0)
    is_lead = torch.zeros(R, T, dtype=torch.bool)
    is_lead[row, position] = True
    valid = is_lead.gather(-1, lead) & prompt.valid.repeat_interleave(R // len(prompt.valid), dim=0)
    same = GroupIndex.of(leaders).planes
    if not (same.equal(planes) and bool((valid | (group < 0)).all())):
        raise ValueError(f"{start}group_index names groups without a stored pair")
    sizes = torch.zeros(R, T, dtype=torch.int64).scatter_add_(-1, lead, (group >= 0).long())
    if bool((stored["bias"][sizes[row, position] < 2] != 0).any()):
        raise ValueError(f"{start}bias is not 0 for tokens in no group")


def _pop(tensors: dict[str, Tensor], start: str, specs: dict[str, _Spec]) -> dict[str, Tensor]:
    """Remove tensors whose names begin with `start`; return them, checked, by the rest."""
    names = [name for name in tensors if name.startswith(start)]
    popped = {name.removeprefix(start): tensors.pop(name) for name in names}
    if different := specs.keys() ^ popped.keys():
        raise ValueError(f"missing or unexpected: {start}{', '.join(sorted(different))[:60]}")
    for name, spec in specs.items():
        x = popped[name]
        fits = len(x.shape) == len(spec.shape) and all(
            n in (None, m) for n, m in zip(spec.shape, x.shape, strict=True)
        )
        if not fits or x.dtype not in spec.dtypes:
            dtypes = " or ".join(str(d).removeprefix("torch.") for d in spec.dtypes)
            shape = ", ".join("n" if n is None else str(n) for n in spec.shape)
            raise ValueError(
                f"{start}{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, "
                f"expected {dtypes} [{shape}]"
            )
        if not bool((x.isfinite() & (x >= spec.low) & (x <= spec.high)).all()):
            raise ValueError(
                f"{start}{name} has numbers that are not finite or not in [{spec.low}, {spec.high}]"
            )
    return popped


def _sliding_layers(cache: CompressedCache) -> dict[int, DynamicSlidingWindowLayer]:
    layers = enumerate(cache.layers)
    return {i: x for i, x in layers if isinstance(x, DynamicSlidingWindowLayer)}


def _plan(plan: CacheConfig) -> dict[str, Any]:
    """Return policy, options, budget and dtype as plain JSON values."""
    fields = {"policy": plan.policy.name, **plan.policy.flat()}
    fields |= {"budget": plan.budget, "kv_dtype": plan.kv_dtype}
    fields |= {} if plan.memory is None else {"memory": float(plan.memory.memory)}
    fields |= {} if plan.table is None else {"table": asdict(plan.table)}
    return json.loads(json.dumps(fields, default=str))


def _check_whole(model: Any) -> None:
    attachment = attachment_of(model)
    if (ranks := attachment.parts.ranks) > 1:
        raise ValueError(
            f"this model's heads are spread over {ranks} processes, each of which holds a part of "
            "a context: ask while it is in memory, or save and load it with the model in one "
            "process"
        )
