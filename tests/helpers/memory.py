"""What tensors are alive, and a bound on the memory of a process."""

import gc
import resource
import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.recording import tensors_in

MOST_MEMORY = 2 * 2**30  # more than any refusal may ask for


def storages(head_dim: int = 0) -> dict[int, int]:
    """Address and bytes of every storage, or of those that could hold keys or values."""
    gc.collect()
    held = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    if head_dim:
        held = [x for x in held if x.ndim >= 3 and x.shape[-1] == head_dim]
        held = [x for x in held if x.is_floating_point()]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}


class Outputs(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes; bytes that operations write."""

    def __init__(self):
        super().__init__()
        self.numel = self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if x.untyped_storage().data_ptr() not in before:  # views cost nothing
                self.numel = max(self.numel, x.numel())
                self.nbytes += x.untyped_storage().nbytes()
        written = args[2] if "scatter_" in func._schema.name else args[0] if args else None
        if any(x in func._schema.name for x in ("copy_", "scatter_", "fill_")):
            self.nbytes += written.numel() * args[0].element_size()
        return out


@contextmanager
def bounded():
    """Limit this process's memory, so that an exhausting file fails the test, not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Live(TorchDispatchMode):
    """The most bytes alive at once of storages that operations made, on meta tensors too."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(x.untyped_storage()) for x in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tensors_in(out)):
            if id(storage) not in before and storage not in self.storages:
                self.storages.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _free(self, nbytes):
        self.now -= nbytes
