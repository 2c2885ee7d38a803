"""Real documents: continued text, summaries, short questions and a planted number.

Data is the package's novels, a folder of `.txt` files, or one such file.
Continued text and the number have reference answers; summaries and short answers are compared with
the model's own replies with the full cache.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmkv.eval.samples import DataError, Request, Sample, Suite, interleave
from mmkv.eval.suites import files
from mmkv.eval.suites.continuation import cuts, gaps
from mmkv.eval.suites.needle import DEPTHS

NOTE = "the documents are novels or the user's own, and the questions are worded here"
EACH = 20  # samples of each task
LENGTH = 900  # tokens of an excerpt
TEXT_LENGTH, FOLLOWS = 800, 128  # tokens of the task "text" and of its continuation
SUMMARY = "Summarize the text above in a few sentences."
QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Who or what is mentioned first in the text above?",
    'Quote the sentence of the text above that mentions the word "{word}".',
    "Name three things that the text above mentions.",
    "How does the text above end? Answer in one sentence.",
)
_ADJECTIVES = ("quiet", "northern", "golden", "broken", "crooked", "silver", "hidden", "narrow")
_NOUNS = ("harbor", "orchard", "archive", "lantern", "workshop", "cellar", "bridge", "granary")
# Three small letters before it, unlike in "Mrs." and "p.", and a capital after it; or the full
# stop, exclamation mark or question mark of Chinese and Japanese, and closing brackets.
_SENTENCE_END = re.compile(
    r"(?<=[a-z]{3})[.!?][\"'”’)]*(?=\s+\W?[A-Z]|\s*$)"
    r"|[\u3002\uff01\uff1f]+[\u300d\u300f”’\uff09]*"
)
_CHARACTERS = 6  # per token, more than in prose: keeps an excerpt's start far from the end


def load(request: Request) -> Iterator[Sample]:
    """Return samples of every task, or of `request.tasks`; tasks and folders take turns.

    No two tasks use the same document if there are enough.
    """
    order, count = list(TASKS), request.count
    documents = texts_of(request.data, (request.length or LENGTH) + FOLLOWS, count)

    def make(name: str, n: int) -> list[Sample]:
        size = request.length or (TEXT_LENGTH if name == "text" else LENGTH)
        document = documents[(EACH * order.index(name) + n) % len(documents)]
        return [_sample(name, n, size, count, *document)]

    return request.in_turns(TASKS, EACH, make)


def texts_of(data: Path, tokens: int, count: Callable[[str], int]) -> list[tuple[str, str]]:
    """Return names and texts of at least so many tokens, shuffled; the folders take turns."""
    if files.stands_for(data, files.NOVELS):
        texts = {f"{name.rpartition('-')[0]}/{name}": text for name, text in files.novels().items()}
    else:
        paths = files.text_files(data, ".txt")
        texts = {name: files.read_text(path) for name, path in paths.items()}
    # Sorting by a hash separates similar chapters, and a new file does not move the others.
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    folders: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        text = texts[name]
        if count(text[: 2 * _CHARACTERS * tokens]) >= tokens:
            folders.setdefault(name.rpartition("/")[0], []).append((name, text))
    if not folders:
        raise DataError(f"{data}: no .txt file of {tokens} tokens or more")
    return list(interleave(folders[folder] for folder in sorted(folders)))


def _sample(
    task: str, number: int, size: int, count: Callable[[str], int], name: str, text: str
) -> Sample:
    """Return sample `number` of a task: an excerpt of `size` tokens that begins a paragraph."""
    rng = random.Random(f"documents:{task}:{number}:{name}")
    tokens = size + FOLLOWS
    starts = [match.end() for match in re.finditer(r"\n+", text[: -_CHARACTERS * tokens])]
    start = rng.choice([0, *starts])
    text = text[start : start + 2 * _CHARACTERS * tokens]
    start, end = (place or len(text) for place in cuts(text, count, (size, tokens)))
    sample = TASKS[task](text[:start], text[start:end].strip(), number, rng)
    folder = name.rpartition("/")[0]
    tags = (*((f"folder={folder}",) if folder else ()), *sample.tags)
    return replace(sample, id=f"{task}-{number}/{name}", task=task, tags=tags)


def _text(excerpt: str, rest: str, number: int, rng: random.Random) -> Sample:
    """Return a sample for continuing a text; its last eighth is the question that may be hidden."""
    end = max((place for place in gaps(excerpt) if place < len(excerpt) * 7 // 8), default=0)
    return Sample.about(excerpt[:end], excerpt[end:], (rest,), chat=False, max_new_tokens=64)


def _summary(excerpt: str, rest: str, number: int, rng: random.Random) -> Sample:
    return Sample.about(f"{_whole(excerpt)}\n\n", SUMMARY, (), max_new_tokens=64)


def _question(excerpt: str, rest: str, number: int, rng: random.Random) -> Sample:
    """Return a sample that asks one of `QUESTIONS`; its `{word}` occurs once in the excerpt."""
    excerpt = _whole(excerpt)
    counts = Counter(re.findall(r"\b[a-z]{6,}\b", excerpt))
    unique = [word for word, times in counts.items() if times == 1]
    question = QUESTIONS[number % len(QUESTIONS)]
    question = question.format(word=rng.choice(unique or list(counts) or ["the"]))
    return Sample.about(f"{excerpt}\n\n", question, (), max_new_tokens=64)


def _needle(excerpt: str, rest: str, number: int, rng: random.Random) -> Sample:
    """Return a sample that asks for a number, planted at the end of the sentence that ends nearest
    to the depth, or between words if no end of a sentence is found."""
    excerpt, depth = _whole(excerpt), DEPTHS[number % len(DEPTHS)]
    subject = f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    code = str(rng.randrange(10_000, 100_000))
    ends = [match.end() for match in _SENTENCE_END.finditer(excerpt)]
    places = [0, *(ends or gaps(excerpt)), len(excerpt)]
    place = min(places, key=lambda end: abs(end - depth * len(excerpt)))
    planted = f"The access code for the {subject} is {code}."
    parts = (excerpt[:place], planted, excerpt[place:].lstrip())
    text = " ".join(part for part in parts if part)
    question = f"What is the access code for the {subject}? Reply with the number."
    extra: Any = {"max_new_tokens": 24, "metric": "contains", "tags": (f"depth={depth}",)}
    return Sample.about(f"{text}\n\n", question, (code,), **extra)


def _whole(excerpt: str) -> str:
    """Return an excerpt up to its last whole sentence, if that ends in its second half."""
    ends = [match.end() for match in _SENTENCE_END.finditer(excerpt)]
    return excerpt[: ends[-1]] if ends and 2 * ends[-1] > len(excerpt) else excerpt


# Functions from excerpt, continuation, sample number and random numbers to a sample.
TASKS: dict[str, Callable[[str, str, int, random.Random], Sample]] = {
    "text": _text,
    "summary": _summary,
    "question": _question,
    "needle": _needle,
}
SUITE = Suite(load, note=NOTE, options=("tasks", "length"), words=(files.NOVELS,))
