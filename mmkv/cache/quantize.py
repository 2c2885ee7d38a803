"""Kept keys and values in 8 or 4 bits: `wrap(..., kv_dtype="int8")`.

A token is quantised when its slot is written and read back in the model's own type, so slots are
overwritten, emptied and chosen as without. Each token's D numbers are one group, or groups of 64
where D is a multiple of 64, each with a scale and a zero point of its own: a token's codes depend
on no other token.

Codes, packing and reading are those of hqq (github.com/mobiusml/hqq, Apache-2.0), which the
`QuantizedCache` of transformers uses too: code = round(x / scale + zero), read as
(code - zero) * scale. The other backend there, optimum-quanto, has no 8 bits (transformers 5.23),
and is in maintenance mode (github.com/huggingface/optimum-quanto, pull request 408).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {"int8": 8, "int4": 4}
_GROUP = 64
# Codes that attention turns to numbers at a time: on a CPU what stays in its cache.
_CPU_PIECE, _DEVICE_PIECE = 2**20, 2**28
# Where hqq stops: a smaller range is one code, and no scale is below one over this.
_SMALLEST_RANGE, _MOST_SCALED = 1e-4, 2e4
_PARAMETERS = torch.float16


class QuantizedKV:
    """Rows of tokens in 8 or 4 bits, read and written as a tensor [R, S, D] is: by row and slot.

    Attributes:
        codes: uint8 [R, S, D] for 8 bits; [R, S, D / 2] for 4, the first half of a token's numbers
            in the high bits, the second in the low ones.
        scale, zero: float16 [R, S, G], for each of a token's G groups.
        dtype: what was stored, and what reading gives.
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
            ValueError: an unknown `kv_dtype`, or an odd D in 4 bits.
        """
        check(kv_dtype, x.shape[-1])
        return cls(*_quantise(x, BITS[kv_dtype], _by_hqq), BITS[kv_dtype], x.dtype)

    @property
    def shape(self) -> torch.Size:
        """[R, S, D]."""
        return torch.Size([*self.codes.shape[:2], self.codes.shape[2] * 8 // self.bits])

    @property
    def exact(self) -> torch.dtype:
        """What codes are reckoned with."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """Of the codes, scales and zero points."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held: codes, scales and zero points."""
        return sum(x.untyped_storage().nbytes() for x in self._held)

    @property
    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.zero

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedKV:
        """With other rows or slots."""
        codes, scale, zero = map(change, self._held)
        return QuantizedKV(codes, scale, zero, self.bits, self.dtype)

    def __getitem__(self, where: Any) -> Tensor:
        """The tokens at rows and slots `where`, in fresh storage of `dtype`."""
        codes, scale, zero = (x[where] for x in self._held)
        return _read(codes, scale, zero, self.bits, self.dtype)

    def up_to(self, width: int) -> QuantizedKV:
        """The first `width` slots, in the same storage."""
        return self._each(lambda x: x[:, :width])

    def products(self, query: Tensor) -> Tensor:
        """Inner products of queries [R, Q, D] with every token: [R, Q, S].

        With the codes, a few rows at a time; each group's scale and zero point are of the product:
        sum(q * (c - zero) * scale) = scale * (sum(q * c) - zero * sum(q)).
        """
        found = query.new_empty(*query.shape[:2], self.shape[1])
        for rows in self._pieces():
            codes, scale, zero = self._groups(rows, query.dtype)
            total: Tensor | float = 0.0
            for q, c, s, z in zip(
                query[rows].chunk(len(scale), -1), codes, scale, zero, strict=True
            ):
                shift = q.sum(-1, keepdim=True) @ z.mT
                total = torch.baddbmm(shift, q, c.mT, beta=-1).mul_(s.mT).add_(total)
            found[rows] = total
        return found

    def mixed(self, weights: Tensor) -> Tensor:
        """Sums of all tokens by weights [R, Q, S]: [R, Q, D]; as `products` reads them."""
        found = weights.new_empty(*weights.shape[:2], self.shape[2])
        for rows in self._pieces():
            codes, scale, zero = self._groups(rows, weights.dtype)
            sums = found[rows].chunk(len(scale), -1)
            for out, c, s, z in zip(sums, codes, scale, zero, strict=True):
                scaled = weights[rows] * s.mT
                out.copy_(torch.baddbmm(scaled @ z, scaled, c, beta=-1))
        return found

    def _pieces(self) -> list[slice]:
        """The rows, in parts of which codes become numbers at once."""
        most = _CPU_PIECE if self.device.type == "cpu" else _DEVICE_PIECE
        R, n = len(self.codes), max(1, most // max(1, self.shape[1] * self.shape[2]))
        return [slice(a, min(a + n, R)) for a in range(0, R, n)]

    def _groups(self, rows: slice, dtype: torch.dtype) -> tuple[Sequence[Tensor], ...]:
        """Codes [r, S, width], scales and zero points [r, S, 1] of each of the G groups."""
        codes, scale, zero = (x[rows] for x in self._held)
        numbers = _unpacked(codes, self.bits, dtype)
        G = scale.shape[-1]
        return numbers.chunk(G, -1), scale.to(dtype).chunk(G, -1), zero.to(dtype).chunk(G, -1)

    def __setitem__(self, where: Any, x: Tensor) -> None:
        """Quantise x [..., D] into rows and slots `where`."""
        self.codes[where], self.scale[where], self.zero[where] = _quantise(x, self.bits, _by_step)

    def select(self, index: Tensor) -> QuantizedKV:
        """A copy of the rows `index`, which may repeat: their codes, as they are."""
        return self._each(lambda x: x[index])

    def grown(self, more: int) -> QuantizedKV:
        """The same tokens with `more` empty slots behind them, in fresh storage."""
        return self._each(lambda x: pad(x, (0, 0, 0, more)))


Stored = Tensor | QuantizedKV


def check(kv_dtype: str | None, head_dim: int | None = None) -> None:
    """Whether kept pairs can be held as `kv_dtype`; None is the model's own type.

    Raises:
        ValueError: an unknown one, an odd `head_dim` in 4 bits, or hqq is not installed.
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


def select(x: Stored, index: Tensor) -> Stored:
    """A copy of the rows `index`."""
    return x.select(index) if isinstance(x, QuantizedKV) else x[index]


def nbytes(x: Stored) -> int:
    """Bytes of the storages held."""
    return x.nbytes if isinstance(x, QuantizedKV) else x.untyped_storage().nbytes()


def squares(exact: Tensor, read: Tensor, filled: Tensor) -> Tensor:
    """Sums of squares of each row's error and of the row itself: float32 [R, 2].

    Of the tokens `exact` [R, S, D] and `read` after quantisation, where slots are `filled`.
    """
    exact = exact.float().masked_fill(~filled[..., None], 0.0)
    error = read.float().masked_fill(~filled[..., None], 0.0) - exact
    return torch.stack([error.square().sum((1, 2)), exact.square().sum((1, 2))], dim=-1)


def relative_error(squares: Tensor) -> Tensor:
    """|exact - read| / |exact| from the sums of squares [..., 2] of both: [...]."""
    error, whole = squares.unbind(-1)
    return (error / whole.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()


def _quantise(x: Tensor, bits: int, how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of tokens [..., D], as `QuantizedKV` holds them."""
    D = x.shape[-1]
    width = _GROUP if D % _GROUP == 0 else D
    codes, scale, zero = how(x.reshape(-1, width), bits)
    # A group whose numbers differ by less than float16 can tell beside their size is one number.
    level = zero.abs() > torch.finfo(_PARAMETERS).max
    codes = codes.masked_fill(level, 0).to(torch.uint8).view(*x.shape)
    zero, scale = torch.where(level, zero * scale, zero), scale.masked_fill(level, 1.0)
    if bits == 4:
        halves = codes.unflatten(-1, (2, D // 2)).movedim(-2, 0)
        codes = _hqq().pack["4bit_u8"](halves)[0]
    groups = (*x.shape[:-1], D // width)
    return codes, scale.to(_PARAMETERS).view(groups), zero.to(_PARAMETERS).view(groups)


def _by_hqq(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, width], scales and zero points [n, 1] of groups [n, width].

    Without hqq's search for better zero points, which lets groups influence each other.
    """
    plain: dict[str, Any] = {"axis": 1, "optimize": False, "bitpack": False}
    width, device = groups.shape[1], str(groups.device)
    codes, meta = _hqq().quantize(groups, nbits=bits, group_size=width, device=device, **plain)
    return codes, meta["scale"], meta["zero"]


def _by_step(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `_by_hqq` gives, to the bit, for the tokens of a step.

    hqq's own function empties torch's CUDA cache twice a call: fit for a prompt, not for each layer
    of each step, which would wait for memory to be freed and allocated again.
    """
    x, levels = groups.float(), 2**bits - 1
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    span = high - low
    scale = (levels / span).masked_fill(span <= _SMALLEST_RANGE, 1.0).clamp(max=_MOST_SCALED)
    zero = -low * scale
    return (x * scale + zero).round().clamp(0, levels), 1.0 / scale, zero


def _read(codes: Tensor, scale: Tensor, zero: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Numbers [..., D] from their codes: all of a layer's at each step, hence in place."""
    x = _unpacked(codes, bits, torch.promote_types(dtype, torch.float32)).unflatten(
        -1, (scale.shape[-1], -1)
    )
    x.sub_(zero.to(x.dtype)[..., None]).mul_(scale.to(x.dtype)[..., None])
    return x.flatten(-2).to(dtype)


def _unpacked(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Codes as numbers [..., D]."""
    if bits == 8:
        return codes.to(dtype)
    half = codes.shape[-1]
    found = torch.empty(*codes.shape[:-1], 2 * half, dtype=dtype, device=codes.device)
    found[..., :half], found[..., half:] = codes >> 4, codes & 15
    return found


def products(query: Tensor, keys: Stored, scale: float) -> Tensor:
    """Logits of queries [R, Q, D]: [R, Q, U]."""
    if isinstance(keys, QuantizedKV):
        return keys.products(query.to(keys.exact) * scale)
    return (query * scale) @ keys.mT


def mixed(weights: Tensor, values: Stored) -> Tensor:
    """Values summed by weights [R, Q, U], in the model's type: [R, Q, D]."""
    if isinstance(values, QuantizedKV):
        return values.mixed(weights.to(values.exact)).to(values.dtype)
    return weights.to(values.dtype) @ values


@cache
def _hqq() -> Any:
    """hqq's quantiser; its import takes seconds, so that only who uses it pays."""
    from hqq.core.quantize import Quantizer

    return Quantizer
