"""Built-in stand-ins for LongBench: its seven kinds of task, composed from look-up texts.

The texts are held-out ones of the kind that the built-in model was trained on. It can repeat one
record or describe a picture, so each kind of task is reduced to one of these.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mmkv.builtin import scenes, texts
from mmkv.builtin.texts import Lookup
from mmkv.eval import scoring
from mmkv.eval.samples import Request, Sample

EACH = 10  # samples of each task
LENGTHS = (320, 448, 576, 704)  # tokens of a text; the samples take turns
PICTURE_LENGTHS = (160, 240, 320, 400)  # of a text beside a picture, which takes 144 tokens
WITH_PICTURE = ("summary", "count")


def load(request: Request) -> Iterator[Sample]:
    """Return ten samples of each task, or up to the limit; the tasks take turns."""
    return request.in_turns(BUILDERS, EACH, _build)


def _build(name: str, number: int) -> list[Sample]:
    # Every task has its own texts, and its samples use all lengths.
    seed = 10_000 * (1 + list(BUILDERS).index(name)) + number
    length = (PICTURE_LENGTHS if name in WITH_PICTURE else LENGTHS)[number % 4]
    lookup = texts.make_lookup(seed, length)
    sample = BUILDERS[name](lookup, random.Random(f"longbench:{name}:{number}"))
    return [replace(sample, id=f"{name}-{number}", task=name, tags=(f"length={length}",))]


def sentences(text: str) -> list[str]:
    """Return the sentences of a look-up text, each with its full stop."""
    return [f"{sentence}." for sentence in text.removesuffix(".").split(". ")]


def _passages(names: Sequence[Any], parts: list[str], cuts: list[int]) -> str:
    """Return sentences cut into one passage for each name, which is its heading."""
    pairs = zip(names, itertools.pairwise(cuts), strict=True)
    return "\n\n".join(f"Passage {name}:\n{' '.join(parts[a:b])}" for name, (a, b) in pairs)


def look_up(lookup: Lookup, rng: random.Random, *, number: int = 1) -> Sample:
    """Return a question about one record of a text, which is cut into `number` passages."""
    question, text = rng.choice(lookup.questions), f"{lookup.text} "
    if number > 1:
        parts = sentences(lookup.text)
        cuts = [round(i * len(parts) / number) for i in range(number + 1)]
        text = _passages(range(1, number + 1), parts, cuts) + "\n\n"
    return Sample.about(text, question.text, (question.answer,), metric="token_f1")


def describe(lookup: Lookup, scene: scenes.Scene, rng: random.Random) -> Sample:
    """Return a request to describe a picture, the only long answer that the model can give."""
    question, answers = scenes.describe_question("the picture", rng), (scenes.describe(scene),)
    extra: Any = {"images": (scenes.draw(scene),), "max_new_tokens": 96, "metric": "rouge_l"}
    return Sample.about(f"{lookup.text} ", question, answers, **extra)


def _summary(lookup: Lookup, rng: random.Random) -> Sample:
    return describe(lookup, scenes.make_scene(rng.randrange(10**9)), rng)


def _few_shot(lookup: Lookup, rng: random.Random) -> Sample:
    """Return three solved questions and one more; the class is the record's value."""
    classes = tuple(dict.fromkeys(value for _, value in lookup.records))
    # Leave out records whose class is part of another word of the answer ("cap" in "cape").
    unambiguous = [
        (question, value)
        for question, (_, value) in zip(lookup.questions, lookup.records, strict=True)
        if scoring.classification(question.answer, value, classes) == 1
    ]
    *shown, (last, value) = rng.sample(unambiguous, 4)
    turns = [f"{question.text} ASSISTANT: {question.answer}" for question, _ in shown]
    # Few-shot prompts take no chat template, so the model's turns are written out here.
    lines = [f"USER: {lookup.text} {turns[0]}", *(f"USER: {turn}" for turn in turns[1:])]
    extra: Any = {"classes": classes, "chat": False, "metric": "classification", "first_line": True}
    question = f"USER: {last.text} ASSISTANT:"
    return Sample.about("\n".join([*lines, ""]), question, (last.answer, value), **extra)


def _count(lookup: Lookup, rng: random.Random) -> Sample:
    """Return a question about the number of objects of a kind in a picture before a text."""
    scene = scenes.make_scene(rng.randrange(10**9))
    question = scenes.ask(scene, rng)
    while not question.text.startswith("How many"):
        question = scenes.ask(scene, rng)
    answers = (question.answer, question.answer.split()[2])  # "There are three ..."
    extra: Any = {"images": (scenes.draw(scene),), "max_new_tokens": 16, "metric": "contains"}
    return Sample.about(f"{lookup.text} ", question.text, answers, **extra)


def _retrieval(lookup: Lookup, rng: random.Random) -> Sample:
    """Return a request to tell which of six passages, named after their records, has a key."""
    # Each cut is before a record, so that every passage has a record that can name it.
    parts, records = sentences(lookup.text), lookup.records
    cuts = [round(i * len(records) / 6) for i in range(7)]
    places = [parts.index(f"{key} {value}.") for key, value in (records[i] for i in cuts[1:6])]
    bounds = [0, *places, len(parts)]
    while True:
        chosen = [rng.choice(records[a:b]) for a, b in itertools.pairwise(cuts)]
        names = tuple(value for _, value in chosen)
        key, name = rng.choice(chosen)
        # As above, no name may be part of another word of the answer.
        unambiguous = scoring.classification(f"{key} {name}.", name, names) == 1
        if unambiguous and len(set(names)) == len(names):
            break
    text, answers = _passages(names, parts, bounds), (f"{key} {name}.", name)
    extra: Any = {"classes": names, "metric": "classification"}
    return Sample.about(f"{text}\n\n", f"Look up {key}.", answers, **extra)


def _code(lookup: Lookup, rng: random.Random) -> Sample:
    """Return a listing of records and comments; the last comment asks for the next line."""
    records = {f"{key} {value}." for key, value in lookup.records}
    lines = [
        f"    set {sentence.removesuffix('.')}" if sentence in records else f"    # {sentence}"
        for sentence in sentences(lookup.text)
    ]
    question = rng.choice(lookup.questions)
    text, query = "\n".join(["USER: values", *lines, "    "]), f"# {question.text} ASSISTANT:"
    # Leading blanks count in code, and the model's replies begin with one.
    answers = (question.answer, f" {question.answer}")
    return Sample.about(text, query, answers, chat=False, metric="edit_similarity")


BUILDERS: dict[str, Callable[[Lookup, random.Random], Sample]] = {
    "single_doc_qa": look_up,
    "multi_doc_qa": partial(look_up, number=4),
    "summary": _summary,
    "few_shot": _few_shot,
    "count": _count,
    "retrieval": _retrieval,
    "code": _code,
}
