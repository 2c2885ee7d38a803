"""The Python standard library's own files: natural text that every machine has."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

_TESTS = {"test", "tests", "idle_test", "site-packages"}
_ONE_IN = 12


def files() -> dict[str, Path]:
    """Some of the library's modules by name, without its tests.

    A file's name decides, so they are the same on every machine with this version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    return {
        name.as_posix(): path
        for name, path in modules.items()
        if not _TESTS & set(name.parts) and zlib.crc32(name.as_posix().encode()) % _ONE_IN == 0
    }
