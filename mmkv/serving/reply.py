"""How a reply is sampled, and its stream: tokens, and text as soon as it is certain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MOST_LOGPROBS = 20


class Refused(ValueError):  # noqa: N818 - an answer, not a fault
    """A request that can never be served; `code` is OpenAI's error code, if it has one."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class Busy(RuntimeError):  # noqa: N818 - as above
    """Too many requests wait; the request may be sent again later."""


class Closed(RuntimeError):  # noqa: N818 - as above
    """The engine was closed and takes no more requests."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options by which a reply's tokens are chosen."""

    # 0, or below a millionth, by which float32 cannot divide: the likeliest token is taken.
    temperature: float = 0.0
    top_p: float = 1.0  # draw from the likeliest tokens, up to this sum of probabilities
    top_k: int = 0  # draw from so many likeliest tokens; 0: all
    seed: int | None = None  # as `torch.manual_seed(seed)` before `generate`; None: random
    stop: tuple[str, ...] = ()  # texts that end the reply and are not part of it
    min_p: float = 0.0  # least probability, relative to the likeliest token's
    # Values above 1 make tokens of prompt and reply less likely; None: the model's setting.
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the reply
    frequency_penalty: float = 0.0  # subtracted once for each occurrence in the reply
    # Added to the logits of tokens, by their ids.
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    logprobs: int | None = None  # return log probabilities, and so many likeliest tokens
    echo: bool = False  # begin with the prompt's text and its log probabilities
    grammar: str | None = None  # of llguidance; the text must match it

    def __post_init__(self) -> None:
        """Refuse options out of range."""
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
        """Whether tokens are drawn at random."""
        return self.temperature >= 1e-6


class Logprob(NamedTuple):
    """A token, its text and its log probability, which is None for a prompt's first token."""

    token: int
    text: str
    logprob: float | None


class TokenLogprobs(NamedTuple):
    """A token of the text, and the likeliest ones in its place."""

    taken: Logprob
    top: tuple[Logprob, ...]


class Event(NamedTuple):
    """A token, and the text that is certain with it: "" while a character or stop is incomplete.

    With `Sampling.logprobs` it has log probabilities; with `echo`, the first event has the prompt's
    too. The token is -1 where no reply was requested.
    """

    token: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Usage:
    """The tokens and bytes of a request."""

    prompt_tokens: int = 0  # pictures included
    completion_tokens: int = 0  # so far
    kept_tokens: int = 0  # of the prompt, mean over layers and heads
    shared: bool = False  # whether the prompt's beginning had been read for another request
    cache_bytes: int = 0  # after the prompt or at the end, the larger


class Reply:
    """A reply as it grows: iterate over it (async or not), or wait for all of it.

    Each of several readers gets every event. Leaving an async iteration early (a cancelled task, or
    `aclose`) cancels the request.
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
        """End the reply; its memory is freed before the next step."""
        self.cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> tuple[list[int], str]:
        """Wait for the whole reply; return its tokens and its text.

        Raises:
            TimeoutError: the reply took longer than `timeout` seconds; the request goes on.
            Exception: the error of the request.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"the reply was not complete after {timeout} s")
        if self.error is not None:
            raise self.error
        return list(self.tokens), self.text

    def __iter__(self) -> Iterator[Event]:
        n_read = 0
        while True:
            with self._changed:
                while len(self._events) == n_read and self.finish_reason is None:
                    self._changed.wait()
                new, done = self._events[n_read:], self.finish_reason is not None
            yield from new
            n_read += len(new)
            if done:
                break
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncGenerator[Event]:
        n_read, changed = 0, asyncio.Event()
        listener = asyncio.get_running_loop(), changed
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                changed.clear()
                with self._changed:
                    new, done = self._events[n_read:], self.finish_reason is not None
                for event in new:
                    yield event
                n_read += len(new)
                if done:
                    break
                if not new:
                    await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)
            if self.finish_reason is None:
                self.cancel()
        if self.error is not None:
            raise self.error

    def put(self, event: Event | None, finish_reason: str | None, usage: Usage) -> None:
        """Add an event, or end the reply, and wake its readers; for the engine only."""
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
        for loop, changed in listeners:
            with suppress(RuntimeError):  # the loop of that reader has ended
                loop.call_soon_threadsafe(changed.set)


class TextStream:
    """A decoder of tokens that holds back partial characters and what may begin a stop text."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        self._tokens: list[int] = []
        self._first = self._next = 0  # tokens from `first` are context for those from `next`
        self._held_back = ""

    def add(self, token: int) -> str:
        """Return the text that a token makes certain; set `stopped` if it completes a stop text."""
        if self.tokenizer is None:
            return ""
        self._tokens.append(token)
        text = self._decode()
        # An incomplete character is not certain, but a stop text may stand before it.
        whole = self._held_back + text.rstrip("\ufffd")
        if text.endswith("\ufffd") and not any(stop in whole for stop in self.stop):
            return ""
        return self._certain(text)

    def end(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.tokenizer is None or self.stopped:
            return ""
        text = self._certain(self._decode()) + self._held_back
        self._held_back = ""
        return text

    def _decode(self) -> str:
        before = self._text(self._tokens[self._first : self._next])
        return self._text(self._tokens[self._first :])[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _certain(self, text: str) -> str:
        self._first, self._next = self._next, len(self._tokens)
        text = self._held_back + text
        stops = [at for at in map(text.find, self.stop) if at >= 0]
        if stops:
            self.stopped, self._held_back = True, ""
            return text[: min(stops)]
        n_held = max((overlap(text, stop) for stop in self.stop), default=0)
        self._held_back = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
