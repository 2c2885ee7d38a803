"""Real documents: text that goes on, summaries, short questions and a planted number.

Data is a folder of `.txt` files, such as `python -m mmkv.eval.corpus` writes, or one such file.
What a reply should be is known of the number alone: summaries and short answers are compared with
what the model itself replies with the full cache.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmkv.eval.samples import DataError, Request, Sample, asked_about, interleave
from mmkv.eval.suites import files
from mmkv.eval.suites.continuation import cuts
from mmkv.eval.suites.needle import DEPTHS

NOTE = "the documents are the user's own, and the questions are worded here"
EACH = 20  # samples of each task
LENGTH = 900  # tokens of an excerpt
TEXT_LENGTH, FOLLOWS = 800, 128  # of a text that goes on, and of what follows it
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
# Three small letters stand before it, as "Mrs." and "p." have not, and a capital behind it.
_SENTENCE_END = re.compile(r"(?<=[a-z]{3})[.!?][\"'”’)]*(?=\s+\W?[A-Z]|\s*$)")
_LETTERS = 6  # of a token, more than prose has: how far an excerpt may begin from the end


def load(request: Request) -> list[Sample]:
    """Samples of every task, or of `request.tasks`; tasks take turns, and folders of documents.

    Each task has documents of its own while there are enough.
    """
    assert request.data is not None
    chosen, known, count = request.chosen(TASKS), list(TASKS), request.count
    documents = texts_of(request.data, (request.length or LENGTH) + FOLLOWS, count)

    def make(name: str, n: int) -> list[Sample]:
        size = request.length or (TEXT_LENGTH if name == "text" else LENGTH)
        turn = documents[(EACH * known.index(name) + n) % len(documents)]
        return [_sample(name, n, size, count, *turn)]

    return request.in_turns(chosen, EACH, make)


def texts_of(data: Path, tokens: int, count: Callable[[str], int]) -> list[tuple[str, str]]:
    """Names and texts of at least so many tokens; the folders take turns, in a mixed order."""
    paths = files.text_files(data, ".txt")
    # By a hash of the name: neighbouring chapters are alike, and a new file moves no other.
    names = sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest())
    folders: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        text = files.read_text(paths[name])
        if count(text[: 2 * _LETTERS * tokens]) >= tokens:
            folders.setdefault(name.rpartition("/")[0], []).append((name, text))
    if not folders:
        wanted = f"no .txt file of {tokens} tokens or more"
        raise DataError(f"{data}: {wanted}; python -m mmkv.eval.corpus FOLDER writes some")
    return interleave([folders[folder] for folder in sorted(folders)])


def _sample(
    task: str, number: int, size: int, count: Callable[[str], int], name: str, text: str
) -> Sample:
    """Sample `number` of a task: an excerpt of `size` tokens that begins with a paragraph."""
    rng = random.Random(f"documents:{task}:{number}:{name}")
    tokens = size + FOLLOWS
    starts = [found.end() for found in re.finditer(r"\n+", text[: -_LETTERS * tokens])]
    start = rng.choice([0, *starts])
    text = text[start : start + 2 * _LETTERS * tokens]
    start, end = (place or len(text) for place in cuts(text, count, (size, tokens)))
    made = TASKS[task](text[:start], text[start:end].strip(), number, rng)
    folder = name.rpartition("/")[0]
    made["tags"] = (*((f"folder={folder}",) if folder else ()), *made.get("tags", ()))
    return Sample(id=f"{task}-{number}/{name}", task=task, note=NOTE, **made)


def _text(excerpt: str, rest: str, number: int, rng: random.Random) -> dict[str, Any]:
    """The text goes on; a hidden question is its last eighth."""
    end = excerpt.rfind(" ", 0, len(excerpt) * 7 // 8)
    return asked_about(excerpt[:end], excerpt[end:], (rest,), chat=False, max_new_tokens=64)


def _summary(excerpt: str, rest: str, number: int, rng: random.Random) -> dict[str, Any]:
    return asked_about(f"{_whole(excerpt)}\n\n", SUMMARY, (), max_new_tokens=64)


def _question(excerpt: str, rest: str, number: int, rng: random.Random) -> dict[str, Any]:
    """One of `QUESTIONS`; the word that one of them names occurs once."""
    excerpt = _whole(excerpt)
    found = Counter(re.findall(r"\b[a-z]{6,}\b", excerpt))
    once = [word for word, times in found.items() if times == 1]
    asked = QUESTIONS[number % len(QUESTIONS)]
    asked = asked.format(word=rng.choice(once or list(found) or ["the"]))
    return asked_about(f"{excerpt}\n\n", asked, (), max_new_tokens=64)


def _needle(excerpt: str, rest: str, number: int, rng: random.Random) -> dict[str, Any]:
    """A number, planted where a sentence ends that is nearest to the depth."""
    excerpt, depth = _whole(excerpt), DEPTHS[number % len(DEPTHS)]
    what = f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    code = str(rng.randrange(10_000, 100_000))
    places = [0, *(found.end() for found in _SENTENCE_END.finditer(excerpt)), len(excerpt)]
    place = min(places, key=lambda end: abs(end - depth * len(excerpt)))
    planted = f"The access code for the {what} is {code}."
    parts = (excerpt[:place], planted, excerpt[place:].lstrip())
    text = " ".join(part for part in parts if part)
    asked = f"What is the access code for the {what}? Reply with the number."
    how: Any = {"max_new_tokens": 24, "metric": "contains", "tags": (f"depth={depth}",)}
    return asked_about(f"{text}\n\n", asked, (code,), **how)


def _whole(excerpt: str) -> str:
    """An excerpt up to the end of its last whole sentence, if that is in its second half."""
    ends = [found.end() for found in _SENTENCE_END.finditer(excerpt)]
    return excerpt[: ends[-1]] if ends and 2 * ends[-1] > len(excerpt) else excerpt


# What makes a sample of an excerpt, what follows that, its number, and a source of chance.
TASKS: dict[str, Callable[[str, str, int, random.Random], dict[str, Any]]] = {
    "text": _text,
    "summary": _summary,
    "question": _question,
    "needle": _needle,
}
