"""Importance of tokens from keys and values alone: no query is asked.

Shape letters, `valid` and padding are those of `mmkv.scores`: float32 out, higher = keep, not
negative, 0 for padding, which influences nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.scores import check_valid

# Multipliers of a common integer hash; products of 32-bit numbers with them stay below 2 ** 63.
_MIX = (0x45D9F3B, 0x45D9F3B)
_BITS = 2**32 - 1


@torch.no_grad()
def inverse_key_norm(key: Tensor, valid: Tensor | None = None) -> Tensor:
    """`1 / |k|`: tokens rank as by `-|k|`, the score of the paper, over all heads and layers.

    It is the inverse because an importance is not negative: sizes of layers share it out.

    Args:
        key: `[B, H, N, D]`.
        valid: bool `[B, N]`, False for padding.

    Returns:
        float32 `[B, H, N]`.

    Raises:
        ValueError: shapes do not fit.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arXiv 2406.11430, section 3.
    """
    valid = _checked(key, valid)
    return (1 / key.float().norm(dim=-1)).masked_fill(~valid[:, None], 0.0)


@torch.no_grad()
def key_difference(key: Tensor, valid: Tensor | None = None) -> Tensor:
    """How unlike the others a key is: 1 - cos(key, mean of the normalised keys).

    Args:
        key: `[B, H, N, D]`, after rotary embedding, as they lie in the cache.
        valid: bool `[B, N]`, False for padding.

    Returns:
        float32 `[B, H, N]`, in [0, 2]; the paper's score is this without the 1.

    Raises:
        ValueError: shapes do not fit.

    Source: KeyDiff, arXiv 2504.15364, section 3 (kvpress: `KeyDiffPress`). The paper evicts after
    every block of a prompt; so does a cache that evicts chunks.
    """
    valid = _checked(key, valid)
    unit, mean = normalised_keys(key, valid)
    likeness = torch.nn.functional.cosine_similarity(unit, mean, dim=-1)
    return (1 - likeness).clamp(min=0).masked_fill(~valid[:, None], 0.0)


def normalised_keys(key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of length 1, float32 `[B, H, N, D]`, 0 for padding, and their mean `[B, H, 1, D]`."""
    unit = torch.nn.functional.normalize(key.float(), dim=-1)
    # What padding holds may be anything; a key that overflowed has no direction.
    unit = unit.masked_fill(~valid[:, None, :, None], 0.0).nan_to_num(nan=0.0)
    number = valid.sum(-1).clamp(min=1)[:, None, None, None]
    return unit, unit.sum(2, keepdim=True) / number


@torch.no_grad()
def noise(valid: Tensor, head: Tensor, *, seed: int, layer_idx: int) -> Tensor:
    """Noise that is the same each time, and for a row of a batch what it is alone.

    A hash of the seed, the layer, the head, how many tokens the row has and the token's place among
    them. So it does not read or move torch's generators, and a later turn draws anew.

    Args:
        valid: bool `[B, N]`, False for padding.
        head: int64 `[H]`, or `[B, 1]` where each row is a head: which key-value heads these are.
        seed: another one gives other noise.
        layer_idx: which layer of the model.

    Returns:
        float32 `[B, H, N]`, uniform in (0, 1).
    """
    valid = _checked(None, valid)
    place = (valid.cumsum(-1) - 1).clamp(min=0)[:, None]
    number = valid.sum(-1)[:, None, None]
    head = head[None, :, None] if head.ndim == 1 else head[..., None]
    found = torch.full_like(place, seed & _BITS)
    for x in (torch.full_like(place, layer_idx), head, number, place):
        found = _hash(found ^ _hash(x + 1))
    found = (found >> 8).float().add_(0.5) / 2**24
    return found.masked_fill(~valid[:, None], 0.0)


def _hash(x: Tensor) -> Tensor:
    """Every bit of a number below 2 ** 32 changes about half of the result's; int64 in and out."""
    for multiplier in _MIX:
        x = ((x >> 16) ^ x) * multiplier & _BITS
    return (x >> 16) ^ x


def _checked(key: Tensor | None, valid: Tensor | None) -> Tensor:
    """Check the shapes; `valid`, all True where there was none."""
    if key is None:
        if valid is None or valid.ndim != 2 or valid.dtype != torch.bool:
            raise ValueError(f"valid must be a bool [B, N], got {valid}")
        return valid
    if key.ndim != 4:
        raise ValueError(f"key must be [B, H, N, D], got {tuple(key.shape)}")
    B, N = key.shape[0], key.shape[2]
    check_valid(valid, B, N)
    return torch.ones(B, N, dtype=torch.bool, device=key.device) if valid is None else valid
