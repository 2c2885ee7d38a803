"""RULER's tasks, generated for any tokenizer and length.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv
2404.06654, table 2 and appendix B. Needles in a haystack (one or more keys, values and queries),
chains of variables, the most common words, and questions on passages. Prompts are worded here, and
the haystack is the user's own text, so that scores do not compare with published ones.

The data is a folder of `.txt` files, the haystack, and for the tasks qa a `squad.json` (SQuAD's
format). The built-in data is a small form: needles among the records of look-up texts, which the
built-in model was trained to answer.
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.eval.samples import DataError, Request, Sample, interleave
from mmkv.eval.suites import files, needle
from mmkv.eval.suites.description import BUILTIN_NOTE
from mmkv.eval.suites.longbench_builtin import sentences

NAME = "ruler"
NOTE = "the haystack is the user's own, and the prompts are worded here"
EACH = 20  # samples of each task
LENGTH = 4096  # tokens of a prompt and its answer
BUILTIN_LENGTHS = (256, 512, 768, 1024)

_NOISE = "The road goes on. Birds sing in the tree. It may rain later. Nobody is in a hurry. "
_HEADER = "Some special numbers are hidden in the text below. Remember them; they are asked for.\n"
# What a task makes: the text before the haystack, what is hidden in it, question and answers.
Parts = tuple[str, list[str], str, tuple[str, ...]]


def load(request: Request) -> list[Sample]:
    """Samples of every task, or of `request.tasks`, which take turns.

    Raises:
        ValueError: no such task, or a length that has no room for one.
        DataError: a file is not what is expected.
    """
    known = BUILTIN if request.data is None else TASKS
    chosen = list(dict.fromkeys(request.tasks or known))
    if wrong := [name for name in chosen if name not in known]:
        raise ValueError(f"tasks must be among {list(known)}, got {wrong}")
    each = EACH if request.limit is None else -(-request.limit // len(chosen))
    if request.data is None:
        groups = [[_builtin(name, n) for n in range(each)] for name in chosen]
        return interleave(groups)[: request.limit]
    words = needle.read_words(request.data)
    passages = _read_squad(request.data) if "qa" in chosen else []
    if "qa" in chosen and not passages:
        if request.tasks:
            raise DataError(f"{request.data}: the task qa needs a squad.json there")
        chosen.remove("qa")
    length, count = request.length or LENGTH, request.count or _words
    groups = [
        [_generated(name, n, words, passages, length, count) for n in range(each)]
        for name in chosen
    ]
    return interleave(groups)[: request.limit]


def _words(text: str) -> int:
    return len(text.split())


def _generated(
    name: str,
    number: int,
    words: list[str],
    passages: list[tuple[str, str, tuple[str, ...]]],
    length: int,
    count: Callable[[str], int],
) -> Sample:
    """Sample `number` of a task, as long as fits into `length` tokens with its answer."""
    make, haystack, new = TASKS[name]
    if name == "cwe" and length < LENGTH:
        make = partial(make, often=10, seldom=1)

    def prompt(size: int) -> tuple[str, str, tuple[str, ...]]:
        rng = random.Random(f"ruler:{name}:{number}")
        header, hidden, question, answers = make(rng, size, passages)
        parts: list[str] = []
        if haystack == "noise":
            parts = sentences((_NOISE * (size // 16 + 1)).strip())[: size // 4]
        elif haystack == "text":
            start = rng.randrange(max(1, len(words) - size))
            parts = words[start : start + size]
        # What is hidden keeps its order; without a haystack it is all there is.
        places = sorted(rng.randrange(len(parts) + 1) for _ in hidden)
        for place, part in reversed(list(zip(places, hidden, strict=True))):
            parts.insert(place, part)
        return f"{header}{' '.join(parts)}\n\n", question, answers

    def fits(size: int) -> bool:
        text, question, _ = prompt(size)
        return count(text + question) + new <= length

    low, high = 0, 8 * length
    if haystack == "text":
        high = min(high, len(words))
    if not fits(low):
        raise ValueError(f"length={length}: too short for the task {name}")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    text, question, answers = prompt(low)
    return Sample(
        id=f"{name}-{number}",
        suite=NAME,
        task=name,
        prompt=text + question,
        question=question,
        answers=answers,
        max_new_tokens=new,
        metric="contains" if name == "qa" else "contains_all",
        tags=(f"length={length}",),
        note=NOTE,
    )


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _word(rng: random.Random) -> str:
    """A word that can be spoken, so that tokenizers cut it into few pieces."""
    pairs = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
    return "".join(pairs) + rng.choice("nrst")


def _names(rng: random.Random, number: int, make: Callable[[random.Random], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < number:
        found[make(rng)] = None
    return list(found)


def _niah(
    rng: random.Random,
    size: int,
    passages: Any,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key: Callable[[random.Random], str] = _word,
    value: Callable[[random.Random], str] = _number,
    fill: bool = False,
) -> Parts:
    """Needles `key: value` in a haystack, or, with `fill`, in a haystack of needles."""
    keys = max(keys, queries, size // 12 if fill else 1)
    names = _names(rng, keys, key)
    known = {name: [value(rng) for _ in range(values)] for name in names}
    asked = rng.sample(names, queries)
    hidden = [f"One special number for {k} is {v}." for k in names for v in known[k]]
    rng.shuffle(hidden)
    what = ", ".join(asked)
    question = f"What are all the special numbers for {what} in the text above?"
    return _HEADER, hidden, question, tuple(v for k in asked for v in known[k])


def _variables(rng: random.Random, size: int, passages: Any, *, hops: int = 4) -> Parts:
    """A chain of assignments: which variables have the value?"""
    names = _names(rng, hops + 1, lambda r: "".join(r.choices(string.ascii_uppercase, k=5)))
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names)]
    question = f"Which {len(names)} variables in the text above have the value {value}?"
    header = "Follow the assignments of variables in the text below.\n"
    return header, lines, question, tuple(names)


def _common(
    rng: random.Random, size: int, passages: Any, *, often: int = 30, seldom: int = 3
) -> Parts:
    """A list of words, ten of which come ten times as often as the others."""
    names = _names(rng, 10 + max(1, size // 12), _word)
    words = names[:10] * often + names[10:] * seldom
    rng.shuffle(words)
    hidden = [f"{i}. {word}" for i, word in enumerate(words, start=1)]
    question = "Which 10 words come most often in the list above?"
    header = "Here is a list of words, some of which come more often.\n"
    return header, hidden, question, tuple(names[:10])


def _frequent(rng: random.Random, size: int, passages: Any) -> Parts:
    """A coded text whose words are Zipf-distributed, alpha 2: the three most frequent."""
    names = _names(rng, 100, _word)
    total = max(60, size // 2)
    weights = [rank**-2.0 for rank in range(1, len(names) + 1)]
    times = [max(1, round(total * w / sum(weights))) for w in weights]
    words = [name for name, n in zip(names, times, strict=True) for _ in range(n)]
    rng.shuffle(words)
    question = "Which three words come most often in the coded text above?"
    return "Here is a coded text.\n", words, question, tuple(names[:3])


def _qa(
    rng: random.Random, size: int, passages: Sequence[tuple[str, str, tuple[str, ...]]]
) -> Parts:
    """A question on one of many passages."""
    text, question, answers = passages[rng.randrange(len(passages))]
    others = [p for p in dict.fromkeys(p for p, _, _ in passages) if p != text]
    shown = [text, *rng.sample(others, min(len(others), size // 100))]
    rng.shuffle(shown)
    hidden = [f"Passage {i}: {p}" for i, p in enumerate(shown, start=1)]
    return "Answer from the passages below.\n", hidden, f"{question} Answer in few words.", answers


# Each task: what makes it, its haystack ("": none but what is hidden), and tokens of the answer.
TASKS: dict[str, tuple[Callable[..., Parts], str, int]] = {
    "niah_single_1": (_niah, "noise", 128),
    "niah_single_2": (_niah, "text", 128),
    "niah_single_3": (partial(_niah, value=_uuid), "text", 128),
    "niah_multikey_1": (partial(_niah, keys=4), "text", 128),
    "niah_multikey_2": (partial(_niah, fill=True), "", 128),
    "niah_multikey_3": (partial(_niah, fill=True, key=_uuid, value=_uuid), "", 128),
    "niah_multivalue": (partial(_niah, values=4), "text", 128),
    "niah_multiquery": (partial(_niah, queries=4), "text", 128),
    "vt": (_variables, "noise", 30),
    "cwe": (_common, "", 120),
    "fwe": (_frequent, "", 50),
    "qa": (_qa, "", 32),
}
# Of the built-in form: how many records a text has; None: all that find room.
BUILTIN = {"niah_single_1": 1, "niah_multikey_1": 4, "niah_multikey_2": None}


def _builtin(name: str, number: int) -> Sample:
    from mmkv.builtin import texts

    length = BUILTIN_LENGTHS[number % len(BUILTIN_LENGTHS)]
    seed = 500_000 + 10_000 * list(BUILTIN).index(name) + number
    lookup = texts.make_lookup(seed, length, records=BUILTIN[name])
    asked = random.Random(f"ruler:{name}:{number}").choice(lookup.questions)
    return Sample(
        id=f"{name}-{number}",
        suite=NAME,
        task=name,
        prompt=f"{lookup.text} {asked.text}",
        question=asked.text,
        answers=(asked.answer,),
        max_new_tokens=8,
        metric="contains_all",
        tags=(f"length={length}",),
        note=BUILTIN_NOTE,
    )


def _read_squad(folder: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """Passage, question and answers of a `squad.json` in the folder; [] if there is none."""
    path = folder / "squad.json"
    if not path.exists():
        return []
    try:
        data = files.read_json(path)
        return [
            (passage["context"], qa["question"], tuple(a["text"] for a in qa["answers"]))
            for article in data["data"]
            for passage in article["paragraphs"]
            for qa in passage["qas"]
            if qa["answers"]
        ]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: not in SQuAD's format: {error!r}") from None
