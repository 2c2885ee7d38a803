"""Continuation: the perplexity of a text's continuation after its beginning.

Data is a text file, a folder of them, or the package's novels, chapter by chapter.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence

from mmkv.eval.samples import DataError, Request, Sample, Suite
from mmkv.eval.suites import files

LENGTH = 1024  # tokens of a prompt and its continuation
# Where the context before a hidden question, the prompt and the answer end, as shares of LENGTH.
_SHARES = (0.65625, 0.75, 1)
_MOST_CHARACTERS = 12  # per token; the rest of a text is not read
SUFFIXES = (".txt", ".md", ".py")
# Scripts without blanks between words: Thai to Burmese, Khmer, Chinese and Japanese.
_NO_BLANKS = r"[\u0e00-\u109f\u1780-\u17ff\u3001-\u9fff\uff01-\uff65]"
_GAP = re.compile(rf"(?<=\S) (?=\S)|(?<={_NO_BLANKS})(?={_NO_BLANKS})")
NOTE = "texts are novels or the user's own"


def load(request: Request) -> Iterator[Sample]:
    """Yield a sample of each text that is long enough, cut between two words of one line."""
    length, any_text = request.length or LENGTH, False
    for name, whole in files.texts(request.data, *SUFFIXES):
        text = whole[: _MOST_CHARACTERS * length]
        context_end, start, end = cuts(text, request.count, [x * length for x in _SHARES])
        if end is not None:
            any_text = True
            parts = text[:context_end], text[context_end:start], (text[start:end].strip(),)
            yield Sample.about(*parts, id=name, chat=False, max_new_tokens=64)
    if not any_text:
        suffixes = ", ".join(SUFFIXES)
        raise DataError(f"{request.data}: no text of {length} tokens or more in {suffixes} files")


def cuts(text: str, count: Callable[[str], int], tokens: Sequence[float]) -> list[int | None]:
    """Return the first of `gaps` after each of these numbers of tokens; None: too short a text."""
    places = gaps(text)
    firsts = [bisect.bisect_left(places, n, key=lambda end: count(text[:end])) for n in tokens]
    return [places[i] if i < len(places) else None for i in firsts]


def gaps(text: str) -> list[int]:
    """Return where a text may be cut: before a blank between two words of a line, and between two
    characters of a script without blanks."""
    return [match.start() for match in _GAP.finditer(text)]


SUITE = Suite(load, note=NOTE, options=("length",), words=(files.NOVELS,))
