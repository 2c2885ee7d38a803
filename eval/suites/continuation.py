"""Continuation: the perplexity of what follows the beginning of a text.

Data is a text file, a folder of them, or "stdlib": one module in twelve of the Python standard
library, which every machine has.
"""

from __future__ import annotations

import bisect
import re
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmkv.eval.samples import DataError, Request, Sample
from mmkv.eval.suites import files

LENGTH = 1024  # tokens of a prompt and of what follows it
# Ends, as shares of the text: of what a hidden question leaves, of the prompt, and of all.
_SHARES = (0.65625, 0.75, 1)
_MOST_LETTERS = 12  # of a token, in what is looked at
SUFFIXES = (".txt", ".md", ".py")
_TESTS = {"test", "tests", "idle_test", "site-packages"}
NOTE = "texts are this machine's own"


def load(request: Request) -> list[Sample]:
    """One sample of each text that is long enough, cut between two words of one line."""
    assert request.data is not None
    length, samples = request.length or LENGTH, []
    stdlib = files.stands_for(request.data, files.STDLIB)
    paths = library() if stdlib else files.text_files(request.data, *SUFFIXES)
    for name, path in paths.items():
        if request.limit is not None and len(samples) == request.limit:
            break
        text = files.read_text(path)[: _MOST_LETTERS * length]
        asked, start, end = cuts(text, request.count, [share * length for share in _SHARES])
        if end is not None:
            made: Any = {"question": text[asked:start], "answers": (text[start:end].strip(),)}
            made |= {"chat": False, "max_new_tokens": 64, "note": NOTE}
            samples.append(Sample(id=name, prompt=text[:start], **made))
    if not samples:
        raise DataError(f"{request.data}: no text of {length} tokens or more in {SUFFIXES} files")
    return samples


def library() -> dict[str, Path]:
    """Some of the standard library's modules by name, without its tests.

    A file's name decides, so they are the same on every machine with this version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    modules = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    return {
        name.as_posix(): path
        for name, path in modules.items()
        if not _TESTS & set(name.parts) and zlib.crc32(name.as_posix().encode()) % 12 == 0
    }


def cuts(text: str, count: Callable[[str], int], tokens: Sequence[float]) -> list[int | None]:
    """For each number of tokens the first place with as many before it, between two words of one
    line; None if the text has fewer."""
    places = [found.start() for found in re.finditer(r"(?<=\S) (?=\S)", text)]
    found = [bisect.bisect_left(places, n, key=lambda end: count(text[:end])) for n in tokens]
    return [places[i] if i < len(places) else None for i in found]
