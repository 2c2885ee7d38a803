"""A context as a safetensors file: what its cache holds, and a header. All of it is checked.

What follows from the tokens read (masks, lengths, what is always kept) is not stored.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from mmkv import digest
from mmkv.attach.attachment import Attachment, attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.evict import evict
from mmkv.cache.phases import Decoding
from mmkv.cache.prompt_kv import PromptKV, token_numbers
from mmkv.cache.token_masks import TokenMasks

FORMAT, VERSION = "mmkv-context", 3
_TEXTS = ("plan", "weights", "dtype", "lead", "task", "digest")
_LISTS = ("roles", "pictures", "sizes", "learned")
_ABOUT = {"version": int} | dict.fromkeys(_TEXTS, str) | dict.fromkeys(_LISTS, list)
# What a template may be asked to count, in a file.
_MOST_PICTURES = 10_000


@dataclass(frozen=True)
class _Kind:
    """What a tensor of a file must be: its shape, None for any length; types; range."""

    shape: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    least: float = -math.inf
    most: float = math.inf


_INTEGERS = (torch.int64, torch.int32)
# What a model is told of each token, [B, T], up to which number (that of ids is the model's).
TOKENWISE = {"input_ids": 0, "attention_mask": 1, "token_type_ids": 2, "mm_token_type_ids": 2}
# What it is told of each picture or film.
GRIDS = {
    "image_grid_thw": _Kind((None, 3), _INTEGERS, 1),
    "video_grid_thw": _Kind((None, 3), _INTEGERS, 1),
    "second_per_grid_ts": _Kind((None,), least=1e-6),
}


def save(
    path: str | os.PathLike[str],
    model: Any,
    cache: CompressedCache,
    inputs: dict[str, Tensor],
    opened: dict[str, Any],
) -> None:
    """Write a context; `load` reads it. Arguments are those of `mmkv.Context`."""
    _check_whole(model)
    windows = _windows(cache)
    if len(cache.compressed) + len(windows) != len(cache.layers):
        raise ValueError(
            "a context of a model with linear-attention layers cannot be saved: ask while it is "
            "in memory"
        )
    tensors = {f"inputs.{name}": x for name, x in inputs.items()}
    sizes: list[list[int]] = []
    for i, layer in zip(cache.ordinal, cache.compressed, strict=True):
        kept = layer.keeping()
        dense = kept.dense()
        pairs = ("keys", "values", "positions", "scores", "bias", "group_index")
        found = {name: getattr(dense, name) for name in pairs}
        found |= {"retained": kept.retained, "error": kept.error}
        tensors |= {f"layers.{i}.{k}": x for k, x in found.items() if x is not None}
        sizes.append(kept.sizes)
    for i, window in windows.items():
        both: Any = {"keys": window.keys, "values": window.values}
        tensors |= {f"windows.{i}.{k}": x for k, x in both.items()}
    about: dict[str, Any] = {
        "version": VERSION,
        "plan": _plan(cache.plan),
        "weights": digest.of_model(model, attachment_of(model).parts.config),
        "dtype": str(model.dtype),
        **opened,
        "sizes": sizes,
        "task": cache.plan.task,
        "learned": cache.plan.learned or [],
    }
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    about["digest"] = digest.of_tensors(tensors, json.dumps(about, sort_keys=True))
    try:
        save_file(tensors, os.fspath(path), {FORMAT: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"context {os.fspath(path)}: cannot be written: {error}") from None


def load(
    path: str | os.PathLike[str], model: Any
) -> tuple[CompressedCache, dict[str, Tensor], dict[str, Any]]:
    """What `save` was given beside the model, which read it; errors name the file."""
    _check_whole(model)
    attachment = attachment_of(model)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = _about((file.metadata() or {}).get(FORMAT))
            _check_model(about, attachment)
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        known = about.pop("digest")
        if known != digest.of_tensors(tensors, json.dumps(about, sort_keys=True)):
            raise ValueError("damaged: its content is not what was written")
        opened = {name: tuple(about[name]) for name in ("roles", "pictures")}
        return *_restored(attachment, about, tensors), {**opened, "lead": about["lead"]}
    except (OSError, SafetensorError, ValueError) as error:
        what = "" if isinstance(error, ValueError) else "unreadable: "
        raise ValueError(f"context {os.fspath(path)}: {what}{error}") from None


def _about(text: str | None) -> dict[str, Any]:
    """The header of a file, from its text."""
    if text is None:
        raise ValueError("it holds no context")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    version = found.get("version") if isinstance(found, dict) else found
    if version != VERSION:
        raise ValueError(f"version {str(version)[:40]}, expected {VERSION}: read it again")
    if found.keys() != _ABOUT.keys():
        raise ValueError(f"its header has not the entries {', '.join(_ABOUT)}")
    if wrong := [name for name, kind in _ABOUT.items() if type(found[name]) is not kind]:
        raise _wrong(found, *wrong)
    roles, pictures = found["roles"], found["pictures"]
    chat = all(type(x) is str for x in roles) and all(type(x) is int and x >= 0 for x in pictures)
    if not chat or len(roles) != len(pictures) or sum(pictures) > _MOST_PICTURES:
        raise _wrong(found, "roles", "pictures")
    return found


def _wrong(about: dict[str, Any], *names: str) -> ValueError:
    said = ", ".join(f"{name}={str(about[name])[:40]}" for name in names)
    return ValueError(f"its header says {said}")


def _check_model(about: dict[str, Any], attachment: Attachment) -> None:
    """Whether a context was read by this model under this wrap."""
    model: Any = attachment.model
    if about["dtype"] != str(model.dtype):
        raise ValueError(
            f"it was read in {about['dtype'][:40]}, and the model is in {model.dtype}: load the "
            "model in that dtype, or read it again"
        )
    if about["weights"] != digest.of_model(model, attachment.parts.config):
        raise ValueError(
            "it was read by a model with other weights or adapters: load that model (--model)"
        )
    here, before = _plan(attachment.plan), None
    if about["plan"] != here:
        with suppress(ValueError, RecursionError):
            before = json.loads(about["plan"])
        if not isinstance(before, dict):
            raise _wrong(about, "plan")
        now = json.loads(here)
        names = [x for x in ("policy", "budget", *now, *before) if before.get(x) != now.get(x)]
        name = names[0] if names else "policy"
        old, new = (f"{name}={plan.get(name)}"[:60] for plan in (before, now))
        raise ValueError(
            f"it was read with {old}, and the model is wrapped with {new} now: wrap it as it was"
        )


def _restored(
    attachment: Attachment, about: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[CompressedCache, dict[str, Tensor]]:
    """Cache and inputs of a context, from what a file holds."""
    model, parts = attachment.model, attachment.parts
    cache = CompressedCache(parts.config, attachment.plan)
    device: torch.device = model.device  # type: ignore[assignment]
    inputs = _inputs(attachment, tensors)
    ids, L = inputs["input_ids"], len(cache.compressed)
    B, T = ids.shape
    images = torch.tensor(parts.image_token_ids, dtype=ids.dtype)
    prompt = TokenMasks.of(
        cache.plan.policy,
        inputs["attention_mask"].bool(),
        torch.isin(ids, images) if len(images) else None,
        budget=cache.plan.budget,
        n_layers=L,
    )
    prompt.check_ends()
    _check_sizes(about, cache.plan, L, prompt.lengths)
    cache.plan = replace(cache.plan, task=about["task"], learned=tuple(about["learned"]) or None)
    dtypes: tuple[torch.dtype, ...] = (model.dtype,)  # type: ignore[assignment]
    if torch.is_autocast_enabled(device.type):
        dtypes += (torch.get_autocast_dtype(device.type),)
    for i, layer, sizes in zip(cache.ordinal, cache.compressed, about["sizes"], strict=True):
        heads, dim = parts.pair_shape(i)
        found = _pairs(f"layers.{i}.", tensors, cache.plan, prompt, (B, heads, T, dim), dtypes)
        kept: Any = {name: x.to(device) for name, x in found.items()}
        retained, error = kept.pop("retained", None), kept.pop("error", None)
        pairs = PromptKV(**kept)
        if pairs.group_index is not None:
            pairs.weights = token_numbers(pairs.positions, pairs.group_index)
        with torch.no_grad():
            layer.state = evict(pairs, cache.plan, prompt.to(device), prompt.lengths, 0, i)
        layer.state.sizes, layer.state.retained, layer.state.error = sizes, retained, error
        layer.seen, layer.is_initialized = T, True
    for i, window in _windows(cache).items():
        (heads, dim), last = parts.pair_shape(i), min(T, window.sliding_window - 1)
        kind = _Kind((B, heads, last, dim), dtypes)
        found = _taken(tensors, f"windows.{i}.", {"keys": kind, "values": kind})
        keys, values = found["keys"].to(device), found["values"].to(device)
        window.lazy_initialization(keys, values)
        window.keys, window.values, window.cumulative_length = keys, values, T
    if tensors:
        raise ValueError(f"it holds {min(tensors)[:60]!r}, which no context of this model does")
    cache.prompt, cache.phase, cache.sizes_learned = prompt.to(device), Decoding(), True
    inputs = {name: x.to(device) for name, x in inputs.items()}
    cache.ids = inputs["input_ids"]
    return cache, inputs


def _check_sizes(
    about: dict[str, Any], plan: CacheConfig, n_layers: int, lengths: list[int]
) -> None:
    """Check the header's tokens of each layer and row, and shares of layers learned of a task."""
    sizes, shares = about["sizes"], about["learned"]
    if [isinstance(x, list) and len(x) for x in sizes] != [len(lengths)] * n_layers or not all(
        type(n) is int and 0 < n <= most
        for layer in sizes
        for n, most in zip(layer, lengths, strict=True)
    ):
        raise _wrong(about, "sizes")
    sound = all(type(x) is float and 0 <= x <= 1 for x in shares)
    sound = sound and len(shares) in (0, n_layers) and math.isclose(sum(shares or [1.0]), 1.0)
    if not sound or (plan.sampling is None and (about["task"] or shares)):
        raise _wrong(about, "task", "learned")


