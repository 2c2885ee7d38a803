"""Needle in a haystack: one record in a long text, over a grid of depth and length.

The built-in haystack is a look-up text with other records, of a length in tokens of the built-in
model; others are `.txt` files or Python's documentation, cut to lengths in words. With "drawings"
as data the needle is an object that one of two to eight pictures shows.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from mmkv.builtin import drawings, texts
from mmkv.eval.samples import DataError, Request, Sample, qa_fields
from mmkv.eval.suites import files
from mmkv.eval.suites.description import BUILTIN_NOTE
from mmkv.eval.suites.longbench_builtin import sentences

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 768, 1024)
FILE_LENGTHS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
PICTURES = (2, 4, 6, 8)
REPEATS = 2  # samples of each cell
NOTE = "the needle and the question are worded here"


def load(request: Request) -> list[Sample]:
    """Return the built-in samples, or needles in a haystack of other texts or pictures.

    All cells of the grid come once, then all again. Tags are such as "depth=0.5" and "length=512".
    """
    data = request.data
    if files.stands_for(data, files.DRAWINGS):
        return _in_pictures()[: request.limit]
    words = [] if data is None else read_words(data)
    lengths = [size for size in FILE_LENGTHS if size <= len(words)] if words else LENGTHS
    samples: list[Sample] = []
    for repeat, length, depth in itertools.product(range(REPEATS), lengths, DEPTHS):
        cell = f"{depth}:{length}:{repeat}"
        rng = random.Random(f"needle:{cell}" if data is None else f"needle:{data.name}:{cell}")
        fields = _from_words(rng, words, length, depth) if words else _builtin(rng, length, depth)
        fields |= {"metric": "contains", "tags": (f"depth={depth}", f"length={length}")}
        samples.append(Sample(id=f"depth={depth}/length={length}/{repeat}", **fields))
    return samples[: request.limit]


def _in_pictures() -> list[Sample]:
    samples: list[Sample] = []
    for repeat, count in itertools.product(range(REPEATS), PICTURES):
        for number in range(count):
            rng = random.Random(f"needle:pictures:{repeat}:{count}:{number}")
            while True:
                scenes = [drawings.make_scene(rng.randrange(2**40)) for _ in range(count)]
                if question := drawings.find_question(scenes, rng, number):
                    break
            extra: Any = {"images": tuple(map(drawings.draw, scenes)), "metric": "contains"}
            extra |= {"tags": (f"pictures={count}", f"shown={number + 1}"), "note": BUILTIN_NOTE}
            answers = (f"{drawings.ORDINALS[number]} picture",)
            fields: Any = qa_fields("", question.text, answers, max_new_tokens=24, **extra)
            samples.append(Sample(id=f"pictures={count}/{number}/{repeat}", **fields))
    return samples


def _builtin(rng: random.Random, length: int, depth: float) -> dict[str, Any]:
    lookup = texts.make_lookup(400_000 + rng.randrange(100_000), length)
    key, value = rng.choice(lookup.records)
    needle = texts.answer(key, value)
    rest = sentences(lookup.text)
    rest.remove(needle)
    text, question = f"{' '.join(_insert(rest, needle, depth))} ", texts.phrase(key, rng)
    return qa_fields(text, question, (needle, value), note=BUILTIN_NOTE)


def _from_words(rng: random.Random, words: list[str], length: int, depth: float) -> dict[str, Any]:
    start = rng.randrange(len(words) - length + 1)
    key, value = rng.choice(texts.KEYS), rng.choice(texts.VALUES)
    needle = f"The secret word of {key} is {value}."
    text = " ".join(_insert(words[start : start + length], needle, depth))
    question, extra = f"What is the secret word of {key}?", {"max_new_tokens": 24, "note": NOTE}
    return qa_fields(f"{text}\n\n", question, (needle, value), **extra)


def _insert(parts: list[str], needle: str, depth: float) -> list[str]:
    """Insert the needle where the letters before it are nearest to a share `depth` of all."""
    letters = list(itertools.accumulate((len(part) for part in parts), initial=0))
    place = min(range(len(letters)), key=lambda i: abs(letters[i] - depth * letters[-1]))
    return [*parts[:place], needle, *parts[place:]]


def read_words(data: Path) -> list[str]:
    """Return the words of a text file, of a folder's text files, or, for "stdlib", of Python's
    documentation. Raises DataError."""
    if files.stands_for(data, files.STDLIB):
        return " ".join(files.documentation().values()).split()
    paths = sorted(data.glob("*.txt")) if data.is_dir() else [data]
    words = [word for path in paths for word in files.read_text(path).split()]
    if len(words) < FILE_LENGTHS[0]:
        requirement = f"a haystack of {FILE_LENGTHS[0]} words or more in .txt files"
        raise DataError(f"{data}: expected {requirement}, got {len(words)}")
    return words
