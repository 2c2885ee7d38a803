"""Attention of the last queries in float32, for scores.

Scores by attention use the layer's `scale`, `softcap` and, where it is not causal, `mask`. They are
float32 inside `torch.autocast` too, which is turned off here. Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from mmkv.tensors import no_autocast

if TYPE_CHECKING:
    from mmkv.policy import Policy

# How a token's value may count in its score, see `mmkv.scores.values`.
Value = Literal["norm", "output", "residual"]
Pooling = Literal["avg", "max"]


def check_decoding(policy: Policy, **options: Any) -> None:
    """Refuse options that change scores if decode steps drop tokens by attention alone.

    Raises:
        ValueError: an option is set.
    """
    for name, value in options.items():
        if value and policy.decode.name in ("fixed", "least-attended"):
            raise ValueError(
                f"{name}={value!r} changes a prompt's scores, but decode={policy.decode.name!r} "
                f"drops tokens by attention: leave {name} out, or use decode='ratio' or 'grow'"
            )


def window_rows(
    query: Tensor,
    key: Tensor,
    window: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    log_weights: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last `window` queries, `[B, H, G, window, N]`; 0 if masked."""
    B, H, N, D = key.shape
    if mask is None:
        allowed = torch.ones(window, N, dtype=torch.bool, device=key.device).tril(N - window)
    else:
        allowed = mask[:, :, None, -window:]
    if valid is not None:
        # Keys and queries alike: padding may hold any values, NaN included.
        allowed = allowed & valid[:, None, None, None] & valid[:, None, None, -window:, None]
    with no_autocast(key.device):
        rows = query[:, :, -window:].float() * scale_of(D, scale, softcap)
        logits = (rows.reshape(B, H, -1, D) @ key.float().mT).view(B, H, -1, window, N)
        if softcap is not None:
            logits.tanh_().mul_(softcap)
        if log_weights is not None:
            logits += log_weights[:, :, None, None]
        attention = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return attention.masked_fill(~allowed, 0.0)


def pooled(score: Tensor, kernel_size: int, pooling: Pooling | None) -> Tensor:
    """Pool scores `[B, H, G, n]`, not negative, over tokens; return their mean over query heads."""
    if pooling is not None:  # padding lies before a row's tokens and is 0, like the pool's edge
        flat, pool = score.flatten(0, 2), avg_pool1d if pooling == "avg" else max_pool1d
        score = pool(flat, kernel_size, stride=1, padding=kernel_size // 2).view_as(score)
    return score.mean(2)


def scale_of(D: int, scale: float | None, softcap: float | None = None) -> float:
    """Return the factor of queries, divided by the softcap if there is one."""
    return (D**-0.5 if scale is None else scale) / (1.0 if softcap is None else softcap)


def checked(
    query: Tensor, key: Tensor, valid: Tensor | None, mask: Tensor | None, softcap: float | None
) -> tuple[int, int, int, int]:
    """Return `(B, Hq, Q, D)` of the arguments of a score by attention, which are checked."""
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


def drop_full_mask(valid: Tensor | None) -> Tensor | None:
    """Return None if nothing is padding; not checked on a GPU, where the host would wait."""
    if valid is not None and valid.device.type == "cpu" and bool(valid.all()):
        return None
    return valid
