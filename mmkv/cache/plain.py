"""Kept pairs in the model's own type, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


class PlainKV:
    """The pairs of R rows in S slots, in the model's type; what is done to `QuantizedKV` too.

    Attributes:
        stores: one tensor [2, R, S, D] of keys and values, so that a step writes once; two of
            [1, R, S, D] and [1, R, S, Dv] if they differ in size or type.
        keys, values: [R, S, D] and [R, S, Dv], views of these.
    """

    rotation = None

    def __init__(self, *stores: Tensor) -> None:
        self.stores = stores
        self.keys, self.values = (x for store in stores for x in store)
        self.rows = torch.arange(len(self.keys), device=self.keys.device)

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> PlainKV:
        """Hold keys [R, S, D] and values [R, S, Dv]."""
        if keys.shape == values.shape and keys.dtype == values.dtype:
            return cls(torch.stack([keys, values]))
        return cls(keys[None], values[None])

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainKV:
        """Return a copy whose keys and values are views of its own stores."""
        return PlainKV(*(x.clone() for x in self.stores))

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
        return sum(x.untyped_storage().nbytes() for x in self.stores)

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

    def pairs(self, width: int, *, whole: bool) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the first `width` slots."""
        if width == self.slots:
            return self.keys, self.values
        return self.keys[:, :width], self.values[:, :width]

    def pieces(self, position: int, q: int) -> list[int]:
        """Return that all q tokens are written at once."""
        return [q]

    def new(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return new pairs, keys [R, q, D] and values [R, q, Dv], as `stores` has them."""
        return [torch.stack([key, value])] if len(self.stores) == 1 else [key[None], value[None]]

    def write(self, new: Sequence[Tensor], slots: int | Tensor, position: int) -> None:
        """Write the pairs of q `new` tokens to the slots from `slots` on, or one to its."""
        if isinstance(slots, int):
            for store, x in zip(self.stores, new, strict=True):
                store[:, :, slots : slots + x.shape[2]] = x
        else:
            self.place(new, slots, slots)

    def place(self, new: Sequence[Tensor], slots: Tensor, place: Tensor) -> None:
        """Write the pair of one `new` token into each row's slot [R or 1]."""
        for store, x in zip(self.stores, new, strict=True):
            store[:, self.rows, slots] = x[:, :, 0]

    def make_room(self, position: int) -> None:
        """Do nothing: a token's slot is there."""

    def place_of(self, position: int) -> int:
        """Return 0: there is no window."""
        return 0

    def index_select(self, rows: Tensor) -> PlainKV:
        """Return a copy of the rows, which may repeat."""
        return PlainKV(*(x.index_select(1, rows) for x in self.stores))

    def grown(self, n_new: int) -> PlainKV:
        """Return the same pairs with `n_new` empty slots after them, in new storage."""
        return PlainKV(*(pad(x, (0, 0, 0, n_new)) for x in self.stores))
