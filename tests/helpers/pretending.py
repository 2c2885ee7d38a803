"""A GPU's stand-in: tensors that say they are on a device of their own; the CPU computes them.

What a GPU would refuse is refused: an operation on tensors of two devices, numpy on the device's
memory, and, while a step is captured, whatever passes between host and device. What makes the host
wait is counted. Kernels are not pretended: torch's own operations run.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.recording import each_tensor

aten = torch.ops.aten
CPU = torch.device("cpu")
# torch's place for devices that it does not know; its guards are no-ops.
backend_registration._setup_privateuseone_for_python_backend()
DEVICE = torch.device("privateuseone", 0)
_TRANSFERS = {aten._to_copy.default, aten.copy_.default}
# Whose outcome or its shape the host must know.
_READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put_.default}


class OnDevice(Tensor):
    """A tensor on a device that is not there; `inner`, on the CPU, holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def tolist(self) -> list[Any]:
        """By way of the CPU, as torch does for the devices it knows."""
        return self.cpu().tolist()

    def __repr__(self, **kwargs: Any) -> str:
        return f"OnDevice({self.inner!r})"

    def __setitem__(self, where: Any, value: Any) -> None:
        """Write by index; a number that is written by an index of tensors makes the host wait.

        On CUDA, torch makes a tensor of the number on the host and sends it (seen on an H100 with
        torch 2.11); on other devices it fills one there, so dispatch does not see it.
        """
        indices = where if isinstance(where, tuple) else (where,)
        sends = not isinstance(value, Tensor) and any(isinstance(x, Tensor) for x in indices)
        if sends and Devices.running:
            Devices.running[-1]._waits("a number written by index")
        super().__setitem__(where, value)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} on {args} outside of `Devices()`")


class Devices(TorchDispatchMode):
    """Runs every operation on the CPU and keeps the devices apart.

    Attributes:
        counted: where not None, how often the host waited, by operation and line.
        capturing: whether a step is being captured.
        refused: whether something was refused then.
        running: the active ones, the innermost last.
    """

    running: ClassVar[list[Devices]] = []

    def __init__(self, *, capturing: bool = False) -> None:
        super().__init__()
        self.counted: Counter[str] | None = None
        self.capturing, self.refused = capturing, False
        self.lifted: list[bool] = []

    def __enter__(self) -> Devices:
        # `torch.tensor(..., device=)` makes a tensor on the CPU and sends it, which is seen here.
        Devices.running.append(self)
        self.lifted.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Devices.running.pop()
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self.lifted.pop())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._fused_sdp_choice.default:
            return 0  # the plain formula: the fused kernels are each device's own
        given: list[Tensor] = []

        def inner(x: Tensor) -> Tensor:
            given.append(x)
            return x.inner if isinstance(x, OnDevice) else x

        args_inside = each_tensor(inner, args)
        kwargs_inside = each_tensor(inner, kwargs)
        found = {x.device for x in given if x.ndim or x.device != CPU}
        device = next(iter(found - {CPU}), None) or next((x.device for x in given), CPU)
        if device != CPU and (func in _READS or (func in _INDEXING and _by_mask(args[1]))):
            self._waits(func)
        if func in _TRANSFERS:
            source, target = given[-1].device, kwargs.get("device") or given[0].device
            nonblocking = kwargs.get("non_blocking") or args[2:3] == (True,)
            if source != target and (self.capturing or target == CPU or not nonblocking):
                self._waits(func)
        elif len(found) > 1:
            raise RuntimeError(f"{func}: expected all tensors on one device, got {found}")
        if (asked := kwargs.get("device")) is not None:
            device, kwargs_inside["device"] = torch.device(asked), CPU
            if device.type == DEVICE.type:
                device = DEVICE
        if func in (aten.copy_.default, *_READS):
            device = given[0].device
        kwargs_inside.pop("pin_memory", None)
        out = func(*args_inside, **kwargs_inside)
        if device == CPU:
            return out
        outer = {id(x.inner): x for x in given if isinstance(x, OnDevice)}
        return each_tensor(lambda x: outer[id(x)] if id(x) in outer else OnDevice(x), out)

    def _waits(self, func: Any) -> None:
        if self.capturing:
            self.refused = True
            raise RuntimeError(f"{func} between host and device: a captured step cannot")
        if self.counted is not None:
            self.counted[f"{func} in {_caller()}"] += 1


def _caller() -> str:
    """The line that is neither torch's nor this file's."""
    own = (__file__, str(Path(torch.__file__).parent))
    frames = (f for f in reversed(traceback.extract_stack()) if not f.filename.startswith(own))
    found = next(frames)
    return f"{found.filename}:{found.lineno}"


def _by_mask(indices: Any) -> bool:
    return any(x is not None and x.dtype == torch.bool for x in indices)


def move(module: nn.Module) -> nn.Module:
    """The module with its weights on the device."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                moved = nn.Parameter(OnDevice(x.detach()), requires_grad=False)
                part._parameters[name] = moved
        for name, x in part._buffers.items():
            if x is not None:
                part._buffers[name] = OnDevice(x)
    return module
