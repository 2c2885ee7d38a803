"""A CUDA graph's stand-in on the CPU: a step's tensor operations, repeated without its Python.

As with a graph, the code of a step runs once and does nothing; a replay repeats the operations on
the same memory. Whatever a step takes from the host is therefore frozen, and shows as a difference.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Notes each operation, and what the memory it writes to held before."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple, dict, Any]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.refused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.refused = True
            raise RuntimeError("the host reads a value: a captured step cannot")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            for x in given:
                at = x.untyped_storage().data_ptr()
                if at not in self.before and at not in self.made:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self.before[at] = (whole, whole.clone())
        out = func(*args, **kwargs)
        old = {x.untyped_storage().data_ptr() for x in given}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in old:
                self.made.add(x.untyped_storage().data_ptr())
        if "empty" not in func._schema.name:  # it holds nothing yet; an `out=` may resize it
            self.done.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        """As if nothing had run."""
        for whole, held in self.before.values():
            whole.copy_(held)

    def replay(self) -> None:
        """Repeat every operation; each result goes where the first one went."""
        for func, args, kwargs, out in self.done:
            new = func(*args, **kwargs)
            for x, y in zip(tree_leaves(out), tree_leaves(new), strict=True):
                shared = (
                    not isinstance(x, Tensor)
                    or x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
                )
                if not shared:
                    x.copy_(y)
