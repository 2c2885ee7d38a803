"""How much of a large product is computed at a time, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Elements of attention probabilities in flight. On a CPU a tile that stays in cache is twice as
# fast as one that goes through memory, while much smaller ones wait on threads; an accelerator
# wants few large launches.
_CPU_TILE_PER_THREAD = 2**20
_DEVICE_TILE = 2**28


def tile(device: torch.device) -> int:
    """Elements of attention in flight: calls cost little then, and what they read stays near."""
    if device.type == "cpu":
        return _CPU_TILE_PER_THREAD * torch.get_num_threads()
    return _DEVICE_TILE


def autocast_off(x: Tensor) -> AbstractContextManager[Any]:
    """Within it, products of float32 stay float32: autocast would round them to 16 bits."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()
