"""What may stand around a model and call it: PEFT, torch.compile, DataParallel."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

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
    """The model inside what stands around it (PEFT, torch.compile, DataParallel), or itself.

    Raises:
        ValueError: no model; the message says what to call instead.
    """
    while isinstance(model, nn.Module):
        inside = _inside(model)
        if inside is None:
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
    """Refuse what changes the cache on its way between the caller and the model.

    Raises:
        ValueError: an adapter of PEFT with a cache of its own, or a DataParallel over devices.
    """
    outer: Any = model
    while outer is not None:
        name = type(outer).__name__
        kind = getattr(getattr(outer, "active_peft_config", None), "peft_type", None)
        why = None if kind is None else _PEFT_REFUSED.get(kind)
        if why is not None:
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
