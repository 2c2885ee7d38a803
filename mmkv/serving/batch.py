"""Requests, and one decode step of all running replies: its batch, and how a request ends."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.cache_utils import Cache

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.forward_pass import AttentionCall, Decoding, ForwardPass, current
from mmkv.calls import passing
from mmkv.contexts import Context
from mmkv.layer_inputs import rows_of
from mmkv.parts.slots import send
from mmkv.serving import choose
from mmkv.serving.pool import Member, Pool
from mmkv.serving.reply import Event, Reply, Sampling, TextStream, TokenLogprobs, Usage


@dataclass(eq=False, kw_only=True)
class Request:
    """A request that waits, whose prompt is read, or whose reply grows."""

    reply: Reply
    inputs: dict[str, Any]  # of the model, one row; with a prefix, of what follows it
    prefix: dict[str, Any] | None  # inputs that other requests may share
    key: str  # identifies the prefix
    sampling: Sampling
    extra_processors: list[LogitsProcessor]  # besides those of `generate`
    max_new_tokens: int
    plan: CacheConfig
    tokens: int  # of the whole prompt
    max_bytes: int  # upper bound of its cache if it shares nothing
    text: TextStream
    deadline: float  # by `time.monotonic`; inf: none
    reserved: int = 0  # bytes that its cache may still reach; 0 once it is in the pool
    # Its prefix, as long as others may share it; the request's cache begins as a copy of it.
    context: Context | None = None
    shared: bool = False  # whether its prefix had been read for another request
    cache: CompressedCache | None = None  # None while it waits, and once it is in the pool
    member: Member | None = None
    echo: Event = Event(-1, "")  # text and log probabilities of the prompt, sent with the reply
    kept_tokens: int = 0
    peak_bytes: int = 0
    unread: int = 0  # tokens of its prompt that are not read yet
    overtaken: int = 0  # how many later requests were started before it
    chunks_to_itself: int = 0  # chunks to read before a shorter prompt may be read in between
    # Set when its prompt is read: what `generate` chooses tokens by, and the next position.
    ids: Tensor = field(default_factory=lambda: torch.empty(0))
    processors: Any = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    eos: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    position: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def aborted(self) -> str | None:
        """Why the request must end now: "cancelled", "timeout", or None."""
        if self.reply.cancelled:
            return "cancelled"
        return "timeout" if time.monotonic() >= self.deadline else None

    @property
    def seen(self) -> int:
        """Tokens of the prompt and of the reply so far."""
        return self.tokens + len(self.reply.tokens)

    def next_token(self, logits: Tensor) -> int:
        """Choose the next token from logits, float32 [1, V], as `generate` does."""
        scores = self.processors(self.ids[:, : self.seen], logits)
        if self.generator is None:
            token = int(scores.argmax(-1))
        else:
            probs = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(probs, num_samples=1, generator=self.generator))
        if (top := self.sampling.logprobs) is not None:
            self.logprobs = tuple(choose.logprobs(logits, [token], top, self.text.tokenizer))
        return token

    def emit(self, token: int) -> str | None:
        """Send the next token; return why the reply ends with it, or None."""
        self.ids[0, self.seen] = token
        text = self.text.add(token)
        reason = None
        if token in self.eos or self.text.stopped:
            reason = "stop"
        elif len(self.reply.tokens) + 1 >= self.max_new_tokens:
            reason = "length"
        if reason is not None:
            text += self.text.end()
        event = Event(token, self.echo.text + text, self.echo.logprobs + self.logprobs)
        self.echo, self.logprobs = Event(-1, ""), ()
        self.reply.put(event, None, self.usage(1))
        return reason

    def weigh(self) -> None:
        """Update `peak_bytes` by the present size of the cache."""
        if self.cache is not None:
            self.peak_bytes = max(self.peak_bytes, self.cache.nbytes)

    def usage(self, n_pending: int = 0) -> Usage:
        """Return the usage so far, with `n_pending` tokens that are about to be sent."""
        tokens = len(self.reply.tokens) + n_pending
        return Usage(self.tokens, tokens, self.kept_tokens, self.shared, self.peak_bytes)


class Batch:
    """Replies that grow together.

    With `limited`, no request takes more bytes than are reserved for it. The lock `wake` is held
    while a state that other threads read is changed.
    """

    def __init__(self, model: Any, limited: bool, wake: threading.Condition) -> None:
        self.model, self.limited, self.wake = model, limited, wake
        self.running: list[Request] = []
        self.reading: list[Request] = []  # a short prompt is read within the one before it
        self.pool = Pool()
        self.stepping = False  # whether a step is under way
        self.counts = Counter(tokens_generated=0, prompt_tokens=0, requests_done=0, prefix_hits=0)
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if model._supports_logits_to_keep():
            self._options["logits_to_keep"] = 1

    def step(self) -> None:
        """Generate one token of every running reply."""
        self._join()
        rows = [x.owner for x in self.pool.members]
        rows += [x for x in self.running if x.member is None]
        if not rows:
            return
        self.stepping = True
        try:
            batch = RowCaches([x.cache for x in rows if x.cache is not None], self.pool)
            last = np.array([[x.reply.tokens[-1]] for x in rows])
            out = self.model(
                input_ids=send(last, self.model.device),
                position_ids=torch.cat([x.position for x in rows], dim=-2),
                **passing(self.model, batch),
                **self._options,
            )
            logits = out.logits[:, -1].float()  # [B, V]
            likeliest = logits.argmax(-1).tolist()
        except Exception as error:
            for request in rows:
                self.end(request, "error", error)
            return
        finally:
            self.stepping = False
        for i, request in enumerate(rows):
            if (error := batch.errors[i]) is not None:
                self.end(request, "error", error)
            else:
                request.position = request.position + 1
                self.advance(request, logits[i : i + 1], likeliest[i])

    def _join(self) -> None:
        """Move running requests into the pool, where it takes them; one alone stays outside."""
        for request in list(self.running) if len(self.running) > 1 else ():
            cache = request.cache
            if cache is None or not self.pool.takes(cache):
                continue
            try:
                new = request.max_new_tokens - len(request.reply.tokens)
                limit = request.reserved if self.limited else None
                request.member = self.pool.join(request, cache, new, limit, request.context)
                request.cache, request.context, request.reserved = None, None, 0
            except Exception as error:
                self.end(request, "error", error)

    def advance(self, request: Request, logits: Tensor, likeliest: int | None = None) -> None:
        """Choose and send a request's next token from logits [1, V]; an error ends it alone."""
        try:
            chooses = request.generator is not None or len(request.processors)
            if likeliest is None or chooses or request.sampling.logprobs is not None:
                likeliest = request.next_token(logits)
            reason = request.emit(likeliest)
        except Exception as error:
            self.end(request, "error", error)
        else:
            self.counts["tokens_generated"] += 1
            if reason is not None:
                self.end(request, reason)

    def end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """End a request: free its memory, and tell its client even if that fails."""
        try:
            request.weigh()
            if request.member is not None:
                request.peak_bytes = max(request.peak_bytes, self.pool.bytes_of(request.member))
                self.pool.leave(request.member)
        finally:
            with self.wake:
                for place in (self.running, self.reading):
                    if request in place:
                        place.remove(request)
                self.counts["requests_done"] += 1
            request.cache = request.context = request.member = None
            request.reserved = 0
            _let_go(error)
            request.reply.error = error
            request.reply.put(None, reason, request.usage())


