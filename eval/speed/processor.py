"""The processor that CPU figures are taken on, and how its matrix products are computed."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

# oneMKL's switch between its code paths, read at its first product.
PATHS = "MKL_CBWR"
_CPUINFO = Path("/proc/cpuinfo")


def use_vectors() -> None:
    """Let oneMKL use AVX2 on processors that are not Intel's, before the first product.

    Left alone it takes a path there whose products of a few rows, which is what a decode step is
    made of, run two to three times slower. That time is in every row alike and hides what caches
    differ by. A value that is already set stays; "AUTO" is oneMKL's own choice.
    """
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    intel = _read("vendor_id") in ("", "GenuineIntel")
    if torch.backends.mkl.is_available() and vectors and not intel:
        os.environ.setdefault(PATHS, "AVX2")


def in_words() -> str:
    """The processor, its threads, and the path of its products where one was chosen."""
    name = _read("model name") or platform.processor() or platform.machine()
    parts = [f"{name} CPU", f"{torch.get_num_threads()} threads"]
    if chosen := os.environ.get(PATHS):
        parts.append(f"{PATHS}={chosen}")
    return ", ".join(parts)


def _read(field: str) -> str:
    """A field of the first processor, "" where the system does not tell."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")
