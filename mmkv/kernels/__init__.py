"""Triton kernels for what is slow in plain torch: column sums of attention, and decode steps.

Triton is no dependency of this package: torch brings one along wherever a GPU can use it. Ask
`available` before calling a kernel, and have another way where it says no. Each kernel has a twin
in plain torch in `mmkv.kernels.twins`, which the tests compare it with.

With `TRITON_INTERPRET=1` in the environment before Triton is first imported, the kernels run on
the CPU, slowly: for tests and debugging.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmkv.kernels.columns import column_sums, row_lse
    from mmkv.kernels.decode import decode_attention
    from mmkv.kernels.pointwise import rms_norm, rotate, silu_mul

logger = logging.getLogger(__name__)

# Every kernel's function, by the module that holds it. Loaded on first use: they import Triton.
_HOME = {
    "column_sums": "mmkv.kernels.columns",
    "decode_attention": "mmkv.kernels.decode",
    "rms_norm": "mmkv.kernels.pointwise",
    "rotate": "mmkv.kernels.pointwise",
    "row_lse": "mmkv.kernels.columns",
    "silu_mul": "mmkv.kernels.pointwise",
}

# Where the package uses its kernels: not on the CPU, where they are for tests.
DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256  # a tile of keys has to fit the shared memory of a multiprocessor

__all__ = [
    "DEVICES",
    "DTYPES",
    "MAX_HEAD_DIM",
    "available",
    "column_sums",
    "decode_attention",
    "rms_norm",
    "rotate",
    "row_lse",
    "silu_mul",
    "takes",
    "wanted",
]


def available(device: torch.device) -> bool:
    """Whether the kernels run on `device`.

    True on a GPU that Triton compiles for (NVIDIA from Ampere on, and AMD) if Triton, a C compiler
    and Python's headers, which it calls for, are installed; the log says what is missing. True on
    the CPU if Triton's interpreter is switched on.
    """
    installed = importlib.util.find_spec("triton") is not None
    if device.type == "cpu":
        switch = os.environ.get("TRITON_INTERPRET", "")
        return installed and switch.lower() in ("1", "true", "yes", "on", "y")
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and _complete(installed, torch.cuda.get_device_capability(device))
    )


def takes(*tensors: Tensor, wide: bool = False) -> bool:
    """Whether the kernels are available for these tensors' device, dtype and head dimension.

    Args:
        tensors: queries, keys, values: `[..., D]`. They must be of one dtype.
        wide: asks of kernels that take any last dimension.
    """
    first = tensors[0]
    return (
        first.dtype in DTYPES
        and all(t.dtype == first.dtype for t in tensors)
        and (wide or all(t.shape[-1] <= MAX_HEAD_DIM for t in tensors))
        and available(first.device)
    )


def wanted(*tensors: Tensor, wide: bool = False) -> bool:
    """Whether the package uses its kernels on these tensors: it can, and that is the faster way."""
    return tensors[0].device.type in DEVICES and takes(*tensors, wide=wide)


@cache
def _complete(installed: bool, capability: tuple[int, int]) -> bool:
    """Whether nothing is missing to run kernels on a GPU; what is missing is logged once."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not installed:
        missing = "Triton is not installed"
    elif torch.version.hip is None and capability < (8, 0):
        had = ".".join(map(str, capability))
        missing = f"Triton compiles for capability 8.0 and later, and this is {had}"
    elif not any(map(shutil.which, compilers)):
        missing = f"Triton needs a C compiler, and there is no {' or '.join(compilers)}"
    elif not header.is_file():
        missing = f"Triton needs Python's headers (python3-dev), and there is no {header}"
    else:
        return True
    logger.warning("the GPU kernels are off, plain torch is slower: %s", missing)
    return False


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'mmkv.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