def _let_go(error: BaseException | None) -> None:
    """Replace an error's frames by text: clients may keep the error, and frames refer to caches."""
    while error is not None:
        if error.__traceback__ is not None:
            error.add_note("In the engine:\n" + "".join(traceback.format_tb(error.__traceback__)))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class RowCaches(CompressedCache):
    """One decode step's view of many caches: the members of a pool, then caches of one row each.

    Linear layers run on the whole batch; attention runs once for the pool, and once for each row
    outside it, whose policy does more than attention in a step. An error in one of these rows
    (`errors`) does not affect the others.
    """

    def __init__(self, rows: Sequence[CompressedCache], pool: Pool) -> None:
        self.pool, self.n_pooled = pool, len(pool.members)
        caches = [*(x.cache for x in pool.members), *rows]
        # Skips the `__init__` of CompressedCache, which would make layers.
        Cache.__init__(self, layers=list(caches[0].layers))
        self.rows = dict(enumerate(rows, self.n_pooled))
        self._lengths = [x.lengths[0] for x in caches]
        self.errors: list[Exception | None] = [None] * len(caches)
        self.plan, self.shape = caches[0].plan, caches[0].shape
        self.phase, self.prompt = Decoding(), None
        self.short_positions, self.long = None, False  # no row goes beyond (`Engine.positions`)
        self._passes: dict[int, ForwardPass] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: lengths differ between rows, and `position_ids` are passed."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return a mask's key length, 1, and its offset, 0: no mask is needed."""
        return 1, 0

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens of each row."""
        return self._lengths

    def check_plan(self, config: Any, plan: Any) -> None:
        """Accept any plan: each row was checked when its prompt was read, and may have its own."""

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Prepare all rows for one token each."""
        running.cache = self
        running.observes = any(row.observes_replies for row in self.rows.values())
        self._passes = {i: ForwardPass(entered=True, parts=running.parts) for i in self.rows}
        if self.n_pooled:
            self.pool.step()
        self._for_each_row(lambda i, row: row.step(self._passes[i], None, 1))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count one token per row, and pass all on to the attention function that runs next."""
        running = current.get()
        assert running is not None
        running.check_attended()
        for row in self.rows.values():
            layer: Any = row.layers[layer_idx]
            layer.update(key_states, value_states)
        running.pending = layer_idx
        return key_states, value_states

    def attend(
        self, layer_idx: int, call: AttentionCall, own: tuple[Tensor, Any] | None
    ) -> tuple[Tensor, Any]:
        """Return a layer's attention, [B, 1, Hq, D]: of the pool at once, of other rows singly."""
        query, value = call.query, call.value
        out = query.new_empty(0, 1, query.shape[1], value.shape[-1])
        if self.n_pooled:
            pooled = [x[: self.n_pooled] for x in call[:3]]
            out = self.pool.attend(layer_idx, *pooled, scale=call.scale, softcap=call.softcap)
        if not self.rows:
            return out, None
        out = torch.cat([out, out.new_zeros(len(self.rows), *out.shape[1:])])
        running = current.get()
        assert running is not None
        rotary = running.rotary.get(layer_idx)

        def attend_row(i: int, row: CompressedCache) -> None:
            row_pass, at = self._passes[i], slice(i, i + 1)
            if rotary is not None and row.observes_replies:
                index = torch.tensor([i], device=rotary.cos.device)
                row_pass.rotary[layer_idx] = rows_of(rotary, index)
            current.set(row_pass)
            of_row = call._replace(query=query[at], key=call.key[at], value=value[at])
            out[at] = row.attend(layer_idx, of_row, None)[0]

        try:
            self._for_each_row(attend_row)
        finally:
            current.set(running)
        return out, None

    def finish(self) -> None:
        """Finish the step of each row, after the last layer."""
        self._for_each_row(lambda i, row: row.finish())

    def _for_each_row(self, function: Callable[[int, CompressedCache], None]) -> None:
        """Call a function for each row without an error; an error is kept for its row."""
        for i, row in self.rows.items():
            if self.errors[i] is None:
                try:
                    function(i, row)
                except Exception as error:
                    self.errors[i] = error
