"""What a request asks for, and the stream of its reply: tokens, and text once it is certain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_LOGPROBS = 20


class Refused(ValueError):  # noqa: N818 - an answer, not a fault
    """A request that can never be served; `code` is OpenAI's where its clients know one."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Busy(RuntimeError):  # noqa: N818 - as above
    """Too many requests wait: it may be asked again later."""


class Closed(RuntimeError):  # noqa: N818 - as above
    """The engine was closed: it takes no more requests."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a reply's tokens are chosen."""

    # 0 takes the likeliest token, as does less than a millionth, which float32 cannot divide by.
    temperature: float = 0.0
    top_p: float = 1.0  # draw from the likeliest tokens that have this much probability together
    top_k: int = 0  # draw from so many likeliest tokens; 0: all
    seed: int | None = None  # as of `torch.manual_seed(seed)` before `generate`; None: any
    stop: tuple[str, ...] = ()  # texts that end the reply, and are no part of its text
    min_p: float = 0.0  # draw from tokens at least this likely, relative to the likeliest
    # Above 1, tokens of prompt and reply are less likely; None: the model's.
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0  # taken from the scores of tokens that the reply has
    frequency_penalty: float = 0.0  # taken from a token's score each time that the reply has it
    # Added to the scores of tokens, by their ids.
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None  # tell log probabilities, and so many of the likeliest tokens
    echo: bool = False  # begin with the prompt's text, and its log probabilities
    grammar: str | None = None  # of llguidance, which the text has to match

    def __post_init__(self) -> None:
        """Refuse options that are out of range."""
        if not 0 <= self.temperature < float("inf"):
            raise Refused(f"temperature={self.temperature}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise Refused(f"top_p={self.top_p}: expected a number above 0, at most 1")
        if self.top_k < 0:
            raise Refused(f"top_k={self.top_k}: expected 0 or more")
        if isinstance(self.stop, str) or not all(isinstance(x, str) and x for x in self.stop):
            raise Refused(f"stop={self.stop!r}: expected texts, such as stop=('END',)")
        if not 0 <= self.min_p <= 1:
            raise Refused(f"min_p={self.min_p}: expected a number from 0 to 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            raise Refused(f"repetition_penalty={self.repetition_penalty}: expected more than 0")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(value := getattr(self, name)) < float("inf"):
                raise Refused(f"{name}={value}: expected a number such as 0.5")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise Refused(f"logprobs={self.logprobs}: expected 0 to {MOST_LOGPROBS}")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature >= 1e-6


class Logprob(NamedTuple):
    """A token, its text and its log probability; None: of a prompt's first token."""

    token: int
    text: str
    logprob: float | None


class TokenLogprobs(NamedTuple):
    """A token that was taken, and the likeliest ones in its place."""

    taken: Logprob
    top: tuple[Logprob, ...]


class Event(NamedTuple):
    """A token, and the text that is certain with it: "" while a character or stop is incomplete.

    With `Sampling.logprobs` also what was likely; with `echo`, the first one has the prompt's; its
    token is -1 where no reply is asked for.
    """

    token: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Usage:
    """What a request took."""

    prompt_tokens: int = 0  # pictures included
    completion_tokens: int = 0  # so far
    kept_tokens: int = 0  # of the prompt, mean over layers and heads
    shared: bool = False  # whether the prompt's beginning had been read for another request
    cache_bytes: int = 0  # when the prompt had been read or at the end, the larger


class Reply:
    """A reply as it comes: iterate over it (async or not), or wait for all of it.

    Several may read it; each gets every event. Leaving an async iteration early (a cancelled task,
    or `aclose`) cancels the request.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        # "stop", "length", "cancelled", "timeout" or "error"; None while it runs.
        self.finish_reason: str | None = None
        self.error: Exception | None = None  # what iterating and waiting raise
        self.usage = Usage()  # so far
        self.cancelled = False
        self._wake = wake
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def cancel(self) -> None:
        """End the reply; what it holds is freed before the next step."""
        self.cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> tuple[list[int], str]:
        """Wait for the whole reply: its tokens and its text.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; the request goes on.
            Exception: what went wrong with the request.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"the reply was not complete after {timeout} s")
        if self.error is not None:
            raise self.error
        return list(self.tokens), self.text

    def __iter__(self) -> Iterator[Event]:
        at = 0
        while True:
            with self._changed:
                while len(self._events) == at and self.finish_reason is None:
                    self._changed.wait()
                new, done = self._events[at:], self.finish_reason is not None
            yield from new
            at += len(new)
            if done:
                break
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncGenerator[Event]:
        at, told = 0, asyncio.Event()
        listener = asyncio.get_running_loop(), told
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                told.clear()
                with self._changed:
                    new, done = self._events[at:], self.finish_reason is not None
                for event in new:
                    yield event
                at += len(new)
                if done:
                    break
                if not new:
                    await told.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)
            if self.finish_reason is None:
                self.cancel()
        if self.error is not None:
            raise self.error

    def put(self, event: Event | None, finish_reason: str | None, usage: Usage) -> None:
        """Of the engine: add an event, or end the reply, and tell whoever waits."""
        with self._changed:
            if self.finish_reason is not None:
                return
            if event is not None:
                self.tokens += [event.token] if event.token >= 0 else []
                self.text += event.text
                self._events.append(event)
            self.usage, self.finish_reason = usage, finish_reason
            self._changed.notify_all()
            listeners = list(self._listeners)
        for loop, told in listeners:
            with suppress(RuntimeError):  # the loop has ended: nobody is left to tell
                loop.call_soon_threadsafe(told.set)


class TextStream:
    """Text that is certain: no half character, and nothing that may begin a stop text."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        self._tokens: list[int] = []
        self._first = self._next = 0  # tokens from `first` give context to those from `next`
        self._held = ""

    def add(self, token: int) -> str:
        """The text that a token makes certain; `stopped` says whether it completes a stop text."""
        if self.tokenizer is None:
            return ""
        self._tokens.append(token)
        text = self._decode()
        # An incomplete character is not certain, but a stop text may stand before it.
        whole = self._held + text.rstrip("\ufffd")
        if text.endswith("\ufffd") and not any(stop in whole for stop in self.stop):
            return ""
        return self._certain(text)

    def end(self) -> str:
        """What was held back, once the last token has come."""
        if self.tokenizer is None or self.stopped:
            return ""
        text = self._certain(self._decode()) + self._held
        self._held = ""
        return text

    def _decode(self) -> str:
        before = self._text(self._tokens[self._first : self._next])
        return self._text(self._tokens[self._first :])[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _certain(self, text: str) -> str:
        self._first, self._next = self._next, len(self._tokens)
        text = self._held + text
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
