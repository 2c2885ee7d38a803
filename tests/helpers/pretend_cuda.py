"""A stand-in for the part of `torch.cuda` that captures: devices, streams, graphs, memory pools.

It starts with another device current than the one that has the tensors. Only what is done while
that one is current is captured, by a recorder; the rest is done at once, as CUDA does it. A capture
in which something was refused cannot be ended, and the allocator then still knows of it.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import torch

from helpers.pretending import Devices
from helpers.recording import Recorder
from mmkv.attach import graph

ELSEWHERE = torch.device("meta")


class Stream:
    def __init__(self, device):
        self.device = device


class Cuda:
    """Stands in as `graph.cuda` for tensors that are at `home`.

    Attributes:
        current, stream_now: the current device and stream.
        graphs: every graph whose capture began.
        underway: the pools that the allocator takes for those of a capture.
        pools: those whose memory it holds.
        sync_mode: 2 makes a wait of the host an error.
    """

    def __init__(self, home):
        self.home, self.current, self.stream_now = home, ELSEWHERE, None
        self.graphs, self.underway, self.pools = [], [], []
        self.capturing = {}
        self.sync_mode = 0
        self.memory = SimpleNamespace(
            _cuda_endAllocateToPool=self._end, _cuda_releasePool=self._release
        )

    @contextmanager
    def _now(self, stream, device):
        before = self.stream_now, self.current
        self.stream_now, self.current = stream, device
        try:
            yield
        finally:
            self.stream_now, self.current = before

    def device(self, device):
        return self._now(self.stream_now, device)

    def stream(self, stream):
        return self._now(stream, stream.device)

    def Stream(self):  # noqa: N802
        return Stream(self.current)

    def CUDAGraph(self):  # noqa: N802
        return Graph(self)

    def graph_pool_handle(self):
        return (0, 1 + len(self.graphs))

    def current_device(self):
        return 0 if self.current == self.home else 1

    def synchronize(self):
        pass

    empty_cache = synchronize

    def get_sync_debug_mode(self):
        return self.sync_mode

    def set_sync_debug_mode(self, mode):
        self.sync_mode = {"default": 0, "error": 2}.get(mode, mode)

    def _end(self, device, pool):
        if (device, pool) not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove((device, pool))

    def _release(self, device, pool):
        self.pools.remove((device, pool))


class Graph:
    def __init__(self, cuda):
        self.cuda = cuda
        self.recorder = Recorder()
        self.refusing = Devices(capturing=True) if cuda.home.type != "cpu" else nullcontext()
        self.inside = ExitStack()

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        cuda = self.cuda
        if cuda.stream_now is None:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        cuda.graphs.append(self)
        self.at = cuda.current_device(), pool
        cuda.underway.append(self.at)
        cuda.pools.append(self.at)
        if cuda.stream_now in cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda.capturing[cuda.stream_now] = self
        if cuda.current == cuda.home:
            self.inside.enter_context(self.recorder)
            self.inside.enter_context(self.refusing)

    def capture_end(self):
        if self.cuda.capturing.get(self.cuda.stream_now) is not self:
            raise RuntimeError("Capture must end on the same stream it began on.")
        del self.cuda.capturing[self.cuda.stream_now]
        self.inside.close()
        self.recorder.undo()
        if self.recorder.refused or getattr(self.refusing, "refused", False):
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda._end(*self.at)

    def replay(self):
        self.recorder.replay()


def install(monkeypatch, home):
    """Capture on the stand-in from now on."""
    cuda = Cuda(home)
    monkeypatch.setattr(graph, "cuda", cuda)
    monkeypatch.setattr(graph, "_streams", {})
    monkeypatch.setattr(graph, "_failed", [])
    return cuda
