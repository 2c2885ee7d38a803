"""One request on its way: what it asks, its own cache, and how its next token is chosen."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.contexts import Context
from mmkv.serving import choose
from mmkv.serving.pool import Member
from mmkv.serving.reply import Event, Reply, Sampling, TextStream, TokenLogprobs, Usage


@dataclass(eq=False)
class Request:
    """A request, waiting, being read or running.

    Attributes:
        inputs: of the model, one row; behind a prefix those of the rest alone.
        prefix: inputs that other requests may share, or None.
        key: what tells the prefix apart.
        tokens: of the whole prompt.
        whole: bytes that it takes at the most, alone.
        reserved: bytes that it may take from now on.
        context: what was read of the prefix, while that is held for others too and its cache begins
            as a copy of it.
        cache: what it holds; None before, and once it is a member of the pool.
        member: what it is in the pool, which then counts its bytes and what it may take.
        unread: tokens of its prompt that are not read.
        passed: how many requests that waited less were begun before it.
        turns: chunks of its prompt that are read before a shorter prompt may come between.
        echo: what the reply begins with: the prompt's text, and what was likely in it.
        custom: what its tokens are chosen by beside what `generate` has.
    """

    reply: Reply
    inputs: dict[str, Any]
    sampling: Sampling
    new: int
    plan: CacheConfig
    tokens: int
    whole: int
    text: TextStream
    deadline: float | None = None
    prefix: dict[str, Any] | None = None
    key: str = ""
    reserved: int = 0
    context: Context | None = None
    shared: bool = False
    cache: CompressedCache | None = None
    member: Member | None = None
    echo: Event = Event(-1, "")
    custom: list[LogitsProcessor] = field(default_factory=list["LogitsProcessor"])
    kept: int = 0
    most: int = 0
    unread: int = 0
    passed: int = 0
    turns: int = 0
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
        asks = self.sampling.logprobs is not None
        return self.generator is None and not len(self.processors) and not asks

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
