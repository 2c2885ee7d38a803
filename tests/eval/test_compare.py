"""Several runs side by side: what is on the front, tables, pictures, and runs of others."""

import json
import math
import re
import shutil
from typing import Any

import pandas as pd
import pytest
from test_eval_report import PNG, call, row, write_run

from helpers.models import make_model
from mmkv.eval.compare import Comparison, front
from mmkv.eval.runner import fitting
from mmkv.eval.store import RunError

HIDDEN = ":question=hidden"
SPREAD = {"a": (1, 0.2), "b": (2, 0.1), "c": (3, 0.5), "d": (3, 0.6), "e": (4, 0.6), "f": (9, 0.9)}


def front_of(points: dict[str, tuple[Any, Any]], cost: str, metric: str) -> list[str]:
    frame = pd.DataFrame(points.values(), points.keys(), [cost, metric], dtype=float)
    return list(front(frame, cost, metric).index)


@pytest.mark.parametrize(
    ("cost", "metric", "expected"),
    [
        ("held_bytes", "score", ["a", "d", "f"]),
        ("tokens_per_s", "rouge", ["f"]),
        ("first_token_s", "ppl", ["a", "b"]),
        ("tokens_per_s", "ppl", ["f", "e", "c", "b"]),
    ],
)
def test_front_rows_are_beaten_by_none(cost, metric, expected):
    assert front_of(SPREAD, cost, metric) == expected


def test_unmeasured_rows_are_on_no_front():
    points = {"a": (1, None), "b": (None, 1.0), "c": (2, math.inf), "d": (3, 0.5)}
    assert front_of(points, "held_bytes", "score") == ["d"]


def measured(policy: str, budget: float, index: int, nbytes: int, score: float) -> dict[str, Any]:
    speed = {"first_token_s": 0.5, "tokens_per_s": 20.0}
    nbytes_by_name = {"held_bytes": nbytes, "full_bytes": 8192, "other_bytes": 1024}
    return row(policy, budget, index, score=score, **nbytes_by_name, **speed)


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
SETTINGS = {
    "policies": {"full": {}, "h2o": {}, "snapkv": {"window": 8}, "snapkv" + HIDDEN: {"window": 8}},
    **{"model": "llava", "data": "drawings"},
}


@pytest.fixture
def folder(tmp_path):
    """A folder of one run."""
    write_run(tmp_path / "mmvet", ROWS, **SETTINGS)
    return tmp_path


def test_visible_and_hidden_questions_are_sections_of_their_own(folder):
    tables = Comparison([folder]).tables()
    titles = [f"mmvet (drawings), question {question}: llava" for question in ("visible", "hidden")]
    assert [t.title for t in tables] == titles
    rest = ["0.500", "20", "2", "r"]
    # The full cache holds 10 KiB, of which 1 is empty slots: shares are of its pairs' 9.
    full = ("**full**", ["90.0", "100.0", "9", *rest])
    visible = [("h2o 10%", ["20.0", "11.1", "1", *rest])]
    visible.append(("**snapkv 10%**", ["40.0", "11.1", "1", *rest]))
    assert tables[0].rows == [full, *visible]
    assert tables[1].rows == [full, ("**snapkv 10%**", ["30.0", "22.2", "2", *rest])]


def test_rouge_stands_beside_the_divergence_where_replies_were_generated(tmp_path):
    def measured(policy: str, budget: float, nats: float, rouge: float) -> dict[str, Any]:
        figures = {"divergence_sum": nats, "next_sum": 3, "next_tokens": 4, "rouge": rouge}
        figures |= {"held_bytes": 1024, "full_bytes": 1024}
        return row(policy, budget, 0, divergences=[nats], **figures)

    rows = [measured("full", 1.0, 0.0, 1.0), measured("h2o", 0.1, 2.0, 0.25)]
    write_run(tmp_path / "run", rows, **SETTINGS)
    (table,) = Comparison([tmp_path]).tables()
    assert table.columns[2] == "ROUGE-L"
    assert table.rows[1] == (
        "h2o 10%",
        ["0.500", "75.0", "0.25", "2.00", "100.0", "1", "–", "–", "1", "r"],
    )


