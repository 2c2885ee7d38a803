"""Attention as scores need it: of some queries, in float32, a tile at a time.

Scores by attention follow what the layer computes: its `scale`, its `softcap`, and its `mask` where
that is not causal. They are float32 inside `torch.autocast` too, which the cache turns off. Shape
letters as in `mmkv.scores`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmkv.policy import Policy

# What a token's value may add to its attention, see `mmkv.scores.values`.
Value = Literal["norm", "output", "residual"]
# Elements of attention probabilities in flight. On a CPU a tile that stays in cache is twice as
# fast as one that goes through memory, while much smaller ones wait on threads; an accelerator
# wants few large launches.
_CPU_TILE_PER_THREAD = 2**18
_DEVICE_TILE = 2**28


def check_decoding(policy: Policy, **options: Any) -> None:
    """Refuse options that weigh attention where decoding goes on by attention alone.

    Raises:
        ValueError: one is set.
    """
    for name, value in options.items():
        if value and policy.decode.name in ("fixed", "least"):
            raise ValueError(
                f"{name}={value!r} weighs attention, but decode={policy.decode.name!r} goes on by "
                f"attention alone: leave {name} out, or use decode='ratio' or 'grow'"
            )


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


def window_rows(
    query: Tensor,
    key: Tensor,
    window: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of the last `window` queries, `[B, H, G, window, N]`; 0 where nothing is seen."""
    B, H, N, D = key.shape
    if mask is None:
        allowed = torch.ones(window, N, dtype=torch.bool, device=key.device).tril(N - window)
    else:
        allowed = mask[:, :, None, -window:]
    if valid is not None:
        # Both sides of the mask: what padding holds may be anything, NaN included.
        allowed = allowed & valid[:, None, None, None] & valid[:, None, None, -window:, None]
    with autocast_off(key):
        rows = query[:, :, -window:].float() * scale_of(D, scale, softcap)
        logits = (rows.reshape(B, H, -1, D) @ key.float().mT).view(B, H, -1, window, N)
        if softcap is not None:
            logits.tanh_().mul_(softcap)
        if bias is not None:
            logits += bias[:, :, None, None]
        attention = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return attention.masked_fill(~allowed, 0.0)


def scale_of(D: int, scale: float | None, softcap: float | None = None) -> float:
    """What to multiply queries with; before a softcap, logits are counted in units of it."""
    return (D**-0.5 if scale is None else scale) / (1.0 if softcap is None else softcap)


def checked(
    query: Tensor, key: Tensor, valid: Tensor | None, mask: Tensor | None, softcap: float | None
) -> tuple[int, int, int, int]:
    """Check what scores by attention are given; return `(B, Hq, Q, D)`."""
    shapes = f"query {tuple(query.shape)} and key {tuple(key.shape)}"
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query must be [B, Hq, N, D] and key [B, H, N, D], got {shapes}")
    B, Hq, Q, D = query.shape
    if key.shape[0] != B:
        raise ValueError(f"query and key must have the same batch size, got {shapes}")
    if key.shape[3] != D:
        raise ValueError(f"query and key must have the same head_dim, got {shapes}")
    if key.shape[1] < 1 or Hq < 1 or Hq % key.shape[1]:
        raise ValueError(f"query heads must be a multiple of key-value heads, got {shapes}")
    N = key.shape[2]
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (B, N)):
        raise ValueError(
            f"valid must be a bool [B, N] = ({B}, {N}), got {valid.dtype} {tuple(valid.shape)}"
        )
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (B, 1, Q, N)):
        raise ValueError(
            f"mask must be a bool [B, 1, Q, N] = ({B}, 1, {Q}, {N}), "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    return B, Hq, Q, D


def unless_all(valid: Tensor | None) -> Tensor | None:
    """None where nothing is padding, which saves masking; not asked of a device that would sync."""
    if valid is not None and valid.device.type == "cpu" and bool(valid.all()):
        return None
    return valid
