"""The engine's thread: it reads prompts in turn, and steps the running replies in between.

The running replies take a step before each chunk of a prompt, and also within a chunk that takes
longer than the last whole one did (at the prompt's end, when tokens are evicted). So no reply waits
longer than one chunk takes. Between two chunks of a long prompt a short one may be read, after
which the long one has as many chunks to itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv import contexts
from mmkv.attach.attachment import Attachment
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import between, current
from mmkv.calls import CACHE
from mmkv.contexts import Context
from mmkv.serving.batch import Batch, Request
from mmkv.serving.memory import Bounds
from mmkv.serving.pool import Pool
from mmkv.serving.prompts import chunk_size, kept, read
from mmkv.serving.reply import Busy, Closed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """An engine's requests and bytes now (`None`: no limit), and its counts since it began."""

    running: int
    waiting: int
    prefilling: int
    cache_bytes: int
    cache_memory: int | None
    reserved_bytes: int  # upper bound of `cache_bytes`
    prefixes: int  # stored to be shared
    tokens_generated: int
    prompt_tokens: int
    requests_done: int  # for any reason
    prefix_hits: int  # requests whose prefix had been read


@dataclass(frozen=True)
class Limits:
    """The limits of an engine; see `Engine`."""

    cache_memory: int | None
    max_batch: int
    share_prefixes: bool
    max_waiting: int
    max_prefixes: int


class _Aborted(Exception):  # noqa: N818 - a signal, not an error
    """Ends the reading of a prompt whose request must end."""


class _Failed(BaseException):
    """Ends the reading of a prompt when the engine itself failed, not that prompt's request."""


