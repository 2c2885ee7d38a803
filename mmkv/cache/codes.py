"""Codes of 8 or 4 bits for keys and values.

Keys have a few channels with a large mean and a large spread. So a key is stored minus its row's
mean, rotated by a Hadamard matrix with random signs (QuaRot, arXiv 2404.00456), which spreads every
channel over all of them. A query is rotated too; the mean adds the same number to all logits of a
row, which softmax ignores.

A token's key and value are split into groups of 64 numbers, or of all where 64 does not divide
them. Each group has a step and a lowest number in float16: code c stands for lowest + c * step.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"int8": 8, "int4": 4}
_GROUP = 64
_RANGES = torch.float16
# Steps and lowest numbers of groups are at most the largest float16, and steps at least this.
_LEAST_STEP, _MOST = 2.0**-14, torch.finfo(_RANGES).max


def check(kv_dtype: str | None) -> None:
    """Check that kept pairs can be stored as `kv_dtype`; None is the model's own type.

    Raises:
        ValueError: it is unknown.
    """
    if kv_dtype is not None and kv_dtype not in BITS:
        raise ValueError(
            f"kv_dtype={kv_dtype!r}: expected {' or '.join(map(repr, BITS))}, "
            "or None for the model's own type"
        )


@lru_cache
def rotation(D: int, Dv: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an orthonormal matrix [D, D]: random signs, then Hadamard matrices along the diagonal.

    Each is of the largest power of two that divides D. Zeros follow if values of Dv numbers are
    longer than keys. The type is float32, or `dtype` if wider.
    """
    size, signs = D & -D, random.Random(0)
    number = torch.arange(size)
    shared_bits = number[:, None] & number
    ones = torch.stack([(shared_bits >> i) & 1 for i in range(size.bit_length())])
    parity = ones.sum(0) % 2
    hadamard = (1.0 - 2.0 * parity.double()) / math.sqrt(size)
    with torch.inference_mode(False):
        matrix = torch.block_diag(*[hadamard] * (D // size))
        matrix = matrix * torch.tensor([[1.0 if signs.random() < 0.5 else -1.0] for _ in range(D)])
        matrix = pad(matrix, (0, max(0, Dv - D)))
        return matrix.to(device, torch.promote_types(dtype, torch.float32))


def group(N: int) -> int:
    """Return how many of a key's or a value's N numbers share a step."""
    return _GROUP if N % _GROUP == 0 else N


def quantised(pairs: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes [R, P, n, N], steps and lowest numbers [R, n, 2, 2 G] of pairs [R, n, 2, N]."""
    levels, groups = 2**bits - 1, pairs.unflatten(-1, (-1, group(pairs.shape[-1])))
    low, high = groups.aminmax(dim=-1)
    step = ((high - low) / levels).clamp(_LEAST_STEP, _MOST).to(_RANGES)
    ranges = torch.stack([step, low.clamp(-_MOST, _MOST).to(_RANGES)], dim=2)
    step, low = (x[..., None] for x in ranges.to(pairs.dtype).unbind(2))
    codes = ((groups - low) / step).round_().clamp_(0, levels).to(torch.uint8).flatten(-2)
    codes = codes.transpose(1, 2).contiguous()
    if bits == 4:
        codes = codes[:, :1] | (codes[:, 1:] << 4)
    return codes, ranges.flatten(-2)


def squares(exact: Tensor, stored: Tensor, filled: Tensor) -> Tensor:
    """Return the sums of squares of each row's error and of the row itself: float32 [R, 2].

    Over `filled` slots; the error is `stored` after quantisation minus `exact`, [R, S, D] both.
    """
    exact = exact.float().masked_fill(~filled[..., None], 0.0)
    error = stored.float().masked_fill(~filled[..., None], 0.0) - exact
    return torch.stack([error.square().sum((1, 2)), exact.square().sum((1, 2))], dim=-1)


def relative_error(squares: Tensor) -> Tensor:
    """Return |exact - stored| / |exact| [...] from the results [..., 2] of `squares`."""
    error, exact = squares.unbind(-1)
    return (error / exact.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
