"""One user's turns, whatever answers them: a model here, or a server."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from .values import Settings, Turn

if TYPE_CHECKING:
    from PIL import Image

LONGEST_QUESTION = 4000  # characters


class NoPictureError(ValueError):
    """A question before any picture; how to choose one differs between page and terminal."""


class Talk:
    """A conversation; `ask` continues it. A subclass answers in `_answered`, and `_forget`s."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._busy = threading.Lock()
        self._stop = False
        self._closed = False

    def stop(self) -> None:
        """End the answers that are streaming; what they have said stays."""
        self._stop = True

    def clear(self) -> None:
        """Forget every turn and free what it holds.

        Raises:
            ValueError: the answers did not stop within ten seconds.
        """
        self.stop()
        if not self._busy.acquire(timeout=10):
            raise ValueError("the answers are still streaming: stop them first")
        try:
            self.turns = []
            self._forget()
        finally:
            self._busy.release()

    def close(self) -> None:
        """The user has gone: stop, and free everything as soon as nothing runs."""
        self._closed = True
        self.clear()

    def ask(
        self, question: str, picture: Image.Image | None, settings: Settings
    ) -> Generator[Turn]:
        """Answer a question: the turn as it grows, and last the whole of it.

        Args:
            question: of the user.
            picture: new in this turn, RGB; None asks on about the earlier ones.
            settings: where they differ from before, the conversation is read again.

        Raises:
            ValueError: an empty question, no picture, a setting out of range, a budget below what
                must be kept, or more tokens than the model reads. The conversation stays as it was.
        """
        if not self._busy.acquire(blocking=False):
            raise ValueError("an answer is still streaming: wait for it, or stop it")
        try:
            self._stop = False
            yield from self._answered(_checked(question), picture, settings)
        finally:
            self._busy.release()
            if self._closed:
                self.clear()

    def _answered(
        self, question: str, picture: Image.Image | None, settings: Settings
    ) -> Generator[Turn]:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError


def _checked(question: str) -> str:
    question = question.strip()
    if not question:
        raise ValueError("the question is empty")
    if len(question) > LONGEST_QUESTION:
        raise ValueError(
            f"the question has {len(question)} characters: {LONGEST_QUESTION} at most are read"
        )
    return question
