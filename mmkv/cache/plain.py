"""Kept pairs in the model's own type, as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(eq=False)
class PlainKV:
    """The pairs of R rows in S slots, in the model's type; what is done to `QuantizedKV` too."""

    keys: Tensor  # [R, S, D]
    values: Tensor  # [R, S, Dv]
    rotation = None

    def __post_init__(self) -> None:
        """Number the rows."""
        self.rows = torch.arange(len(self.keys), device=self.keys.device)

    @property
    def dtype(self) -> torch.dtype:
        """The model's type."""
        return self.keys.dtype

    @property
    def slots(self) -> int:
        """S."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages."""
        return sum(x.untyped_storage().nbytes() for x in (self.keys, self.values))

    @property
    def full_pair_bytes(self) -> int:
        """Bytes of a pair."""
        return sum(x.shape[-1] * x.element_size() for x in (self.keys, self.values))

    def nbytes_of(self, slots: int) -> int:
        """Return the bytes of a row with so many slots."""
        return slots * self.full_pair_bytes

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values."""
        return self.keys, self.values

    def parts(self, width: int, *, whole: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Return the first `width` slots of all rows: the rows, keys and values."""
        if width == self.slots:
            yield slice(None), self.keys, self.values
        else:
            yield slice(None), self.keys[:, :width], self.values[:, :width]

    def pieces(self, position: int, q: int) -> list[int]:
        """Return that all q tokens are written at once."""
        return [q]

    def write(self, key: Tensor, value: Tensor, slots: int | Tensor, position: int) -> None:
        """Write the pairs [R, q, D] of new tokens to the slots from `slots` on, or one to its."""
        if isinstance(slots, int):
            where: Any = slice(None), slice(slots, slots + key.shape[1])
            self.keys[where], self.values[where] = key, value
        else:
            self.place(key, value, slots, slots)

    def place(self, key: Tensor, value: Tensor, slots: Tensor, place: Tensor) -> None:
        """Write the pair [R, 1, D] of one token into each row's slot [R or 1]."""
        where = self.rows, slots
        self.keys[where], self.values[where] = key[:, 0], value[:, 0]

    def make_room(self, position: int) -> None:
        """Do nothing: a token's slot is there."""

    def place_of(self, position: int) -> int:
        """Return 0: there is no window."""
        return 0

    def index_select(self, rows: Tensor) -> PlainKV:
        """Return a copy of the rows, which may repeat."""
        return PlainKV(self.keys.index_select(0, rows), self.values.index_select(0, rows))

    def grown(self, n_new: int) -> PlainKV:
        """Return the same pairs with `n_new` empty slots after them, in new storage."""
        return PlainKV(*(pad(x, (0, 0, 0, n_new)) for x in (self.keys, self.values)))
