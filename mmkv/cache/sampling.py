"""Layer sizes learned on the first requests of a task, for all others (XKV's sampling).

Li et al., "XKV", arXiv 2412.05896, section IV-C: requests of one kind need much the same sizes, so
those of the first ones are averaged and reused.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_task: ContextVar[str] = ContextVar("mmkv_task", default="")


@contextmanager
def task(name: str) -> Generator[None]:
    """Name the task of the requests in a `with` block, of this thread, for allocation="sampled".

    Each task has layer sizes of its own; requests outside any block are of one task too.

    Raises:
        ValueError: the name is no text, or empty.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"task({name!r}): expected the name of a task, such as 'summaries'")
    before = _task.set(name)
    try:
        yield
    finally:
        _task.reset(before)


def current_task() -> str:
    """The task of what this thread runs; "" where none is named."""
    return _task.get()


class SampledSizes:
    """What one wrap learns of layer sizes; several threads may use it.

    Args:
        samples: requests of each task to learn from.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._seen: dict[str, list[tuple[float, ...]]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, sizes: Sequence[int]) -> None:
        """Take in the sizes [L] of one request; those after the first `samples` do not count."""
        with self._lock:
            seen = self._seen.setdefault(name, [])
            if len(seen) < self.samples:
                seen.append(tuple(n / sum(sizes) for n in sizes))

    def known(self, name: str) -> int:
        """How many requests of a task were learned from."""
        with self._lock:
            return len(self._seen.get(name, ()))

    def shares(self, name: str) -> tuple[float, ...] | None:
        """Each layer's share of the total, a mean over requests; None while it is learned."""
        with self._lock:
            seen = self._seen.get(name, ())
            if len(seen) < self.samples:
                return None
            return tuple(math.fsum(layer) / len(seen) for layer in zip(*seen, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """A lock cannot be pickled."""
        with self._lock:
            return {"samples": self.samples, "_seen": {k: [*v] for k, v in self._seen.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With a lock of its own."""
        vars(self).update(state, _lock=threading.Lock())
