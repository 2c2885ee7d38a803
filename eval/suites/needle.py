"""Needle in a haystack: one record in a long text, over a grid of depth and length.

The built-in haystack is a look-up text with other records, of a length in tokens of the built-in
model; others are `.txt` files or Python's documentation, cut to lengths in words. With "drawings"
as data the needle is an object that one of two to eight pictures shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.builtin import drawings, texts
from mmkv.eval.samples import DataError, Request, Sample, Suite
from mmkv.eval.suites import files
from mmkv.eval.suites.longbench_builtin import sentences

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 768, 1024)
FILE_LENGTHS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
PICTURES = (2, 4, 6, 8)
REPEATS = 2  # samples of each cell
NOTE = "the needle and the question are worded here"


def load(request: Request) -> Iterator[Sample]:
    """Yield needles in a haystack of other texts; see `builtin`."""
    words = read_words(request.data)
    lengths = [size for size in FILE_LENGTHS if size <= len(words)]
    return _grid(f"needle:{request.data.name}", lengths, partial(_from_words, words))


def builtin(request: Request) -> Iterator[Sample]:
    """Yield the built-in samples, or those in drawn pictures.

    All cells of the grid come once, then all again. Tags are such as "depth=0.5" and "length=512".
    """
    if files.stands_for(request.data, files.DRAWINGS):
        return _in_pictures()
    return _grid("needle", LENGTHS, _from_lookup)


def _grid(
    seed: str, lengths: Sequence[int], make: Callable[[random.Random, int, float], Sample]
) -> Iterator[Sample]:
    for repeat, length, depth in itertools.product(range(REPEATS), lengths, DEPTHS):
        sample = make(random.Random(f"{seed}:{depth}:{length}:{repeat}"), length, depth)
        tags = f"depth={depth}", f"length={length}"
        yield replace(sample, id=f"{tags[0]}/{tags[1]}/{repeat}", tags=tags)


def _in_pictures() -> Iterator[Sample]:
    for repeat, count in itertools.product(range(REPEATS), PICTURES):
        for number in range(count):
            name, tags = f"{count}/{number}/{repeat}", (f"pictures={count}", f"shown={number + 1}")
            rng = random.Random(f"needle:pictures:{repeat}:{count}:{number}")
            while True:
                scenes = [drawings.make_scene(rng.randrange(2**40)) for _ in range(count)]
                if question := drawings.find_question(scenes, rng, number):
                    break
            answers, images = (f"{drawings.ORDINALS[number]} picture",), map(drawings.draw, scenes)
            fields: Any = {"id": f"pictures={name}", "images": tuple(images), "tags": tags}
            yield Sample.about("", question.text, answers, max_new_tokens=24, **fields)


def _from_lookup(rng: random.Random, length: int, depth: float) -> Sample:
    lookup = texts.make_lookup(400_000 + rng.randrange(100_000), length)
    key, value = rng.choice(lookup.records)
    needle = texts.answer(key, value)
    rest = sentences(lookup.text)
    rest.remove(needle)
    text = f"{' '.join(_insert(rest, needle, depth))} "
    return Sample.about(text, texts.phrase(key, rng), (needle, value))


def _from_words(words: list[str], rng: random.Random, length: int, depth: float) -> Sample:
    start = rng.randrange(len(words) - length + 1)
    key, value = rng.choice(texts.KEYS), rng.choice(texts.VALUES)
    needle = f"The secret word of {key} is {value}."
    text = " ".join(_insert(words[start : start + length], needle, depth))
    question = f"What is the secret word of {key}?"
    return Sample.about(f"{text}\n\n", question, (needle, value), max_new_tokens=24)


def _insert(parts: list[str], needle: str, depth: float) -> list[str]:
    """Insert the needle where the letters before it are nearest to a share `depth` of all."""
    letters = list(itertools.accumulate((len(part) for part in parts), initial=0))
    place = min(range(len(letters)), key=lambda i: abs(letters[i] - depth * letters[-1]))
    return [*parts[:place], needle, *parts[place:]]


def read_words(data: Path) -> list[str]:
    """Return the words of a text file, of a folder's text files, of Python's documentation
    ("stdlib"), or of the package's novels ("novels"). Raises DataError."""
    if files.stands_for(data, files.STDLIB):
        return " ".join(files.documentation().values()).split()
    if files.stands_for(data, files.NOVELS):
        return " ".join(files.novels().values()).split()
    paths = sorted(data.glob("*.txt")) if data.is_dir() else [data]
    words = [word for path in paths for word in files.read_text(path).split()]
    if len(words) < FILE_LENGTHS[0]:
        requirement = f"a haystack of {FILE_LENGTHS[0]} words or more in .txt files"
        raise DataError(f"{data}: expected {requirement}, got {len(words)}")
    return words


SUITE = Suite(
    load, builtin, None, NOTE, "contains", words=(files.STDLIB, files.NOVELS, files.DRAWINGS)
)
