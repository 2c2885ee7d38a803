"""How many operations a piece of code starts on a device, counted without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts operations that start something on a device: not those that only make a view.

    Attributes:
        names: what was started.
    """

    FREE = (
        *("view", "reshape", "expand", "transpose", "select", "slice", "detach", "alias", "empty"),
        *("squeeze", "permute", "split"),
    )

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name != "t" and not any(free in name for free in self.FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile is not counted."""
        names, self.names = self.names, []
        try:
            yield
        finally:
            self.names = names
