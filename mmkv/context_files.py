"""A context as a safetensors file: what its cache holds, and a header. All of it is checked.

What follows from the tokens read (masks, lengths, what is always kept) is not stored.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
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
# What a model is told of each token, and of each picture or film.
TOKENWISE = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_PAIRS = ("keys", "values", "positions", "scores", "bias", "group_index")
_ABOUT = {
    "version": int,
    "plan": str,
    "weights": str,
    "dtype": str,
    "roles": list,
    "pictures": list,
    "lead": str,
    "sizes": list,
    "task": str,
    "learned": list,
    "digest": str,
}
# The logarithm of a group's weight; weights far from this would overflow.
_MOST_BIAS = 32.0
# What a template may be asked to count, in a file.
_MOST_PICTURES = 10_000
_INTEGERS = (torch.int64, torch.int32)


def save(
    path: str | os.PathLike[str],
    model: Any,
    cache: CompressedCache,
    inputs: dict[str, Tensor],
    opened: dict[str, Any],
) -> None:
    """Write a context; `load` reads it. Arguments are those of `mmkv.Context`.

    Raises:
        ValueError: some layers have linear attention, heads are spread over processes, or the file
            cannot be written.
    """
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
        found = {name: getattr(dense, name) for name in _PAIRS}
        found |= {"retained": kept.retained, "error": kept.error}
        tensors |= {f"layers.{i}.{k}": x for k, x in found.items() if x is not None}
        sizes.append(kept.sizes)
    for i, window in windows.items():
        assert window.keys is not None
        assert window.values is not None
        tensors |= {f"windows.{i}.keys": window.keys, f"windows.{i}.values": window.values}
    about: dict[str, Any] = {
        "version": VERSION,
        "plan": _plan(cache),
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
    """What `save` was given beside the model, which read it.

    Raises:
        ValueError: no context, or one of another model, policy or budget, or a damaged one; the
            message names the file. Or the model's heads are spread over processes.
    """
    _check_whole(model)
    attachment = attachment_of(model)
    cache = CompressedCache(attachment.parts.config, attachment.plan)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = _about((file.metadata() or {}).get(FORMAT))
            _check_model(about, model, cache, attachment)
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
        known = about.pop("digest")
        if known != digest.of_tensors(tensors, json.dumps(about, sort_keys=True)):
            raise ValueError("damaged: its content is not what was written")
        opened = {name: tuple(about[name]) for name in ("roles", "pictures")}
        return *_restored(attachment, cache, about, tensors), {**opened, "lead": about["lead"]}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"context {os.fspath(path)}: unreadable: {error}") from None
    except ValueError as error:
        raise ValueError(f"context {os.fspath(path)}: {error}") from None


def _about(text: str | None) -> dict[str, Any]:
    """The header.

    Raises:
        ValueError: there is none, or it is not what `save` writes.
    """
    if text is None:
        raise ValueError("it holds no context")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else found
        raise ValueError(f"version {str(version)[:40]}, expected {VERSION}: read it again")
    if found.keys() != _ABOUT.keys():
        raise ValueError(f"its header has not the entries {', '.join(_ABOUT)}")
    for name, kind in _ABOUT.items():
        if type(found[name]) is not kind:
            raise ValueError(f"its header says {name}={str(found[name])[:40]}")
    roles, pictures = found["roles"], found["pictures"]
    chat = all(type(x) is str for x in roles) and all(type(x) is int and x >= 0 for x in pictures)
    if not chat or len(roles) != len(pictures) or sum(pictures) > _MOST_PICTURES:
        raise ValueError(f"its header says roles={str(roles)[:40]}, pictures={str(pictures)[:40]}")
    return found


def _check_model(
    about: dict[str, Any], model: Any, cache: CompressedCache, attachment: Attachment
) -> None:
    """Whether a context was read by this model under this wrap.

    Raises:
        ValueError: it was not; the message names the difference.
    """
    if about["plan"] != _plan(cache):
        raise ValueError(
            f"it was read with {_difference(about['plan'], _plan(cache))} now: wrap it as it was"
        )
    if about["dtype"] != str(model.dtype):
        raise ValueError(
            f"it was read in {about['dtype'][:40]}, and the model is in {model.dtype}: load the "
            "model in that dtype, or read it again"
        )
    if about["weights"] != digest.of_model(model, attachment.parts.config):
        raise ValueError("it was read by a model with other weights or adapters")


def _restored(
    attachment: Attachment,
    cache: CompressedCache,
    about: dict[str, Any],
    tensors: dict[str, Tensor],
) -> tuple[CompressedCache, dict[str, Tensor]]:
    """Cache and inputs of a context, from what a file holds.

    Raises:
        ValueError: it holds what no context does.
    """
    model, parts = attachment.model, attachment.parts
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
    cache.plan = _learned(cache.plan, about, L)
    if not _are_sizes(about["sizes"], L, prompt.lengths):
        raise ValueError(f"its header says sizes={str(about['sizes'])[:40]}")
    dtypes = _dtypes(model)
    for i, layer, sizes in zip(cache.ordinal, cache.compressed, about["sizes"], strict=True):
        found, (heads, dim) = _taken(tensors, f"layers.{i}."), parts.pair_shape(i)
        held = _pairs(f"layers.{i}", found, cache.plan, prompt, (B, heads, T, dim), dtypes)
        kept: Any = {name: x.to(device) for name, x in held.items()}
        retained, error = kept.pop("retained", None), kept.pop("error", None)
        pairs = PromptKV(**kept)
        if pairs.group_index is not None:
            pairs.weights = token_numbers(pairs.positions, pairs.group_index)
        with torch.no_grad():
            layer.state = evict(pairs, cache.plan, prompt.to(device), prompt.lengths, 0, i)
        layer.state.sizes, layer.state.retained, layer.state.error = sizes, retained, error
        layer.seen, layer.is_initialized = T, True
    for i, window in _windows(cache).items():
        found = _taken(tensors, f"windows.{i}.")
        (heads, dim), last = parts.pair_shape(i), min(T, window.sliding_window - 1)
        if found.keys() != {"keys", "values"}:
            raise ValueError(f"it lacks windows.{i}.keys or windows.{i}.values")
        keys, values = (
            _checked(f"windows.{i}.{name}", found[name], (B, heads, last, dim), dtypes).to(device)
            for name in ("keys", "values")
        )
        window.lazy_initialization(keys, values)
        window.keys, window.values, window.cumulative_length = keys, values, T
    if tensors:
        raise ValueError(f"it holds {min(tensors)[:60]!r}, which no context of this model does")
    cache.prompt, cache.phase, cache.sizes_learned = prompt.to(device), Decoding(), True
    inputs = {name: x.to(device) for name, x in inputs.items()}
    cache.ids = inputs["input_ids"]
    return cache, inputs


def _inputs(attachment: Attachment, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was read, token by token, and the grids of its pictures; taken from `tensors`.

    Raises:
        ValueError: not what a model is told, or not of tokens and pictures that go together.
    """
    model: Any = attachment.model
    found = _taken(tensors, "inputs.")
    ids = found.get("input_ids")
    if ids is None or ids.ndim != 2 or 0 in ids.shape or "attention_mask" not in found:
        raise ValueError("it lacks input_ids [B, T] or attention_mask")
    images = attachment.parts.image_token_ids
    words = max([model.get_input_embeddings().num_embeddings - 1, *images])
    most = {"input_ids": words, "attention_mask": 1}
    for name, x in found.items():
        if name in TOKENWISE:
            _checked(f"inputs.{name}", x, tuple(ids.shape), _INTEGERS, 0, most.get(name, 2))
        elif name == "second_per_grid_ts":
            _checked(f"inputs.{name}", x, (len(x),) if x.ndim else (1,), (torch.float32,), 1e-6)
        elif name in GRIDS:
            shape = (len(x), 3) if x.ndim else (1, 3)
            _checked(f"inputs.{name}", x, shape, _INTEGERS, 1)
        else:
            raise ValueError(f"it holds inputs.{name[:60]}, which no context does")
    there = torch.isin(ids, torch.tensor(images, dtype=ids.dtype))
    kinds = found.get("mm_token_type_ids")
    if kinds is not None and not torch.equal(kinds > 0, there):
        raise ValueError("inputs.mm_token_type_ids are not those of its pictures")
    grids = [row for name in GRIDS[:2] if name in found for row in found[name].tolist()]
    if grids or "image_grid_thw" in signature(type(model).forward).parameters:
        tokens, patches = int(there.sum()), sum(map(math.prod, grids))
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
    found: dict[str, Tensor],
    plan: CacheConfig,
    prompt: TokenMasks,
    shape: tuple[int, int, int, int],
    dtypes: tuple[torch.dtype, ...],
) -> dict[str, Tensor]:
    """The pairs that a layer keeps, checked.

    Args:
        layer: how their names begin.
        found: what the file holds of the layer.
        plan: under which it was read.
        prompt: what is known of the tokens.
        shape: B, H, T, D.
        dtypes: that keys and values may have.

    Raises:
        ValueError: they are not such as eviction leaves; the message names the tensor.
    """
    (B, H, T, D), policy = shape, plan.policy
    keys, positions = found.get("keys"), found.get("positions")
    if keys is None or positions is None:
        raise ValueError(f"it lacks {layer}.keys or {layer}.positions")
    U = keys.shape[2] if keys.ndim == 4 and 0 < keys.shape[2] <= T else "n"
    for name in ("keys", "values"):
        if name in found:
            _checked(f"{layer}.{name}", found[name], (B, H, U, D), dtypes)
    _checked(f"{layer}.positions", positions, (B, H, U), (torch.int64,), -1, T - 1)
    held, place = positions >= 0, positions.clamp(min=0)

    def at(mask: Tensor) -> Tensor:
        return mask[:, None].expand(-1, H, -1).gather(-1, place) & held

    ascend = (positions[..., 1:] > positions[..., :-1]) | ~held[..., :-1]
    always = at(prompt.always_kept).sum(-1) == torch.tensor(prompt.floors)[:, None]
    sound = ascend.all() & (at(prompt.valid) == held).all() & (always & held[..., -1]).all()
    whole = torch.tensor(prompt.lengths)[:, None] == held.sum(-1)
    if not bool(sound):
        raise ValueError(f"{layer}.positions are not those of tokens that are kept, ascending")

    merges = policy.merge is not None and policy.merge.weighted
    added = {"": False, "sum": True, "max": plan.evicts(prompt) or policy.score.repeats}[
        policy.score.turn_reduction
    ]
    scored = (added or policy.decode.needs_decode_attention) and not plan.keeps_everything
    expected = {"keys", "values", "positions"} | ({"scores"} if scored else set[str]())
    expected |= {"bias", "group_index"} if merges and not bool(whole.all()) else set[str]()
    expected |= {"error"} if plan.kv_dtype else set[str]()
    expected |= {"retained"} & found.keys() if policy.score.ranks else set[str]()
    if different := expected ^ found.keys():
        raise ValueError(f"{layer} has, or lacks, {', '.join(sorted(different))[:60]}")

    floats = (torch.float32,)
    for name, size, least, most in (
        ("scores", (B, H, U), 0.0, math.inf),
        ("bias", (B, H, U), -_MOST_BIAS, _MOST_BIAS),
        ("group_index", (B, H, T), -1, T - 1),
        ("retained", (B,), 0.0, 1.0),
        ("error", (B, 2), 0.0, math.inf),
    ):
        if name in found:
            kinds = (torch.int16, torch.int32) if name == "group_index" else floats
            _checked(f"{layer}.{name}", found[name], size, kinds, least, most)
    if merges and "bias" in found:
        group = found["group_index"].long()
        lead, grouped = group.clamp(min=0), group >= 0
        leads = torch.zeros(B, H, T + 1, dtype=torch.bool)
        leads.scatter_(-1, positions.masked_fill(~held, T), True)
        sound = (group.gather(-1, lead) == lead) & leads.gather(-1, lead) & prompt.valid[:, None]
        if not bool((sound | ~grouped).all()):
            raise ValueError(f"{layer}.group_index names groups that are not there")
        alone = token_numbers(positions, found["group_index"]) == 1
        if bool((found["bias"].masked_fill(~alone, 0.0) != 0).any()):
            raise ValueError(f"{layer}.bias weighs tokens that are in no group")
    return found


