"""A CUDA graph's stand-in on the CPU: a step's tensor operations, repeated without its Python.

As with a graph, the code of a step runs once and does nothing; a replay repeats the operations on
the same memory. Whatever a step takes from the host is therefore frozen, and shows as a difference.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def each_tensor(change: Callable[[Tensor], Any], x: Any) -> Any:
    """What an operation takes or gives, its tensors changed; torch's `tree_map` is far slower."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, dict):
        return {k: each_tensor(change, y) for k, y in x.items()}
    if isinstance(x, tuple | list):
        return type(x)([each_tensor(change, y) for y in x])
    return x


def tensors_in(x: Any) -> list[Tensor]:
    """The tensors an operation takes or gives."""
    found = list[Tensor]()
    each_tensor(found.append, x)
    return found


class Recorder(TorchDispatchMode):
    """Notes each operation, and what the memory it writes to held before."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.refused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            self.refused = True
            raise RuntimeError("the host reads a value: a captured step cannot")
        given = tensors_in((args, kwargs))
        if func._schema.is_mutable:
            for x in given:
                at = x.untyped_storage().data_ptr()
                if at not in self.before and at not in self.made:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self.before[at] = (whole, whole.clone())
        out = func(*args, **kwargs)
        old = {x.untyped_storage().data_ptr() for x in given}
        for x in tensors_in(out):
            if x.untyped_storage().data_ptr() not in old:
                self.made.add(x.untyped_storage().data_ptr())
        if "empty" not in func._schema.name:  # it holds nothing yet; an `out=` may resize it
            self.done.append((func, args, kwargs, tensors_in(out)))
        return out

    def undo(self) -> None:
        """As if nothing had run."""
        for whole, held in self.before.values():
            whole.copy_(held)

    def replay(self) -> None:
        """Repeat every operation; each result goes where the first one went."""
        for func, args, kwargs, old in self.done:
            new = func(*args, **kwargs)
            for x, y in zip(old, tensors_in(new), strict=True):
                if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
                    x.copy_(y)
