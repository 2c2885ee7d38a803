"""The running replies: a step of all of them at a time, and how each leaves."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache_name import passing
from mmkv.parts.slots import send
from mmkv.serving.pool import Pool
from mmkv.serving.request import Request
from mmkv.serving.rows import RowCaches


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
                request.member = self.pool.join(request, cache, new, limit)
                request.cache, request.reserved = None, 0
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
