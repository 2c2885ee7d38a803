"""RULER's tasks, generated for any tokenizer and length.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv
2404.06654, table 2 and appendix B. Prompts and haystacks are not the paper's, so that
scores do not compare with published ones.
"""

from __future__ import annotations

import bisect
import itertools
import random
import string
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.eval.samples import DataError, Request, Sample, Suite
from mmkv.eval.suites import files, needle

NOTE = "the haystack is novels or the user's own, and the prompts are worded here"
EACH = 20  # samples of each task
LENGTH = 4096  # tokens of a prompt and its answer

_NOISE = [
    "The road goes on.",
    "Birds sing in the tree.",
    "It may rain later.",
    "Nobody is in a hurry.",
]
Question = tuple[str, tuple[str, ...]]  # its text and its answers
# What a task makes: the text before the haystack, the parts hidden in it, and questions.
Parts = tuple[str, list[str], list[Question]]
# Passages, and the questions that they answer.
Reading = tuple[list[str], list[Question]]


def load(request: Request) -> Iterator[Sample]:
    """Return samples of every task, or of `request.tasks`; the tasks take turns."""
    words = needle.read_words(request.data)
    tasks = request.chosen(TASKS)
    readings = {name: _readings(request.data, name) for name in tasks if name in _READINGS}
    without_data = [name for name, items in readings.items() if not items]
    if without_data and request.tasks:
        file = _READINGS[without_data[0]][0]
        raise DataError(f"{request.data}: the task {without_data[0]} needs a {file} there")

    contexts = _Contexts(words, readings, request)

    def make(name: str, number: int) -> list[Sample]:
        return [] if name in without_data else contexts.samples(name, number)

    return request.in_turns(TASKS, EACH, make)


