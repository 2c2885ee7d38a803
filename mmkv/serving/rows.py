"""A batch whose rows are caches of their own, for one decode step of requests that come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import ForwardPass, current
from mmkv.cache.phases import Decoding


class RowCaches(CompressedCache):
    """One decode step's view of several caches of one row: row i of the batch goes to cache i.

    Linear layers run on the whole batch; each row attends to what its own cache keeps. An error in
    one row (`errors`) leaves the others as they are.

    Args:
        rows: caches of one row each, all behind their prompts.
    """

    def __init__(self, rows: Sequence[CompressedCache]) -> None:
        # Not that of CompressedCache: this one holds no layers of its own.
        Cache.__init__(self, layers=[x for row in rows[:1] for x in row.layers])
        self.rows = list(rows)
        self.errors: list[Exception | None] = [None] * len(rows)
        self.plan, self.shape = rows[0].plan, rows[0].shape
        self.phase, self.prompt = Decoding(), None
        self.clock, self.on_clock = None, False
        self._passes: list[ForwardPass] = []
        self._observe: list[bool] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows differ, and the positions are given."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """One new token, which sees what its cache holds."""
        return 1, 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's prompt."""
        return [row.lengths[0] for row in self.rows]

    @property
    def observes_replies(self) -> bool:
        """Whether queries of any row will observe."""
        return any(row.observes_replies for row in self.rows)

    def check_plan(self, config: Any, plan: Any) -> None:
        """Each row was checked when its prompt was read, and may have a plan of its own."""

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Before one token of each row."""
        if mask is not None or q != 1:
            raise ValueError("a batch of rows takes one token a row, and no attention_mask")
        running.cache = self
        self._passes = [ForwardPass(entered=True, parts=running.parts) for _ in self.rows]
        self._observe = [row.observes_replies for row in self.rows]
        for i, row in enumerate(self.rows):
            self._guarded(i, lambda row=row, i=i: row.step(self._passes[i], None, 1))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count one token a row, and hand them to the attention function that runs next."""
        running = current.get()
        assert running is not None
        running.check_taken()
        for row in self.rows:
            layer: Any = row.layers[layer_idx]
            layer.update(key_states, value_states)
        running.hand_over(layer_idx, key_states)
        return key_states, value_states

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        delegate: Callable[[], tuple[Tensor, Any]],
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """One layer's attention [B, 1, Hq, D], row by row."""
        running = current.get()
        assert running is not None
        rotary = running.rotary.get(layer_idx)
        B, Hq, q, _ = query.shape
        out = query.new_zeros(B, q, Hq, value.shape[-1])
        try:
            for i, (row, own) in enumerate(zip(self.rows, self._passes, strict=True)):
                if self.errors[i] is not None:
                    continue
                if rotary is not None and self._observe[i]:
                    own.rotary[layer_idx] = rotary.rows(torch.tensor([i], device=rotary.cos.device))
                current.set(own)
                at = slice(i, i + 1)

                def attended(row: CompressedCache = row, at: slice = at) -> None:
                    given = query[at], key[at], value[at]
                    out[at] = row.attend(layer_idx, *given, delegate, **options)[0]

                self._guarded(i, attended)
        finally:
            current.set(running)
        return out, None

    def finish(self) -> None:
        """After the last layer: each row's own rounds."""
        for i, row in enumerate(self.rows):
            self._guarded(i, row.finish)

    def _guarded(self, i: int, function: Callable[[], None]) -> None:
        """Run what concerns row i alone; its error is its own."""
        if self.errors[i] is None:
            try:
                function()
            except Exception as error:
                self.errors[i] = error
