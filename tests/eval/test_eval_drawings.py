"""The suites' drawn pictures, and needles in novels: deterministic and answerable."""

from pathlib import Path

import pytest

from helpers.marks import cases
from mmkv.eval import scoring
from mmkv.eval.suites.registry import load_suite

SIZES = {"description": 20, "mmvet": 24, "needle": 40}


@cases("suite", SIZES, "description", "mmvet")
def test_drawings_are_deterministic_and_their_answers_are_right(suite):
    first = load_suite(suite, Path("drawings"))
    assert first == load_suite(suite)
    assert len(first) == len({s.id for s in first}) == SIZES[suite]
    assert len({(s.prompt, s.images[0].tobytes()) for s in first}) == len(first)
    assert load_suite(suite, limit=9) == first[:9]
    for sample in first:
        assert sample.suite == suite
        assert sample.note == "the pictures are drawn by the package"
        full = None if suite == "description" else 1.0
        assert scoring.score(sample, sample.answers[0]) == full


def test_drawings_need_a_suite_of_pictures():
    with pytest.raises(ValueError, match="does not read drawings: description, mmvet, needle do"):
        load_suite("ruler", "drawings")


def test_drawn_questions_have_capabilities():
    found = load_suite("mmvet")
    assert {tag for s in found for tag in s.tags} == {"rec", "spat", "count", "ocr", "several"}
    assert all((len(s.images) == 2) == ("several" in s.tags) for s in found)


def test_a_needle_lies_at_its_depth():
    for sample in load_suite("needle", "novels", limit=20):
        text, (needle, value) = sample.prompt, sample.answers
        depth = float(sample.tags[0].removeprefix("depth="))
        place = text.index(needle) / len(text.rsplit("\n\n", 1)[0])
        assert place == pytest.approx(depth, abs=0.03)
        assert text.count(needle) == 1
        assert needle.endswith(f" is {value}.")