def _checked(
    name: str,
    x: Tensor,
    shape: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...],
    least: float = -math.inf,
    most: float = math.inf,
) -> Tensor:
    """A tensor as it is.

    Raises:
        ValueError: it has another shape or dtype, or numbers that are not finite or out of range.
    """
    if tuple(x.shape) != shape or x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(
            f"{name} is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, expected {wanted} "
            f"[{', '.join(map(str, shape))}]"
        )
    if x.numel() and not (x.isfinite().all() and bool((x >= least).all() & (x <= most).all())):
        raise ValueError(f"{name} holds numbers that are not finite or not in [{least}, {most}]")
    return x


def _taken(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names; they are taken out."""
    names = [name for name in tensors if name.startswith(start)]
    return {name.removeprefix(start): tensors.pop(name) for name in names}


def _are_sizes(sizes: list[Any], n_layers: int, lengths: list[int]) -> bool:
    """Whether they are a number of tokens for each layer and row of a prompt."""
    return len(sizes) == n_layers and all(
        isinstance(layer, list)
        and len(layer) == len(lengths)
        and all(type(n) is int and 0 < n <= most for n, most in zip(layer, lengths, strict=True))
        for layer in sizes
    )


def _learned(plan: CacheConfig, about: dict[str, Any], n_layers: int) -> CacheConfig:
    """The plan with the task of a context, and the layers' shares that were learned before it.

    Raises:
        ValueError: they are no shares, or nothing is learned under this plan.
    """
    task, shares = about["task"], about["learned"]
    sound = all(type(x) is float and 0 <= x <= 1 for x in shares)
    sound = sound and len(shares) in (0, n_layers) and math.isclose(sum(shares or [1.0]), 1.0)
    if not sound or (plan.sampling is None and (task or shares)):
        raise ValueError(f"its header says task={task[:40]!r}, learned={str(shares)[:40]}")
    return replace(plan, task=task, learned=tuple(shares) or None)


def _windows(cache: CompressedCache) -> dict[int, DynamicSlidingWindowLayer]:
    """The layers that hold their last tokens alone, as the model has it, by their index."""
    layers = enumerate(cache.layers)
    return {i: x for i, x in layers if isinstance(x, DynamicSlidingWindowLayer)}


def _dtypes(model: Any) -> tuple[torch.dtype, ...]:
    """What keys and values may be: of the model, or of autocast."""
    kind = model.device.type
    autocast = torch.is_autocast_enabled(kind)
    return (model.dtype, torch.get_autocast_dtype(kind)) if autocast else (model.dtype,)


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
    """The first entry in which two plans differ, and its values, which may be long.

    Raises:
        ValueError: the first is no plan.
    """
    try:
        before, now = json.loads(there), json.loads(here)
    except (ValueError, RecursionError):
        before = now = None
    if not isinstance(before, dict) or not isinstance(now, dict):
        raise ValueError(f"its header says plan={there[:40]}")
    names = [x for x in ("policy", "budget", *now, *before) if before.get(x) != now.get(x)]
    name = names[0] if names else "policy"
    old, new = (f"{name}={plan.get(name)}"[:60] for plan in (before, now))
    return f"{old}, and the model is wrapped with {new}"


def _check_whole(model: Any) -> None:
    attachment = attachment_of(model)
    if (ranks := attachment.parts.ranks) > 1:
        raise ValueError(
            f"this model's heads are spread over {ranks} processes, each of which holds a part of "
            "a context: ask while it is in memory, or save and load it with the model in one "
            "process"
        )
