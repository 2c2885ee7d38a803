"""Scorers against independent implementations written as loops."""

from __future__ import annotations

import random
import re
import string

import pytest

pytest.importorskip("rouge_score", reason="the eval extra is not installed")

from mmkv.eval import scoring
from mmkv.eval.samples import Sample

WORDS = ("a", "an", "The,", "red", "Red,", "ring.", "star", "is", "left-hand", "12", "café", "x=1;")


def random_pairs(seed: int, number: int = 200) -> list[tuple[str, str]]:
    """Texts of the words above, of random characters, equal and empty ones among them."""
    rng = random.Random(seed)
    alphabet = string.ascii_letters[:8] + "  .,é"

    def text() -> str:
        if rng.random() < 0.5:
            return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(14)))
        return "".join(rng.choice(alphabet) for _ in range(rng.randrange(40)))

    pairs = [(text(), text()) for _ in range(number)]
    pairs[:5] = [("", ""), ("", "red"), ("red", ""), ("the", "a"), ("red ring", "red ring")]
    return pairs


PAIRS = random_pairs(0)
# Of comments and lines, examples below say more.
_NO_MARKS = str.maketrans("", "", "#`/\n")


# Oracles -----------------------------------------------------------------------------------------


def loop_lcs(a: list[str], b: list[str]) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a)):
        for j in range(len(b)):
            if a[i] == b[j]:
                table[i + 1][j + 1] = table[i][j] + 1
            else:
                table[i + 1][j + 1] = max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def loop_rouge_l(a: str, b: str) -> float:
    left, right = (re.findall(r"[a-z0-9]+", text.lower()) for text in (a, b))
    common = loop_lcs(left, right)
    if not common:
        return 0.0
    precision, recall = common / len(left), common / len(right)
    return 2 * precision * recall / (precision + recall)


def loop_f1(a: str, b: str) -> float:
    def words(text: str) -> list[str]:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in kept.split() if word not in ("a", "an", "the")]

    left, right = words(a), words(b)
    spare, shared = list(right), 0
    for word in left:
        if word in spare:
            spare.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(left), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def loop_matches(a: str, b: str) -> int:
    """Characters in the longest common block, then left and right of it, and so on."""
    best = (0, 0, 0)
    for i in range(len(a)):
        for j in range(len(b)):
            n = 0
            while i + n < len(a) and j + n < len(b) and a[i + n] == b[j + n]:
                n += 1
            if n > best[0]:
                best = (n, i, j)
    n, i, j = best
    if n == 0:
        return 0
    return n + loop_matches(a[:i], b[:j]) + loop_matches(a[i + n :], b[j + n :])


def loop_similarity(a: str, b: str) -> float:
    total = len(a) + len(b)
    return round(100 * (2 * loop_matches(a, b) / total if total else 1.0)) / 100


# Scorers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "oracle"),
    [("token_f1", loop_f1), ("edit_similarity", loop_similarity), ("rouge_l", loop_rouge_l)],
)
def test_scorers_agree_with_a_loop(name, oracle):
    for text, right in PAIRS:
        text, right = (x.translate(_NO_MARKS) for x in (text, right))
        found = scoring.SCORERS[name](text, right)
        assert found == pytest.approx(oracle(text, right), abs=1e-12)


@pytest.mark.parametrize("name", sorted(scoring.SCORERS))
def test_scores_stay_in_0_to_1_and_are_best_for_the_answer_itself(name):
    classes = ("red", "circle")
    for (text, right), (other, _) in zip(PAIRS, PAIRS[::-1], strict=True):
        alone = [scoring.best(name, text, (answer,), classes) for answer in (right, other)]
        assert all(0 <= x <= 1 for x in alone)
        expected = sum(alone) / 2 if name == "contains_all" else max(alone)
        assert scoring.best(name, text, (right, other), classes) == expected
    answer = "12" if name == "count" else "red 12"
    assert scoring.best(name, answer, (answer,), (answer,)) == 1
    assert scoring.best(name, "", (answer,), (answer,)) == 0
    assert scoring.best(name, answer, (), (answer,)) == 0


@pytest.mark.parametrize(
    ("name", "text", "answers", "classes", "value"),
    [
        ("token_f1", "The red ring.", ("a ring",), (), 2 / 3),
        ("token_f1", "ring", ("star", "ring"), (), 1),
        ("rouge_2", "a red ring", ("the red ring",), (), 0.5),
        ("classification", "Type: Date", ("Date",), ("Date", "City"), 1),
        ("classification", "Date or City", ("Date",), ("Date", "City"), 0.5),
        ("classification", "City", ("Date",), ("Date", "City"), 0),
        ("classification", "Other date", ("Other date",), ("date", "Other date", "Other"), 1),
        ("count", "There are 7.", ("7",), (), 1),
        ("count", "7, not 17", ("7",), (), 0.5),
        ("count", "seven", ("7",), (), 0),
        ("retrieval", "Paragraph 7", ("Paragraph 7",), (), 1),
        ("retrieval", "7 or 8", ("Paragraph 7",), (), 0.5),
        ("retrieval", "Paragraph 17", ("Paragraph 7",), (), 0),
        ("edit_similarity", "\n# a comment\nx = 1\ny", ("x = 1",), (), 1),
        ("edit_similarity", "// only a comment", ("x = 1",), (), 0),
        ("edit_similarity", "abcd", ("bcde",), (), 0.75),
        ("contains", "It is a ring.", ("star", "ring"), (), 1),
        ("contains", "It is a string.", ("ring",), (), 0),
        ("contains", "anything", ("the",), (), 0),
    ],
)
def test_scorers_on_examples(name, text, answers, classes, value):
    assert scoring.best(name, text, answers, classes) == pytest.approx(value)


def test_a_sample_is_scored_by_its_metric_on_its_first_line():
    options = {"id": "1", "suite": "longbench", "task": "trec", "prompt": "", "answers": ("ring",)}
    sample = Sample(**options, metric="rouge_l", first_line=True)
    assert scoring.score(sample, "\n\nring\nstar") == 1
    assert scoring.score(Sample(**options, metric="rouge_l"), "ring\nstar") < 1
    assert scoring.score(Sample(**options), "ring") is None
