"""Storage of kept pairs as codes of 8 or 4 bits: `wrap(..., kv_dtype="int4")`.

A row's first tokens (one, or the policy's sinks) and the newest generated ones get much attention,
and the first token's key is unlike all others: these pairs are exact, in the model's type.
Generated tokens enter a window. When it is full, its oldest `BULK` are written as codes at once, so
at least the newest `NEWEST` are exact, as in KIVI (arXiv 2402.02750).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache.codes import quantised, rotation
from mmkv.cache.products import Coded, Pairs
from mmkv.tensors import no_autocast

# On a CPU a layer of at most so many numbers, keys and values, is converted to floats before it is
# attended to, which takes fewer operations than multiplying codes.
_FEW = 3 * 2**18

# Generated tokens that are always exact, that are written as codes at once, and both together.
NEWEST, BULK = 32, 16
WINDOW = NEWEST + BULK


class QuantizedKV:
    """The pairs of a layer's blocks, in 8 or 4 bits; a few are exact.

    A block has R' rows of S slots; rows and slots of all blocks lie one after the other, R rows and
    n slots in all. A pair is a key, rotated and minus the row's mean, and a value: twice N numbers,
    N the larger of D and Dv. A file needs the five tensors, `start` and `opened`; the wrap gives
    the rest.

    Attributes:
        shapes: R' and S of each block.
        codes: int8 [P, n, N], as `quantised` returns them.
        steps: float16 [2, n, G], of the G groups of keys and of values; 0 in an empty and in an
            exact slot, whose codes so stand for zeros.
        exact: [R, X, 2, N] in the model's type, the exact pairs: `WINDOW` places for generated
            tokens, if there is a window, and after them the row's first tokens. A place without
            a token of its own holds zeros.
        exact_slots: int64 [R, X], the slot to which each exact pair is added, numbered within its
            row. If several places have the same slot, the last one has its pair, unless `short`.
        mean: [R, 1, N], subtracted from rotated keys; float32, or the model's type if wider. It is
            0 until a row has codes, and does not change after that.
        sizes: D and Dv; None: N both.
        start: the position of the token that enters the window at its place 0.
        opened: whether there is a window, from the first generated token on.
        reuses: whether a new token may take a slot that was in use.
        short: whether a row may have fewer tokens than places for its first ones: new tokens get
            the empty slots of such places. They become codes there, or, in a block that `reuses`
            slots, stay exact.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
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
        self.shapes, self.codes, self.steps, self.exact = shapes, codes, steps, exact
        self.exact_slots, self.mean = exact_slots, mean
        self.bits, self.start, self.opened, self.reuses = bits, start, opened, reuses
        self.sizes = sizes or (mean.shape[-1], mean.shape[-1])
        self.short = False
        self._n_rows, self._n_slots = [R for R, _ in shapes], [R * S for R, S in shapes]
        self._capacities = [S for _, S in shapes]

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
        """Quantise a block's pairs [R, S, D] and [R, S, Dv] in slots `filled`, bool [R, S].

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
        _mark_zeros(own_mean, coded.any(-1)[:, None])
        mean = own_mean if mean is None else torch.where(mean.isnan(), own_mean, mean)
        pairs = _pairs(keys.sub_(mean), values)
        codes, steps = quantised(pairs, bits)
        steps.masked_fill_(~coded[..., None], 0.0)
        exact = pairs.take_along_dim(exact_slots[..., None, None], dim=1).to(values.dtype)
        own = filled.gather(1, exact_slots)
        if opened:
            newest, first = exact_slots[:, :WINDOW, None], exact_slots[:, None, WINDOW:]
            own[:, :WINDOW] &= (newest != first).all(-1)
        _mark_zeros(exact, own)
        exact.masked_fill_(~own[..., None, None], 0.0)
        return cls(
            [(keys.shape[0], keys.shape[1])],
            codes.flatten(1, 2),
            steps.flatten(1, 2),
            exact,
            exact_slots,
            mean,
            bits=bits,
            start=start,
            opened=opened,
            reuses=reuses,
            sizes=sizes,
        )

    @classmethod
    def joined(cls, parts: Sequence[QuantizedKV]) -> QuantizedKV:
        """Hold the blocks of all parts, in new storage if there are several."""
        if len(parts) == 1:
            return parts[0]
        codes, steps, *others = zip(*(x._tensors for x in parts), strict=True)
        shapes = [shape for x in parts for shape in x.shapes]
        with no_autocast(parts[0].codes.device):  # it cannot join float16 if it rounds to bfloat16
            codes, steps = (torch.cat(x, dim=1) for x in (codes, steps))
            found = parts[0]._with(shapes, codes, steps, *map(torch.cat, others))
        found.reuses, found.short = any(x.reuses for x in parts), any(x.short for x in parts)
        return found

    def split(self) -> list[QuantizedKV]:
        """Return each block alone, as views."""
        by_slot = (x.split(self._n_slots, dim=1) for x in (self.codes, self.steps))
        by_row = (x.split(self._n_rows) for x in self._tensors[2:])
        return [
            self._with([shape], *tensors)
            for shape, *tensors in zip(self.shapes, *by_slot, *by_row, strict=True)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The model's type, of the pairs that are held exactly and of those that are read."""
        return self.exact.dtype

    @property
    def rotation(self) -> Tensor:
        """What keys were, and queries are to be, multiplied by: [D, N], in the type of `mean`."""
        return rotation(*self.sizes, self.mean.dtype, self.mean.device)

    @cached_property
    def _first(self) -> Tensor:
        """The number of each row's first slot among all n: int64 [R, 1]."""
        blocks = zip(accumulate([0, *self._n_slots[:-1]]), self.shapes, strict=True)
        device = self.codes.device
        firsts = [torch.arange(a, a + R * S, S, device=device) for a, (R, S) in blocks]
        return torch.cat(firsts)[:, None]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.steps, self.exact, self.exact_slots, self.mean

    def _with(self, shapes: Sequence[tuple[int, int]], *tensors: Tensor) -> QuantizedKV:
        """Return a copy with other shapes and tensors, in the order of `_tensors`."""
        found = QuantizedKV(
            shapes,
            *tensors,
            bits=self.bits,
            start=self.start,
            opened=self.opened,
            reuses=self.reuses,
            sizes=self.sizes,
        )
        found.short = self.short
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of codes, steps, exact pairs and means."""
        return sum(x.untyped_storage().nbytes() for x in self._tensors)

    @property
    def pair_bytes(self) -> int:
        """Bytes of a pair as it is stored: its codes and steps."""
        return sum(x[:, 0].numel() * x.element_size() for x in (self.codes, self.steps))

    @property
    def full_pair_bytes(self) -> int:
        """Bytes of a pair in the model's type."""
        return sum(self.sizes) * self.exact.element_size()

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Return all keys [R', S, D] and values [R', S, Dv] of each block, in the model's type."""
        pairs, matrix = self._numbers(self._capacities, whole=True), self.rotation.mT
        with no_autocast(matrix.device):
            keys = [(keys @ matrix).to(self.dtype) for keys, _ in pairs]
        return [(x, values.to(self.dtype)) for x, (_, values) in zip(keys, pairs, strict=True)]

    def pairs(self, widths: Sequence[int], *, whole: bool) -> Sequence[Pairs]:
        """Return rotated keys and values of each block's first slots, as many as `widths` says.

        These are tensors in the type of `mean` if all slots are few and on a CPU, else codes. With
        `whole` the mean is added to the keys.
        """
        few = 2 * self.steps.shape[1] * self.codes.shape[-1] <= _FEW
        if few and self.codes.device.type == "cpu":
            return self._numbers(widths, whole=whole)
        return self._coded(widths, whole=whole)

    def _coded(self, widths: Sequence[int], *, whole: bool) -> list[tuple[Coded, Coded]]:
        """Return the result of `pairs` as codes."""
        steps, exact = self.steps, self.exact
        if not steps.is_cuda:  # our kernel there reads them as they are
            steps, exact = steps.to(self.mean.dtype), exact.to(self.mean.dtype)
        by_slot = (x.split_with_sizes(self._n_slots, 1) for x in (self.codes, steps))
        of_rows = (*exact.unbind(2), self.exact_slots[:, None], self.mean)
        by_row = (x.split_with_sizes(self._n_rows) for x in of_rows)
        of_key, of_value = (None, None) if self.bits == 8 else ("low", "high")
        blocks, N, size = list[tuple[Coded, Coded]](), self.codes.shape[-1], self.sizes[1]
        for (R, S), width, c, s, key, value, slots, mean in zip(
            self.shapes, widths, *by_slot, *by_row, strict=True
        ):
            c, s = c.view(-1, R, S, N)[:, :, :width], s.view(2, R, S, -1)[:, :, :width].mT
            keys = Coded(c[0], of_key, s[0], key, slots, mean if whole else None, short=self.short)
            blocks.append((keys, Coded(c[-1], of_value, s[1], value, slots, None, size)))
        return blocks

    def _numbers(self, widths: Sequence[int], *, whole: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the result of `pairs` as tensors [R', width, N] and [R', width, Dv]."""
        codes = self.codes
        if self.bits == 4:  # 16 moves the low half up; a product keeps the lowest 8 bits
            codes = torch.cat([codes * 16, codes & -16])
        numbers, (_, n, G) = codes.to(self.mean.dtype), self.steps.shape
        numbers.view(2, n, G, -1).mul_(self.steps[..., None])
        # An unused place of the window adds zeros to an exact pair.
        at, exact = self._first + self.exact_slots, self.exact.to(numbers.dtype)
        numbers.index_add_(1, at.flatten(), exact.flatten(0, 1).transpose(0, 1))
        blocks = list[tuple[Tensor, Tensor]]()
        parts = zip(numbers.split_with_sizes(self._n_slots, 1), self.shapes, widths, strict=True)
        for x, (R, S), width in parts:
            keys, values = x.view(2, R, S, -1).narrow(2, 0, width).unbind()
            if self.sizes[1] < self.sizes[0]:
                values = values[..., : self.sizes[1]]
            blocks.append((keys, values))
        if whole:
            for (keys, _), mean in zip(blocks, self.mean.split(self._n_rows), strict=True):
                keys += mean
        return blocks

    def pieces(self, position: int, q: int) -> list[int]:
        """Return the lengths of the parts in which to write q tokens from `position` on."""
        first = min(q, BULK - self.place_of(position) % BULK)
        rest = [BULK] * ((q - first) // BULK) + [(q - first) % BULK]
        return [n for n in [first, *rest] if n]

    def new(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return rotated keys [R, q, N] and values [R, q, Dv] side by side: one [1, R, q, 2, N]."""
        return [_pairs(key, value)[None]]

    def write(self, new: Sequence[Tensor], slots: Sequence[int | Tensor], position: int) -> None:
        """Put the pairs of q new tokens, one of `pieces`, into the window; the first at `position`.

        `new` is what the method `new` returned, with rows in the order of blocks. `slots` has for
        each block the first of q slots that all its rows use, or int64 [R' or 1] for one token.
        """
        self.make_room(position)
        pairs, place = self._centred(new), self.place_of(position)
        q = pairs.shape[1]
        places = self.exact_slots[:, place : place + q]
        if self.reuses:
            of_pairs = torch.empty_like(places)
            self._fill(of_pairs, slots)
            for i in range(q):
                pairs[:, i : i + 1] = self._replace(pairs[:, i : i + 1], of_pairs[:, i : i + 1])
        self.exact[:, place : place + q] = pairs
        self._fill(places, slots)

    def _fill(self, places: Tensor, slots: Sequence[int | Tensor]) -> None:
        """Write the slots of q new tokens, given as to `write`, into `places` int64 [R, q]."""
        q, blocks = places.shape[1], places.split_with_sizes(self._n_rows)
        for block, slot in zip(blocks, slots, strict=True):
            if not isinstance(slot, int):
                block.copy_(slot[:, None])
            elif q == 1:
                block.fill_(slot)
            else:
                block.copy_(torch.arange(slot, slot + q, device=block.device))

    def write_replayed(
        self, new: Sequence[Tensor], slots: Sequence[int | Tensor], place: Tensor
    ) -> None:
        """Put one token's pair at a place [1] of the window, in a replayed step.

        The host has called `make_room`; other arguments are those of `write`.
        """
        pairs = self._centred(new)
        of_pairs = self.exact_slots.new_empty(len(pairs), 1)
        self._fill(of_pairs, slots)
        if self.reuses:
            pairs = self._replace(pairs, of_pairs)
        self.exact.index_copy_(1, place, pairs.to(self.dtype))
        self.exact_slots.index_copy_(1, place, of_pairs)

    def _centred(self, new: Sequence[Tensor]) -> Tensor:
        """Return the new pairs [R, q, 2, N], the mean subtracted from keys."""
        pairs = new[0][0]
        pairs[:, :, 0].sub_(self.mean)
        return pairs

    def place_of(self, position: int) -> int:
        """Return the place in the window of the token at `position`."""
        return (position - self.start) % WINDOW

    def _replace(self, pairs: Tensor, slots: Tensor) -> Tensor:
        """Drop what slots [R, 1] held, for new pairs [R, 1, 2, N]; return these for the window.

        The place of a first token takes the pair that takes its slot, and the window gets zeros.
        """
        self.steps.index_fill_(1, (self._first + slots).flatten(), 0.0)
        _mark_zeros(pairs, True, self.dtype)
        same = self.exact_slots == slots
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
        self._take_mean(at)
        slots, pairs = self._first + self.exact_slots[:, at], self.exact[:, at]
        codes, steps = quantised(pairs.to(self.mean.dtype), self.bits)
        self.codes[:, slots], self.steps[:, slots] = codes, steps
        self.exact[:, at], self.exact_slots[:, at] = 0.0, self.exact_slots[:, -1:]

    def _take_mean(self, at: slice) -> None:
        """Take the mean of the keys at these places of the window, for rows that have no codes."""
        has_codes = (self.mean != 0).any(-1, keepdim=True)
        held = (self.exact != 0).flatten(2).any(-1)[..., None]
        if not self.reuses:  # the window is full
            held[:, :WINDOW] = True
        total = self.exact[:, at, 0].to(self.mean.dtype).sum(1, keepdim=True)
        counts = held[:, at].sum(1, keepdim=True)
        mean = total / counts.clamp(min=1)
        _mark_zeros(mean, counts[..., 0] > 0)
        mean.masked_fill_(has_codes, 0.0)
        self.mean += mean
        self.exact[:, :, 0] -= mean * held

    def select(self, rows: Sequence[Tensor]) -> QuantizedKV:
        """Return a copy of rows of each block, int64 [n], which may repeat; n may be 0.

        A block of which no row is left is dropped.
        """
        parts = zip(self.split(), rows, strict=True)
        return self.joined([part._chosen(i) for part, i in parts if len(i)])

    def _chosen(self, rows: Tensor) -> QuantizedKV:
        """Return a copy of some rows of one block."""
        (shape,) = self.shapes
        codes, steps = (
            x.unflatten(1, shape).index_select(1, rows).flatten(1, 2)
            for x in (self.codes, self.steps)
        )
        others = (x.index_select(0, rows) for x in self._tensors[2:])
        return self._with([(len(rows), shape[1])], codes, steps, *others)

    def fitted(self, capacities: list[int]) -> QuantizedKV:
        """Return the same pairs with so many slots in each block, in new storage if it is more."""
        if capacities == self._capacities:
            return self
        parts = zip(self.split(), capacities, strict=True)
        return self.joined([part._grown(n) for part, n in parts])

    def _grown(self, capacity: int) -> QuantizedKV:
        """Return one block with so many slots, new ones empty."""
        ((R, S),) = self.shapes
        codes, steps = (
            pad(x.unflatten(1, (R, S)), (0, 0, 0, capacity - S)).flatten(1, 2)
            for x in (self.codes, self.steps)
        )
        return self._with([(R, capacity)], codes, steps, *self._tensors[2:])


def _pairs(keys: Tensor, values: Tensor) -> Tensor:
    """Return keys [R, n, N] and values [R, n, Dv] side by side, [R, n, 2, N]."""
    if missing := keys.shape[-1] - values.shape[-1]:
        values = pad(values, (0, missing))
    return torch.stack([keys, values.to(keys.dtype)], dim=2)


def _mark_zeros(x: Tensor, there: Tensor | bool, dtype: torch.dtype | None = None) -> None:
    """Set the first number to a tiny one where a token's numbers are all 0: zeros mean no token.

    `x` is pairs [R, n, 2, N], which are 0 for the padding token in the first layer, or the mean
    [R, 1, N] of such keys. `there`, bool [R, n], says where tokens are; True: everywhere. `dtype`
    is the type to which x is rounded later.
    """
    numbers = x.view(*x.shape[:2], -1)
    zeros = (numbers == 0).all(-1) & there
    numbers[..., 0].masked_fill_(zeros, torch.finfo(dtype or x.dtype).tiny)