def _inputs(attachment: Attachment, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was read, token by token, and the grids of its pictures; taken from `tensors`."""
    model: Any = attachment.model
    images = attachment.parts.image_token_ids
    there = {x.removeprefix("inputs.") for x in tensors if x.startswith("inputs.")}
    ids = tensors.get("inputs.input_ids", torch.empty(0))
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError("it lacks input_ids [B, T]")
    words = max([model.get_input_embeddings().num_embeddings - 1, *images])
    kinds = {k: _Kind(tuple(ids.shape), _INTEGERS, 0, most) for k, most in TOKENWISE.items()}
    kinds = {**kinds, "input_ids": replace(kinds["input_ids"], most=words), **GRIDS}
    there |= {"attention_mask"}
    found = _taken(tensors, "inputs.", {k: x for k, x in kinds.items() if k in there})
    pictured = torch.isin(ids, torch.tensor(images, dtype=ids.dtype))
    types = found.get("mm_token_type_ids")
    if types is not None and not torch.equal(types > 0, pictured):
        raise ValueError("inputs.mm_token_type_ids are not those of its pictures")
    names = ("image_grid_thw", "video_grid_thw")
    grids = [row for name in names if name in found for row in found[name].tolist()]
    if grids or "image_grid_thw" in signature(type(model).forward).parameters:
        tokens, patches = int(pictured.sum()), sum(map(math.prod, grids))
        vision = getattr(model.config, "vision_config", None)
        merged: int = getattr(vision, "spatial_merge_size", 0) ** 2
        if patches != tokens * merged:
            raise ValueError(f"its grids have {patches} patches for {tokens} tokens of pictures")
    if grids:
        given = {name: x.to(model.device) for name, x in found.items()}
        try:
            model._prepare_position_ids_for_generation(given["input_ids"], given)
        except Exception as error:  # of models, which meet wrong grids with errors of every type
            why = " ".join(str(error).split())
            raise ValueError(f"its grids are not those of its pictures: {why}") from None
    return found


def _pairs(
    layer: str,
    tensors: dict[str, Tensor],
    plan: CacheConfig,
    prompt: TokenMasks,
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, ...],
) -> dict[str, Tensor]:
    """The pairs that a layer keeps, checked; taken from `tensors`. The shape is B, H, T, D."""
    (B, H, T, D), policy = shape, plan.policy
    positions = tensors.get(f"{layer}positions", torch.empty(0))
    U = min(max(1, positions.shape[-1]), T) if positions.ndim else 1
    n_kept = int((positions >= 0).sum()) if positions.dtype == torch.int64 else 0
    added = {"": False, "sum": True, "max": plan.evicts(prompt) or policy.score.repeats}[
        policy.score.turn_reduction
    ]
    kinds = {
        "keys": _Kind((B, H, U, D), dtypes),
        "values": _Kind((B, H, U, D), dtypes),
        "positions": _Kind((B, H, U), (torch.int64,), -1, T - 1),
    }
    if (added or policy.decode.needs_decode_attention) and not plan.keeps_everything:
        kinds["scores"] = _Kind((B, H, U), least=0.0)
    merges = policy.merge is not None and policy.merge.weighted
    if grouped := merges and n_kept != H * sum(prompt.lengths):
        # The logarithm of a group's weight; weights far from this would overflow.
        kinds["bias"] = _Kind((B, H, U), least=-32.0, most=32.0)
        kinds["group_index"] = _Kind((B, H, T), (torch.int16, torch.int32), -1, T - 1)
    if plan.kv_dtype:
        kinds["error"] = _Kind((B, 2), least=0.0)
    if policy.score.ranks and f"{layer}retained" in tensors:
        kinds["retained"] = _Kind((B,), least=0.0, most=1.0)
    found = _taken(tensors, layer, kinds)
    held, place = positions >= 0, positions.clamp(min=0)

    def at(mask: Tensor) -> Tensor:
        return mask[:, None].expand(-1, H, -1).gather(-1, place) & held

    ascend = (positions[..., 1:] > positions[..., :-1]) | ~held[..., :-1]
    always = at(prompt.always_kept).sum(-1) == torch.tensor(prompt.floors)[:, None]
    sound = ascend.all() & (at(prompt.valid) == held).all() & (always & held[..., -1]).all()
    if not bool(sound):
        raise ValueError(f"{layer}positions are not those of tokens that are kept, ascending")
    if grouped:
        group = found["group_index"].long()
        lead = group.clamp(min=0)
        leads = torch.zeros(B, H, T + 1, dtype=torch.bool)
        leads.scatter_(-1, positions.masked_fill(~held, T), True)
        sound = (group.gather(-1, lead) == lead) & leads.gather(-1, lead) & prompt.valid[:, None]
        if not bool((sound | (group < 0)).all()):
            raise ValueError(f"{layer}group_index names groups that are not there")
        alone = token_numbers(positions, group) == 1
        if bool((found["bias"].masked_fill(~alone, 0.0) != 0).any()):
            raise ValueError(f"{layer}bias weighs tokens that are in no group")
    return found


def _taken(tensors: dict[str, Tensor], start: str, kinds: dict[str, _Kind]) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names; they are taken out."""
    names = [name for name in tensors if name.startswith(start)]
    found = {name.removeprefix(start): tensors.pop(name) for name in names}
    if different := kinds.keys() ^ found.keys():
        raise ValueError(f"it has, or lacks, {start}{', '.join(sorted(different))[:60]}")
    for name, kind in kinds.items():
        x = found[name]
        fits = len(x.shape) == len(kind.shape) and all(
            n in (None, m) for n, m in zip(kind.shape, x.shape, strict=True)
        )
        if not fits or x.dtype not in kind.dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in kind.dtypes)
            shape = ", ".join("n" if n is None else str(n) for n in kind.shape)
            raise ValueError(
                f"{start}{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, "
                f"expected {wanted} [{shape}]"
            )
        if not bool((x.isfinite() & (x >= kind.least) & (x <= kind.most)).all()):
            raise ValueError(
                f"{start}{name} holds numbers that are not finite or not in [{kind.least}, "
                f"{kind.most}]"
            )
    return found


def _windows(cache: CompressedCache) -> dict[int, DynamicSlidingWindowLayer]:
    """The layers that hold their last tokens alone, as the model has it, by their index."""
    layers = enumerate(cache.layers)
    return {i: x for i, x in layers if isinstance(x, DynamicSlidingWindowLayer)}


def _plan(plan: CacheConfig) -> str:
    """Policy with all its options, budget and type, as one line."""
    known = {"policy": plan.policy.name, **plan.policy.flat()}
    known |= {"budget": plan.budget, "kv_dtype": plan.kv_dtype}
    return json.dumps(known, default=str, sort_keys=True)


def _check_whole(model: Any) -> None:
    attachment = attachment_of(model)
    if (ranks := attachment.parts.ranks) > 1:
        raise ValueError(
            f"this model's heads are spread over {ranks} processes, each of which holds a part of "
            "a context: ask while it is in memory, or save and load it with the model in one "
            "process"
        )
