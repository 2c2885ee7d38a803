"""Needle in a haystack: one record in a long text, over a grid of depth and length.

Built-in data puts the asked record at a given depth of a look-up text that holds other records as
well; lengths are in tokens of the built-in model. Other haystacks are `.txt` files (one, or a
folder of them, read in order of name), cut to lengths in words.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from mmkv.eval.samples import DataError, Sample
from mmkv.eval.suites import files
from mmkv.eval.suites.description import BUILTIN_NOTE
from mmkv.eval.suites.longbench_builtin import sentences

NAME = "needle"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 768, 1024)
FILE_LENGTHS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
REPEATS = 2  # samples of each cell
NOTE = "the needle and the question are worded here"


def load(
    data: str | Path = "builtin",
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
) -> list[Sample]:
    """Return the samples, from the built-in data or a haystack. Raises DataError.

    Every cell of the grid comes once before any comes twice. Tags are "depth=0.5" and "length=512".
    """
    if data == "builtin":
        samples = [
            _builtin(depth, length, repeat)
            for repeat in range(REPEATS)
            for length in LENGTHS
            for depth in DEPTHS
        ]
    else:
        samples = _from_words(Path(data), _read_words(Path(data)))
    return samples[:limit]


def _builtin(depth: float, length: int, repeat: int) -> Sample:
    from mmkv.builtin import texts

    rng = random.Random(f"needle:{depth}:{length}:{repeat}")
    lookup = texts.make_lookup(400_000 + rng.randrange(100_000), length)
    key, value = rng.choice(lookup.records)
    needle = texts.answer(key, value)
    rest = sentences(lookup.text)
    rest.remove(needle)
    text = " ".join(_insert(rest, needle, depth))
    return Sample(
        id=f"depth={depth}/length={length}/{repeat}",
        suite=NAME,
        task=NAME,
        prompt=f"{text} {texts.phrase(key, rng)}",
        answers=(needle, value),
        max_new_tokens=8,
        metric="contains",
        tags=(f"depth={depth}", f"length={length}"),
        note=BUILTIN_NOTE,
    )


def _insert(parts: list[str], needle: str, depth: float) -> list[str]:
    """Put the needle where the parts before it are nearest to the share `depth` of all letters."""
    before = list(itertools.accumulate((len(part) for part in parts), initial=0))
    place = min(range(len(before)), key=lambda i: abs(before[i] - depth * before[-1]))
    return [*parts[:place], needle, *parts[place:]]


def _read_words(data: Path) -> list[str]:
    paths = sorted(data.glob("*.txt")) if data.is_dir() else [data]
    words: list[str] = []
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        if path.stat().st_size > files.MAX_JSON_BYTES:
            raise DataError(f"{path}: has more than {files.MAX_JSON_BYTES} bytes")
        try:
            words += path.read_text(encoding="utf-8-sig").split()
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a text file in UTF-8: {error}") from error
    if len(words) < FILE_LENGTHS[0]:
        raise DataError(
            f"{data}: expected a haystack of {FILE_LENGTHS[0]} words or more in .txt files, "
            f"got {len(words)}"
        )
    return words


def _from_words(data: Path, words: list[str]) -> list[Sample]:
    from mmkv.builtin import texts

    samples = []
    for repeat in range(REPEATS):
        for length in (size for size in FILE_LENGTHS if size <= len(words)):
            for depth in DEPTHS:
                rng = random.Random(f"needle:{data.name}:{depth}:{length}:{repeat}")
                start = rng.randrange(len(words) - length + 1)
                key, value = rng.choice(texts.KEYS), rng.choice(texts.VALUES)
                needle = f"The secret word of {key} is {value}."
                text = " ".join(_insert(words[start : start + length], needle, depth))
                samples.append(
                    Sample(
                        id=f"depth={depth}/length={length}/{repeat}",
                        suite=NAME,
                        task=NAME,
                        prompt=f"{text}\n\nWhat is the secret word of {key}?",
                        answers=(needle, value),
                        max_new_tokens=24,
                        metric="contains",
                        tags=(f"depth={depth}", f"length={length}"),
                        note=NOTE,
                    )
                )
    return samples
