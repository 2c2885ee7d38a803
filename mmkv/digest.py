"""Hashes: of what tells models apart, adapters that are active included, and of tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def of_model(model: Any, config: Any) -> str:
    """A hash of 64 numbers of each tensor of a model, active adapters included, and of its options.

    The config is its text decoder's. Tensors on the meta device are a `NotImplementedError`.
    """
    about = [getattr(config, "rope_parameters", None), adapters(model)]
    found = hashlib.sha256(json.dumps(about, default=str, sort_keys=True).encode())
    apart = tuple(
        f"{name}.{kind}.{adapter}."
        for name, module in model.named_modules()
        for kind, adapter in _held(module)
        if adapter not in _active(module)
    )
    for name, x in model.state_dict().items():
        if f"{name}.".startswith(apart):
            continue
        found.update(f"{name.replace('.base_layer', '')} {x.dtype} {tuple(x.shape)}".encode())
        some = x.detach().flatten()[:: max(1, x.numel() // 64)][:64].cpu()
        found.update(some.float().numpy().tobytes())
    return found.hexdigest()


def of_tensors(tensors: Mapping[str, Tensor], how: str) -> str:
    """A hash of tensors, whole, with their names, types and shapes, and of `how`."""
    found = hashlib.sha256(how.encode())
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        flat = x.detach().cpu().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def adapters(model: Any) -> dict[str, dict[str, Any]]:
    """The active adapters (PEFT) of each module that has any, each with its scale."""
    return {
        name: {x: getattr(module, "scaling", {}).get(x) for x in active}
        for name, module in model.named_modules()
        if (active := _active(module))
    }


def _held(module: Any) -> list[tuple[str, str]]:
    """The adapters that a module has weights of, with the names of these."""
    kinds = getattr(module, "adapter_layer_names", ())
    return [(kind, adapter) for kind in kinds for adapter in getattr(module, kind, {})]


def _active(module: Any) -> list[str]:
    if not _held(module) or module.disable_adapters:
        return []
    return module.active_adapters
