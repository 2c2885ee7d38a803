"""One layer of the compressed cache: blocks of kept pairs, or a whole prompt while it waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from mmkv.held import Held
from mmkv.storage import Block, Clock, Place


class CompressedLayer(CacheLayerMixin):
    """One layer's kept pairs, in blocks of rows; `None` before the prefill."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Drop everything."""
        self.seen = 0
        self.batch = 0
        self.heads = 0
        self.blocks: list[Block] | None = None
        self.held: Held | None = None
        self.sizes: list[int] | None = None
        self.retained: Tensor | None = None
        self.error: Tensor | None = None
        self.stream: Tensor | None = None
        self.similarity: Tensor | None = None
        self.compared: Tensor | None = None
        self.ordered: tuple[list[Block], Tensor | None, Tensor | None] | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn the layer's shape."""
        self.batch, self.heads = key_states.shape[:2]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the tokens and hand them on; the attention function stores them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens seen, not kept: positions go on from here."""
        return self.seen

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The new tokens' own block: each layer knows itself which old ones it holds."""
        if isinstance(query_length, Tensor):  # older releases pass the cache positions
            query_length = query_length.shape[0]
        return query_length, self.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        self.forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted tokens cannot come back."""
        raise ValueError(
            "a compressed cache cannot be cropped, so assisted and contrastive decoding cannot "
            "use it: generate without them, or mmkv.unwrap(model) first"
        )

    def offload(self) -> None:
        """Refused: the cache is small because it was compressed; it stays on the device."""
        raise ValueError(
            "a compressed cache cannot be offloaded: generate without cache offloading"
        )

    prefetch = offload

    def select_rows(self, batch: Tensor) -> None:
        """Choose rows of the batch; everything a row has moves with it."""
        if self.blocks is None:
            return
        chosen = batch.cpu().numpy()
        wanted = (chosen[:, None] * self.heads + np.arange(self.heads)).reshape(-1)
        blocks = []
        for block in self.blocks:
            old = np.arange(self.rows) if block.rows is None else block.rows.cpu().numpy()
            place = np.full(self.rows, -1)
            place[old] = np.arange(len(old))
            mine = np.flatnonzero(place[wanted] >= 0)
            if len(mine):
                rows = None if block.rows is None else torch.from_numpy(mine).to(block.rows.device)
                blocks.append(block.select(place[wanted[mine]], rows))
        self.blocks, self.batch = blocks, len(chosen)
        if self.sizes is not None:
            self.sizes = [self.sizes[int(b)] for b in chosen]
        if self.retained is not None:
            self.retained = self.retained[batch.to(self.retained.device)]
        if self.error is not None:
            self.error = self.error[batch.to(self.error.device)]

    @property
    def rows(self) -> int:
        """B * H."""
        return self.batch * self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values."""
        held = 0 if self.held is None else self.held.nbytes
        return held + sum(b.nbytes for b in self.blocks or ())

    def compare(self, similarity: Tensor, tokens: Tensor) -> None:
        """Take in the mean similarity [B] of the residual stream over a prompt's `tokens` [B].

        The chunks of one prompt are averaged; `begin` forgets the last prompt's.
        """
        if self.similarity is None or self.compared is None:
            self.similarity, self.compared = similarity, tokens
            return
        total = self.compared + tokens
        both = self.similarity * self.compared + similarity * tokens
        self.similarity, self.compared = both / total.clamp(min=1), total

    def past(self) -> Held | None:
        """All that is held of earlier tokens; None before the first."""
        if self.held is not None or self.blocks is None:
            return self.held
        return Held.from_blocks(self.blocks, self.batch, self.heads)

    def kept(self) -> Tensor:
        """Original positions held, int64 [B, H, n], ascending, -1 as filler at the end."""
        if self.blocks is None:
            raise ValueError("nothing is kept yet: run a prompt through the wrapped model first")
        found = Held.from_blocks(self.blocks, self.batch, self.heads).positions
        far = torch.iinfo(torch.int64).max
        found = found.masked_fill(found < 0, far).sort(dim=-1).values
        return found.masked_fill(found == far, -1)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        clock: Clock | None = None,
        **options: Any,
    ) -> Tensor:
        """A decode step, or a continuation by q tokens: write, attend, drop.

        Args:
            query: [B, Hq, q, D].
            key: [B, H, q, D].
            value: [B, H, q, D].
            clock: what drives the step in place of the host, or None.
            options: scale and softcap.

        Returns:
            [B, q, Hq, D].
        """
        assert self.blocks is not None
        B, Hq, q, D = query.shape
        first = self.seen - q
        rows = query.reshape(self.rows, Hq // self.heads * q, D)
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()
        order, back = self._order()
        parts = [(rows, key, value)]
        if order is not None:
            sizes = [len(b.positions) for b in self.blocks]
            rows, key, value = rows[order], key[order], value[order]
            parts = list(zip(*(x.split(sizes) for x in (rows, key, value)), strict=True))
        place: Place = first if clock is None else clock.position
        out: list[Tensor] = []
        for block, (mine, new_key, new_value) in zip(self.blocks, parts, strict=True):
            block.append(new_key, new_value, first, clock)
            out.append(block.attend(mine, q, place, **options))
            block.advance(place if q == 1 else self.seen - 1, q)
        done = out[0] if back is None else torch.cat(out)[back]
        return done.view(B, Hq, q, -1).transpose(1, 2)

    def _order(self) -> tuple[Tensor | None, Tensor | None]:
        """The rows as they lie in the blocks, and the way back; None where one block holds all."""
        blocks = self.blocks or []
        if self.ordered is None or self.ordered[0] is not blocks:
            rows = [b.rows for b in blocks if b.rows is not None]
            order = torch.cat(rows) if rows else None
            self.ordered = blocks, order, None if order is None else order.argsort()
        return self.ordered[1:]


def nbytes(layer: object) -> int:
    """Bytes of the storages a layer of any cache holds for keys and values."""
    if isinstance(layer, CompressedLayer):
        return layer.nbytes
    held = [getattr(layer, name, None) for name in ("keys", "values")]
    return sum(x.untyped_storage().nbytes() for x in held if x is not None)