@dataclass(frozen=True)
class _Contexts:
    """Contexts made from the passages of a task, or from words of a haystack."""

    words: Sequence[str]
    readings: Mapping[str, list[Reading]]
    request: Request

    @property
    def length(self) -> int:
        """Tokens of a context with its longest question and an answer, at most."""
        return self.request.length or LENGTH

    def make(self, name: str, number: int, size: int) -> tuple[str, list[Question]]:
        """Return a context of about `size` words, and up to `request.questions` questions."""
        parts_of, haystack, _ = TASKS[name]
        if name == "cwe" and self.length < LENGTH:
            parts_of = partial(parts_of, often=10, seldom=1)
        rng = random.Random(f"ruler:{name}:{number}")
        header, hidden, questions = parts_of(rng, size, self.readings.get(name, []))
        parts = list[str]()  # without a haystack there are only the hidden parts
        if haystack == "noise":
            parts = (_NOISE * (size // 16 + 1))[: size // 4]
        elif haystack == "text":
            start = rng.randrange(max(1, len(self.words) - size))
            parts = [*self.words[start : start + size]]
        # The hidden parts keep their order.
        places = sorted(rng.randrange(len(parts) + 1) for _ in hidden)
        for place, part in reversed(list(zip(places, hidden, strict=True))):
            parts.insert(place, part)
        return f"{header}{' '.join(parts)}\n\n", questions[: self.request.questions]

    def tokens(self, name: str, number: int, size: int) -> int:
        """Return the tokens of a context with its longest question and an answer."""
        (text, questions), (*_, new) = self.make(name, number, size), TASKS[name]
        return max(self.request.count(text + question) for question, _ in questions) + new

    def samples(self, name: str, number: int) -> list[Sample]:
        """Return samples of each question about a context as long as the length allows."""
        length, (_, haystack, new) = self.length, TASKS[name]
        if self.tokens(name, number, 0) > length:
            raise ValueError(self.too_short(name))
        max_size = min(8 * length, len(self.words)) if haystack == "text" else 8 * length
        fits = range(max_size, 0, -1)
        first = bisect.bisect_left(fits, True, key=lambda n: self.tokens(name, number, n) <= length)
        return _samples(name, number, *self.make(name, number, max_size - first), length, new)

    def too_short(self, name: str) -> str:
        """Return an error's text: which lengths and tasks work in place of this length."""
        tasks = [x for x in self.request.chosen(TASKS) if x not in _READINGS or self.readings[x]]
        least = {x: max(self.tokens(x, i, 0) for i in range(EACH)) for x in tasks}
        fitting = ",".join(x for x in tasks if least[x] <= self.length)
        some = f", or --tasks {fitting}" if fitting else ""
        return (
            f"length={self.length}: too short for the task {name}, which needs {least[name]} "
            f"tokens: use --length {max(least.values())} or more{some}"
        )


def _samples(
    name: str, number: int, text: str, questions: Sequence[Question], length: int, new: int
) -> list[Sample]:
    extra: Any = {"task": name, "max_new_tokens": new, "tags": (f"length={length}",)}
    extra |= {"metric": "contains" if name in _READINGS else "contains_all"}
    names = [f"{name}-{number}" + (f"-{i}" if i else "") for i in range(len(questions))]
    each = zip(names, questions, strict=True)
    return [Sample.about(text, *question, id=name, **extra) for name, question in each]


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _word(rng: random.Random) -> str:
    """Return a pronounceable word, which tokenizers split into few tokens."""
    pairs = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
    return "".join(pairs) + rng.choice("nrst")


def _names(rng: random.Random, number: int, make: Callable[[random.Random], str]) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < number:
        names[make(rng)] = None
    return list(names)


def _niah(
    rng: random.Random,
    size: int,
    readings: Any,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key: Callable[[random.Random], str] = _word,
    value: Callable[[random.Random], str] = lambda rng: str(rng.randrange(10**6, 10**7)),
    fill: bool = False,
) -> Parts:
    """Return needles, each a key and a value; with `fill` the haystack is needles too."""
    keys = max(keys, queries, size // 12 if fill else 1)
    names = _names(rng, keys, key)
    values_of = {name: [value(rng) for _ in range(values)] for name in names}
    first = rng.sample(names, queries)
    hidden = [f"One special number for {k} is {v}." for k in names for v in values_of[k]]
    rng.shuffle(hidden)
    order, qas = [*first, *(name for name in names if name not in first)], list[Question]()
    for i in range(0, len(order) - queries + 1, queries):
        group = order[i : i + queries]
        question = f"What are all the special numbers for {', '.join(group)} in the text above?"
        qas.append((question, tuple(v for k in group for v in values_of[k])))
    header = "Some special numbers are hidden in the text below. Remember them; they are asked for."
    return f"{header}\n", hidden, qas


def _variables(rng: random.Random, size: int, readings: Any) -> Parts:
    """Return a chain of assignments, and the question which variables have its value."""
    names = _names(rng, 5, lambda r: "".join(r.choices(string.ascii_uppercase, k=5)))
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names)]
    question = f"Which {len(names)} variables in the text above have the value {value}?"
    header = "Follow the assignments of variables in the text below.\n"
    return header, lines, [(question, tuple(names))]


def _common(
    rng: random.Random, size: int, readings: Any, *, often: int = 30, seldom: int = 3
) -> Parts:
    names = _names(rng, 10 + max(1, size // 12), _word)
    words = names[:10] * often + names[10:] * seldom
    rng.shuffle(words)
    hidden = [f"{i}. {word}" for i, word in enumerate(words, start=1)]
    question = "Which 10 words come most often in the list above?"
    header = "Here is a list of words, some of which come more often.\n"
    return header, hidden, [(question, tuple(names[:10]))]


def _frequent(rng: random.Random, size: int, readings: Any) -> Parts:
    names, total = _names(rng, 100, _word), max(60, size // 2)
    weights = [rank**-2.0 for rank in range(1, len(names) + 1)]  # Zipf's law, alpha 2
    counts = [max(1, round(total * w / sum(weights))) for w in weights]
    words = [name for name, n in zip(names, counts, strict=True) for _ in range(n)]
    rng.shuffle(words)
    question = "Which three words come most often in the coded text above?"
    return "Here is a coded text.\n", words, [(question, tuple(names[:3]))]


def _qa(rng: random.Random, size: int, readings: Sequence[Reading]) -> Parts:
    """Return passages, with questions that one or several of them answer."""
    passages_needed, questions = readings[rng.randrange(len(readings))]
    all_passages = dict.fromkeys(passage for passages, _ in readings for passage in passages)
    others = [passage for passage in all_passages if passage not in passages_needed]
    passages_shown = [*passages_needed, *rng.sample(others, min(len(others), size // 100))]
    rng.shuffle(passages_shown)
    hidden = [f"Passage {i}: {p}" for i, p in enumerate(passages_shown, start=1)]
    qas = [(f"{text} Answer in few words.", answers) for text, answers in questions]
    return "Answer from the passages below.\n", hidden, qas


# For each task its function, its haystack ("": only the hidden parts), and tokens of the answer.
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
    "qa_squad": (_qa, "", 32),
    "qa_hotpot": (_qa, "", 32),
}


def _readings(folder: Path, task: str) -> list[Reading]:
    """Return the passages and questions of a published file; [] if it does not exist."""
    file, dataset, read = _READINGS[task]
    if not (folder / file).exists():
        return []
    content = files.read_json(folder / file)
    try:
        return [reading for reading in read(content) if reading[1]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder / file}: not in {dataset}'s format: {error!r}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r:.40}")
    return value


def _squad(data: Any) -> list[Reading]:
    def question_of(qa: Any) -> Question:
        return _text(qa["question"]), tuple(_text(answer["text"]) for answer in qa["answers"])

    return [
        ([_text(x["context"])], [question_of(qa) for qa in x["qas"] if qa["answers"]])
        for article in data["data"]
        for x in article["paragraphs"]
    ]


def _hotpot(data: Any) -> list[Reading]:
    return [
        (
            [f"{title}\n{''.join(lines)}" for title, lines in entry["context"]],
            [(_text(entry["question"]), (_text(entry["answer"]),))],
        )
        for entry in data
    ]


# For each task on passages its file, its data set, and the function that reads it.
_READINGS = {
    "qa_squad": ("squad.json", "SQuAD", _squad),
    "qa_hotpot": ("hotpot.json", "HotpotQA", _hotpot),
}
_OPTIONS = ("tasks", "length", "questions")
SUITE = Suite(load, note=NOTE, options=_OPTIONS, words=(files.NOVELS,))
