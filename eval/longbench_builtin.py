"""Built-in stand-ins for LongBench: its seven kinds of task, composed from look-up texts.

The texts are those that the built-in model was trained on (held-out ones): sentences of filler and
records such as "amber lamp.". Each task is a way to ask for records that LongBench's kinds suggest.
The model never saw headings, summaries of several records, code or the counting of passages, so
its scores there are low; the perplexity of the reference still shows what a policy loses.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import scoring
from .description import BUILTIN_NOTE
from .samples import Sample, interleave

if TYPE_CHECKING:
    from mmkv.builtin.texts import Lookup

NAME = "longbench"
BUILTIN_SIZE = 10  # samples of each task
LENGTHS = (320, 448, 576, 704)  # tokens of the text, in turn


def builtin(limit: int | None = None, tasks: list[str] | None = None) -> list[Sample]:
    """Return ten samples of each task, or the first `limit`; the tasks take turns.

    `tasks` selects kinds by name. Raises ValueError for a name that is not one of them.
    """
    wrong = [name for name in tasks or () if name not in BUILDERS]
    if wrong:
        raise ValueError(f"built-in tasks must be among {list(BUILDERS)}, got {wrong}")
    chosen = list(dict.fromkeys(tasks)) if tasks else list(BUILDERS)
    each = BUILTIN_SIZE if limit is None else -(-limit // len(chosen))
    groups = [[_build(name, number) for number in range(each)] for name in chosen]
    return interleave(groups)[:limit]


def _build(name: str, number: int) -> Sample:
    from mmkv.builtin import texts

    # Every task has texts of its own, in turn of each length.
    seed = 10_000 * (1 + list(BUILDERS).index(name)) + number
    lookup = texts.make_lookup(seed, LENGTHS[number % len(LENGTHS)])
    fields = BUILDERS[name](lookup, random.Random(f"longbench:{name}:{number}"))
    return Sample(
        id=f"{name}-{number}",
        suite=NAME,
        task=name,
        tags=(f"length={LENGTHS[number % len(LENGTHS)]}",),
        note=BUILTIN_NOTE,
        **fields,
    )


def sentences(text: str) -> list[str]:
    """Return the sentences of a look-up text, each with its full stop."""
    return [f"{sentence}." for sentence in text.removesuffix(".").split(". ")]


def passages(text: str, number: int) -> list[str]:
    """Return `text` cut into `number` passages of nearly as many sentences each."""
    parts = sentences(text)
    cuts = [round(i * len(parts) / number) for i in range(number + 1)]
    return [" ".join(parts[a:b]) for a, b in itertools.pairwise(cuts)]


def number_passages(parts: list[str]) -> str:
    """Return passages under headings "Passage 1:" and so on."""
    return "\n\n".join(f"Passage {i}:\n{part}" for i, part in enumerate(parts, 1))


def _single(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    question = rng.choice(lookup.questions)
    return {
        "prompt": f"{lookup.text} {question.text}",
        "answers": (question.answer,),
        "max_new_tokens": 8,
        "metric": "token_f1",
    }


def _multi(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    question = rng.choice(lookup.questions)
    text = number_passages(passages(lookup.text, 4))
    return {
        "prompt": f"{text}\n\n{question.text}",
        "answers": (question.answer,),
        "max_new_tokens": 8,
        "metric": "token_f1",
    }


def _summary(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    chosen = sorted(rng.sample(range(len(lookup.records)), 4))
    keys = [lookup.records[i][0] for i in chosen]
    return {
        "prompt": f"{lookup.text} Look up {', '.join(keys[:-1])} and {keys[-1]}.",
        "answers": (" ".join(lookup.questions[i].answer for i in chosen),),
        "max_new_tokens": 24,
        "metric": "rouge_l",
    }


def _few_shot(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Three solved questions, then one; the class is the record's value."""
    classes = tuple(dict.fromkeys(value for _, value in lookup.records))
    # A class may be part of another word of the answer ("cap" in "cape"): ask for one that is not.
    fair = [
        (question, value)
        for question, (_, value) in zip(lookup.questions, lookup.records, strict=True)
        if scoring.classification(question.answer, (value,), classes) == 1
    ]
    *shown, (last, value) = rng.sample(fair, 4)
    turns = [f"{question.text} ASSISTANT: {question.answer}" for question, _ in shown]
    # The words of the model's own turns, written out: few-shot prompts take no chat template.
    lines = [f"USER: {lookup.text} {turns[0]}", *(f"USER: {turn}" for turn in turns[1:])]
    return {
        "prompt": "\n".join([*lines, f"USER: {last.text} ASSISTANT:"]),
        "answers": (last.answer, value),
        "classes": classes,
        "chat": False,
        "max_new_tokens": 8,
        "metric": "classification",
        "first_line": True,
    }


def _count(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Passages of which some come twice; how many are different."""
    different = passages(lookup.text, rng.randint(3, 6))
    shown = different + rng.sample(different, rng.randint(1, 3))
    rng.shuffle(shown)
    return {
        "prompt": f"{number_passages(shown)}\n\nHow many different passages are there?",
        "answers": (str(len(different)),),
        "max_new_tokens": 8,
        "metric": "count",
    }


def _retrieval(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Which passage a record stands in; the record itself names it."""
    parts = passages(lookup.text, 6)
    answers = []
    for i, part in enumerate(parts):
        for key, value in lookup.records:
            if f"{key} {value}." in sentences(part):
                answers.append((key, f"{key} {i + 1}."))
                part = part.replace(f"{key} {value}.", answers[-1][1])
        parts[i] = part
    key, answer = rng.choice(answers)
    return {
        "prompt": f"{number_passages(parts)}\n\nWhat is the value of {key}?",
        "answers": (answer,),
        "max_new_tokens": 8,
        "metric": "retrieval",
    }


def _code(lookup: Lookup, rng: random.Random) -> dict[str, Any]:
    """Assignments among comments; the last line assigns a name for the second time."""
    records = {f"{key} {value}.": (key, value) for key, value in lookup.records}
    lines = []
    for sentence in sentences(lookup.text):
        key, value = records.get(sentence, ("", ""))
        lines.append(f"    {key} = {value}" if key else f"    # {sentence}")
    key, value = rng.choice(lookup.records)
    return {
        "prompt": "\n".join(["def values():", *lines, f"    {key} ="]),
        "answers": (value,),
        "chat": False,
        "max_new_tokens": 8,
        "metric": "edit_similarity",
    }


BUILDERS: dict[str, Callable[[Lookup, random.Random], dict[str, Any]]] = {
    "single_doc_qa": _single,
    "multi_doc_qa": _multi,
    "summary": _summary,
    "few_shot": _few_shot,
    "count": _count,
    "retrieval": _retrieval,
    "code": _code,
}
