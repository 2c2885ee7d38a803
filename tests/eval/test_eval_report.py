"""Tables, files and figures of a run; the commands."""

import csv
import json
import math
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.evaluation import save_model
from helpers.marks import cases
from helpers.picture_chat import picture_chat
from mmkv.cli.commands import main
from mmkv.eval import measure, runner
from mmkv.eval.sizing import commands
from mmkv.eval.store import RunError, read_rows
from mmkv.eval.tabulate import Report

PNG = b"\x89PNG\r\n\x1a\n"


def row(policy: str, budget: float, index: int, **figures: Any) -> dict[str, Any]:
    about = {"sample": str(index), "suite": "mmvet", "task": "mmvet", "run": "r", "n": 2}
    tags = ["ocr"] if index == 0 else ["ocr", "math"]
    return {"policy": policy, "budget": budget, "index": index, "tags": tags, **about, **figures}


# Perplexities worked out by hand: nll and tokens are summed over the samples, then divided.
ROWS = [
    row("full", 1.0, 0, nll=2.0, answer_tokens=4, rouge=1.0, score=1.0, kept_fraction=1.0),
    row("full", 1.0, 1, nll=4.0, answer_tokens=2, rouge=1.0, score=0.5, kept_fraction=1.0),
    row("h2o", 0.1, 0, nll=6.0, answer_tokens=4, rouge=0.5, score=0.5, kept_fraction=0.1),
    row("h2o", 0.1, 1, nll=9.0, answer_tokens=2, rouge=0.25, score=0.0, kept_fraction=0.1),
    row("prefixkv", 0.1, 0, nll=3.0, answer_tokens=4, rouge=0.75, score=1.0, kept_fraction=0.1),
    row("prefixkv", 0.1, 1, error="the budget is too small"),
]


