"""Read a prompt once, ask about it many times: a compressed cache without its question.

    context = mmkv.read(model, inputs)
    reply = context.ask(question)

What `read` evicts, it evicts without knowing a question. Asking evicts nothing more: a question's
tokens, and the reply's as the policy has it, stand behind what is left, and the context stays as it
is for the next one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mmkv import adapters
from mmkv.attach.attachment import Attachment
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.dense import DenseKV
from mmkv.cache.evict import evict
from mmkv.cache.phases import Decoding
from mmkv.cache.token_masks import TokenMasks
from mmkv.report import CacheReport

FORMAT, VERSION = "mmkv-context", 1
_MASKS = ("valid", "image", "asked", "must", "protected")
_DENSE = ("keys", "values", "positions", "scores", "weights", "bias", "leaders")
_HOSTED = ("lengths", "windows", "floors", "anchored", "inner", "granted")
_SEEN = ("input_ids", "attention_mask")


class Context:
    """A prompt that was read, and what its compressed cache holds.

    Made by `mmkv.read` or `mmkv.load_context`.

    Attributes:
        model: the wrapped model that read it.
        cache: the `CompressedCache` it is held in.
        inputs: what was read, token by token [B, T], and the grids of its pictures.
    """

    def __init__(self, model: Any, cache: CompressedCache, inputs: dict[str, Tensor]) -> None:
        self.model = model
        self.cache = cache
        self.inputs = inputs

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values."""
        return self.cache.nbytes

    def report(self) -> CacheReport:
        """What the cache holds."""
        return self.cache.report()

    def ask(self, inputs: Mapping[str, Any], **options: Any) -> Any:
        """The model's reply to a question behind the context, which stays as it is.

        Args:
            inputs: what the processor or tokenizer makes of the question alone (without special
                tokens that begin a text), [Q, q], padded on the left; pictures where it has any. A
                context of one row answers Q questions at once.
            options: of `model.generate`.

        Returns:
            int64 [Q, n], the new tokens; with `return_dict_in_generate=True` what `generate` gives,
            whose `sequences` are the new tokens.

        Raises:
            ValueError: the context has several rows, and the questions are not as many; or the
                model was wrapped anew since.
        """
        given = self.behind(inputs)
        start = given["input_ids"].shape[1]
        out = self.model.generate(**given, **options)
        if isinstance(out, Tensor):
            return out[:, start:]
        out.sequences = out.sequences[:, start:]
        return out

    def behind(self, inputs: Mapping[str, Any], *, copied: bool = True) -> dict[str, Any]:
        """What `generate` is given for a question: among it a cache that keeps it whole.

        Args:
            inputs: as for `ask`.
            copied: whether the cache is a copy; if not, the context is used up.

        Raises:
            ValueError: as `ask`.
        """
        cache = copy.deepcopy(self.cache) if copied else self.cache
        cache.evicts_turns = False
        return {**self._behind(inputs, cache), "past_key_values": cache}

    def append(self, inputs: Mapping[str, Any], *, prefill_chunk_size: int | None = None) -> None:
        """Read on: more pages, more frames, which compete with what is held under the same budget.

        Args:
            inputs: as for `ask`, one row for each of the context.
            prefill_chunk_size: how many tokens to read at a time; None: all at once.

        Raises:
            ValueError: another number of rows.
        """
        given = self._behind(inputs, self.cache)
        self.cache = _read(self.model, given, prefill_chunk_size, past_key_values=self.cache)
        self.inputs = _lasting(given)

    def _behind(self, inputs: Mapping[str, Any], cache: CompressedCache) -> dict[str, Any]:
        """What `generate` is given: all tokens seen with the new ones, and the new pictures."""
        more = _tensors(inputs, self.model.device)
        rows, asked = len(self.inputs["input_ids"]), len(more["input_ids"])
        before = self.inputs
        if rows != asked and (rows != 1 or cache is self.cache):
            raise ValueError(
                f"{asked} rows behind a context of {rows}: give one row for each of the context's"
                + ("" if cache is self.cache else ", or read one row and ask many questions")
            )
        grids = [name for name in more if _is_grid(name)]
        if grids and (rows > 1 or asked > 1):
            raise ValueError(
                f"{grids[0]} for {asked} rows behind a context of {rows}: with pictures in the "
                "question, ask one row at a time"
            )
        if asked != rows:
            cache.batch_repeat_interleave(asked)
            before = {name: torch.cat([x] * asked) for name, x in before.items()}
        given: dict[str, Any] = dict(more)
        if grids:
            given |= _features(self.model, given)
        for name, old in before.items():
            if _is_grid(name):
                given[name] = torch.cat([old, more[name]]) if name in more else old
            else:
                new = more.get(name)
                if new is None:
                    new = old.new_zeros(more["input_ids"].shape)
                given[name] = torch.cat([old, new], dim=1)
        return given

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the context to a safetensors file; `mmkv.load_context` reads it.

        Raises:
            ValueError: some layers (sliding, linear attention) have a cache of their own, or heads
                are spread over processes.
        """
        _check_whole(self.model)
        cache, prompt = self.cache, self.cache.prompt
        assert prompt is not None
        if len(cache.compressed) != len(cache.layers):
            raise ValueError(
                "a context of a model with sliding-window or linear-attention layers cannot be "
                "saved: their caches are the model's own"
            )
        tensors = {f"inputs.{name}": x for name, x in self.inputs.items()}
        tensors |= {f"prompt.{name}": getattr(prompt, name) for name in _MASKS}
        sizes: list[list[int]] = []
        for i, layer in enumerate(cache.compressed):
            kept = layer.keeping()
            held = kept.dense()
            found = {name: getattr(held, name) for name in _DENSE}
            found |= {"retained": kept.retained, "error": kept.error}
            tensors |= {f"layers.{i}.{k}": x for k, x in found.items() if x is not None}
            sizes.append(kept.sizes)
        about = {
            "version": VERSION,
            "plan": _plan(cache),
            "weights": _digest(self.model),
            "seen": cache.get_seq_length(),
            **{name: getattr(prompt, name) for name in _HOSTED},
            "sizes": sizes,
            "task": cache.plan.task,
            "learned": cache.plan.learned or [],
        }
        held = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        save_file(held, os.fspath(path), {FORMAT: json.dumps(about)})


def read(
    model: nn.Module, inputs: Mapping[str, Any], *, prefill_chunk_size: int | None = None
) -> Context:
    """Read a prompt without its question into a compressed cache, to ask about it many times.

    Args:
        model: a wrapped model.
        inputs: what its processor returns for the prompt: input_ids [B, N], attention_mask, and
            pixel values and all else that belongs to pictures.
        prefill_chunk_size: how many tokens to read at a time; None: all at once.

    Raises:
        ValueError: the model is not wrapped, or there are no input_ids.
    """
    inner = _wrapped(model)
    attachment: Attachment = vars(inner)["_mmkv"]
    cache = CompressedCache(attachment.parts.config, attachment.plan)
    return read_into(cache, inner, inputs, prefill_chunk_size)


def read_into(
    cache: CompressedCache, model: Any, inputs: Mapping[str, Any], chunk: int | None
) -> Context:
    """As `read`, into an empty cache, which may have a plan of its own.

    Raises:
        ValueError: as `read`.
    """
    if postpone := cache.plan.policy.postpone:
        raise ValueError(
            f"postpone={postpone} waits for generated tokens, and a context is read without any: "
            "wrap the model with postpone=0"
        )
    given = _tensors(inputs, model.device)
    return Context(model, _read(model, given, chunk, past_key_values=cache), _lasting(given))


def load_context(path: str | os.PathLike[str], model: nn.Module) -> Context:
    """Read a context from a file that `Context.save` wrote.

    Args:
        path: the file. Nothing in it is run.
        model: the model that read it, wrapped in the same way.

    Raises:
        ValueError: no context, or one of another model, policy or budget; the message names the
            file. Or the model's heads are spread over processes.
    """
    inner = _wrapped(model)
    _check_whole(inner)
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            about = _about((file.metadata() or {}).get(FORMAT))
            names: list[str] = list(file.keys())
            tensors = {name: file.get_tensor(name).to(inner.device) for name in names}
        return _restored(inner, about, tensors)
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"context {os.fspath(path)}: unreadable: {error}") from None
    except ValueError as error:
        raise ValueError(f"context {os.fspath(path)}: {error}") from None


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


def _about(text: str | None) -> dict[str, Any]:
    """The header of a file, checked.

    Raises:
        ValueError: there is none, or it is not what `Context.save` writes.
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
    rows = {len(found[name]) for name in _HOSTED}
    rows |= {len(x) for x in found["sizes"]}
    if len(rows) != 1 or 0 in rows:
        raise ValueError("its header does not say the same number of rows everywhere")
    return found


