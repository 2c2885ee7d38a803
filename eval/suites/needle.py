"""Needle in a haystack: one sentence in a long text, over a grid of depth and length.

The haystack is the package's novels or `.txt` files, cut to lengths in words. With "drawings" as
data the needle is an object that one of two to eight pictures shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmkv.builtin import drawings
from mmkv.eval.samples import DataError, Request, Sample, Suite
from mmkv.eval.suites import files

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
PICTURES = (2, 4, 6, 8)
REPEATS = 2  # samples of each cell
NOTE = "the needle and the question are worded here"


def load(request: Request) -> Iterator[Sample]:
    """Yield needles in a haystack of words.

    All cells of the grid come once, then all again. Tags are such as "depth=0.5" and "length=500".
    """
    words = read_words(request.data)
    lengths = [size for size in LENGTHS if size <= len(words)]
    for repeat, length, depth in itertools.product(range(REPEATS), lengths, DEPTHS):
        rng = random.Random(f"needle:{request.data.name}:{depth}:{length}:{repeat}")
        tags = f"depth={depth}", f"length={length}"
        sample = _from_words(words, rng, length, depth)
        yield replace(sample, id=f"{tags[0]}/{tags[1]}/{repeat}", tags=tags)


def drawn(request: Request) -> Iterator[Sample]:
    """Yield questions which picture shows an object."""
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


def _from_words(words: list[str], rng: random.Random, length: int, depth: float) -> Sample:
    start = rng.randrange(len(words) - length + 1)
    key, value = rng.sample(drawings.WORDS, 2)
    needle = f"The secret word of {key} is {value}."
    text = " ".join(_insert(words[start : start + length], needle, depth))
    question = f"What is the secret word of {key}?"
    return Sample.about(f"{text}\n\n", question, (needle, value), max_new_tokens=24)


def _insert(parts: list[str], needle: str, depth: float) -> list[str]:
    """Return the parts with the needle where the letters before it are nearest to `depth`."""
    letters = list(itertools.accumulate((len(part) for part in parts), initial=0))
    place = min(range(len(letters)), key=lambda i: abs(letters[i] - depth * letters[-1]))
    return [*parts[:place], needle, *parts[place:]]


def read_words(data: Path) -> list[str]:
    """Return the words of a text file, of a folder's text files, or of the package's novels
    ("novels"). Raises DataError."""
    words = [word for _, text in files.texts(data, ".txt") for word in text.split()]
    if len(words) < LENGTHS[0]:
        requirement = f"a haystack of {LENGTHS[0]} words or more in .txt files"
        raise DataError(f"{data}: expected {requirement}, got {len(words)}")
    return words


SUITE = Suite(load, drawn, None, NOTE, "contains", words=(files.DRAWINGS, files.NOVELS))
