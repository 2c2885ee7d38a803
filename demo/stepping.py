"""`model.generate` one token at a time, so that several answers take turns on one device.

Each answer runs in a thread of its own that waits after every token. Only the caller of `step`
lets it go on, so answers never run at the same time and each one's time is its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Turnstile:
    """A lock that lets waiting threads through in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._serving = 0

    @contextmanager
    def turn(self) -> Generator[None]:
        """Wait for the turn; the `with` block is it."""
        with self._changed:
            mine = self._next
            self._next += 1
            self._changed.wait_for(lambda: self._serving == mine)
        try:
            yield
        finally:
            with self._changed:
                self._serving += 1
                self._changed.notify_all()


class Draw(LogitsProcessor):
    """Leaves one token possible, drawn at a temperature with random numbers of its own.

    Answers that take turns would otherwise share one source of random numbers.
    """

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V]: 0 for the drawn token, -inf for the others."""
        chances = torch.softmax(scores.float() / self.temperature, dim=-1)
        drawn = torch.multinomial(chances, 1, generator=self.generator)
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


class Stepper:
    """One call of `model.generate` that pauses after each token.

    Nothing else may generate with the model, wrapped or not, meanwhile.

    Attributes:
        sequence: int64 [N], the prompt and the tokens so far; None before the first.
        seconds: model time of each token so far, in order.
        done: no token will follow.
        cache: the model's `past_key_values`; None before the first token.
    """

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        self.sequence: Tensor | None = None
        self.seconds: list[float] = []
        self.done = False
        self.cache: Any = None
        self._model, self._options = model, options
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._stop = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def step(self) -> bool:
        """One more token; False when the answer had ended and none came.

        Raises:
            ValueError: what the model refuses, and any other error of `generate`.
        """
        if self.done:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        start = time.perf_counter()
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error
        if self.done:
            return False
        self.seconds.append(time.perf_counter() - start)
        return True

    def close(self) -> None:
        """End the answer as it is."""
        self._stop = True
        if self._thread is None:
            self.done = True
        while not self.done:
            self._go.release()
            self._paused.acquire()

    def _pause(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self._stop:
            self.sequence = input_ids[0].cpu()  # waits for the device, so that its time counts
            self._paused.release()
            self._go.acquire()
        return torch.full((len(input_ids),), self._stop, device=input_ids.device)

    def _remember(self, module: Any, args: Any, output: Any) -> None:
        self.cache = output.past_key_values

    def _run(self) -> None:
        self._go.acquire()
        hook = self._model.register_forward_hook(self._remember)
        try:
            self._model.generate(**self._options, stopping_criteria=[self._pause])
        except BaseException as error:
            self._error = error
        finally:
            hook.remove()
            self.done = True
            self._paused.release()
