"""Storage of kept pairs as codes of 8 or 4 bits: `wrap(..., kv_dtype="int4")`.

A row's first tokens (one, or the policy's sinks) and the newest generated ones get much attention,
and the first token's key is unlike all others: these pairs are exact, in the model's type.
Generated tokens enter a window. When it is full, its oldest `BULK` are written as codes at once, so
at least the newest `NEWEST` are exact, as in KIVI (arXiv 2402.02750).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.codes import quantised, rotation
from mmkv.cache.products import Coded

# On a CPU a block of at most so many numbers, keys and values, is converted to floats before it is
# attended to, which takes fewer operations than multiplying codes.
_FEW = 2**19

# Generated tokens that are always exact, that are written as codes at once, and both together.
NEWEST, BULK = 32, 16
WINDOW = NEWEST + BULK


class QuantizedKV:
    """The pairs of R rows in S slots, in 8 or 4 bits; a few are exact.

    A pair is a key, rotated and minus the row's mean, and a value: twice N numbers, N the larger of
    D and Dv. A file needs the five tensors, `start` and `opened`; the wrap gives the rest.

    Attributes:
        codes: int8 [R, P, S, N], as `quantised` returns them.
        steps: float16 [R, 2 G, S], of a key's G groups, then of a value's; 0 in an empty and in an
            exact slot, whose codes so stand for zeros.
        exact: [R, X, 2, N] in the model's type, the exact pairs: `WINDOW` places for generated
            tokens, if there is a window, and after them the row's first tokens. A place without
            a token of its own holds zeros.
        exact_slots: int64 [R, X], the slot of each place, to which its pair is added.
        mean: [R, 1, N], subtracted from rotated keys; float32, or the model's type if wider.
        sizes: D and Dv; None: N both.
        start: the position of the token that enters the window at its place 0.
        opened: whether there is a window, from the first generated token on.
        reuses: whether a new token may take a slot that was in use.
    """

    def __init__(
        self,
        codes: Tensor,
        steps: Tensor,
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
        self.codes, self.steps, self.exact = codes, steps, exact
        self.exact_slots, self.mean = exact_slots, mean
        self.bits, self.start, self.opened, self.reuses = bits, start, opened, reuses
        self.sizes = sizes or (mean.shape[-1], mean.shape[-1])
        self.rows = torch.arange(len(codes), device=codes.device)[:, None]

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
        codes, steps = quantised(pairs, bits)
        steps = steps.mT.contiguous().masked_fill_(~coded[:, None], 0.0)
        exact = pairs.take_along_dim(exact_slots[..., None, None], dim=1).to(values.dtype)
        own = filled.gather(1, exact_slots)
        if opened:
            newest, first = exact_slots[:, :WINDOW, None], exact_slots[:, None, WINDOW:]
            own[:, :WINDOW] &= (newest != first).all(-1)
        exact.masked_fill_(~own[..., None, None], 0.0)
        return cls(
            codes,
            steps,
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
        return self.codes, self.steps, self.exact, self.exact_slots, self.mean

    def _with(self, codes: Tensor, steps: Tensor, *others: Tensor) -> QuantizedKV:
        """Return a copy with other tensors, in the order of `_tensors`."""
        return QuantizedKV(
            codes,
            steps,
            *others,
            bits=self.bits,
            start=self.start,
            opened=self.opened,
            reuses=self.reuses,
            sizes=self.sizes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of codes, steps, exact pairs and means."""
        return sum(x.untyped_storage().nbytes() for x in self._tensors)

    def nbytes_of(self, slots: int) -> int:
        """Return the bytes of a row with so many slots and a window."""
        n_exact = self.exact.shape[1] + (0 if self.opened else WINDOW)
        per_slot = _row_bytes(self.codes[:, :, :1]) + _row_bytes(self.steps[..., :1])
        per_exact = _row_bytes(self.exact[:, :1]) + _row_bytes(self.exact_slots[:, :1])
        return slots * per_slot + n_exact * per_exact + _row_bytes(self.mean)

    @property
    def full_pair_bytes(self) -> int:
        """Bytes of a pair in the model's type."""
        return sum(self.sizes) * self.exact.element_size()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys [R, S, D] and values [R, S, Dv] in the model's type, in new storage."""
        keys, values = self._numbers(self.slots, whole=True)
        return (keys @ self.rotation.mT).to(self.dtype), values.to(self.dtype)

    def pairs(self, width: int, *, whole: bool) -> tuple[Tensor, Tensor] | tuple[Coded, Coded]:
        """Return the rotated keys and the values of the first `width` slots.

        These are tensors in the type of `mean` if they are few and on a CPU, else codes. With
        `whole` the mean is added to the keys.
        """
        few = 2 * len(self.codes) * width * self.codes.shape[-1] <= _FEW
        if few and self.codes.device.type == "cpu":
            return self._numbers(width, whole=whole)
        of_key, of_value = (None, None) if self.bits == 8 else ("low", "high")
        codes = self.codes.narrow(2, 0, width).unbind(1)
        key_steps, steps = self.steps.narrow(2, 0, width).to(self.mean.dtype).chunk(2, dim=1)
        exact_keys, exact = self.exact.to(self.mean.dtype).unbind(2)
        slots, mean = self.exact_slots[:, None], self.mean if whole else None
        keys = Coded(codes[0], of_key, key_steps, exact_keys, slots, mean)
        return keys, Coded(codes[-1], of_value, steps, exact, slots, None, self.sizes[1])

    def _numbers(self, width: int, *, whole: bool) -> tuple[Tensor, Tensor]:
        """Return the result of `pairs` as tensors [R, width, N] and [R, width, Dv]."""
        codes, steps = self.codes.narrow(2, 0, width), self.steps.narrow(2, 0, width)
        if self.bits == 4:
            codes = torch.cat([codes << 4, codes & -16], dim=1)
        numbers = codes.to(self.mean.dtype)
        R, N, G = len(codes), codes.shape[-1], steps.shape[1] // 2
        numbers.view(R, 2, width, G, N // G).mul_(steps.view(R, 2, G, width).mT[..., None])
        # An unused place of the window adds zeros to an exact pair.
        at, exact = (self.rows, self.exact_slots), self.exact.to(numbers.dtype)
        numbers.transpose(1, 2).index_put_(at, exact, accumulate=True)
        keys, values = numbers.unbind(1)
        if whole:
            keys += self.mean
        return keys, values[..., : self.sizes[1]]

    def pieces(self, position: int, q: int) -> list[int]:
        """Return the lengths of the parts in which to write q tokens from `position` on."""
        first = min(q, BULK - self.place_of(position) % BULK)
        rest = [BULK] * ((q - first) // BULK) + [(q - first) % BULK]
        return [n for n in [first, *rest] if n]

    def new(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return rotated keys [R, q, N] and values [R, q, Dv] side by side: one [1, R, q, 2, N]."""
        return [_pairs(key, value)[None]]

    def write(self, new: Sequence[Tensor], slots: int | Tensor, position: int) -> None:
        """Put the pairs of q new tokens, one of `pieces`, into the window; the first at `position`.

        `new` is the result of the method `new`, from whose keys this subtracts the mean in place.
        `slots` is the first of q slots that all rows use, or int64 [R] for one token.
        """
        self.make_room(position)
        pairs, place = self._centred(new), self.place_of(position)
        q = pairs.shape[1]
        for i in range(q) if self.reuses else ():
            pairs[:, i : i + 1] = self._replace(pairs[:, i : i + 1], slots + i)
        self.exact[:, place : place + q] = pairs
        of_pairs = self.exact_slots[:, place : place + q]
        if not isinstance(slots, int):
            of_pairs.copy_(slots[:, None])
        elif q == 1:
            of_pairs.fill_(slots)
        else:
            of_pairs.copy_(torch.arange(slots, slots + q, device=pairs.device))

    def place(self, new: Sequence[Tensor], slots: Tensor, place: Tensor) -> None:
        """Put one token's pair at a place [1] of the window, in a replayed step.

        The host has called `make_room`; slots are int64 [R or 1].
        """
        pairs = self._centred(new)
        if self.reuses:
            pairs = self._replace(pairs, slots)
        self.exact.index_copy_(1, place, pairs.to(self.dtype))
        self.exact_slots.index_copy_(1, place, slots[:, None].expand(len(pairs), 1))

    def _centred(self, new: Sequence[Tensor]) -> Tensor:
        """Subtract the mean from the keys of new pairs, in place; return the pairs [R, q, 2, N]."""
        pairs = new[0][0]
        pairs[:, :, 0].sub_(self.mean)
        return pairs

    def place_of(self, position: int) -> int:
        """Return the place in the window of the token at `position`."""
        return (position - self.start) % WINDOW

    def _replace(self, pairs: Tensor, slots: int | Tensor) -> Tensor:
        """Drop what these slots held, for new pairs [R, 1, 2, N]; return these for the window.

        The place of a first token takes the pair that takes its slot, and the window gets zeros.
        """
        if isinstance(slots, int):
            self.steps[..., slots] = 0.0
            same = self.exact_slots == slots
        else:
            at = slots[:, None, None].expand(*self.steps.shape[:2], 1)
            self.steps.scatter_(2, at, 0.0)
            same = self.exact_slots == slots[:, None]
        newest, first = same[:, :WINDOW], same[:, WINDOW:]
        self.exact[:, :WINDOW].masked_fill_(newest[..., None, None], 0.0)
        # A slot that stays exact, as zeros are written there when the window is full.
        left = torch.where(newest, self.exact_slots[:, -1:], self.exact_slots[:, :WINDOW])
        self.exact_slots[:, :WINDOW] = left
        of_first = torch.where(first[..., None, None], pairs, self.exact[:, WINDOW:])
        self.exact[:, WINDOW:] = of_first
        return pairs.masked_fill(first.any(1)[:, None, None, None], 0.0)

    def make_room(self, position: int) -> None:
        """Make a place in the window for the token at `position`.

        This writes the oldest `BULK` of a full window as codes. The host does it between steps; a
        replayed step does not.
        """
        if not self.opened:
            slots = self.exact_slots[:, -1:].expand(-1, WINDOW)
            self.exact = pad(self.exact, (0, 0, 0, 0, WINDOW, 0))
            self.exact_slots = torch.cat([slots, self.exact_slots], dim=1)
            self.opened = True
        n_written = position - self.start
        if n_written < WINDOW or n_written % BULK:
            return
        at = slice(n_written % WINDOW, n_written % WINDOW + BULK)
        slots, pairs = self.exact_slots[:, at].clone(), self.exact[:, at].to(self.mean.dtype)
        codes, steps = quantised(pairs, self.bits)
        self.codes[self.rows, :, slots] = codes.transpose(1, 2)
        self.steps[self.rows, :, slots] = steps
        self.exact[:, at], self.exact_slots[:, at] = 0.0, self.exact_slots[:, -1:]

    def index_select(self, rows: Tensor) -> QuantizedKV:
        """Return a copy of the rows, which may repeat, as stored."""
        return self._with(*(x.index_select(0, rows) for x in self._tensors))

    def grown(self, n_new: int) -> QuantizedKV:
        """Return the same pairs with `n_new` empty slots after them, in new storage."""
        codes, steps = pad(self.codes, (0, 0, 0, n_new)), pad(self.steps, (0, n_new))
        return self._with(codes, steps, *self._tensors[2:])


def _row_bytes(x: Tensor) -> int:
    return x[0].numel() * x.element_size()


def _pairs(keys: Tensor, values: Tensor) -> Tensor:
    """Return keys [R, n, N] and values [R, n, Dv] side by side, [R, n, 2, N]."""
    if missing := keys.shape[-1] - values.shape[-1]:
        values = pad(values, (0, missing))
    return torch.stack([keys, values.to(keys.dtype)], dim=2)
