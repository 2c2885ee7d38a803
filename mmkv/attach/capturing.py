"""One decode step captured as a CUDA graph, on its own device; a failed attempt leaves nothing.

`torch.cuda.graph` captures on the current device, whichever that is, and where CUDA refuses to end
a capture it leaves its stream current and the allocator as if the capture went on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# For tests, which have none, to replace; and its private parts are not typed.
cuda: Any = torch.cuda

# One capture at a time: they share a stream. A stream for each would cost a workspace of cuBLAS
# each, which is never freed.
_lock = threading.Lock()
_streams: dict[int, Any] = {}
# torch's allocator of pinned memory goes on asking a failed graph about its capture.
_failed: list[Any] = []


def capture(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """A function that replays what `step` did on `device`, and the output, which it fills.

    Raises:
        RuntimeError: the step did what cannot be captured, or worked on another device.
    """
    with _lock, cuda.device(device):
        ran = torch.zeros((), device=device)
        graph = cuda.CUDAGraph()
        # A capture cannot get back what the allocator holds in reserve.
        cuda.synchronize()
        cuda.empty_cache()
        with cuda.stream(_stream()), _into(graph):
            ran.add_(1)
            out = step()
        if ran.item():  # done at once
            raise RuntimeError(f"the capture on {device} recorded nothing")

    def replay(ran: torch.Tensor = ran) -> None:  # the graph writes to `ran`: it has to live on
        graph.replay()

    return replay, out


@contextmanager
def refusing_waits() -> Generator[None]:
    """Make what would have the host wait for the device an error: a capture could not hold it.

    The switch is the whole process's, so it is left alone while other threads are at work.
    """
    if threading.active_count() > 1:
        yield
        return
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


@contextmanager
def _into(graph: Any) -> Generator[None]:
    """Capture what the current stream is given; over in every case."""
    device, pool = cuda.current_device(), cuda.graph_pool_handle()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # what the step raised says more
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        # torch tells its allocator of the end only once CUDA had no objection to it. It refuses
        # where it knows of it already.
        with suppress(RuntimeError):
            cuda.memory._cuda_endAllocateToPool(device, pool)
            cuda.memory._cuda_releasePool(device, pool)
            _failed.append(graph)
        raise


def _stream() -> Any:
    """The current device's stream for captures."""
    index = cuda.current_device()
    if index not in _streams:
        _streams[index] = cuda.Stream()
    return _streams[index]
