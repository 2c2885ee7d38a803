"""Requests on their way, and a step of all running replies: their caches in it, how each leaves."""

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
from mmkv.cache.forward_pass import ForwardPass, current
from mmkv.cache.phases import Decoding
from mmkv.calls import passing
from mmkv.contexts import Context
from mmkv.parts.slots import send
from mmkv.serving import choose
from mmkv.serving.pool import Member, Pool
from mmkv.serving.reply import Event, Reply, Sampling, TextStream, TokenLogprobs, Usage


@dataclass(eq=False, kw_only=True)
class Request:
    """A request, waiting, being read or running."""

    reply: Reply
    inputs: dict[str, Any]  # of the model, one row; behind a prefix those of the rest alone
    prefix: dict[str, Any] | None  # inputs that other requests may share
    key: str  # what tells the prefix apart
    sampling: Sampling
    custom: list[LogitsProcessor]  # what its tokens are chosen by beside what `generate` has
    new: int
    plan: CacheConfig
    tokens: int  # of the whole prompt
    whole: int  # bytes that it takes at the most, alone
    text: TextStream
    deadline: float | None
    reserved: int = 0  # bytes that it may take from now on; a member's are the pool's
    # What was read of its prefix, while that is held for others too: its cache begins as a copy.
    context: Context | None = None
    shared: bool = False
    cache: CompressedCache | None = None  # None before, and once it is a member of the pool
    member: Member | None = None
    echo: Event = Event(-1, "")  # the prompt's text, and what was likely in it: the reply's start
    kept: int = 0
    most: int = 0
    unread: int = 0  # tokens of its prompt
    passed: int = 0  # how many requests that waited less were begun before it
    turns: int = 0  # chunks of its prompt that are read before a shorter prompt may come between
    # Set when its prompt is read: what `generate` would choose by, and where the next token goes.
    ids: Tensor = field(default_factory=lambda: torch.empty(0))
    processors: Any = ()
    likely: tuple[TokenLogprobs, ...] = ()
    eos: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    position: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def over(self) -> str | None:
        """Why it should end now: "cancelled", "timeout", or None."""
        if self.reply.cancelled:
            return "cancelled"
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return "timeout" if late else None

    @property
    def plain(self) -> bool:
        """Whether its next token is the likeliest, and nothing else counts."""
        drawn = self.generator is not None
        return not drawn and not len(self.processors) and self.sampling.logprobs is None

    @property
    def seen(self) -> int:
        """Tokens of the prompt and the reply."""
        return self.tokens + len(self.reply.tokens)

    def next_token(self, logits: Tensor) -> int:
        """The next token from logits float32 [1, V], chosen as `generate` does."""
        scores = self.processors(self.ids[:, : self.seen], logits)
        if self.generator is None:
            token = int(scores.argmax(-1))
        else:
            probs = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(probs, num_samples=1, generator=self.generator))
        if (top := self.sampling.logprobs) is not None:
            self.likely = tuple(choose.logprobs(logits, [token], top, self.text.tokenizer))
        return token

    def give(self, token: int) -> str | None:
        """Send the next token; why the reply ends with it, or None."""
        self.ids[0, self.seen] = token
        text = self.text.add(token)
        reason = None
        if token in self.eos or self.text.stopped:
            reason = "stop"
        elif len(self.reply.tokens) + 1 >= self.new:
            reason = "length"
        if reason is not None:
            text += self.text.end()
        event = Event(token, self.echo.text + text, self.echo.logprobs + self.likely)
        self.echo, self.likely = Event(-1, ""), ()
        self.reply.put(event, None, self.usage(1))
        return reason

    def weigh(self) -> None:
        """Look at what its cache takes now."""
        if self.cache is not None:
            self.most = max(self.most, self.cache.nbytes)

    def usage(self, more: int = 0) -> Usage:
        """What it took so far, with `more` tokens."""
        tokens = len(self.reply.tokens) + more
        return Usage(self.tokens, tokens, self.kept, self.shared, self.most)


class Batch:
    """Replies that grow together.

    Where it is `limited`, a request takes no more than what is reserved for it. `wake` is held
    while what other threads look at changes.
    """

    def __init__(self, model: Any, limited: bool, wake: threading.Condition) -> None:
        self.model, self.limited, self.wake = model, limited, wake
        self.running: list[Request] = []
        self.reading: list[Request] = []  # the last is read, between two chunks of the one before
        self.pool = Pool()
        self.stepping = False  # whether a step is under way
        self.counts = Counter(tokens_generated=0, requests_done=0)
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if model._supports_logits_to_keep():
            self._options["logits_to_keep"] = 1

    def step(self) -> None:
        """One token more of every running reply."""
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
                for place in (self.running, self.reading):
                    if request in place:
                        place.remove(request)
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

    def check_plan(self, config: Any, plan: Any) -> None:
        """Each row was checked when its prompt was read, and may have a plan of its own."""

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Before one token of each row."""
        running.cache = self
        running.observes = any(row.observes_replies for row in self.rows.values())
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
        out = query.new_empty(0, 1, query.shape[1], value.shape[-1])
        if self.first:
            given = [x[: self.first] for x in (query, key, value)]
            out = self.pool.attend(layer_idx, *given, **options)
        if not self.rows:
            return out, None
        out = torch.cat([out, out.new_zeros(len(self.rows), *out.shape[1:])])
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
