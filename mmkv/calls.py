"""Find a model inside its containers, copy it, and name its argument for the cache.

All depend on other libraries alone. This file imports no other file of mmkv, as it is also loaded
by itself, with older releases of transformers.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.generation.utils import GenerationMixin

# Attribute or method that returns the model, by class name; a subclass counts as its base.
AROUND: dict[str, str] = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "PeftModel": "get_base_model",
}
# Adapters of PEFT that hand the model a cache of their own, by `peft_type`.
_PEFT_REFUSED = {"CARTRIDGE": "a cartridge", "PREFIX_TUNING": "prefix tuning"}


def unwrap_container(model: Any) -> Any:
    """Return the model inside its containers, or the model itself; refuse other objects."""
    while isinstance(model, nn.Module):
        if (inner := _inside(model)) is None:
            return model
        model = inner
    raise ValueError(_no_model(model))


def _from_outside(model: nn.Module) -> Iterator[Any]:
    """Yield the containers of a model, the outermost first, and then the model inside."""
    outer: Any = model
    while outer is not None:
        yield outer
        outer = _inside(outer)


def _inside(model: nn.Module) -> Any:
    """Return the model inside one container; None if `model` is no container."""
    names = [cls.__name__ for cls in type(model).__mro__]
    attribute = next((AROUND[n] for n in names if n in AROUND), None)
    if attribute is None:
        return None
    inner = getattr(model, attribute)
    return inner if isinstance(inner, nn.Module) else inner()


def twin(model: Any) -> Any:
    """Return a copy of the model that shares its weights, and can be wrapped independently."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def check_container(model: nn.Module) -> None:
    """Refuse containers that change the cache between the caller and the model."""
    for outer in _from_outside(model):
        name = type(outer).__name__
        kind: Any = getattr(getattr(outer, "active_peft_config", None), "peft_type", None)
        if why := _PEFT_REFUSED.get(kind):
            raise ValueError(
                f"mmkv cannot wrap a {name} with {why} as its adapter, which hands the model a "
                "cache of its own: use another, such as LoRA"
            )
        if name == "DataParallel" and len(outer.device_ids) > 1:
            raise ValueError(
                f"mmkv cannot wrap a DataParallel over {len(outer.device_ids)} devices, which "
                "cannot gather their caches: call mmkv.wrap(model.module, ...) and model.module"
            )


def refuse_soft_prompt(model: Any) -> None:
    """Refuse a model in a PEFT container that puts a trained prompt before each prompt."""
    for outer in _from_outside(model):
        config: Any = getattr(outer, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"a context cannot include the trained prompt of {config.peft_type.value} (PEFT), "
                "which PEFT adds in `generate`: call model.generate(...) on the whole prompt"
            )


def _no_model(value: Any) -> str:
    """Return why an object cannot be wrapped, and what to call instead."""
    loading = "model = AutoModelForCausalLM.from_pretrained(...), then mmkv.wrap(model, ...)"
    if isinstance(value, str | os.PathLike):
        return f"mmkv takes a loaded model, not the path or name {os.fspath(value)!r}: {loading}"
    if isinstance(value, type):
        return f"mmkv takes a loaded model, not the class {value.__name__}: {loading}"
    name = type(value).__name__
    if isinstance(getattr(value, "model", None), nn.Module):
        return (
            f"mmkv takes a model, not the {name} around it: call mmkv.wrap(x.model, ...) on its "
            "model; it then generates with the compressed cache"
        )
    if isinstance(value, tuple) and any(isinstance(x, nn.Module) for x in value):
        return "mmkv takes the model alone: model, processor = ..., then mmkv.wrap(model, ...)"
    a = "an" if name[0].lower() in "aeiou" else "a"
    what = "None" if value is None else f"{a} {name}"
    return f"mmkv takes a loaded model, not {what}: {loading}"


_RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))


def reads_chunks(kv_cache: Any, pictures: bool) -> bool:
    """Return whether `generate` can read a prompt in chunks, after a cache's tokens if it has any.

    Before 5.23 it does not look at pictures in chunks, and before 5.21 it reads the chunks of a
    later turn wrongly.
    """
    continues = kv_cache is not None and kv_cache.get_seq_length() > 0
    return (5, 23 if pictures else 21 if continues else 0) <= _RELEASE


def has_pictures(inputs: Mapping[str, Any]) -> bool:
    """Return whether there are pixels, or what encodes them, among a model's inputs."""
    pixels = (isinstance(x, Tensor) and x.is_floating_point() for x in inputs.values())
    return inputs.get("mm_encoder_outputs") is not None or any(pixels)


# Names of the cache in transformers: the second up to 5.23, the first from 5.24. From 5.24 on, the
# old argument is renamed, with a warning, at the start of a function: a hook still sees what the
# caller wrote. Models that are not of transformers may accept only one name.
_NAMES = ("cache", "past_key_values")


@cache
def _name(kind: type[Any], method: str = "forward") -> str | None:
    accepted = inspect.signature(getattr(kind, method)).parameters
    return next((name for name in _NAMES if name in accepted), None)


# The name in arguments of `generate` and of its methods, and in outputs of models.
CACHE = _name(GenerationMixin, "prepare_inputs_for_generation") or _NAMES[0]


def passing(module: nn.Module, kv_cache: Any) -> dict[str, Any]:
    """Return the cache as a keyword argument of this model or decoder."""
    return {_name(type(module)) or CACHE: kv_cache}


def without(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the cache."""
    return {name: x for name, x in arguments.items() if name not in _NAMES}


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache in a call's arguments or in a model's output; None if there is none."""
    return next((arguments[name] for name in _NAMES if name in arguments), None)
