"""Layer sizes learned on the first requests of a task and reused for the others (XKV's sampling).

Li et al., "XKV", arXiv 2412.05896, section IV-C: requests of one kind need similar sizes, so the
sizes of the first ones are averaged and reused.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# The task of this thread's requests; "": none is named.
current_task: ContextVar[str] = ContextVar("mmkv_task", default="")
_lock = threading.Lock()


@contextmanager
def task(name: str) -> Generator[None]:
    """Name the task of this thread's requests in a `with` block, for allocation="sampled".

    Each task has its own layer sizes; requests outside any block share one unnamed task.

    Raises:
        ValueError: the name is not a string, or empty.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"task({name!r}): expected the name of a task, such as 'summaries'")
    before = current_task.set(name)
    try:
        yield
    finally:
        current_task.reset(before)


class SampledSizes:
    """The layer sizes that one wrap has learned, by task; safe to use from several threads.

    Args:
        samples: the number of requests to learn from, for each task.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._seen: dict[str, list[tuple[float, ...]]] = {}

    def add(self, name: str, sizes: Sequence[int]) -> None:
        """Add the sizes [L] of one request; those after the first `samples` do not count."""
        with _lock:
            shares = self._seen.setdefault(name, [])
            if len(shares) < self.samples:
                shares.append(tuple(n / sum(sizes) for n in sizes))

    def known(self, name: str) -> int:
        """Return the number of a task's requests that were learned from."""
        with _lock:
            return len(self._seen.get(name, ()))

    def shares(self, name: str) -> tuple[float, ...] | None:
        """Return each layer's share of the total, a mean over requests; None before all samples."""
        with _lock:
            shares = self._seen.get(name, ())
            if len(shares) < self.samples:
                return None
            return tuple(math.fsum(layer) / len(shares) for layer in zip(*shares, strict=True))
