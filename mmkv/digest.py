"""Hashes that tell models apart, with their active adapters, and hashes of tensors and files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def of_model(model: Any, config: Any) -> str:
    """Return a hash of 64 numbers of each tensor of a model, active adapters included.

    `config` is the text decoder's. Tensors on the meta device raise a `NotImplementedError`.
    """
    options = [getattr(config, "rope_parameters", None), adapters(model)]
    digest = hashlib.sha256(json.dumps(options, default=str, sort_keys=True).encode())
    inactive = tuple(
        f"{name}.{kind}.{adapter}."
        for name, module in model.named_modules()
        for kind, adapter in _adapter_weights(module)
        if adapter not in _active(module)
    )
    for name, x in model.state_dict().items():
        if f"{name}.".startswith(inactive):
            continue
        digest.update(f"{name.replace('.base_layer', '')} {x.dtype} {tuple(x.shape)}".encode())
        sample = x.detach().flatten()[:: max(1, x.numel() // 64)][:64].cpu()
        digest.update(sample.float().numpy().tobytes())
    return digest.hexdigest()


def of_tensors(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return a hash of whole tensors with their names, types and shapes, and of a text."""
    digest = hashlib.sha256(text.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        flat = x.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_file(path: str | os.PathLike[str]) -> str:
    """Return a hash of a file's content in eight hexadecimal digits. Raises OSError."""
    return of_bytes(Path(path).read_bytes())


def of_bytes(data: bytes) -> str:
    """Return a hash in eight hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:8]


def adapters(model: Any) -> dict[str, dict[str, Any]]:
    """Return the active PEFT adapters of each module that has any, each with its scale."""
    return {
        name: {x: getattr(module, "scaling", {}).get(x) for x in active}
        for name, module in model.named_modules()
        if (active := _active(module))
    }


def _adapter_weights(module: Any) -> list[tuple[str, str]]:
    kinds = getattr(module, "adapter_layer_names", ())
    return [(kind, adapter) for kind in kinds for adapter in getattr(module, kind, {})]


def _active(module: Any) -> list[str]:
    if not _adapter_weights(module) or module.disable_adapters:
        return []
    return module.active_adapters
