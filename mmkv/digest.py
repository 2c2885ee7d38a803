"""Hashes of a model's weights and active adapters, of tensors and of files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

# Numbers of a row, each with its own multiplier, and rows hashed at once.
_WIDTH, _ROWS = 2**16, 128
# How many numbers of a tensor are compared, to notice writes that torch does not count.
_SAMPLE = 256
# The hash of each tensor of a model, by its state when it was hashed.
_hashes: WeakKeyDictionary[nn.Module, dict[Any, str]] = WeakKeyDictionary()


def of_model(model: Any, config: Any) -> str:
    """Return a hash of all bytes of a model's tensors, active adapters included.

    It is the same on every device. A tensor is hashed again if it was replaced or written to, by
    torch's version counter and by a sample: the counter misses writes to `tensor.data` (PEFT).
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
    tensors = {
        name: x
        for key, value in model.state_dict().items()
        if not f"{key}.".startswith(inactive)
        for name, x in _plain(key.replace(".base_layer", ""), value)
    }
    known, hashes = _hashes.get(model, {}), dict[Any, str]()
    for name, x in tensors.items():
        state = _state(x)
        hashes[state] = known.get(state) or f"{int(_hash(_words(x))):x}"
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} {hashes[state]}".encode())
    _hashes[model] = hashes
    return digest.hexdigest()


def _plain(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a value of a state dict, such as codes and scales."""
    if hasattr(x, "__tensor_flatten__"):
        for part in x.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(x, part))
    elif isinstance(x, Tensor):
        yield name, x.detach()


def _state(x: Tensor) -> Any:
    """Return what changes when a tensor is replaced or written to."""
    version = -1 if x.is_inference() else x._version
    data = sample(x).view(torch.uint8).cpu().numpy().tobytes()
    return x.data_ptr(), version, x.dtype, x.shape, x.stride(), data


def sample(x: Tensor) -> Tensor:
    """Return a copy of some of a tensor's numbers, [M]."""
    step = max(1, x.numel() // _SAMPLE) | 1  # odd, so that it sees every column
    return x.flatten()[::step].clone(memory_format=torch.contiguous_format)


def _words(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as int64, padded with zeros."""
    data = x.contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, -len(data) % 8 or 8))
    return data.view(torch.int64)


def _hash(words: Tensor) -> Tensor:
    """Return a hash of int64 numbers, int64 [1], on their device.

    Each is multiplied by an odd number that depends on its place. Its high half is added to the low
    one first, as a product's low bits do not depend on high ones: two changed signs would cancel.
    Sums of integers are exact, so the order in which a device adds does not matter.
    """
    factors = _factors(words.device)
    sums = []
    for part in words.split(_WIDTH * _ROWS):
        rows = [x for x in part.tensor_split([len(part) // _WIDTH * _WIDTH]) if len(x)]
        for x in rows:
            halves = (x >> 32).add_(x).view(-1, min(len(x), _WIDTH))
            sums.append(halves.mul_(factors[: len(x)]).sum(1))
    joined = torch.cat(sums) if sums else words.new_zeros(1)
    return joined if len(joined) == 1 else _hash(joined)


def _factors(device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, int64 [_WIDTH]: those of splitmix64."""
    x = np.arange(1, _WIDTH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy((x | np.uint64(1)).view(np.int64)).to(device)


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
