"""Codes of 8 or 4 bits for keys and values.

Keys have a few channels with a large mean and a large spread. So a key is stored minus its row's
mean, rotated by a Hadamard matrix with random signs (QuaRot, arXiv 2404.00456), which spreads every
channel over all of them. A query is rotated too; the mean adds the same number to all logits of a
row, which softmax ignores.

A token's key and value are split into groups of 64 numbers, or of all where 64 does not divide
them. Each group has a step in float16: code c stands for c * step. A code is -128 to 127; in 4 bits
it is a multiple of 16, of which only the upper half is stored. The number farthest from 0 has code
-128, so that its sign is the step's. Reading codes and quantising again gives the same codes.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.memory import BITS, group

_STEPS = torch.float16


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
    number = torch.arange(size, device="cpu")
    shared_bits = number[:, None] & number
    ones = torch.stack([(shared_bits >> i) & 1 for i in range(size.bit_length())])
    parity = ones.sum(0) % 2
    hadamard = (1.0 - 2.0 * parity.double()) / math.sqrt(size)
    with torch.inference_mode(False):
        matrix = torch.block_diag(*[hadamard] * (D // size))
        row_signs = [[1.0 if signs.random() < 0.5 else -1.0] for _ in range(D)]
        matrix = matrix * torch.tensor(row_signs, dtype=matrix.dtype, device="cpu")
        matrix = pad(matrix, (0, max(0, Dv - D)))
        return matrix.to(device, torch.promote_types(dtype, torch.float32))


def quantised(pairs: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes int8 [P, R, n, N] and steps [2, R, n, G] of pairs [R, n, 2, N].

    In 8 bits P is 2. In 4 bits it is 1: a byte has a number of the key in its low half, and one of
    the value in its high half.
    """
    groups, most = pairs.unflatten(-1, (-1, group(pairs.shape[-1]))), torch.finfo(_STEPS).max
    low, high = groups.amin(-1), groups.amax(-1)  # faster than aminmax
    farthest = torch.where(high > -low, high, low)
    steps = (farthest / -128).clamp(-most, most).to(_STEPS)
    scale = steps.to(pairs.dtype)[..., None] * 2 ** (8 - bits)
    scale.masked_fill_(scale == 0, 1.0)
    codes = (groups / scale).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes = codes.to(torch.int8).flatten(-2).movedim(2, 0).contiguous()
    if bits == 4:
        codes = (codes[:1] & 15) | (codes[1:] << 4)
    return codes, steps.movedim(2, 0).contiguous()


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
