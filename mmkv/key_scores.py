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
def lag_relative(
    key: Tensor, value: Tensor, valid: Tensor | None = None, *, lag: int = 128, skip: int = 4
) -> Tensor:
    """How widely a token's channels spread, measured by the next block of tokens.

    A row's tokens behind the first `skip` are cut into blocks of `lag`. A block's keys (and values)
    are scaled, channel by channel, to the least and the most of the next block; the softmax over
    the block of the standard deviation over channels is averaged over keys and values, and a token
    scores its rank in its block over `lag`. Behind the last block that has a next one all score
    more than 1, the newest most, and so do the first `skip`: these the paper always keeps.

    Args:
        key: `[B, H, N, D]`, after rotary embedding, as they lie in the cache.
        value: `[B, H, N, Dv]`.
        valid: bool `[B, N]`, False for padding.
        lag: tokens of a block, 2 or more.
        skip: first tokens of each row (attention sinks) that are in no block.

    Returns:
        float32 `[B, H, N]`, in [0, 2].

    Raises:
        ValueError: shapes do not fit, or a number is out of range.

    Source: LagKV, arXiv 2504.04704, section 3, and its code, which keeps as many of each block
    (kvpress: `LagKVPress`). A channel that is the same throughout the next block counts as 0; there
    it is no number.
    """
    valid = _checked(key, valid)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key and value must be of the same tokens, got {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if lag < 2 or skip < 0:
        raise ValueError(f"lag={lag}, skip={skip}: lag must be 2 or more, skip not negative")
    B, H, N = key.shape[:3]
    # Each row's tokens from the left, so that its blocks are those it has alone.
    order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
    number = valid.sum(-1, keepdim=True)
    behind = (number - skip).clamp(min=0)
    blocks = behind // lag - 1  # those with a next one
    place = torch.arange(N, device=key.device).expand(B, N)
    last = skip + blocks.clamp(min=0) * lag
    newest = 1 + (place + 1) / number.clamp(min=1)
    found = torch.where(place < skip, 2.0, newest)[:, None].repeat(1, H, 1)
    n = (N - skip) // lag
    if n > 1:
        spread = [
            _spread(_in_order(x, order)[:, :, skip : skip + n * lag].unflatten(2, (n, lag)))
            for x in (key, value)
        ]
        rank = (spread[0] + spread[1]).argsort(dim=-1, stable=True).argsort(dim=-1).flatten(2) / lag
        inside = (place < last)[:, None, skip : skip + (n - 1) * lag]
        part = found[..., skip : skip + (n - 1) * lag]  # a view
        part.copy_(torch.where(inside, rank, part))
    back = order.argsort(dim=-1)[:, None].expand(B, H, N)
    return found.gather(-1, back).masked_fill(~valid[:, None], 0.0)


def _spread(x: Tensor) -> Tensor:
    """Of tokens in blocks `[B, H, n, lag, D]`: `[B, H, n - 1, lag]`, the last block has no next."""
    least, most = x[:, :, 1:].aminmax(dim=3, keepdim=True)
    size = most - least
    scaled = ((x[:, :, :-1] - least) / size).masked_fill(size == 0, 0.0)
    return scaled.std(dim=-1).softmax(dim=-1)


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """`x` `[B, H, N, D]` with the tokens in `order` `[B, N]`, float32."""
    at = order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, at).float()


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
