"""Scorers: what they are on examples, and what holds for all."""

import logging
import random
import string

import pytest

pytest.importorskip("rouge_score", reason="the eval extra is not installed")

from mmkv.demo.conversation import rouge_l
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


def test_words_are_matched_as_by_a_loop():
    for text, right in PAIRS:
        assert scoring.token_f1(text, right) == pytest.approx(loop_f1(text, right), abs=1e-12)


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
        ("rouge_l", "A star, a red ring.", ("the ring, red",), (), 0.4 / 3 / (0.2 + 1 / 3)),
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


@pytest.mark.parametrize("name", scoring.SCORERS)
def test_scorers_as_metrics_of_evaluate(name):
    metrics = pytest.importorskip("mmkv.eval.metrics", reason="the eval extra is not installed")
    given = {"predictions": [a for a, _ in PAIRS], "references": [[b, "red"] for _, b in PAIRS]}
    if name == "classification":
        given["classes"] = [["red", "star"] for _ in PAIRS]
    classes = given.get("classes", [[]] * len(PAIRS))
    each = zip(given["predictions"], given["references"], classes, strict=True)
    expected = [scoring.best(name, *sample) for sample in each]
    found = metrics.load_metric(name).compute(**given)
    assert found == {name: pytest.approx(sum(expected) / len(PAIRS))}


def test_an_unknown_metric_of_evaluate():
    metrics = pytest.importorskip("mmkv.eval.metrics", reason="the eval extra is not installed")
    with pytest.raises(ValueError, match=r"bleu.*rouge_l"):
        metrics.load_metric("bleu")


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Кошка сидит на ковре", "кошка сидит на ковре.", 1.0),
        ("Слон весит 5000 кг", "Кошка ловит 5000 мышей", 0.25),
        ("ein Café", "ein Cafés", 0.5),
        ("猫坐在地毯上。", "猫在地毯上", 10 / 11),
        ("यह कार्यक्रम", "यह नाम", 0.5),
    ],
)
def test_rouge_counts_words_of_any_script(text, answer, expected):
    """Each sign of a script without blanks counts as a word."""
    assert rouge_l(text, answer) == pytest.approx(expected)


@pytest.mark.parametrize("rouge", [scoring.rouge, rouge_l])
def test_rouge_gives_the_root_logger_no_handler(rouge, monkeypatch):
    """It would print mmkv's messages a second time."""
    monkeypatch.setattr(logging.root, "handlers", [])
    assert rouge("a red ring", "a ring") == pytest.approx(0.8)
    assert not logging.root.handlers
