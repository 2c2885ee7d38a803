"""Scores of generated text against references: pure functions, each in [0, 1], higher is better.

The rules are those of LongBench (arXiv 2308.14508), so that figures compare; two libraries differ.
ROUGE is the F-measure of `mmkv.rouge`, which counts letters and digits, while LongBench's library
splits at blanks. `edit_similarity` is difflib's ratio in whole percent, like fuzzywuzzy's `ratio`
in LongBench where that has no compiled edit distance.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from mmkv.rouge import rouge

if TYPE_CHECKING:
    from .samples import Sample

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")


def normalise(text: str) -> str:
    """Return `text` in lower case without punctuation, articles and repeated blanks."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(text: str, answer: str) -> float:
    """Return the F1 of the words that text and answer share, after `normalise`."""
    words, right = normalise(text).split(), normalise(answer).split()
    shared = sum((Counter(words) & Counter(right)).values())
    # 2PR / (P + R) with P = shared / len(words) and R = shared / len(right).
    return 2 * shared / (len(words) + len(right)) if shared else 0.0


def classification(text: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 / n if the right class is among the n classes that the text names, else 0.

    A class whose name is part of the right one's name does not count as named.
    """
    # LongBench removes such names from the list during iteration, and so misses some.
    named = [c for c in classes if c in text and (c == answer or c not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(text: str, answer: str) -> float:
    """Return the share of the numbers in the text that equal the answer."""
    numbers = _NUMBER.findall(text)
    return numbers.count(answer.strip()) / len(numbers) if numbers else 0.0


def retrieval(text: str, answer: str) -> float:
    """Return the share of the numbers in the text that equal the answer's, as in "Paragraph 7"."""
    return max((count(text, number) for number in _NUMBER.findall(answer)[:1]), default=0.0)


def edit_similarity(text: str, answer: str) -> float:
    """Return the similarity of the answer and the text's first line that is not a comment."""
    lines = text.lstrip("\n").split("\n")
    code = [line for line in lines if not any(mark in line for mark in ("`", "#", "//"))]
    return round(100 * SequenceMatcher(None, code[0] if code else "", answer).ratio()) / 100


def contains(text: str, answer: str) -> float:
    """Return 1 if the text contains the answer as whole words, after `normalise`, else 0."""
    words = normalise(answer)
    return float(bool(words) and f" {words} " in f" {normalise(text)} ")


def holds(text: str, answer: str) -> float:
    """Return 1 if the text contains the answer, ignoring case, else 0."""
    return float(answer.lower() in text.lower())


SCORERS: dict[str, Callable[..., float]] = {
    "token_f1": token_f1,
    "rouge_2": partial(rouge, kind="rouge2"),
    "rouge_l": rouge,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
    "contains": contains,
    "contains_all": holds,
}


def best(name: str, text: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return a text's highest score over the answers; for "contains_all" the mean (RULER's
    string_match_all)."""
    extra = [classes] if name == "classification" else []
    scores = [SCORERS[name](text, answer, *extra) for answer in answers] or [0.0]
    return fmean(scores) if name == "contains_all" else max(scores)


def score(sample: Sample, text: str) -> float | None:
    """Return the score of a sample's generated text, or None if the sample has no metric."""
    if sample.metric is None:
        return None
    if sample.first_line:
        text = text.lstrip("\n").split("\n")[0]
    return best(sample.metric, text, sample.answers, sample.classes)
