"""The suite `ruler`: what a prompt holds is what its answers say, whatever the length."""

import json
import re
from collections import Counter

import pytest

from helpers.evaluation import letters
from helpers.marks import cases
from mmkv.eval import scoring
from mmkv.eval.samples import DataError, words
from mmkv.eval.suites import ruler
from mmkv.eval.suites.registry import load_suite

WORDS = [f"word{i}" for i in range(3000)]


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    """A text in which every word is known by its place, and thirty passages."""
    folder = tmp_path_factory.mktemp("ruler")
    (folder / "text.txt").write_text(" ".join(WORDS))
    passages = [
        {
            "context": f"Town {i} has {i + 100} doors. " * 4,
            "qas": [
                {"question": f"Doors of town {i}?", "answers": [{"text": str(i + 100)}]},
                {"question": f"Name of town {i}?", "answers": [{"text": f"Town {i}"}]},
                {"question": f"Windows of town {i}?", "answers": []},
            ],
        }
        for i in range(30)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": passages}]}))
    entries = [
        {
            "question": f"Which town has {i + 100} doors?",
            "answer": f"Town {i}",
            "context": [[f"Town {j}", [f"It has {j + 100} doors. ", "So it is."]] for j in (i, 40)],
        }
        for i in range(30)
    ]
    (folder / "hotpot.json").write_text(json.dumps(entries))
    return folder


def samples_of(haystack, task, length=1000, count=words, n=6):
    return load_suite("ruler", haystack, tasks=[task], length=length, count=count, limit=n)


@pytest.mark.parametrize("task", list(ruler.TASKS))
@cases(
    "length, count",
    [(1000, words), (1800, letters), (4200, letters)],
    (1000, words),
)
def test_prompts_are_as_long_as_asked(haystack, task, length, count):
    found = samples_of(haystack, task, length, count, n=3)
    assert found == samples_of(haystack, task, length, count, n=3)
    assert len({s.prompt for s in found}) == 3
    for sample in found:
        tokens = count(sample.prompt)
        # Passages come whole, thirty of them at the most.
        least = {"qa_squad": 0.15, "qa_hotpot": 0.07}.get(task, 0.93)
        assert least * length <= tokens + sample.max_new_tokens <= length
        assert sample.prompt.endswith(sample.asked)
        context = sample.prompt.removesuffix(sample.asked)
        assert all(answer in context for answer in sample.answers)
        assert scoring.score(sample, " ".join(sample.answers)) == 1


@pytest.mark.parametrize(
    ("task", "keys", "values", "asked"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multikey_2", None, 1, 1),
        ("niah_multikey_3", None, 1, 1),
        ("niah_multivalue", 1, 4, 1),
        ("niah_multiquery", 4, 1, 4),
    ],
)
def test_needle_answers_belong_to_asked_keys(haystack, task, keys, values, asked):
    depths = []
    for sample in samples_of(haystack, task):
        context = sample.prompt.removesuffix(sample.question)
        needles = re.findall(r"One special number for (\S+) is (\S+)\.", context)
        counted = Counter(key for key, _ in needles)
        assert set(counted.values()) == {values}
        assert len(counted) == keys if keys else len(counted) > 30
        named = re.search(r"numbers for (.*) in the text", sample.question)[1].split(", ")
        assert len(named) == asked
        assert Counter(sample.answers) == Counter(v for k, v in needles if k in named)
        long = task in ("niah_single_3", "niah_multikey_3")
        assert all(len(answer) == (36 if long else 7) for answer in sample.answers)
        depths += [context.index(answer) / len(context) for answer in sample.answers]
        if ruler.TASKS[task][1] == "text":  # the user's own text, in its order
            places = [int(x) for x in re.findall(r"word(\d+)", context)]
            assert places == list(range(places[0], places[0] + len(places)))
    assert min(depths) < 0.4
    assert max(depths) > 0.6


def test_variable_answers_follow_the_chain(haystack):
    for sample in samples_of(haystack, "vt"):
        known = {}
        for name, other, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", sample.prompt):
            known[name] = value or known[other]  # each is set before it is read
        wanted = re.search(r"have the value (\d+)", sample.question)[1]
        assert {name for name, value in known.items() if value == wanted} == set(sample.answers)
        assert len(sample.answers) == 5


@cases("length", [1000, 4200], 1000)
def test_common_words_are_the_most_common(haystack, length):
    for sample in samples_of(haystack, "cwe", length, letters):
        counted = Counter(re.findall(r"\d+\. (\w+)", sample.prompt))
        times = 30 if length >= 4096 else 10
        assert {word for word, n in counted.items() if n == times} == set(sample.answers)
        assert len(sample.answers) == 10
        assert sorted(counted.values())[-11] == times / 10


def test_frequent_words_are_the_most_frequent(haystack):
    for sample in samples_of(haystack, "fwe"):
        counted = Counter(sample.prompt.split("\n")[1].split()).most_common(4)
        assert [word for word, _ in counted[:3]] == list(sample.answers)
        assert counted[2][1] > counted[3][1]


def test_passages_hold_the_answer_among_others(haystack):
    for sample in samples_of(haystack, "qa_squad"):
        town = re.search(r"Doors of town (\d+)\?", sample.question)[1]
        assert sample.answers == (str(int(town) + 100),)
        assert sample.prompt.count("Passage ") > 5
        assert sample.prompt.count(f"Town {town} has") == 4


def test_both_passages_of_a_question_are_shown(haystack):
    for sample in samples_of(haystack, "qa_hotpot"):
        doors = int(re.search(r"Which town has (\d+) doors", sample.question)[1])
        assert sample.answers == (f"Town {doors - 100}",)
        assert f"Town {doors - 100}\nIt has {doors} doors. So it is." in sample.prompt
        assert "Town 40\nIt has 140 doors. So it is." in sample.prompt
        assert sample.prompt.count("Passage ") > 2


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multikey_2", "qa_squad", "vt"])
def test_several_questions_on_one_context(haystack, task):
    one = load_suite("ruler", haystack, tasks=[task], length=1000, limit=2)
    found = load_suite("ruler", haystack, tasks=[task], length=1000, limit=9, questions=3)
    of_first = [s for s in found if s.context == found[0].context]
    expected = {"niah_multikey_1": 3, "niah_multikey_2": 3, "qa_squad": 2, "vt": 1}
    assert len(of_first) == expected[task]
    assert len({s.question for s in of_first}) == len({s.id for s in of_first}) == len(of_first)
    assert one[0] == found[0]
    assert one[1].context == found[len(of_first)].context != found[0].context
    for sample in of_first:
        assert all(answer in sample.prompt for answer in sample.answers)


def test_several_questions_on_one_drawing():
    shown = load_suite("mmvet", limit=9, questions=3)
    assert shown[0].context == shown[1].context == shown[2].context != shown[3].context
    assert len({s.prompt for s in shown[:3]}) == 3
    assert shown[0].prompt == load_suite("mmvet", limit=1)[0].prompt
    with pytest.raises(ValueError, match="questions=2: expected 1 or more for ruler"):
        load_suite("needle", questions=2)


@pytest.mark.slow
def test_impossible_requests_raise(haystack, tmp_path):
    with pytest.raises(ValueError, match=r"unknown task 'niah'\. Did you mean"):
        samples_of(haystack, "niah")
    with pytest.raises(ValueError, match="length=300: too short for the task cwe") as short:
        load_suite("ruler", haystack, tasks=["vt", "cwe"], length=300)
    least, tasks = re.search(r"--length (\d+) or more, or --tasks (.*)$", str(short.value)).groups()
    load_suite("ruler", haystack, tasks=["vt", "cwe"], length=int(least))
    load_suite("ruler", haystack, tasks=tasks.split(","), length=300)
    with pytest.raises(ValueError, match=f"length={int(least) - 1}: too short for the task cwe"):
        load_suite("ruler", haystack, tasks=["cwe"], length=int(least) - 1)
    with pytest.raises(ValueError, match="length=500: suite 'needle'"):
        load_suite("needle", haystack, length=500)
    (tmp_path / "text.txt").write_text(" ".join(WORDS))
    assert "qa_squad" not in {s.task for s in load_suite("ruler", tmp_path, limit=12)}
    with pytest.raises(DataError, match="needs a squad"):
        samples_of(tmp_path, "qa_squad")
    (tmp_path / "squad.json").write_text('{"data": [{"paragraphs": 3}]}')
    with pytest.raises(DataError, match=r"squad\.json: not in SQuAD's format"):
        load_suite("ruler", tmp_path, limit=12)
    (tmp_path / "hotpot.json").write_text('[{"question": "?", "answer": 3, "context": []}]')
    with pytest.raises(DataError, match=r"hotpot\.json: not in HotpotQA's format: .*got 3"):
        samples_of(tmp_path, "qa_hotpot")
