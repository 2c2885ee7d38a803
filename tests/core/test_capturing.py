"""One step captured: on its own device, one at a time, and nothing left of a failed attempt."""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from helpers.pretend_cuda import ELSEWHERE, install
from helpers.pretending import DEVICE, Devices, OnDevice
from mmkv.attach import graph
from mmkv.attach.graph import capture, refusing_waits


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, with another device current; tensors are on `DEVICE`."""
    with Devices():
        yield install(monkeypatch, DEVICE)


def settled(cuda):
    """Whether the device, the stream and the allocator are as they were before any capture."""
    return (
        cuda.current == ELSEWHERE
        and cuda.stream_now is None
        and not cuda.capturing
        and not cuda.underway
    )


def test_empty_capture_raises(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "device", nullcontext)
    x = OnDevice(torch.zeros(3))
    with pytest.raises(RuntimeError, match="on privateuseone:0 recorded nothing"):
        capture(lambda: x.add_(1), DEVICE)
    assert settled(cuda)


def waits(x):
    return x.sum().item()


def stops(x):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "error", "said"),
    [(waits, RuntimeError, "between host and device"), (stops, KeyboardInterrupt, None)],
)
def test_failed_capture_leaves_nothing(cuda, step, error, said):
    """Neither the stream, nor the device, nor an allocator that thinks the capture goes on.

    The error is the step's own, not the failure to end the capture.
    """
    x = OnDevice(torch.ones(3))
    with pytest.raises(error, match=said):
        capture(lambda: step(x.add_(1)), DEVICE)
    assert settled(cuda)
    assert x.cpu().tolist() == [1, 1, 1]
    # torch frees a graph's pool with the graph, but not one whose capture never ended.
    assert len(cuda.pools) == (step is stops)
    assert graph._failed == ([] if step is stops else cuda.graphs)
    replay, _ = capture(lambda: x.add_(1), DEVICE)
    replay()
    assert x.cpu().tolist() == [2, 2, 2]


def test_capture_failing_to_begin_leaves_nothing(cuda):
    with cuda.device(DEVICE):
        busy = graph._stream()
    cuda.capturing[busy] = "another's"
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(lambda: None, DEVICE)
    del cuda.capturing[busy]
    assert settled(cuda)
    assert not cuda.pools


def test_one_capture_at_a_time(cuda):
    """Two threads; the second comes while the first is in the middle of its step."""
    inside, found = threading.Event(), []

    def slow():
        inside.set()
        second.join(0.1)  # it may not get in

    def other():
        inside.wait()
        with Devices():
            found.append(capture(lambda: None, DEVICE))

    second = threading.Thread(target=other)
    second.start()
    capture(slow, DEVICE)
    second.join()
    assert len(found) == 1
    assert settled(cuda)


@contextmanager
def raising():
    yield
    raise KeyError


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("ends", [nullcontext, raising])
def test_waits_are_errors_for_one_step_only(cuda, monkeypatch, before, ends):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    cuda.sync_mode = before
    with pytest.raises(KeyError) if ends is raising else nullcontext(), refusing_waits(), ends():
        assert cuda.sync_mode == 2
    assert cuda.sync_mode == before


def test_other_threads_may_wait(cuda, monkeypatch):
    """The setting is process-wide, so it is not changed while other threads run."""
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with refusing_waits():
        assert cuda.sync_mode == 0
