"""How a model is called: what may stand around it, and the name of the argument for its cache.

Both change with other libraries alone. This file needs none of the others: it is loaded by itself
beside older releases of transformers.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn
from transformers.generation.utils import GenerationMixin

# By class name: where they keep the model. A subclass counts as its base.
AROUND: dict[str, str] = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "PeftModel": "get_base_model",
}
# Adapters of PEFT that hand the model a cache of their own, by `peft_type`.
_PEFT_REFUSED = {"CARTRIDGE": "a cartridge", "PREFIX_TUNING": "prefix tuning"}


def unwrap_container(model: Any) -> Any:
    """The model inside what stands around it, or itself; refuse what is no model."""
    while isinstance(model, nn.Module):
        if (inside := _inside(model)) is None:
            return model
        model = inside
    raise ValueError(_no_model(model))


def _inside(model: nn.Module) -> Any:
    """What `model` stands around; None where it is a model of its own."""
    names = [cls.__name__ for cls in type(model).__mro__]
    where = next((AROUND[n] for n in names if n in AROUND), None)
    if where is None:
        return None
    inside = getattr(model, where)
    return inside if isinstance(inside, nn.Module) else inside()


def check_container(model: nn.Module) -> None:
    """Refuse what changes the cache on its way between the caller and the model."""
    outer: Any = model
    while outer is not None:
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
        outer = _inside(outer)


def _no_model(given: Any) -> str:
    """Why it cannot be wrapped, and what to call instead."""
    loading = "model = AutoModelForCausalLM.from_pretrained(...), then mmkv.wrap(model, ...)"
    if isinstance(given, str | os.PathLike):
        return f"mmkv takes a loaded model, not the path or name {os.fspath(given)!r}: {loading}"
    if isinstance(given, type):
        return f"mmkv takes a loaded model, not the class {given.__name__}: {loading}"
    name = type(given).__name__
    if isinstance(getattr(given, "model", None), nn.Module):
        return (
            f"mmkv takes a model, not the {name} around it: call mmkv.wrap(x.model, ...) on its "
            "model; it then generates with the compressed cache"
        )
    if isinstance(given, tuple) and any(isinstance(x, nn.Module) for x in given):
        return "mmkv takes the model alone: model, processor = ..., then mmkv.wrap(model, ...)"
    a = "an" if name[0].lower() in "aeiou" else "a"
    what = "None" if given is None else f"{a} {name}"
    return f"mmkv takes a loaded model, not {what}: {loading}"


# What transformers calls a cache: the second up to 5.23, the first from 5.24. Releases with the new
# name rename the old argument, with a warning, where a function begins: a hook still sees what the
# caller wrote. Models that are not of transformers may know one name alone.
_NAMES = ("cache", "past_key_values")


@cache
def _name(kind: type[Any], method: str = "forward") -> str | None:
    accepted = inspect.signature(getattr(kind, method)).parameters
    return next((name for name in _NAMES if name in accepted), None)


# In the arguments of `generate` and of its methods, and in what models return.
CACHE = _name(GenerationMixin, "prepare_inputs_for_generation") or _NAMES[0]


def passing(module: nn.Module, held: Any) -> dict[str, Any]:
    """A cache as the argument by which this model or decoder takes it."""
    return {_name(type(module)) or CACHE: held}


def without(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call but for the cache."""
    return {name: x for name, x in arguments.items() if name not in _NAMES}


def cache_in(found: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, or in what a model returned; None: there is none."""
    return next((found[name] for name in _NAMES if name in found), None)
