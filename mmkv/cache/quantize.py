"""Kept keys and values in 8 or 4 bits: `wrap(..., kv_dtype="int8")`.

A token is quantised when its slot is written, and read back in the model's own type, so all other
code treats slots as without quantisation. Each token's D numbers are one group, or groups of 64 if
D is a multiple of 64; each group has its own scale and zero point, so a token's codes depend on no
other token.

Codes, packing and reading are those of hqq (github.com/mobiusml/hqq, Apache-2.0), which the
`QuantizedCache` of transformers uses too: code = round(x / scale + zero), read as
(code - zero) * scale. Its other backend, optimum-quanto, has no 8 bits (transformers 5.23), and is
in maintenance mode (github.com/huggingface/optimum-quanto, pull request 408).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"int8": 8, "int4": 4}
_GROUP = 64
# The number of codes that attention unpacks at a time: on a CPU as many as fit its cache.
_CPU_PIECE, _DEVICE_PIECE = 2**20, 2**28
# Limits of hqq: the range below which a group has one code, and the largest 1 / scale.
_SMALLEST_RANGE, _MOST_SCALED = 1e-4, 2e4
_PARAMETERS = torch.float16


class QuantizedKV:
    """Rows of tokens in 8 or 4 bits, indexed by row and slot like a tensor [R, S, D].

    Attributes:
        codes: uint8 [R, S, D] for 8 bits; [R, S, D / 2] for 4 bits, with the first half of a
            token's numbers in the high bits and the second half in the low bits.
        scale, zero: float16 [R, S, G], for each of a token's G groups.
        dtype: the type of the numbers before quantisation and after reading.
    """

    def __init__(
        self, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, dtype: torch.dtype
    ) -> None:
        self.codes, self.scale, self.zero = codes, scale, zero
        self.bits, self.dtype = bits, dtype

    @classmethod
    def of(cls, x: Tensor, kv_dtype: str) -> QuantizedKV:
        """Quantise tokens [R, S, D].

        Raises:
            ValueError: `kv_dtype` is unknown, or D is odd in 4 bits.
        """
        check(kv_dtype, x.shape[-1])
        return cls(*_quantise(x, BITS[kv_dtype]), BITS[kv_dtype], x.dtype)

    @property
    def shape(self) -> torch.Size:
        """[R, S, D]."""
        return torch.Size([*self.codes.shape[:2], self.codes.shape[2] * 8 // self.bits])

    @property
    def exact(self) -> torch.dtype:
        """The type in which codes are converted: float32, or the stored type if it is wider."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the codes, scales and zero points."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of codes, scales and zero points."""
        return sum(x.untyped_storage().nbytes() for x in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.zero

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedKV:
        """Apply `change` to codes, scales and zero points."""
        codes, scale, zero = map(change, self._tensors)
        return QuantizedKV(codes, scale, zero, self.bits, self.dtype)

    def __getitem__(self, where: Any) -> Tensor:
        """Read the tokens at rows and slots `where` into new storage of type `dtype`."""
        codes, scale, zero = (x[where] for x in self._tensors)
        return _read(codes, scale, zero, self.bits, self.dtype)

    def up_to(self, width: int) -> QuantizedKV:
        """Return the first `width` slots, as views."""
        return self._each(lambda x: x[:, :width])

    def products(self, query: Tensor) -> Tensor:
        """Return the inner products of queries [R, Q, D] with every token: [R, Q, S].

        Scale and zero point are applied to each group's product with the codes, for some rows each:
        sum(q * (c - zero) * scale) = scale * (sum(q * c) - zero * sum(q)).
        """
        products = query.new_empty(*query.shape[:2], self.shape[1])
        for rows in self._pieces():
            codes, scale, zero = self._groups(rows, query.dtype)
            total: Tensor | float = 0.0
            for q, c, s, z in zip(
                query[rows].chunk(len(scale), -1), codes, scale, zero, strict=True
            ):
                shift = q.sum(-1, keepdim=True) @ z.mT
                total = torch.baddbmm(shift, q, c.mT, beta=-1).mul_(s.mT).add_(total)
            products[rows] = total
        return products

    def mixed(self, weights: Tensor) -> Tensor:
        """Return sums of all tokens by weights [R, Q, S]: [R, Q, D]; computed like `products`."""
        sums = weights.new_empty(*weights.shape[:2], self.shape[2])
        for rows in self._pieces():
            codes, scale, zero = self._groups(rows, weights.dtype)
            group_sums = sums[rows].chunk(len(scale), -1)
            for out, c, s, z in zip(group_sums, codes, scale, zero, strict=True):
                scaled = weights[rows] * s.mT
                out.copy_(torch.baddbmm(scaled @ z, scaled, c, beta=-1))
        return sums

    def _pieces(self) -> list[slice]:
        """Return the slices of rows whose codes are unpacked at a time."""
        max_codes = _CPU_PIECE if self.device.type == "cpu" else _DEVICE_PIECE
        R, n = len(self.codes), max(1, max_codes // max(1, self.shape[1] * self.shape[2]))
        return [slice(a, min(a + n, R)) for a in range(0, R, n)]

    def _groups(self, rows: slice, dtype: torch.dtype) -> tuple[Sequence[Tensor], ...]:
        """Return codes [r, S, width], scales and zero points [r, S, 1] of each of the G groups."""
        codes, scale, zero = (x[rows] for x in self._tensors)
        numbers = _unpacked(codes, self.bits, dtype)
        G = scale.shape[-1]
        return numbers.chunk(G, -1), scale.to(dtype).chunk(G, -1), zero.to(dtype).chunk(G, -1)

    def __setitem__(self, where: Any, x: Tensor) -> None:
        """Quantise x [..., D] into rows and slots `where`."""
        self.codes[where], self.scale[where], self.zero[where] = _quantise(x, self.bits)

    def index_select(self, dim: int, index: Tensor) -> QuantizedKV:
        """Return a copy of the rows `index`, which may repeat, as stored; `dim` is 0."""
        return self._each(lambda x: x.index_select(dim, index))

    def grown(self, n_new: int) -> QuantizedKV:
        """Return the same tokens with `n_new` empty slots behind them, in new storage."""
        return self._each(lambda x: pad(x, (0, 0, 0, n_new)))


Stored = Tensor | QuantizedKV


def check(kv_dtype: str | None, head_dim: int | None = None) -> None:
    """Check that kept pairs can be stored as `kv_dtype`; None is the model's own type.

    Raises:
        ValueError: it is unknown, `head_dim` is odd in 4 bits, or hqq is not installed.
    """
    if kv_dtype is None:
        return
    if kv_dtype not in BITS:
        raise ValueError(
            f"kv_dtype={kv_dtype!r}: expected {' or '.join(map(repr, BITS))}, "
            "or None for the model's own type"
        )
    if BITS[kv_dtype] == 4 and head_dim is not None and head_dim % 2:
        raise ValueError(
            f"kv_dtype={kv_dtype!r} packs two numbers into a byte, but a head has {head_dim}: "
            "use 'int8'"
        )
    if find_spec("hqq") is None:
        raise ValueError(f"kv_dtype={kv_dtype!r} needs hqq: pip install 'mmkv[quant]'")


def nbytes(x: Stored) -> int:
    """Return the bytes of the storages."""
    return x.nbytes if isinstance(x, QuantizedKV) else x.untyped_storage().nbytes()


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


def _quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points of tokens [..., D] in the layout of `QuantizedKV`.

    Bit for bit those of hqq's `Quantizer.quantize`, without its search for better zero points, in
    which groups influence each other. That function empties torch's CUDA cache twice a call, after
    which memory is allocated again: too slow for each layer of each step.
    """
    D, levels = x.shape[-1], 2**bits - 1
    width = _GROUP if D % _GROUP == 0 else D
    groups = x.reshape(-1, width).float()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    span = high - low
    scale = (levels / span).masked_fill(span <= _SMALLEST_RANGE, 1.0).clamp(max=_MOST_SCALED)
    zero = -low * scale
    codes, scale = (groups * scale + zero).round_().clamp_(0, levels), 1.0 / scale
    # A zero point too large for float16 means a tiny range: such a group is stored as one number.
    is_constant = zero.abs() > torch.finfo(_PARAMETERS).max
    codes = codes.masked_fill(is_constant, 0).to(torch.uint8).view(*x.shape)
    zero, scale = torch.where(is_constant, zero * scale, zero), scale.masked_fill(is_constant, 1.0)
    if bits == 4:
        from hqq.core.quantize import Quantizer  # takes seconds the first time

        halves = codes.unflatten(-1, (2, D // 2)).movedim(-2, 0)
        codes = Quantizer.pack["4bit_u8"](halves)[0]
    shape = (*x.shape[:-1], D // width)
    return codes, scale.to(_PARAMETERS).view(shape), zero.to(_PARAMETERS).view(shape)


def _read(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., D] of codes; in place, as each step reads all of a layer's."""
    x = _unpacked(codes, bits, torch.promote_types(dtype, torch.float32)).unflatten(
        -1, (scale.shape[-1], -1)
    )
    x.sub_(zero.to(x.dtype)[..., None]).mul_(scale.to(x.dtype)[..., None])
    return x.flatten(-2).to(dtype)


def _unpacked(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return codes as numbers [..., D]."""
    if bits == 8:
        return codes.to(dtype)
    half = codes.shape[-1]
    numbers = torch.empty(*codes.shape[:-1], 2 * half, dtype=dtype, device=codes.device)
    numbers[..., :half], numbers[..., half:] = codes >> 4, codes & 15
    return numbers


def products(query: Tensor, keys: Stored, scale: float) -> Tensor:
    """Return the logits [R, Q, U] of queries [R, Q, D]; in float32 or wider on CUDA."""
    if isinstance(keys, QuantizedKV):
        return keys.products(query.to(keys.exact) * scale)
    trains = torch.is_grad_enabled() and query.requires_grad
    if query.is_cuda and query.itemsize == 2 and not trains:
        return torch.bmm(query, keys.mT, out_dtype=torch.float32).mul_(scale)
    return (query * scale) @ keys.mT


def mixed(weights: Tensor, values: Stored) -> Tensor:
    """Return the sums of values by weights [R, Q, U], in the model's type: [R, Q, D]."""
    if isinstance(values, QuantizedKV):
        return values.mixed(weights.to(values.exact)).to(values.dtype)
    return weights.to(values.dtype) @ values
