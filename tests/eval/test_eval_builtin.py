"""The suites' built-in data: deterministic, small enough for the built-in model, and answerable."""

import functools
from pathlib import Path

import pytest

from mmkv.builtin import WEIGHTS
from mmkv.eval import scoring
from mmkv.eval.suites import longbench_builtin
from mmkv.eval.suites.registry import load_suite

SIZES = {"description": 50, "mmvet": 48, "longbench": 70, "needle": 40, "ruler": 60}
SIZES |= {"cnn_dailymail": 20, "xsum": 20}


@functools.cache
def whole(suite):
    return load_suite(suite)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(WEIGHTS)


@pytest.mark.parametrize("suite", sorted(SIZES))
def test_builtin_data_is_deterministic_and_fits_the_builtin_model(suite, tokenizer):
    """The reference scores full marks."""
    first, again = whole(suite), load_suite(suite, Path("builtin"))
    assert first == again
    assert len(first) == SIZES[suite]
    assert len({s.id for s in first}) == len(first)
    assert len({(s.prompt, s.images and s.images[0].tobytes()) for s in first}) == len(first)
    assert load_suite(suite, limit=9) == first[:9]
    for sample in first:
        assert sample.suite == suite
        assert sample.note
        prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
        reply = tokenizer.encode(f" {sample.answers[0]}", add_special_tokens=False)
        assert len(prompt) + 150 * len(sample.images) + sample.max_new_tokens + 16 <= 2048
        assert len(reply) < sample.max_new_tokens
        assert tokenizer.image_token not in sample.prompt
        full = None if suite == "description" else 1.0
        assert scoring.score(sample, sample.answers[0]) == full


def test_builtin_questions_have_capabilities():
    found = whole("mmvet")
    assert {tag for s in found for tag in s.tags} == {"rec", "spat", "count", "several"}
    assert all((len(s.images) == 2) == ("several" in s.tags) for s in found)


def test_builtin_longbench_has_seven_kinds_that_take_turns():
    found = whole("longbench")
    kinds = [s.task for s in found[:7]]
    assert len(set(kinds)) == 7
    assert [s.task for s in found] == kinds * 10
    assert {s.task for s in found if not s.chat} == {"few_shot", "code"}
    assert {s.task for s in found if s.images} == set(longbench_builtin.WITH_PICTURE)
    selected = load_suite("longbench", tasks=["code", "count"], limit=3)
    assert [s.id for s in selected] == ["code-0", "count-0", "code-1"]
    with pytest.raises(ValueError, match="unknown task 'qasper'"):
        load_suite("longbench", tasks=["qasper"])


def test_the_builtin_needle_lies_at_its_depth():
    for sample in whole("needle"):
        text, needle = sample.prompt, sample.answers[0]
        depth = float(sample.tags[0].removeprefix("depth="))
        place = text.index(needle) / len(text.rsplit(".", 1)[0])
        assert place == pytest.approx(depth, abs=0.03)
        assert text.count(needle) == 1


def test_a_wrong_value_costs_marks_in_every_task_of_longbench():
    for sample in whole("longbench"):
        wrong = {
            "summary": "There are no objects in the picture.",
            "count": "There are twelve stars in the picture.",
        }
        text = wrong.get(sample.task) or f"{sample.answers[0].split()[0]} nothing."
        assert (scoring.score(sample, text) or 0) < 0.8, sample.id


def test_builtin_passages_for_retrieval_have_six_names():
    for sample in load_suite("longbench", tasks=["retrieval"]):
        assert len(set(sample.classes)) == 6
        assert all(sample.prompt.count(f"Passage {name}:") == 1 for name in sample.classes)
        passage = sample.prompt.split(f"Passage {sample.answers[1]}:")[1].split("\n\n")[0]
        assert sample.answers[0] in passage