def _restored(model: Any, about: dict[str, Any], tensors: dict[str, Tensor]) -> Context:
    """A context from what a file holds.

    Raises:
        ValueError: it is another model's, or was made under another wrap.
        KeyError: a tensor is missing.
    """
    attachment: Attachment = vars(model)["_mmkv"]
    cache = CompressedCache(attachment.parts.config, attachment.plan)
    if about["plan"] != _plan(cache):
        raise ValueError(
            f"it was read with {_difference(about['plan'], _plan(cache))} now: wrap it as it was"
        )
    if about["weights"] != _digest(model):
        raise ValueError("it was read by a model with other weights")
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
    masks = {name: tensors[f"prompt.{name}"] for name in _MASKS}
    for name, x in {**{n: inputs[n] for n in _SEEN}, **masks}.items():
        if x.shape != (B, T) or (name in _MASKS and x.dtype != torch.bool):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected [{B}, {T}]")
    hosted = {name: about[name] for name in _HOSTED}
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
        held = DenseKV(**{k: found[k] for k in _DENSE})  # type: ignore[arg-type]
        with torch.no_grad():
            layer.state = evict(held, cache.plan, prompt, prompt.lengths, 0, i)
        layer.state.sizes = sizes
        layer.state.retained, layer.state.error = found["retained"], found["error"]
        layer.seen, layer.is_initialized = T, True
    cache.prompt, cache.phase = prompt, Decoding()
    return Context(model, cache, inputs)


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
    """What tells weights apart: a hash of 64 numbers of each of the decoder's tensors."""
    attachment: Attachment = vars(model)["_mmkv"]
    found = hashlib.sha256()
    for name, x in attachment.parts.decoder.state_dict().items():
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        some = x.detach().flatten()[:: max(1, x.numel() // 64)][:64].cpu()
        found.update(some.float().numpy().tobytes())
    return found.hexdigest()


def _read(model: Any, given: dict[str, Any], chunk: int | None, **more: Any) -> CompressedCache:
    """The cache of a prompt, or of one with more behind it."""
    out = model.generate(
        **given,
        **more,
        max_new_tokens=1,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=True,
        prefill_chunk_size=chunk,
    )
    cache = out.past_key_values
    cache.max_length = 0
    return cache


def _check_whole(model: Any) -> None:
    attachment: Attachment = vars(model)["_mmkv"]
    if (ranks := attachment.parts.ranks) > 1:
        raise ValueError(
            f"this model's heads are spread over {ranks} processes, each of which holds a part of "
            "a context: ask while it is in memory, or save and load it with the model in one "
            "process"
        )


def _wrapped(model: nn.Module) -> Any:
    inner = adapters.innermost(model)
    if "_mmkv" not in vars(inner):
        raise ValueError(
            f"this {type(inner).__name__} is not wrapped: call mmkv.wrap(model, ...) first"
        )
    return inner


@torch.no_grad()
def _features(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the vision tower makes of new pictures with grids (Qwen), which it is not given then.

    Positions need the grids of all pictures seen, the tower those of the new ones.
    """
    found: dict[str, Any] = {}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels in given:
            encode = getattr(model, f"get_{kind}_features")
            grid = given[f"{kind}_grid_thw"]
            found[kind] = encode(given.pop(pixels), grid, return_dict=True)
    return {"mm_encoder_outputs": found} if found else {}


def _tensors(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Model inputs on the model's device, with a mask."""
    found = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    if "input_ids" not in found:
        raise ValueError(f"there are no input_ids among {sorted(inputs)}")
    if found["input_ids"].ndim != 2:
        shape = tuple(found["input_ids"].shape)
        raise ValueError(f"input_ids of shape {shape}: expected [B, N]")
    found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
    return found


def _lasting(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """What later turns must be told: all that goes token by token, and grids of pictures."""
    shape = given["input_ids"].shape
    tensors = {k: x for k, x in given.items() if isinstance(x, Tensor)}
    return {k: x for k, x in tensors.items() if x.shape == shape or _is_grid(k)}


def _is_grid(name: str) -> bool:
    return name.endswith("grid_thw")