class Worker:
    """The thread, and the requests that wait, whose prompts are read, or whose replies grow."""

    def __init__(self, attachment: Attachment, limits: Limits, bounds: Bounds) -> None:
        self.model: Any = attachment.model
        self.attachment = attachment
        self.limits, self.bounds = limits, bounds
        self.wake = threading.Condition()
        self.waiting: deque[Request] = deque()
        self.batch = Batch(self.model, limits.cache_memory is not None, self.wake)
        self.reading = self.batch.reading
        self.prefixes: OrderedDict[str, Context] = OrderedDict()
        self.closed = False
        self._chunks, self._chunk_of = 0, None  # number read so far; request of the last
        # Seconds that the last whole chunk took, and this one so far; when the last step ended.
        self._gap, self._spent, self._rested = float("inf"), 0.0, 0.0
        self._hooks = [self.model.register_forward_pre_hook(self._before_chunk, prepend=True)]
        layers = attachment.parts.layers
        self._hooks += [x.register_forward_pre_hook(self._between) for x in layers]
        self._thread = threading.Thread(target=self._loop, daemon=True, name="mmkv-engine")
        self._thread.start()

    def add(self, request: Request) -> None:
        """Append a request to the queue, unless the engine is closed or too many wait."""
        with self.wake:
            if self.closed:
                raise Closed("the engine is closed")
            if len(self.waiting) >= self.limits.max_waiting:
                raise Busy(f"{len(self.waiting)} requests wait already: try again later")
            self.waiting.append(request)
            self.wake.notify_all()

    def notify(self) -> None:
        """Wake the thread, which then ends cancelled requests."""
        with self.wake:
            self.wake.notify_all()

    def close(self) -> None:
        """End all requests and the thread."""
        self.closed = True
        self.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def live(self) -> list[Request]:
        """Return the requests that hold or may take memory."""
        return [*self.batch.running, *self.reading]

    def stats(self) -> EngineStats:
        """Return what the engine holds now, and its counts so far."""
        with self.wake:
            live, contexts = self.live(), list(self.prefixes.values())
            caches = [x.cache for x in live if x.cache is not None]
            return EngineStats(
                running=len(self.batch.running),
                waiting=len(self.waiting),
                prefilling=len(self.reading),
                cache_bytes=sum(x.nbytes for x in [self.batch.pool, *caches, *contexts]),
                cache_memory=self.limits.cache_memory,
                reserved_bytes=sum(x.reserved for x in live)
                + sum(x.nbytes for x in contexts)
                + self.batch.pool.most
                + self.batch.pool.spare,
                prefixes=len(contexts),
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
            except (Exception, _Failed) as failed:  # no request may wait for ever
                logger.exception("the engine failed, and goes on without what it held")
                error = failed.args[0] if isinstance(failed, _Failed) else failed
                self._end_all("error", error)
        for hook in self._hooks:
            hook.remove()
        self._end_all("cancelled")

    def _end_all(self, reason: str, error: Exception | None = None) -> None:
        with self.wake:
            requests = [*self.waiting, *self.live()]
            self.waiting.clear()
            self.prefixes.clear()
        for request in requests:
            try:
                self.batch.end(request, reason, error)
            except Exception:
                logger.exception("a request ended without giving back what it held")
        self.batch.pool = Pool()

    def _sweep(self) -> None:
        """End requests that were cancelled or took too long, except the one whose pass runs."""
        with self.wake:
            requests = [*self.waiting, *self.batch.running, *self.reading[:-1]]
            aborted = [x for x in requests if x.aborted]
            for request in aborted:
                if request in self.waiting:
                    self.waiting.remove(request)
        for request in aborted:
            if request in self.reading and request.cache is not None:
                request.cache.reset()  # its pass ends after those of the prompts read within it
            self.batch.end(request, request.aborted or "cancelled")

    def _admitted(self, max_tokens: int | None = None) -> Request | None:
        """Admit the request that has waited longest, if there is room for it; None: no request.

        One whose prefix is stored goes first: it takes less, and others may need that memory. If
        there is no room for it, the oldest may start where it leaves that prefix in place. No
        request is overtaken by more than `max_batch` of these. With `max_tokens`, a request of at
        most so many goes ahead of longer ones that wait, if there is room for these as well.
        """
        with self.wake:
            if len(self.live()) >= self.limits.max_batch:
                return None
            being_read = {x.key for x in self.reading if x.key and x.key not in self.prefixes}
            bytes_ahead, request = 0, None
            for request in self.waiting:
                short = max_tokens is None or request.tokens <= max_tokens
                if short and request.key not in being_read:
                    break
                bytes_ahead += request.max_bytes
            else:
                return None
            oldest = request
            if max_tokens is None and oldest.overtaken < self.limits.max_batch:
                request = next((x for x in self.waiting if x.key in self.prefixes), oldest)
        context = self.prefixes.get(request.key)
        need = request.max_bytes if context is None else self._bytes_behind(request, context)
        has_room = self._has_room(need + bytes_ahead * (request is oldest), request.key)
        if not has_room and request is not oldest:
            has_room = self._has_room(oldest.max_bytes + bytes_ahead, kept_key=request.key)
            if has_room:
                request, context, need = oldest, None, oldest.max_bytes
        if not has_room:
            if self.live():
                return None
            # Even alone there is no room for a copy of its prefix: the request uses that up.
            self._drop([request.key])
            self._has_room(need)
        with self.wake:
            self.waiting.remove(request)
            oldest.overtaken += request is not oldest
            request.reserved, request.context = need, context
            request.shared = context is not None
            self.reading.append(request)
        if context is not None:
            self.batch.counts["prefix_hits"] += 1
            if request.key in self.prefixes:
                self.prefixes.move_to_end(request.key)
        return request

    def _bytes_behind(self, request: Request, context: Context) -> int:
        tokens, new = request.inputs["input_ids"].shape[1], request.max_new_tokens
        return min(request.max_bytes, self.bounds.behind(context.cache, tokens, new))

    def _has_room(self, need: int, kept_key: str = "") -> bool:
        """Free `need` bytes if unused prefixes and spare slots suffice; return whether they do."""
        if self.limits.cache_memory is None:
            return True
        reserved = self.batch.pool.most + sum(x.reserved for x in self.live())
        sizes = {key: x.nbytes for key, x in self.prefixes.items()}
        free = self.limits.cache_memory - reserved - sum(sizes.values())
        dropped = list[str]()
        for key in self._unused_prefixes():
            if free >= need:
                break
            if key != kept_key:
                dropped.append(key)
                free += sizes[key]
        if free < need:
            return False
        if free - self.batch.pool.spare < need:
            self.batch.pool.trim()
        self._drop(dropped)
        return True

    def _unused_prefixes(self) -> list[str]:
        """Return keys of prefixes without replies: least recently used first, awaited ones last."""
        with self.wake:
            awaited = {request.key for request in self.waiting}
        in_use = [x.context for x in self.batch.pool.prefixes]
        unused = [key for key, x in self.prefixes.items() if x not in in_use]
        return sorted(unused, key=awaited.__contains__)

    def _drop(self, keys: list[str]) -> None:
        """Forget prefixes; replies that began as copies of them keep their copies."""
        with self.wake:
            dropped = [self.prefixes.pop(key, None) for key in keys]
        for request in self.live():
            if request.context in dropped:
                request.context = None

    def _start(self, request: Request) -> None:
        """Read a request's prompt, then add the request to the batch."""
        try:
            logits = self._read(request)
        except _Aborted:
            if request in self.reading:
                self.batch.end(request, request.aborted or "cancelled")
        except Exception as error:
            self.batch.end(request, "error", error)
        else:
            with self.wake:
                self.reading.remove(request)
                self.batch.running.append(request)
            if request.max_new_tokens:
                self.batch.advance(request, logits)
            else:
                request.reply.put(request.echo, None, request.usage())
                self.batch.end(request, "length")

    def _read(self, request: Request) -> Tensor:
        """Read a request's prompt; return the logits [1, V] of the reply's first token."""
        request.unread = request.tokens
        inputs = self._model_inputs(request)
        cache = request.cache = inputs[CACHE]
        chunk = chunk_size(self.attachment, inputs, self.bounds.chunk)
        logits = read(self.model, request, inputs, chunk)
        self.batch.counts["prompt_tokens"] += request.tokens
        request.inputs, request.prefix = {}, None  # pictures are large
        request.kept_tokens = kept(cache)
        request.weigh()
        bound = self.bounds.reply(cache, request.max_new_tokens)
        if bound is not None:
            request.reserved = min(request.reserved, bound)
        return logits

    def _model_inputs(self, request: Request) -> dict[str, Any]:
        """Return the model's inputs for a request, with a cache of its own."""
        context = request.context
        if context is None:
            cache = request.cache = CompressedCache(self.attachment.parts.config, request.plan)
            cache.own_plan = request.plan is not self.attachment.plan
            if request.prefix is None:
                return {**request.inputs, CACHE: cache}
            chunk = chunk_size(self.attachment, request.prefix, self.bounds.chunk)
            context = contexts.read_into(cache, self.model, request.prefix, chunk)
            need = self._bytes_behind(request, context)
            request.cache, request.reserved = None, 0
            if self.limits.share_prefixes and self._has_room(context.nbytes + need):
                request.reserved = need
                with self.wake:
                    self.prefixes[request.key] = context
                excess = max(0, len(self.prefixes) - self.limits.max_prefixes)
                self._drop(self._unused_prefixes()[:excess])
            else:
                request.reserved = request.max_bytes
        used_up = self.prefixes.get(request.key) is not context
        request.context = None if used_up else context
        return context.behind(request.inputs, copied=not used_up)

    def _before_chunk(self, module: Any, args: Any) -> None:
        """Step the running replies before each chunk of a prompt; maybe read a short prompt too."""
        if not self._interrupts():
            return
        reading, chunk = self.reading[-1], self.bounds.chunk
        if self._chunk_of is reading:
            self._gap = self._spent + time.perf_counter() - self._rested
        self._take_turns()
        short = None
        if reading.chunks_to_itself:
            reading.chunks_to_itself -= 1
        elif reading.unread > chunk:
            short = self._admitted(reading.unread // 2)
        if short is not None:
            before = self._chunks
            self._start(short)
            if reading not in self.reading:
                raise _Aborted
            reading.chunks_to_itself = max(0, self._chunks - before - 1)  # besides this one
            self._take_turns()
        self._chunks, self._chunk_of = self._chunks + 1, reading
        reading.unread -= chunk
        self._spent, self._rested = 0.0, time.perf_counter()

    def _between(self, *args: Any) -> None:
        """Step the replies between a prompt's layers if their last step is a whole chunk ago."""
        since = time.perf_counter() - self._rested
        if since < self._gap or not (self.batch.running and self._interrupts()):
            return
        self._spent += since
        running = current.set(None)  # the prompt's pass is paused
        try:
            self._take_turns()
        finally:
            current.reset(running)

    def _interrupts(self) -> bool:
        """Return whether the pass that calls a hook reads a prompt of this thread."""
        on_thread = threading.current_thread() is self._thread
        return on_thread and bool(self.reading) and not self.batch.stepping

    def _take_turns(self) -> None:
        """End aborted requests, and step the running replies."""
        try:
            self._sweep()
            if self.batch.running:
                self.batch.step()
        except Exception as error:
            raise _Failed(error) from error
        if self.closed or self.reading[-1].aborted:
            raise _Aborted
        self._rested = time.perf_counter()