def write_run(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    asked = {"model": "llava-hf/llava-1.5-7b-hf", "suite": "mmvet", "data": "mm-vet.json"}
    asked |= {"policies": {"full": {}, "h2o": {}, "prefixkv": {"distance": 9}}, "budgets": [0.1]}
    asked |= {"n": 2, "dtype": "float16", "notes": []}
    made = {"id": "r", "mmkv": "0", "torch": "2", "transformers": "5", "commit": "c", "device": "x"}
    run = {"settings": {**asked, **settings}, "made_by": [made]}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture
def report(tmp_path):
    return Report(write_run(tmp_path / "run", ROWS))


def test_figures_equal_hand_computed_ones(report):
    full, h2o, prefix = (report.figures(p, 0.1) for p in ("full", "h2o", "prefixkv"))
    assert full.ppl == pytest.approx(math.exp(6 / 6))
    assert h2o.ppl == pytest.approx(math.exp(15 / 6))
    assert (h2o.rouge, h2o.score) == (0.375, 0.25)
    assert (prefix.n, prefix.errors, prefix.rouge) == (2, 1, 0.75)
    assert prefix.ppl == pytest.approx(math.exp(3 / 4))
    assert math.isnan(prefix.held_bytes)
    assert report.figures("h2o", 0.2).isna().all()


def test_worst_divergence_is_a_percentile_over_the_tokens_of_all_samples(tmp_path):
    """Between the two largest of 1,000 tokens, 0.1 and 7, a thousandth of the way."""
    rows = [row("snapkv", 0.5, i, divergences=x) for i, x in enumerate([[0.1] * 998, [0.1, 7.0]])]
    asked = {"policies": {"snapkv": {}}, "budgets": [0.5]}
    report = Report(write_run(tmp_path, [*rows, row("snapkv", 0.5, 2)], **asked))
    assert report.figures("snapkv", 0.5)["worst"] == pytest.approx(0.1 + 0.001 * 6.9)


def test_main_table_is_in_the_papers_layout(report):
    table = report.main_table()
    assert table.columns == ["10%"]
    assert table.rows == [
        ("h2o", ["12.2 / 0.38 / 25.0"]),
        ("prefixkv", ["**2.12** / **0.75** / **100.0**†"]),
    ]
    notes = "\n".join(table.notes)
    assert "Full cache: perplexity 2.72, ROUGE-L 1.00, score 75.0." in notes
    assert "prefixkv at 10%: 1 of 2 samples could not be measured (the budget is too" in notes
    assert "prefixkv with distance=9" in notes
    assert "n = 2, float16 on x" in notes


def test_task_failed_by_full_cache_is_named(report, tmp_path):
    nothing = "The full cache scores 0: the model cannot do this task, so scores tell nothing"
    assert nothing not in "\n".join(report.notes())
    rows = [x | {"score": 0.0} if "score" in x else x for x in ROWS]
    assert nothing in "\n".join(Report(write_run(tmp_path / "other", rows)).notes())


def test_scores_by_capability(report):
    (table,) = [t for t in report.tables() if t.corner == "tag"]
    assert table.columns == ["ocr", "math"]
    assert table.rows == [
        ("full", ["75.0", "50.0"]),
        ("h2o", ["25.0", "0.0"]),
        ("prefixkv", ["100.0†", "–"]),
    ]


def test_scores_by_task_and_their_average(tmp_path):
    rows = [
        row("snapkv", 128, i, score=s) | {"suite": "longbench", "task": t, "tags": []}
        for i, (t, s) in enumerate([("qasper", 0.2), ("trec", 0.5), ("trec", 0.6)])
    ]
    how = {"suite": "longbench", "model": "mistralai/Mistral-7B-Instruct-v0.2"}
    how |= {"policies": {"snapkv": {}}, "budgets": [128]}
    report = Report(write_run(tmp_path, rows, **how))
    (table,) = [t for t in report.tables() if t.corner == "task"]
    assert table.columns == ["qasper", "trec", "average"]
    assert table.rows == [
        ("snapkv", ["20.0", "55.0", "37.5"]),
    ]
    # As in the paper, the average is over tasks.
    assert report.main_table().rows == [("snapkv", ["**37.5**"])]


def test_report_writes_markdown_and_csv(report, tmp_path):
    written = {p.name: p for p in report.write()}
    assert set(written) == {"report.md", "report.csv"}
    assert "| h2o | 12.2 / 0.38 / 25.0 |" in written["report.md"].read_text()
    with written["report.csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    groups = [("all", "full"), ("all", "h2o"), ("all", "prefixkv"), ("task mmvet", "full")]
    assert [(x["group"], x["policy"]) for x in lines[:4]] == groups
    assert float(lines[1]["ppl"]) == pytest.approx(math.exp(15 / 6))
    assert lines[1]["held_bytes"] == ""


def test_unfinished_run_is_noted(tmp_path):
    report = Report(write_run(tmp_path / "a", ROWS[:3]))
    assert "Not finished: 3 of 6 rows; none is marked as best." in report.notes()
    assert report.main_table().rows == [("h2o", ["4.48 / 0.50 / 50.0"]), ("prefixkv", ["–"])]
    with pytest.raises(RunError, match="no finished row"):
        Report(write_run(tmp_path / "b", []))


def test_the_full_cache_alone_is_a_row(tmp_path):
    rows = [row("full", 1.0, i, nll=3.0, answer_tokens=3) for i in range(2)]
    report = Report(write_run(tmp_path, rows, policies={"full": {}}, budgets=[0.1, 0.2]))
    table = report.main_table()
    assert (table.columns, table.rows) == (["100%"], [("full", ["**2.72**"])])
    assert next(t.columns for t in report.tables()) == ["100%"]
    with report.write()[1].open(newline="") as file:
        groups = [(x["group"], x["policy"]) for x in csv.DictReader(file)]
    assert len(groups) == len(set(groups))


def test_full_cache_in_few_bits_stands_at_100_percent_of_tokens(tmp_path):
    """At a budget of one token, 1, which equals 1.0, it is not compared either."""
    rows = [
        *(row("full:kv_dtype=int4", 1.0, i, score=0.9) for i in range(2)),
        *(
            row(policy, 1, i, score=s)
            for policy, s in (("h2o", 0.5), ("tova", 0.4))
            for i in (0, 1)
        ),
    ]
    policies = {"full:kv_dtype=int4": {"kv_dtype": "int4"}, "h2o": {}, "tova": {}}
    table = Report(write_run(tmp_path, rows, policies=policies, budgets=[1])).main_table()
    assert table.columns == ["1 tokens", "100%"]
    assert table.rows == [
        ("full:kv_dtype=int4", ["–", "**90.0**"]),
        ("h2o", ["**50.0**", "–"]),
        ("tova", ["40.0", "–"]),
    ]


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(commands, list(map(str, arguments)))


@cases(
    "arguments, message",
    [
        (["eval", "descriptoin"], "Did you mean 'description'?"),
        (["eval", "description", "--policies", "snapkx"], "unknown policy 'snapkx'"),
        (["eval", "description", "--budgets", "0.1,2.0"], "budget=2.0"),
        (["eval", "description", "--metrics", "bleu"], "metric 'bleu'"),
        (["eval", "description", "--option", "window"], "expected name=value"),
        (["eval", "description", "--option", "windw=3"], "read by none of the policies"),
        (["eval", "mmvet", "--data", "missing.json"], "missing.json"),
        (["check", "--within", "0"], "within=0.0"),
        (["check", "--policies", "snapkv", "--option", "window"], "expected name=value"),
        (["check", "--max-new-tokens", "1"], "max_new_tokens=1"),
        (["check", "--prompts", "empty.txt"], "empty.txt: has no prompts"),
        (["report", "empty.txt"], "run empty.txt: empty.txt is a file, not a folder"),
        (["check", "--out", "empty.txt"], "--out empty.txt: empty.txt is a file, not a folder"),
        (["check", "--budgets", "0.1,0.1"], "named twice"),
        (["check", "--policies", "snapkx"], "unknown policy 'snapkx'"),
        (["check", "--prompts", "missing.txt"], "missing.txt: no such file"),
        (["calibrate", "--suite", "prompts", "--data", "missing.txt"], "no such file"),
        (["calibrate", "--length", "512"], "length=512: suite 'description' has lengths of its"),
        (["calibrate", "--budget", "3.0"], "budget=3.0"),
        (["calibrate", "--policy", "condense"], "nothing to calibrate; use prefixkv, xkv"),
        (["calibrate", "--out", "missing/p.json"], "no such folder"),
        (["calibrate", "--out", "."], "is a folder"),
        (["eval", "description", "--out", f"{__file__}/x"], "is a file, not a folder"),
        (["plot", "--out", "x.xyz"], "x.xyz: expected a name that ends in .png"),
        (["plot", "--budget", "0.1,0.2"], "one budget"),
        (["report", "missing"], "no run here"),
    ],
    *(["eval", "descriptoin"], ["check", "--within", "0"], ["calibrate", "--budget", "3.0"]),
    *(["plot", "--out", "x.xyz"], ["report", "missing"]),
)
def test_wrong_arguments_raise_before_model_loads(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    monkeypatch.setattr("mmkv.chat.load", lambda *_, **__: pytest.fail("loaded"))
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty.txt"]


@pytest.mark.slow
def test_commands_end_to_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmkv.chat.load", lambda *_: picture_chat())
    asked = [
        "--policies",
        "snapkv:window=8,prefixkv",
        "--budgets",
        "0.2",
        "--limit",
        "2",
        "--out",
        "a",
    ]
    done = call("eval", "description", *asked, "--metrics", "ppl", "--device", "cpu")
    assert done.exit_code == 0, done.output
    rows = read_rows(tmp_path / "a" / "rows.jsonl")
    options = [("snapkv:window=8", {"window": 8}), ("prefixkv", {})]
    assert [(r["policy"], r["options"]) for r in rows[::2]] == options
    done = call("report", "a")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a" / "frontier.png").read_bytes()[:8] == PNG
    assert "% of the full cache's bytes" in done.output.replace("\n", " ")
    done = call("plot", "--policies", "xkv:retention=0.9,h2o", "--out", "layers.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "layers.png").read_bytes()[:8] == PNG
    done = call("plot", "--policies", "h2o", "--out", "x.jpg")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "x.jpg").read_bytes()[:2] == b"\xff\xd8"


@pytest.mark.slow
def test_nothing_measured_is_exit_code_1(tmp_path, monkeypatch):
    """Not even where the full cache, which others are compared with, was measured."""
    monkeypatch.chdir(tmp_path)
    real = measure._measure

    def fail(variant, budget, batch):
        if variant.policy.name == "snapkv":
            raise ValueError("no room")
        return real(variant, budget, batch)

    monkeypatch.setattr(measure, "_measure", fail)
    save_model(tmp_path / "tiny")
    asked = ("eval", "needle", "--model", "tiny", "--limit", 1, "--metrics", "ppl")
    asked += ("--budgets", "0.3")
    done = call(*asked, "--policies", "full,snapkv", "--out", "a")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "mmkv: nothing could be measured: snapkv at 30%: 1 of 1 samples could not be measured "
        "(no room)."
    )
    assert call(*asked, "--policies", "local,snapkv", "--out", "b").exit_code == 0


def test_a_run_without_figures_is_reported_without_a_drawing(tmp_path):
    """Of several runs there is nothing to compare: that is wrong use."""
    rows = [row(policy, 0.1, 0, kept_fraction=0.1) for policy in ("h2o", "prefixkv")]
    folder = write_run(tmp_path / "run", rows)
    done = call("report", folder)
    assert done.exit_code == 0
    assert done.stderr.startswith("mmkv: nothing to draw: ")
    assert {x.name for x in folder.iterdir()} >= {"report.md", "report.csv"}
    assert not (folder / "frontier.png").exists()
    done = call("report", tmp_path)
    assert done.exit_code == 2
    assert "no metric was measured" in done.stderr


def test_a_report_prints_to_a_terminal_without_its_characters(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", [{**x, "held_bytes": 1, "full_bytes": 2} for x in ROWS])
    screen = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder)])
    assert not end.value.code
    screen.flush()
    assert "?" in screen.buffer.getvalue().decode()  # for the dash of an empty cell


def test_ctrl_c_prints_how_to_resume(tmp_path, monkeypatch):
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mmkv.chat.load", lambda *_: picture_chat())
    monkeypatch.setattr(runner, "measure", stop)
    done = call("eval", "description", "--limit", "1", "--out", str(tmp_path))
    assert done.exit_code == 130
    assert "the same command resumes the run" in done.stderr
