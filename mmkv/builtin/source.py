"""The Python standard library's own files: natural text that every machine has."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

_TESTS = {"test", "tests", "idle_test", "site-packages"}
_HELD_OUT = 12  # one file in so many


def files(*, held_out: bool) -> dict[str, Path]:
    """The library's modules by name, without its tests: those that training sees, or the others.

    A file's name decides, so the parts are the same on every machine with this version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    return {
        name.as_posix(): path
        for name, path in modules.items()
        if not _TESTS & set(name.parts) and held_out == _is_held_out(name.as_posix())
    }


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HELD_OUT == 0
