"""Several runs on one page: what is on the front, what the page holds, and runs of others."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from html.parser import HTMLParser
from typing import Any

import pytest
from test_eval_report import row, write_run
from typer.testing import CliRunner

from helpers.evaluation import save_model
from helpers.models import make_model
from mmkv.eval.cli import commands
from mmkv.eval.matrix import COSTS, Matrix, Point, Section, merge
from mmkv.eval.report import Figures
from mmkv.eval.runner import fitting
from mmkv.eval.store import RunError, Store

HIDDEN = ":question=hidden"


def figures(**given: Any) -> Figures:
    empty: dict[str, Any] = {f.name: None for f in fields(Figures)}
    return Figures(**(empty | {"n": 2, "errors": 0} | given))


def section(metric: str, points: dict[str, tuple[float | None, float | None]]) -> Section:
    """Points by name: cost in bytes, and quality."""
    made = tuple(
        Point(
            name, 0.2, "r", figures(**{"held_bytes": cost, "tokens_per_s": cost, metric: quality})
        )
        for name, (cost, quality) in points.items()
    )
    return Section("model", "suite", "visible", "", (metric,), made)


def names(points: list[Point]) -> list[str]:
    return [p.policy for p in points]


SPREAD = {"a": (1, 0.2), "b": (2, 0.1), "c": (3, 0.5), "d": (3, 0.6), "e": (4, 0.6), "f": (9, 0.9)}


@pytest.mark.parametrize(
    ("metric", "less", "front"),
    [
        ("score", True, ["a", "d", "f"]),
        ("rouge", False, ["f"]),
        ("ppl", True, ["a", "b"]),
        ("ppl", False, ["f", "e", "c", "b"]),
    ],
)
def test_the_front_is_what_nothing_beats(metric, less, front):
    cost = "held_bytes" if less else "tokens_per_s"
    assert names(section(metric, SPREAD).front(cost, less=less)) == front


def test_what_was_not_measured_is_on_no_front():
    points = {"a": (1, None), "b": (None, 1.0), "c": (2, math.inf), "d": (3, 0.5)}
    assert names(section("score", points).front("held_bytes", less=True)) == ["d"]


def measured(policy: str, budget: float, index: int, nbytes: int, score: float) -> dict[str, Any]:
    speed = {"first_token_s": 0.5, "tokens_per_s": 20.0}
    return row(policy, budget, index, held_bytes=nbytes, score=score, **speed)


ROWS = [
    measured(policy, budget, index, nbytes, score)
    for policy, budget, nbytes, score in (
        ("full", 1.0, 10240, 0.9),
        ("h2o", 0.1, 1024, 0.2),
        ("snapkv", 0.1, 1024, 0.4),
        ("snapkv" + HIDDEN, 0.1, 2048, 0.3),
    )
    for index in (0, 1)
]
POLICIES = {"full": {}, "h2o": {}, "snapkv": {"window": 8}, "snapkv" + HIDDEN: {"window": 8}}
SETTINGS = {
    **{"policies": POLICIES, "data_digest": "d", "batch_size": 2, "max_length": None},
    **{"metrics": ["score"], "device": "cpu", "model": "llava", "data": "builtin"},
}


@pytest.fixture
def folder(tmp_path):
    """A matrix of one run."""
    write_run(tmp_path / "mmvet", ROWS, **SETTINGS)
    return tmp_path


class Page(HTMLParser):
    """The tags of a page, and what its cells say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.within = tag

    def handle_data(self, data: str) -> None:
        if self.within in ("td", "th"):
            self.rows[-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        self.within = ""


def test_visible_and_hidden_questions_are_sections_of_their_own(folder):
    visible, hidden = Matrix(folder).sections()
    assert [p.label for p in visible.points] == ["full", "h2o 10%", "snapkv 10%"]
    assert [p.label for p in hidden.points] == ["full", "snapkv 10%"]
    assert names(visible.front("held_bytes", less=True)) == ["snapkv", "full"]
    assert hidden.points[1].figures.held_bytes == 2048


@pytest.mark.slow
def test_the_page_needs_nothing_else(folder):
    paths = Matrix(folder).write()
    assert [p.name for p in paths] == ["matrix.html", "matrix.png"]
    text = paths[0].read_text()
    page = Page(text)
    assert page.tags.count("svg") == 2 * len(COSTS)
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:href", "")), "it loads something"
    assert 'name="viewport"' in text
    assert ["snapkv 10%", "40.0", "1", "0.500", "20", "2", "r"] in page.rows
    assert ["snapkv 10%", "30.0", "2", "0.500", "20", "2", "r"] in page.rows
    assert ["full", "90.0", "10", "0.500", "20", "2", "r"] in page.rows
    assert any(cells[:3] == ["r", "llava", "mmvet"] for cells in page.rows)


def test_names_of_strangers_are_text_alone(tmp_path):
    bad = "<script>alert(1)</script>"
    policies = POLICIES | {bad: {bad: bad}}
    rows = [*ROWS, *(measured(bad, 0.1, i, 512, 0.99) for i in (0, 1))]
    settings = SETTINGS | {"policies": policies, "model": bad, "notes": [bad]}
    write_run(tmp_path / "mmvet", rows, **settings)
    text = Matrix(tmp_path).write()[0].read_text()
    assert "script" not in Page(text).tags
    assert text.count("&lt;script&gt;") >= 6


def test_a_folder_without_runs_is_said(tmp_path):
    with pytest.raises(RunError, match="no run here"):
        Matrix(tmp_path)
    write_run(tmp_path / "run", ROWS[:2], **SETTINGS | {"policies": {"full": {}}})
    with pytest.raises(RunError, match="no policy but the full cache"):
        Matrix(tmp_path).write()


@pytest.mark.slow
def test_runs_of_others_are_added_once(tmp_path, folder):
    other = write_run(tmp_path / "theirs", ROWS[:6], **SETTINGS | {"model": "qwen"})
    out = tmp_path / "all"
    first = merge([folder / "mmvet", other], out)
    assert len(first) == 2
    assert merge([other], out) == first[1:]
    assert {s.model for s in Matrix(out).sections()} == {"llava", "qwen"}
    assert sorted(len(Store(path).rows()) for path in first) == [6, 8]
    # The same run with more rows: what is missing is added.
    write_run(other, ROWS, **SETTINGS | {"model": "qwen"})
    merge([other], out)
    assert [len(Store(path).rows()) for path in first] == [8, 8]
    assert Matrix(out).write()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_bytes": "many"}, "row 2: field 'held_bytes'"),
        ({"score": float("nan")}, "row 2: field 'score'"),
        ({"tags": "ocr"}, "row 2: field 'tags'"),
        ({"index": -1}, "row 2: field 'index'"),
        ({"task": None}, "row 2: field 'task'"),
    ],
)
def test_what_is_no_row_is_refused_before_anything_is_written(tmp_path, folder, change, message):
    rows = [ROWS[0], ROWS[1] | change, *ROWS[2:]]
    write_run(tmp_path / "bad", rows, **SETTINGS)
    with pytest.raises(RunError, match=re.escape(message)):
        merge([folder / "mmvet", tmp_path / "bad"], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_settings_that_are_none_are_refused(tmp_path):
    bad = write_run(tmp_path / "bad", ROWS, **SETTINGS | {"budgets": "0.1"})
    with pytest.raises(RunError, match=r"run\.json: field 'settings\.budgets'"):
        merge([bad], tmp_path / "all")
    with pytest.raises(RunError, match="no run here"):
        merge([tmp_path / "none"], tmp_path / "all")


def test_policies_that_a_model_cannot_have_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr("mmkv.registry.list_policies", lambda: ["full", "snapkv"])
    model = make_model("llama")
    assert fitting(model, [0.5]) == ["full", "snapkv"]
    assert fitting(model, [3]) == ["full"]
    assert "policy snapkv at 3" in capsys.readouterr().err


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(commands, list(arguments))


@pytest.mark.slow
def test_the_commands(tmp_path):
    save_model(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        words = [f"w{4 + (7 * i + len(name)) % 100}" for i in range(400)]
        (tmp_path / "texts" / name).write_text(" ".join(words))
    asked = ["eval", "matrix", "--suites", "continuation", "--model", str(tmp_path / "model")]
    asked += ["--data", f"continuation={tmp_path / 'texts'}", "--policies", "snapkv,h2o"]
    asked += ["--budgets", "0.3", "--option", "window=8", "--out", str(tmp_path / "out")]
    asked += ["--length", "256"]
    first = invoke(*asked)
    assert first.exit_code == 0, first.output
    rows = Store(tmp_path / "out" / "continuation").rows()
    assert len(rows) == 2 * (1 + 2 * 2)
    for found in rows:
        assert 0 < found["first_token_s"] < found["seconds"] * 2 + 1
        assert found["held_bytes"] >= found["cache_bytes"]
    assert (tmp_path / "out" / "matrix.html").is_file()

    again = invoke(*asked)
    assert again.exit_code == 0
    assert Store(tmp_path / "out" / "continuation").rows() == rows
    merged = invoke("eval", "merge", str(tmp_path / "out"), "--out", str(tmp_path / "all"))
    assert merged.exit_code == 0, merged.output
    assert (tmp_path / "all" / "matrix.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "none"], "suite 'none': expected some of"),
        (["--data", "needle=x"], "--suites does not name it"),
        (["--policies", "none"], "none"),
        (["--question", "never"], "question='never'"),
    ],
)
def test_wrong_use_is_a_line(tmp_path, arguments, message):
    found = invoke("eval", "matrix", *arguments, "--out", str(tmp_path / "out"))
    assert found.exit_code == 2
    assert message in found.output
    assert not (tmp_path / "out").exists()


def test_a_single_run_still_has_its_command():
    assert "Measure policies at budgets on a suite" in invoke("eval", "--help").output
    assert invoke("eval", "none").exit_code == 2
