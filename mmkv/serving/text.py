"""A reply's text from its tokens, one by one."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Text that is certain: no half character, and nothing that may begin a stop text.

    Args:
        tokenizer: has `decode`; None: there is no text.
        stop: texts that end the reply.
    """

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
        if text.endswith("\ufffd"):  # an incomplete character
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
        keep = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