def test_folder_without_runs_raises(tmp_path):
    with pytest.raises(RunError, match="no run here"):
        Comparison([tmp_path])
    write_run(tmp_path / "run", ROWS[:2], **SETTINGS | {"policies": {"full": {}}})
    with pytest.raises(RunError, match="no policy but the full cache"):
        Comparison([tmp_path])


@pytest.mark.slow
def test_runs_of_others_stand_beside_mine(tmp_path, folder):
    """Rows of one run that lie in two places count once, and complete each other."""
    theirs = write_run(tmp_path / "theirs", ROWS[:6], **SETTINGS | {"model": "qwen"})
    mine = tmp_path / "mine"
    mine.mkdir()
    shutil.move(folder / "mmvet", mine / "mmvet")
    write_run(mine / "part", ROWS[:5], **SETTINGS)
    done = call("report", mine, theirs, "--out", tmp_path / "all")
    assert done.exit_code == 0, done.output
    written = {p.name for p in (tmp_path / "all").iterdir()}
    assert written == {"frontier.png", "runs.csv", "runs.md"}
    assert (tmp_path / "all" / "frontier.png").read_bytes()[:8] == PNG
    points = pd.read_csv(tmp_path / "all" / "runs.csv")
    assert list(points.groupby("model", sort=False).size()) == [5, 3]
    assert set(points["n"]) == {2}
    assert "| **snapkv 10%** | 40.0 | 11.1 | 1 |" in (tmp_path / "all" / "runs.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_bytes": "many"}, "row 2: field 'held_bytes"),
        ({"score": float("nan")}, "row 2: field 'score"),
        ({"tags": "ocr"}, "row 2: field 'tags"),
        ({"index": "first"}, "row 2: field 'index"),
        ({"task": None}, "row 2: field 'task"),
        ({"held_bytes": -1}, "row 2: field 'held_bytes"),
        ({"policy": "snapkw"}, "row 2: run.json has no policy 'snapkw'"),
        ({"budget": 0.2}, "row 2: run.json has no budget 0.2"),
    ],
)
def test_invalid_row_raises(tmp_path, folder, change, message):
    write_run(tmp_path / "bad", [ROWS[0], ROWS[1] | change, *ROWS[2:]], **SETTINGS)
    done = call("report", folder / "mmvet", tmp_path / "bad", "--out", tmp_path / "all")
    assert done.exit_code == 2
    assert re.search(re.escape(message), done.stderr)
    assert not (tmp_path / "all").exists()


def test_invalid_settings_raise(tmp_path):
    bad = write_run(tmp_path / "bad", ROWS, **SETTINGS | {"budgets": "0.1"})
    with pytest.raises(RunError, match=r"run\.json: field 'settings\.budgets'"):
        Comparison([bad])
    path = write_run(tmp_path / "bad", ROWS, **SETTINGS) / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"made_by": []}))
    with pytest.raises(RunError, match=r"run\.json: field 'made_by'"):
        Comparison([bad])


def test_names_are_drawn_as_they_are(tmp_path):
    """Two dollar signs begin no formula, and no control character reaches the terminal."""
    names = {"model": "price_$5_to_$6\x1b[31m", "data": "$a_$b"}
    done = call("report", write_run(tmp_path / "run", ROWS, **SETTINGS | names))
    assert done.exit_code == 0, done.output
    assert "price_$5_to_$6\ufffd[31m" in done.output
    assert "\x1b[31m" not in done.output


def test_unsupported_policies_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr("mmkv.registry.list_policies", lambda: ["full", "snapkv"])
    model = make_model("llama")
    assert fitting(model, [0.5]) == ["full", "snapkv"]
    assert fitting(model, [3]) == ["full"]
    assert "policy snapkv at 3" in capsys.readouterr().err
