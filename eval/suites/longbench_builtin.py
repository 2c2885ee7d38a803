"""Built-in stand-ins for LongBench: its seven kinds of task, composed from look-up texts.

The texts are held-out ones of the kind that the built-in model was trained on. It can say one
record or speak of a picture; so each kind of task is brought to something it can answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mmkv.builtin import scenes, texts
from mmkv.builtin.texts import Lookup
from mmkv.eval import scoring
from mmkv.eval.samples import Request, Sample, asked_about
from mmkv.eval.suites.description import BUILTIN_NOTE

BUILTIN_SIZE = 10  # samples of each task
LENGTHS = (320, 448, 576, 704)  # tokens of the text, in turn
PICTURE_LENGTHS = (160, 240, 320, 400)  # of a text beside a picture, which takes 144 tokens
WITH_PICTURE = ("summary", "count")


def load(request: Request) -> list[Sample]:
    """Ten samples of each task, or the first; the tasks take turns."""
    return request.in_turns(request.chosen(BUILDERS), BUILTIN_SIZE, _build)


def _build(name: str, number: int) -> list[Sample]:
    # Every task has texts of its own, in turn of each length.
    seed = 10_000 * (1 + list(BUILDERS).index(name)) + number
    length = (PICTURE_LENGTHS if name in WITH_PICTURE else LENGTHS)[number % 4]
    lookup = texts.make_lookup(seed, length)
    made = BUILDERS[name](lookup, random.Random(f"longbench:{name}:{number}"))
    made |= {"task": name, "tags": (f"length={length}",), "note": BUILTIN_NOTE}
    return [Sample(id=f"{name}-{number}", **made)]


def sentences(text: str) -> list[str]:
    """The sentences of a look-up text, each with its full stop."""
    return [f"{sentence}." for sentence in text.removesuffix(".").split(". ")]


def _passages(names: Sequence[Any], parts: list[str], cuts: list[int]) -> str:
    """Sentences cut into as many passages as there are names, each under its own."""
    each = zip(names, itertools.pairwise(cuts), strict=True)
    return "\n\n".join(f"Passage {name}:\n{' '.join(parts[a:b])}" for name, (a, b) in each)


def _look_up(lookup: Lookup, rng: random.Random, *, number: int = 1) -> dict[str, Any]:
    """One record of a text, or of so many passages."""
    question, text = rng.choice(lookup.questions), f"{lookup.text} "
    if number > 1:
        parts = sentences(lookup.text)
        cuts = [round(i * len(parts) / number) for i in range(number + 1)]
        text = _passages(range(1, number + 1), parts, cuts) + "\n\n"
    return asked_about(text, question.text, (question.answer,), metric="token_f1")


def _summary(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Describe the picture beside a text, the one long answer that the model can give."""
    scene = scenes.make_scene(rng.randrange(10**9))
    question, answers = scenes.describe_question("the picture", rng), (scenes.describe(scene),)
    how: Any = {"images": (scenes.draw(scene),), "max_new_tokens": 96, "metric": "rouge_l"}
    return asked_about(f"{lookup.text} ", question, answers, **how)


def _few_shot(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Three solved questions, then one; the class is the record's value."""
    classes = tuple(dict.fromkeys(value for _, value in lookup.records))
    # A class may be part of another word of the answer ("cap" in "cape"): ask for one that is not.
    fair = [
        (question, value)
        for question, (_, value) in zip(lookup.questions, lookup.records, strict=True)
        if scoring.classification(question.answer, value, classes) == 1
    ]
    *shown, (last, value) = rng.sample(fair, 4)
    turns = [f"{question.text} ASSISTANT: {question.answer}" for question, _ in shown]
    # The words of the model's own turns, written out: few-shot prompts take no chat template.
    lines = [f"USER: {lookup.text} {turns[0]}", *(f"USER: {turn}" for turn in turns[1:])]
    how: Any = {"classes": classes, "chat": False, "metric": "classification", "first_line": True}
    question = f"USER: {last.text} ASSISTANT:"
    return asked_about("\n".join([*lines, ""]), question, (last.answer, value), **how)


def _count(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """How many objects of a kind are in the picture beside a text."""
    scene = scenes.make_scene(rng.randrange(10**9))
    asked = scenes.ask(scene, rng, 50)
    question = next(q for q in asked if q.text.startswith("How many"))
    answers = (question.answer, question.answer.split()[2])  # "There are three ..."
    how: Any = {"images": (scenes.draw(scene),), "max_new_tokens": 16, "metric": "contains"}
    return asked_about(f"{lookup.text} ", question.text, answers, **how)


def _retrieval(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Which of six passages, each named by one of its records, has the record asked for."""
    # Cut before every so many records, so that each passage has one to be named by.
    parts, records = sentences(lookup.text), lookup.records
    cuts = [round(i * len(records) / 6) for i in range(7)]
    places = [parts.index(f"{key} {value}.") for key, value in (records[i] for i in cuts[1:6])]
    bounds = [0, *places, len(parts)]
    while True:
        chosen = [rng.choice(records[a:b]) for a, b in itertools.pairwise(cuts)]
        names = tuple(value for _, value in chosen)
        key, name = rng.choice(chosen)
        # As above, no name may be part of another word of the answer.
        fair = scoring.classification(f"{key} {name}.", name, names) == 1
        if fair and len(set(names)) == len(names):
            break
    text, answers = _passages(names, parts, bounds), (f"{key} {name}.", name)
    how: Any = {"classes": names, "metric": "classification"}
    return asked_about(f"{text}\n\n", f"Look up {key}.", answers, **how)


def _code(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """A listing of records and comments; the last comment asks for the next line."""
    records = {f"{key} {value}." for key, value in lookup.records}
    lines = [
        f"    set {sentence.removesuffix('.')}" if sentence in records else f"    # {sentence}"
        for sentence in sentences(lookup.text)
    ]
    question = rng.choice(lookup.questions)
    text, asked = "\n".join(["USER: values", *lines, "    "]), f"# {question.text} ASSISTANT:"
    # Code is compared with its blanks, and the model's words begin with one.
    answers = (question.answer, f" {question.answer}")
    return asked_about(text, asked, answers, chat=False, metric="edit_similarity")


BUILDERS: dict[str, Callable[[Lookup, random.Random], dict[str, Any]]] = {
    "single_doc_qa": _look_up,
    "multi_doc_qa": partial(_look_up, number=4),
    "summary": _summary,
    "few_shot": _few_shot,
    "count": _count,
    "retrieval": _retrieval,
    "code": _code,
}
