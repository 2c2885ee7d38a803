"""The running replies: a step of all of them at a time, their caches in it, and how each leaves."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import ForwardPass, current
from mmkv.cache.phases import Decoding
from mmkv.cache_name import passing
from mmkv.parts.slots import send
from mmkv.serving.pool import Pool
from mmkv.serving.request import Request


class Batch:
    """Replies that grow together.

    Args:
        model: wrapped.
        limited: whether a request may take no more than what is reserved for it.
        wake: held while what other threads look at changes.

    Attributes:
        running: the replies.
        pool: the caches of those that share blocks.
        stepping: whether a step is under way.
        counts: steps, tokens_generated and requests_done.
        step_seconds: of the last step.
    """

    def __init__(self, model: Any, limited: bool, wake: threading.Condition) -> None:
        self.model, self.limited, self.wake = model, limited, wake
        self.running: list[Request] = []
        self.pool = Pool()
        self.stepping, self.step_seconds = False, 0.0
        self.counts = Counter(steps=0, tokens_generated=0, requests_done=0)
        options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True, **options}

    def step(self) -> None:
        """One token more of every running reply."""
        began = time.perf_counter()
        self._join()
        rows = [x.owner for x in self.pool.members]
        rows += [x for x in self.running if x.member is None]
        if not rows:
            return
        self.stepping = True
        try:
            batch, logits = self._forward(rows)
            likeliest = logits.argmax(-1).tolist()
        except Exception as error:
            for request in rows:
                self.end(request, "error", error)
            return
        finally:
            self.stepping = False
        self.step_seconds = time.perf_counter() - began
        self.counts["steps"] += 1
        for i, request in enumerate(rows):
            if (error := batch.errors[i]) is not None:
                self.end(request, "error", error)
            else:
                request.position = request.position + 1
                self.advance(request, logits[i : i + 1], likeliest[i])

    def _join(self) -> None:
        """Requests that are not alone go on in the pool, where they can."""
        for request in list(self.running) if len(self.running) > 1 else ():
            cache = request.cache
            if cache is None or not self.pool.takes(cache):
                continue
            try:
                new = request.new - len(request.reply.tokens)
                limit = request.reserved if self.limited else None
                request.member = self.pool.join(request, cache, new, limit, request.context)
                request.cache, request.context, request.reserved = None, None, 0
            except Exception as error:
                self.end(request, "error", error)

    def _forward(self, rows: list[Request]) -> tuple[RowCaches, Tensor]:
        """The rows' caches, and their next tokens' logits float32 [B, V]."""
        batch = RowCaches([x.cache for x in rows if x.cache is not None], self.pool)
        last = [[x.reply.tokens[-1]] for x in rows]
        out = self.model(
            input_ids=send(np.array(last), self.model.device),
            position_ids=torch.cat([x.position for x in rows], dim=-2),
            **passing(self.model, batch),
            **self._options,
        )
        return batch, out.logits[:, -1].float()

    def advance(self, request: Request, logits: Tensor, likeliest: int | None = None) -> None:
        """Give a request its next token, from logits [1, V]; its errors are its own."""
        try:
            if likeliest is None or not request.plain:
                likeliest = request.next_token(logits)
            reason = request.give(likeliest)
        except Exception as error:
            self.end(request, "error", error)
        else:
            self.counts["tokens_generated"] += 1
            if reason is not None:
                self.end(request, reason)

    def end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """A request leaves, and what it held is freed; its client hears of it in any case."""
        try:
            request.weigh()
            if request.member is not None:
                request.most = max(request.most, self.pool.bytes_of(request.member))
                self.pool.leave(request.member)
        finally:
            with self.wake:
                if request in self.running:
                    self.running.remove(request)
                self.counts["requests_done"] += 1
            request.cache = request.context = request.member = None
            request.reserved = 0
            if error is not None:
                _let_go(error)
            request.reply.error = error
            request.reply.put(None, reason, request.usage())


def _let_go(error: BaseException | None) -> None:
    """Keep the frames of an error as text alone: a client may hold it, and they hold caches."""
    while error is not None:
        if error.__traceback__ is not None:
            error.add_note("In the engine:\n" + "".join(traceback.format_tb(error.__traceback__)))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class RowCaches(CompressedCache):
    """One decode step's view of many caches: the members of a pool, then caches of one row each.

    Linear layers run on the whole batch, attention once for the pool, and once for each row that is
    not in it: rows whose attention is not all that a step has to do. An error in one of these
    (`errors`) leaves the others as they are.

    Args:
        rows: caches of one row each, all behind their prompts.
        pool: requests that come before them.
    """

    def __init__(self, rows: Sequence[CompressedCache], pool: Pool) -> None:
        self.pool, self.first = pool, len(pool.members)
        every = [*(x.cache for x in pool.members), *rows]
        # Not that of CompressedCache: this one holds no layers of its own.
        Cache.__init__(self, layers=list(every[0].layers))
        self.rows = dict(enumerate(rows, self.first))
        self._lengths = [x.lengths[0] for x in every]
        self.errors: list[Exception | None] = [None] * len(every)
        self.plan, self.shape = every[0].plan, every[0].shape
        self.phase, self.prompt = Decoding(), None
        self.clock, self.on_clock = None, False
        self._passes: dict[int, ForwardPass] = {}

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
        return self._lengths

    @property
    def observes_replies(self) -> bool:
        """Whether queries of any row will observe."""
        return any(row.observes_replies for row in self.rows.values())

    def check_plan(self, config: Any, plan: Any) -> None:
        """Each row was checked when its prompt was read, and may have a plan of its own."""

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Before one token of each row."""
        if mask is not None or q != 1:
            raise ValueError("a batch of rows takes one token a row, and no attention_mask")
        running.cache, running.observes = self, self.observes_replies
        self._passes = {i: ForwardPass(entered=True, parts=running.parts) for i in self.rows}
        if self.first:
            self.pool.step()
        self._each(lambda i, row: row.step(self._passes[i], None, 1))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count one token a row, and hand them to the attention function that runs next."""
        running = current.get()
        assert running is not None
        running.check_attended()
        for row in self.rows.values():
            layer: Any = row.layers[layer_idx]
            layer.update(key_states, value_states)
        running.pending = layer_idx
        return key_states, value_states

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        delegate: Callable[[], tuple[Tensor, Any]],
        *,
        mask: Tensor | None = None,
        scale: float | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Any]:
        """One layer's attention [B, 1, Hq, D]: the pool's, and of the other rows one by one."""
        options: dict[str, Any] = {"scale": scale, "softcap": softcap}
        pooled = None
        if self.first:
            given = [x[: self.first] for x in (query, key, value)]
            pooled = self.pool.attend(layer_idx, *given, **options)
            if not self.rows:
                return pooled, None
        B, Hq, q, _ = query.shape
        out = query.new_zeros(B, q, Hq, value.shape[-1])
        if pooled is not None:
            out[: self.first] = pooled
        running = current.get()
        assert running is not None
        rotary = running.rotary.get(layer_idx)

        def attended(i: int, row: CompressedCache) -> None:
            own, at = self._passes[i], slice(i, i + 1)
            if rotary is not None and row.observes_replies:
                own.rotary[layer_idx] = rotary.rows(torch.tensor([i], device=rotary.cos.device))
            current.set(own)
            given = query[at], key[at], value[at]
            out[at] = row.attend(layer_idx, *given, delegate, mask=mask, **options)[0]

        try:
            self._each(attended)
        finally:
            current.set(running)
        return out, None

    def finish(self) -> None:
        """After the last layer: each row's own rounds."""
        self._each(lambda i, row: row.finish())

    def _each(self, function: Callable[[int, CompressedCache], None]) -> None:
        """Run what concerns one row alone; its error is its own, and ends it."""
        for i, row in self.rows.items():
            if self.errors[i] is None:
                try:
                    function(i, row)
                except Exception as error:
                    self.errors[i] = error
