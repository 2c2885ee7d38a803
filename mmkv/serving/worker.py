"""The engine's thread: whose prompt is read next, and one step after another of all replies.

Before each chunk of a prompt that is read, the running replies take a step; where a chunk takes
longer than the last whole one did (the prompt's end, when tokens are evicted), within it too. None
waits longer than one chunk takes. Between two chunks of a long prompt a short one may be read,
after which the long one has as many chunks to itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv import contexts
from mmkv.attach.attachment import Attachment
from mmkv.cache.forward_pass import between, current
from mmkv.calls import CACHE
from mmkv.contexts import Context
from mmkv.serving.batch import Batch, Request
from mmkv.serving.memory import Bounds
from mmkv.serving.pool import Pool
from mmkv.serving.prompts import Reader, kept
from mmkv.serving.reply import Busy, Closed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What an engine may do at a time; see `Engine`."""

    cache_memory: int | None
    max_batch: int
    share_prefixes: bool
    max_waiting: int
    max_prefixes: int


class _Over(Exception):  # noqa: N818 - a signal, not an error
    """Ends the reading of a prompt whose request is over."""


class _Failed(BaseException):
    """Ends the reading of a prompt in which the engine itself failed: no error of that request."""


class Worker:
    """Requests that wait, those whose prompt is read, and those that run; a thread of its own."""

    def __init__(self, attachment: Attachment, limits: Limits, bounds: Bounds) -> None:
        self.model: Any = attachment.model
        self.limits, self.bounds = limits, bounds
        self.reader = Reader(attachment, bounds.chunk)
        self.wake = threading.Condition()
        self.waiting: deque[Request] = deque()
        self.batch = Batch(self.model, limits.cache_memory is not None, self.wake)
        self.reading = self.batch.reading
        self.prefixes: OrderedDict[str, Context] = OrderedDict()
        self.closed = False
        self._counts = Counter(prompt_tokens=0, prefix_hits=0)
        self._chunks, self._chunk_of = 0, None  # read so far; whose the last one is
        # Seconds: of the last whole chunk, of this one so far, and when the last step ended.
        self._gap, self._spent, self._rested = float("inf"), 0.0, 0.0
        self._hooks = [self.model.register_forward_pre_hook(self._before_chunk, prepend=True)]
        layers = attachment.parts.layers
        self._hooks += [x.register_forward_pre_hook(self._between) for x in layers]
        self._thread = threading.Thread(target=self._loop, daemon=True, name="mmkv-engine")
        self._thread.start()

    def add(self, request: Request) -> None:
        """Have a request wait for its turn, unless the engine is closed or too many wait."""
        with self.wake:
            if self.closed:
                raise Closed("the engine is closed")
            if len(self.waiting) >= self.limits.max_waiting:
                raise Busy(f"{len(self.waiting)} requests wait already: try again later")
            self.waiting.append(request)
            self.wake.notify_all()

    def notify(self) -> None:
        """Have the thread look at what was cancelled."""
        with self.wake:
            self.wake.notify_all()

    def close(self) -> None:
        """End all requests, and the thread."""
        self.closed = True
        self.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def live(self) -> list[Request]:
        """Those that hold or may take memory."""
        return [*self.batch.running, *self.reading]

    def stats(self) -> dict[str, Any]:
        """The fields of `EngineStats`."""
        with self.wake:
            live, held = self.live(), list(self.prefixes.values())
            caches = [x.cache for x in live if x.cache is not None]
            return dict(
                running=len(self.batch.running),
                waiting=len(self.waiting),
                prefilling=len(self.reading),
                cache_bytes=sum(x.nbytes for x in [self.batch.pool, *caches, *held]),
                cache_memory=self.limits.cache_memory,
                reserved_bytes=sum(x.reserved for x in live)
                + sum(x.nbytes for x in held)
                + self.batch.pool.most
                + self.batch.pool.spare,
                prefixes=len(held),
                **self._counts,
                **self.batch.counts,
            )

    @torch.no_grad()
    def _loop(self) -> None:
        between.set(self._between)
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.closed or self.waiting or self.batch.running)
            if self.closed:
                break
            try:
                self._sweep()
                request = self._admitted()
                if request is not None:
                    self._start(request)
                elif self.batch.running:
                    self.batch.step()
            except (Exception, _Failed) as failed:  # the engine's own: nobody may wait for ever
                logger.exception("the engine failed, and goes on without what it held")
                error = failed.args[0] if isinstance(failed, _Failed) else failed
                self._end_all("error", error)
        for hook in self._hooks:
            hook.remove()
        self._end_all("cancelled")

    def _end_all(self, reason: str, error: Exception | None = None) -> None:
        with self.wake:
            left = [*self.waiting, *self.live()]
            self.waiting.clear()
            self.prefixes.clear()
        for request in left:
            try:
                self.batch.end(request, reason, error)
            except Exception:
                logger.exception("a request ended without giving back what it held")
        self.batch.pool = Pool()

    def _sweep(self) -> None:
        """End what was cancelled or took too long, but for the prompt whose pass runs."""
        with self.wake:
            over = [x for x in [*self.waiting, *self.batch.running, *self.reading[:-1]] if x.over]
            for request in over:
                if request in self.waiting:
                    self.waiting.remove(request)
        for request in over:
            if request in self.reading and request.cache is not None:
                request.cache.reset()  # what reads it goes on, to its end, once the others are read
            self.batch.end(request, request.over or "cancelled")

    def _admitted(self, most: int | None = None) -> Request | None:
        """The request that has waited longest, if there is room for it now.

        One whose prefix is held goes first: it costs less, and others may need the prefix's room.
        No request waits for more than `max_batch` of these. One of at `most` so many tokens may
        go ahead of longer ones that wait, if there is room for these as well.
        """
        with self.wake:
            if len(self.live()) >= self.limits.max_batch:
                return None
            being_read = {x.key for x in self.reading if x.key and x.key not in self.prefixes}
            ahead, request = 0, None
            for request in self.waiting:
                short = most is None or request.tokens <= most
                if short and request.key not in being_read:
                    break
                ahead += request.whole
            else:
                return None
            oldest = request
            if most is None and oldest.passed < self.limits.max_batch:
                request = next((x for x in self.waiting if x.key in self.prefixes), oldest)
                ahead *= request is oldest
        context = self.prefixes.get(request.key)
        need = request.whole if context is None else self._behind(request, context)
        if not self._has_room(need + ahead, spared=request.key):
            if self.live() or ahead:
                return None
            # Alone, and still no room for a second copy of the prefix: it takes the first.
            self._drop([request.key])
            self._has_room(need)
        with self.wake:
            self.waiting.remove(request)
            oldest.passed += request is not oldest
            request.reserved, request.context = need, context
            request.shared = context is not None
            self.reading.append(request)
        if context is not None:
            self._counts["prefix_hits"] += 1
            if request.key in self.prefixes:
                self.prefixes.move_to_end(request.key)
        return request

    def _behind(self, request: Request, context: Context) -> int:
        asked = request.inputs["input_ids"].shape[1]
        return min(request.whole, self.bounds.behind(context.cache, asked, request.new))

    def _has_room(self, need: int, spared: str = "") -> bool:
        """Whether `need` bytes are free, once what is spare and in the way has gone."""
        if self.limits.cache_memory is None:
            return True
        taken = self.batch.pool.most + sum(x.reserved for x in self.live())
        held = {key: x.nbytes for key, x in self.prefixes.items()}
        free = self.limits.cache_memory - taken - sum(held.values())
        going = list[str]()
        for key in self._spare_prefixes():
            if free >= need:
                break
            if key != spared:
                going.append(key)
                free += held[key]
        if free < need:
            return False
        if free - self.batch.pool.spare < need:
            self.batch.pool.trim()
        self._drop(going)
        return True

    def _spare_prefixes(self) -> list[str]:
        """Held prefixes that no reply attends to: the longest unused first, wanted ones last."""
        with self.wake:
            wanted = {request.key for request in self.waiting}
        in_use = [x.context for x in self.batch.pool.prefixes]
        free = [key for key, x in self.prefixes.items() if x not in in_use]
        return sorted(free, key=wanted.__contains__)

    def _drop(self, keys: list[str]) -> None:
        """Forget prefixes; replies that began as their copies go on with these."""
        with self.wake:
            gone = [self.prefixes.pop(key, None) for key in keys]
        for request in self.live():
            if request.context in gone:
                request.context = None

    def _start(self, request: Request) -> None:
        """Read a request's prompt; then it joins the batch."""
        try:
            logits = self._read(request)
        except _Over:
            if request in self.reading:
                self.batch.end(request, request.over or "cancelled")
        except Exception as error:
            self.batch.end(request, "error", error)
        else:
            with self.wake:
                self.reading.remove(request)
                self.batch.running.append(request)
            if request.new:
                self.batch.advance(request, logits)
            else:
                request.reply.put(request.echo, None, request.usage())
                self.batch.end(request, "length")

    def _read(self, request: Request) -> Tensor:
        """Logits [1, V] of the first token behind a request's prompt."""
        request.unread = request.tokens
        given = self._given(request)
        cache = request.cache = given[CACHE]
        logits = self.reader.read(request, given)
        self._counts["prompt_tokens"] += request.tokens
        request.inputs, request.prefix = {}, None  # pictures are large
        request.kept = kept(cache)
        request.weigh()
        bound = self.bounds.reply(cache, request.new)
        if bound is not None:
            request.reserved = min(request.reserved, bound)
        return logits

    def _given(self, request: Request) -> dict[str, Any]:
        """What the model is given of a request, with a cache that is its own."""
        if request.prefix is None:
            return {**request.inputs, CACHE: self.reader.cache(request.plan)}
        context = request.context
        if context is None:
            cache = request.cache = self.reader.cache(request.plan)
            chunk = self.reader.chunk(request.prefix)
            context = contexts.read_into(cache, self.model, request.prefix, chunk)
            need = self._behind(request, context)
            request.cache, request.reserved = None, 0
            if self.limits.share_prefixes and self._has_room(context.nbytes + need):
                request.reserved = need
                with self.wake:
                    self.prefixes[request.key] = context
                over = max(0, len(self.prefixes) - self.limits.max_prefixes)
                self._drop(self._spare_prefixes()[:over])
            else:
                request.reserved = request.whole
        own = self.prefixes.get(request.key) is not context
        request.context = None if own else context
        return context.behind(request.inputs, copied=not own)

    def _before_chunk(self, module: Any, args: Any) -> None:
        """Before each chunk of a prompt: running replies take a step, or a short prompt is read."""
        if not self._interrupts():
            return
        reading, chunk = self.reading[-1], self.bounds.chunk
        if self._chunk_of is reading:
            self._gap = self._spent + time.perf_counter() - self._rested
        self._take_turns()
        short = None
        if reading.turns:
            reading.turns -= 1
        elif reading.unread > chunk:
            short = self._admitted(reading.unread // 2)
        if short is not None:
            before = self._chunks
            self._start(short)
            if reading not in self.reading:
                raise _Over
            reading.turns = max(0, self._chunks - before - 1)  # one is read now
            self._take_turns()
        self._chunks, self._chunk_of = self._chunks + 1, reading
        reading.unread -= chunk
        self._spent, self._rested = 0.0, time.perf_counter()

    def _between(self, *args: Any) -> None:
        """Between layers of a prompt: replies take a step, if their last was a whole chunk ago."""
        since = time.perf_counter() - self._rested
        if since < self._gap or not (self.batch.running and self._interrupts()):
            return
        self._spent += since
        running = current.set(None)  # the prompt's pass stands still
        try:
            self._take_turns()
        finally:
            current.reset(running)

    def _interrupts(self) -> bool:
        """Whether what calls a hook is the pass of a prompt that is read here."""
        mine = threading.current_thread() is self._thread
        return mine and bool(self.reading) and not self.batch.stepping

    def _take_turns(self) -> None:
        """What is over ends, and the running replies take a step."""
        try:
            self._sweep()
            if self.batch.running:
                self.batch.step()
        except Exception as error:
            raise _Failed(error) from error
        if self.closed or self.reading[-1].over:
            raise _Over
        self._rested = time.perf_counter()
