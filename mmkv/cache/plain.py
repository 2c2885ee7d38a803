"""Kept pairs in the model's own type, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad


class PlainKV:
    """The pairs of a layer's blocks, in the model's type.

    A block has R rows of S slots. The methods are those of `QuantizedKV`.

    Attributes:
        blocks: of each block one tensor [2, R, S, D] of keys and values, so that a step writes
            once; two of [1, R, S, D] and [1, R, S, Dv] if they differ in size or type.
    """

    rotation = None

    def __init__(self, blocks: Sequence[Sequence[Tensor]]) -> None:
        self.blocks = blocks
        pairs = [[x for store in stores for x in store] for stores in blocks]
        # Keys [R, S, D] and values [R, S, Dv] of each block: views.
        self._pairs = [(keys, values) for keys, values in pairs]
        self._n_rows = [len(keys) for keys, _ in self._pairs]
        self._rows = [torch.arange(len(keys), device=keys.device) for keys, _ in self._pairs]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Self:
        """Hold one block: keys [R, S, D] and values [R, S, Dv]."""
        if keys.shape == values.shape and keys.dtype == values.dtype:
            return cls([[torch.stack([keys, values])]])
        return cls([[keys[None], values[None]]])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Hold the blocks of all parts."""
        return cls([stores for part in parts for stores in part.blocks])

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainKV:
        """Return a copy whose keys and values are views of its own tensors."""
        return PlainKV([[x.clone() for x in stores] for stores in self.blocks])

    @property
    def nbytes(self) -> int:
        """Bytes of the storages."""
        return sum(x.untyped_storage().nbytes() for stores in self.blocks for x in stores)

    @property
    def full_pair_bytes(self) -> int:
        """Bytes of a pair."""
        return sum(x.shape[-1] * x.element_size() for x in self._pairs[0])

    @property
    def pair_bytes(self) -> int:
        """Bytes of a pair as it is stored."""
        return self.full_pair_bytes

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Return all keys and values of each block."""
        return self._pairs

    def pairs(self, widths: Sequence[int], *, whole: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of each block's first slots, as many as `widths` says."""
        return [
            (keys, values) if width == keys.shape[1] else (keys[:, :width], values[:, :width])
            for (keys, values), width in zip(self._pairs, widths, strict=True)
        ]

    def pieces(self, position: int, q: int) -> list[int]:
        """Return that all q tokens are written at once."""
        return [q]

    def new(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return new pairs, keys [R, q, D] and values [R, q, Dv], as a block has them."""
        one_tensor = len(self.blocks[0]) == 1
        return [torch.stack([key, value])] if one_tensor else [key[None], value[None]]

    def write(self, new: Sequence[Tensor], slots: Sequence[int | Tensor], position: int) -> None:
        """Write the pairs of q new tokens; arguments are those of `QuantizedKV.write`."""
        parts = zip(*(x.split_with_sizes(self._n_rows, 1) for x in new), strict=True)
        for stores, rows, pairs, slot in zip(self.blocks, self._rows, parts, slots, strict=True):
            for store, x in zip(stores, pairs, strict=True):
                if isinstance(slot, int):
                    store[:, :, slot : slot + x.shape[2]] = x
                else:
                    store[:, rows, slot] = x[:, :, 0]

    def write_replayed(
        self, new: Sequence[Tensor], slots: Sequence[int | Tensor], place: Tensor
    ) -> None:
        """Write the pair of one new token, in a replayed step; `slots` has [R or 1] a block."""
        self.write(new, slots, 0)

    def make_room(self, position: int) -> None:
        """Do nothing: a token's slot is there."""

    def place_of(self, position: int) -> int:
        """Return 0: there is no window."""
        return 0

    def select(self, rows: Sequence[Tensor]) -> PlainKV:
        """Return a copy of rows of each block, int64 [n], which may repeat; n may be 0.

        A block of which no row is left is dropped.
        """
        chosen = zip(self.blocks, rows, strict=True)
        return PlainKV([[x.index_select(1, i) for x in stores] for stores, i in chosen if len(i)])

    def fitted(self, capacities: list[int]) -> PlainKV:
        """Return the same pairs with so many slots in each block, in new storage if it is more."""
        missing = [n - keys.shape[1] for n, (keys, _) in zip(capacities, self._pairs, strict=True)]
        if not any(missing):
            return self
        return PlainKV(
            [
                [pad(x, (0, 0, 0, n)) for x in stores] if n else stores
                for stores, n in zip(self.blocks, missing, strict=True)
            ]
        )
