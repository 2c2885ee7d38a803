"""Small functions on tensors: tiles that fit a cache, rows and spans by index, copies, autocast."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

# Attention probabilities computed at a time. On a CPU a tile that fits into its cache is twice as
# fast as one in memory, while much smaller ones wait on threads; an accelerator needs few large
# launches, of which those on 256 MiB keep it busy.
_CPU_TILE_PER_THREAD = 2**18
_DEVICE_TILE = 2**26


def tile(device: torch.device) -> int:
    """Return how many attention probabilities to compute at a time."""
    if device.type == "cpu":
        return _CPU_TILE_PER_THREAD * torch.get_num_threads()
    return _DEVICE_TILE


def rows(x: Tensor, at: Tensor) -> Tensor:
    """Return rows [..., K, D] of x [..., C, D] at int64 [..., K]; leading dimensions broadcast."""
    *lead, C, D = x.shape
    head = torch.arange(math.prod(lead), device=x.device).view(*lead, 1)
    flat, index = flat_rows(x if x.ndim == 4 else x.reshape(1, -1, C, D), head, at)
    return flat.index_select(0, index.flatten()).view(*index.shape, D)


def flat_rows(x: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [B, H, N, D] as [B * H * N, D], and the indices there of tokens of heads.

    A projection's output, whose heads lie side by side, is not copied. `head` is b * H + h; `head`
    and `token`, int64, broadcast.
    """
    B, H, N, D = x.shape
    if x.transpose(1, 2).is_contiguous():
        first = head if B == 1 else head.add(head // H, alpha=(N - 1) * H)
        return x.transpose(1, 2).reshape(-1, D), torch.add(first, token, alpha=H)
    return x.reshape(-1, D), torch.add(token, head, alpha=N)


def last(number: Tensor, free: Tensor) -> Tensor:
    """Return the last `number` [B, H] tokens among those that are `free`, bool [B, H, U]."""
    return free & (free.flip(-1).cumsum(-1).flip(-1) <= number[..., None])


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each column of float32 [..., C, O], and its row: [..., 1, O] both."""
    if x.device.type != "cpu":
        return x.max(-2, keepdim=True)
    # Pooling handles many columns at once, which `max` with indices does not.
    flat = x.flatten(0, -3)[:, :, None].permute(0, 3, 1, 2)  # images of O channels and C rows
    most, row = max_pool2d(flat, (x.shape[-2], 1), return_indices=True)
    shape = (*x.shape[:-2], 1, x.shape[-1])
    return most.view(shape), row.view(shape)


def spans(starts: Tensor, width: int) -> Tensor:
    """Return the indices from each of starts [..., R + 1], sorted, to the next: int64 [..., R, C].

    Each span is filled up with -1 to C, the `width`, which no span exceeds.
    """
    index = starts[..., :-1, None] + torch.arange(width, device=starts.device)
    return index.masked_fill(index >= starts[..., 1:, None], -1)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    return torch.from_numpy(array.copy()).to(device, non_blocking=True)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would round products of float32 to 16 bits."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
