"""Storage of kept pairs as codes of 8 or 4 bits: `wrap(..., kv_dtype="int4")`.

A row's first tokens (one, or the policy's sinks) and the newest generated ones get much attention,
and the first token's key is unlike all others: these pairs are exact, in the model's type.
Generated tokens enter a window. When it is full, its oldest `BULK` are written as codes at once, so
at least the newest `NEWEST` are exact, as in KIVI (arXiv 2402.02750).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.codes import quantised, rotation
from mmkv.cache.products import Coded

# Generated tokens that are always exact, that are written as codes at once, and both together.
NEWEST, BULK = 32, 16
WINDOW = NEWEST + BULK
# The number of codes that attention unpacks at a time: on a CPU as many as fit its cache.
_CPU_PIECE, _DEVICE_PIECE = 2**19, 2**28


class QuantizedKV:
    """The pairs of R rows in S slots, in 8 or 4 bits; a few are exact.

    A pair is a key, rotated and minus the row's mean, and a value: twice N numbers, N the larger of
    D and Dv. A file needs the five tensors, `start` and `opened`; the wrap gives the rest.

    Attributes:
        codes: uint8 [R, P, S, N]. In 8 bits P is 2, keys and values. In 4 bits P is 1: a byte has
            a number of the key in its low bits, and one of the value in its high bits.
        ranges: float16 [R, 2, 2 G, S], the steps of a key's and a value's G groups, and their
            lowest numbers; 1 and 0 for an empty or an exact slot.
        exact: [R, X, 2, N] in the model's type, the exact pairs: `WINDOW` places for generated
            tokens, if there is a window, and after them the row's first tokens.
        exact_slots: int64 [R, X], the slot of each place. A place without a token of its own
            repeats another one's slot and pair.
        mean: [R, 1, N], subtracted from rotated keys; float32, or the model's type if wider.
        sizes: D and Dv; None: N both.
        start: the position of the token that enters the window at its place 0.
        opened: whether there is a window, from the first generated token on.
        reuses: whether a new token may take a slot that was in use.
    """

    def __init__(
        self,
        codes: Tensor,
        ranges: Tensor,
        exact: Tensor,
        exact_slots: Tensor,
        mean: Tensor,
        *,
        bits: int,
        start: int,
        opened: bool,
        reuses: bool,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        self.codes, self.ranges, self.exact = codes, ranges, exact
        self.exact_slots, self.mean = exact_slots, mean
        self.bits, self.start, self.opened, self.reuses = bits, start, opened, reuses
        self.sizes = sizes or (mean.shape[-1], mean.shape[-1])
        self.rows = torch.arange(len(codes), device=codes.device)[:, None]
        self.exact_range = ranges.new_zeros(2, 1)
        self.exact_range[0].fill_(1.0)

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        filled: Tensor,
        exact_slots: Tensor,
        *,
        bits: int,
        start: int,
        opened: bool,
        reuses: bool,
        mean: Tensor | None = None,
    ) -> QuantizedKV:
        """Quantise the pairs [R, S, D] and [R, S, Dv] in slots that are `filled`, bool [R, S].

        Pairs at `exact_slots` stay exact. `mean` [R, 1, N] is that of rows that were quantised
        before; None, and NaN for a row, takes the mean of these keys without the exact ones. Other
        arguments are attributes.
        """
        sizes = keys.shape[-1], values.shape[-1]
        matrix = rotation(*sizes, keys.dtype, keys.device)
        keys = keys.to(matrix.dtype) @ matrix
        coded = filled.scatter(1, exact_slots, False)
        counted = coded.to(keys.dtype)[:, None]
        own_mean = counted @ keys / counted.sum(-1, keepdim=True).clamp(min=1.0)
        mean = own_mean if mean is None else torch.where(mean.isnan(), own_mean, mean)
        pairs = _pairs(keys.sub_(mean), values)
        codes, ranges = quantised(pairs, bits)
        ranges = ranges.permute(0, 2, 3, 1).contiguous()
        ranges[:, 0].masked_fill_(~coded[:, None], 1.0)
        ranges[:, 1].masked_fill_(~coded[:, None], 0.0)
        exact = pairs.take_along_dim(exact_slots[..., None, None], dim=1).to(values.dtype)
        return cls(
            codes,
            ranges,
            exact,
            exact_slots,
            mean,
            bits=bits,
            start=start,
            opened=opened,
            reuses=reuses,
            sizes=sizes,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The model's type, of the pairs that are held exactly and of those that are read."""
        return self.exact.dtype

    @property
    def slots(self) -> int:
        """S."""
        return self.codes.shape[2]

    @property
    def rotation(self) -> Tensor:
        """What keys were, and queries are to be, multiplied by: [D, N], in the type of `mean`."""
        return rotation(*self.sizes, self.mean.dtype, self.mean.device)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.ranges, self.exact, self.exact_slots, self.mean

    def _with(self, codes: Tensor, ranges: Tensor, *others: Tensor) -> QuantizedKV:
        """Return a copy with other tensors, in the order of `_tensors`."""
        return QuantizedKV(
            codes,
            ranges,
            *others,
            bits=self.bits,
            start=self.start,
            opened=self.opened,
            reuses=self.reuses,
            sizes=self.sizes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of codes, steps, lowest numbers, exact pairs and means."""
        return sum(x.untyped_storage().nbytes() for x in self._tensors)

    def nbytes_of(self, slots: int) -> int:
        """Return the bytes of a row with so many slots and a window."""
        n_exact = self.exact.shape[1] + (0 if self.opened else WINDOW)
        per_slot = _row_bytes(self.codes[:, :, :1]) + _row_bytes(self.ranges[..., :1])
        per_exact = _row_bytes(self.exact[:, :1]) + _row_bytes(self.exact_slots[:, :1])
        return slots * per_slot + n_exact * per_exact + _row_bytes(self.mean)

    @property
    def full_pair_bytes(self) -> int:
        """Bytes of a pair in the model's type."""
        return sum(self.sizes) * self.exact.element_size()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys [R, S, D] and values [R, S, Dv] in the model's type, in new storage."""
        parts = self.parts(self.slots, whole=True)
        both = [(keys.numbers(), values.numbers()) for _, keys, values in parts]
        keys, values = (torch.cat(x) for x in zip(*both, strict=True))
        return self.unrotated(keys).to(self.dtype), values.to(self.dtype)

    def unrotated(self, keys: Tensor | Coded) -> Tensor:
        """Return keys [R, S, D] as the model made them, of rotated ones with their mean."""
        keys = keys.numbers() if isinstance(keys, Coded) else keys
        return keys @ self.rotation.mT

    def parts(self, width: int, *, whole: bool) -> Iterator[tuple[slice, Coded, Coded]]:
        """Unpack the first `width` slots of some rows at a time: these rows, keys and values.

        With `whole` the mean is added to the keys.
        """
        R, dtype = len(self.codes), self.mean.dtype
        n_numbers = max(1, 2 * width * self.mean.shape[-1])
        n = max(1, (_CPU_PIECE if self.codes.device.type == "cpu" else _DEVICE_PIECE) // n_numbers)
        D, Dv = (None, None) if self.sizes[0] == self.sizes[1] else self.sizes
        for rows in (slice(a, a + n) for a in range(0, R, n)) if n < R else (slice(None),):
            numbers, exact_slots = self.codes[rows, :, :width], self.exact_slots[rows]
            if self.bits == 4:
                numbers = torch.cat([numbers & 15, numbers >> 4], dim=1)
            numbers = numbers.to(dtype)
            numbers[self.rows[: len(numbers)], :, exact_slots] = self.exact[rows].to(dtype)
            keys, values = numbers.unbind(1)
            ranges = self.ranges[rows, :, :, :width].to(dtype).flatten(1, 2)
            key_step, step, key_lowest, lowest = ranges.chunk(4, 1)
            mean = self.mean[rows] if whole else None
            key = Coded(keys, key_step, key_lowest, mean, D)
            yield rows, key, Coded(values, step, lowest, None, Dv)

    def pieces(self, position: int, q: int) -> list[int]:
        """Return the lengths of the parts in which to write q tokens from `position` on."""
        first = min(q, BULK - self.place_of(position) % BULK)
        rest = [BULK] * ((q - first) // BULK) + [(q - first) % BULK]
        return [n for n in [first, *rest] if n]

    def new(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return new pairs, rotated keys [R, q, D] and values [R, q, Dv], as `write` takes them."""
        return [key[None], value[None]]

    def write(self, new: Sequence[Tensor], slots: int | Tensor, position: int) -> None:
        """Put the pairs of q new tokens, one of `pieces`, into the window; the first at `position`.

        `slots` is the first of q slots that all rows use, or int64 [R]
        for one token.
        """
        self.make_room(position)
        (key,), (value,) = new
        q, place = key.shape[1], self.place_of(position)
        pairs = _pairs(key - self.mean, value).to(self.dtype)
        self.exact[:, place : place + q] = pairs
        if isinstance(slots, int):
            of_pairs: Any = torch.arange(slots, slots + q, device=key.device) if q > 1 else slots
        else:
            of_pairs = slots[:, None]
        self.exact_slots[:, place : place + q] = of_pairs
        for i in range(q) if self.reuses else ():
            self._replace(pairs[:, i : i + 1], slots + i)

    def place(self, new: Sequence[Tensor], slots: Tensor, place: Tensor) -> None:
        """Put one token's pair at a place [1] of the window, in a replayed step.

        The host has called `make_room`; slots are int64 [R or 1].
        """
        (key,), (value,) = new
        pairs = _pairs(key - self.mean, value).to(self.dtype)
        self.exact.index_copy_(1, place, pairs)
        self.exact_slots.index_copy_(1, place, slots[:, None].expand(len(pairs), 1))
        if self.reuses:
            self._replace(pairs, slots)

    def place_of(self, position: int) -> int:
        """Return the place in the window of the token at `position`."""
        return (position - self.start) % WINDOW

    def _replace(self, pairs: Tensor, slots: int | Tensor) -> None:
        """Put new pairs [R, 1, 2, N] in place of the dropped ones of these slots."""
        if isinstance(slots, int):
            self.ranges[:, 0, :, slots], self.ranges[:, 1, :, slots] = 1.0, 0.0
            same = self.exact_slots == slots
        else:
            self._exact_range(slots[:, None].expand(len(pairs), 1))
            same = self.exact_slots == slots[:, None]
        self.exact.copy_(torch.where(same[..., None, None], pairs, self.exact))

    def _exact_range(self, slots: Tensor) -> None:
        """Set step and lowest number to 1 and 0 at `slots` [R, n]."""
        self.ranges[self.rows, :, :, slots] = self.exact_range

    def make_room(self, position: int) -> None:
        """Make a place in the window for the token at `position`.

        This writes the oldest `BULK` of a full window as codes. The host does it between steps; a
        replayed step does not.
        """
        if not self.opened:
            pairs, slots = self.exact[:, -1:], self.exact_slots[:, -1:]
            self.exact = torch.cat([pairs.expand(-1, WINDOW, -1, -1), self.exact], dim=1)
            self.exact_slots = torch.cat([slots.expand(-1, WINDOW), self.exact_slots], dim=1)
            self.opened = True
        n_written = position - self.start
        if n_written < WINDOW or n_written % BULK:
            return
        at = slice(n_written % WINDOW, n_written % WINDOW + BULK)
        slots, pairs = self.exact_slots[:, at].clone(), self.exact[:, at].to(self.mean.dtype)
        codes, ranges = quantised(pairs, self.bits)
        self.codes[self.rows, :, slots] = codes.transpose(1, 2)
        self.ranges[self.rows, :, :, slots] = ranges
        self.exact[:, at], self.exact_slots[:, at] = self.exact[:, -1:], self.exact_slots[:, -1:]
        # A slot that one of these tokens had left is written too: a newer token there stays exact.
        self._exact_range(self.exact_slots)

    def index_select(self, rows: Tensor) -> QuantizedKV:
        """Return a copy of the rows, which may repeat, as stored."""
        return self._with(*(x.index_select(0, rows) for x in self._tensors))

    def grown(self, n_new: int) -> QuantizedKV:
        """Return the same pairs with `n_new` empty slots after them, in new storage."""
        ranges = pad(self.ranges, (0, n_new))
        ranges[:, 0, :, self.slots :] = 1.0
        codes = pad(self.codes, (0, 0, 0, n_new))
        return self._with(codes, ranges, *self._tensors[2:])


def _row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size()


def _pairs(keys: Tensor, values: Tensor) -> Tensor:
    """Return keys [R, n, N] and values [R, n, Dv] side by side, [R, n, 2, N]."""
    if missing := keys.shape[-1] - values.shape[-1]:
        values = pad(values, (0, missing))
    return torch.stack([keys, values.to(keys.dtype)], dim=2)
