"""Capture of one decode step as a CUDA graph on the model's device, with clean-up after a failure.

`torch.cuda.graph` captures on whichever device is current; if CUDA refuses to end a capture, it
leaves its stream current and the allocator in the state of a running capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# A variable, so that tests without a GPU can replace it; untyped, as its private parts are.
cuda: Any = torch.cuda

# Captures share a stream, so only one runs at a time. With a stream each, every capture would cost
# a cuBLAS workspace, which is never freed.
_lock = threading.Lock()
_streams: dict[int, Any] = {}
# Failed graphs are kept alive, as torch's allocator of pinned memory still queries their captures.
_failed: list[Any] = []


def capture(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Return a function that replays `step` on `device`, and the output, which it overwrites.

    Raises:
        RuntimeError: the step cannot be captured, or ran on another device.
    """
    with _lock, cuda.device(device):
        marker = torch.zeros((), device=device)
        graph = cuda.CUDAGraph()
        # A capture cannot use memory that the allocator has in reserve.
        cuda.synchronize()
        cuda.empty_cache()
        with cuda.stream(_stream()), _into(graph):
            marker.add_(1)
            out = step()
        if marker.item():  # the step ran at once
            raise RuntimeError(f"the capture on {device} recorded nothing")

    def replay(marker: torch.Tensor = marker) -> None:  # keeps `marker`, which the graph writes to
        graph.replay()

    return replay, out


@contextmanager
def refusing_waits() -> Generator[None]:
    """Make the host's waits for the device an error, as they cannot be captured.

    The setting is the whole process's, so it is not changed while other threads run.
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
    """Capture the work on the current stream, and end the capture after an error too."""
    device, pool = cuda.current_device(), cuda.graph_pool_handle()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the step's own error says more
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        # torch tells its allocator of the end only if CUDA ends the capture without an error. If
        # it has told it, these calls raise.
        with suppress(RuntimeError):
            cuda.memory._cuda_endAllocateToPool(device, pool)
            cuda.memory._cuda_releasePool(device, pool)
            _failed.append(graph)
        raise


def _stream() -> Any:
    """Return the current device's stream for captures."""
    index = cuda.current_device()
    if index not in _streams:
        _streams[index] = cuda.Stream()
    return _streams[index]
