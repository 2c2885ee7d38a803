"""Scores generated text against references: pure functions, each in [0, 1], higher is better.

A scorer takes `(text, answers, classes)` and returns the best score over the answers. The rules
are those of LongBench (arXiv 2308.14508), so that figures compare; two libraries differ:

- ROUGE is rouge-score's F-measure without stemming. It lower-cases and reads letters and digits
  alone, while LongBench's library splits at blanks.
- `edit_similarity` is difflib's ratio, rounded to whole percent: what fuzzywuzzy's `ratio`, which
  LongBench calls, computes where no compiled edit distance is installed beside it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

    from .samples import Sample

Scorer = Callable[[str, tuple[str, ...], tuple[str, ...]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")
_COMMENT_MARKS = ("`", "#", "//")


def normalise(text: str) -> str:
    """`text` in lower case without punctuation, articles and runs of blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The first line of `text` after leading line breaks."""
    return text.lstrip("\n").split("\n")[0]


def _best(scores: Iterable[float]) -> float:
    return max(scores, default=0.0)


def token_f1(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The F1 of the words that text and answer share, after `normalise`."""
    words = normalise(text).split()
    return _best(_f1(words, normalise(answer).split()) for answer in answers)


def _f1(words: list[str], right: list[str]) -> float:
    shared = sum((Counter(words) & Counter(right)).values())
    # 2PR / (P + R) with P = shared / len(words) and R = shared / len(right).
    return 2 * shared / (len(words) + len(right)) if shared else 0.0


@lru_cache(maxsize=4)
def _rouge(kind: str) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=False)


def rouge(
    text: str, answers: tuple[str, ...], classes: tuple[str, ...] = (), *, kind: str
) -> float:
    """The F-measure over single words ("rouge1"), pairs ("rouge2") or in order ("rougeL")."""
    return _best(float(_rouge(kind).score(a, text)[kind].fmeasure) for a in answers)


rouge_l = partial(rouge, kind="rougeL")


def classification(text: str, answers: tuple[str, ...], classes: tuple[str, ...]) -> float:
    """1 / n if the right class is among the n classes that the text names, else 0.

    A class whose name is part of the right one's name does not count as named.
    """
    return _best(_classified(text, answer, classes) for answer in answers)


def _classified(text: str, answer: str, classes: tuple[str, ...]) -> float:
    # LongBench removes such names from the list while it walks over it and so misses some.
    named = [c for c in classes if c in text and (c == answer or c not in answer)]
    return 1 / len(named) if answer in named else 0.0


def count(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The share of the numbers in the text that are the right one."""
    return _best(_share(text, answer.strip()) for answer in answers)


def retrieval(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The share of the numbers in the text that are the answer's (as in "Paragraph 7")."""
    numbers = [number for answer in answers for number in _NUMBER.findall(answer)[:1]]
    return _best(_share(text, number) for number in numbers)


def _share(text: str, right: str) -> float:
    numbers = _NUMBER.findall(text)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def edit_similarity(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """How alike the answer and the text's first line that is not a comment are."""
    lines = text.lstrip("\n").split("\n")
    code = [line for line in lines if not any(mark in line for mark in _COMMENT_MARKS)]
    return text_similarity(code[0] if code else "", answers)


def text_similarity(text: str, answers: tuple[str, ...]) -> float:
    """difflib's ratio in whole percent: 2 M / T, with M matching characters of T."""
    return _best(round(100 * SequenceMatcher(None, text, x).ratio()) / 100 for x in answers)


def exact(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """1 if the text is an answer, after `normalise`."""
    found = normalise(text)
    return _best(float(found == normalise(answer)) for answer in answers)


def contains(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """1 if the text holds an answer as whole words, after `normalise`."""
    found = f" {normalise(text)} "
    wanted = [normalise(answer) for answer in answers]
    return _best(float(f" {words} " in found) for words in wanted if words)


def contains_all(text: str, answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> float:
    """The share of the answers that the text holds, in any case (RULER's string_match_all)."""
    return sum(answer.lower() in text.lower() for answer in answers) / max(1, len(answers))


SCORERS: dict[str, Scorer] = {
    "token_f1": token_f1,
    "rouge_1": partial(rouge, kind="rouge1"),
    "rouge_2": partial(rouge, kind="rouge2"),
    "rouge_l": rouge_l,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "edit_similarity": edit_similarity,
    "exact": exact,
    "contains": contains,
    "contains_all": contains_all,
}


def get_scorer(name: str) -> Scorer:
    """A scorer by name; raises ValueError with the names there are."""
    if name not in SCORERS:
        raise ValueError(f"metric must be one of {sorted(SCORERS)}, got {name!r}")
    return SCORERS[name]


def score(sample: Sample, text: str) -> float | None:
    """The score of a sample's generated text, or None if the sample has no metric."""
    if sample.metric is None:
        return None
    if sample.first_line:
        text = first_line(text)
    return get_scorer(sample.metric)(text, sample.answers, sample.classes)
