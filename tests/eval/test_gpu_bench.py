"""`make gpu`, tried in toy sizes on a CPU, and the tables of its committed rows."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mmkv.attach import graph
from mmkv.eval.speed import gpu, gpu_parts

ROOT = Path(__file__).parents[2]


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(gpu.command)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


@pytest.fixture
def log():
    """What a part listens to is left as it was."""
    before, level = list(graph.logger.handlers), graph.logger.level
    yield
    graph.logger.handlers[:] = before
    graph.logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.usefixtures("log")
def test_tiny_parts_write_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_parts.gc, "collect", lambda: 0)  # much, in a process full of tests
    bench = gpu_parts.Bench(tmp_path, tiny=True, seconds=400)
    gpu_parts.decode(bench)
    gpu_parts.prefill(bench)
    rows = gpu.read(tmp_path / "gpu.jsonl")
    slowest = [row for row in rows if row["part"] == "operations"]
    assert len(slowest) == 10
    assert all(row["row"] == "condense" and row["calls"] for row in slowest)
    times = [row["host_ms"] for row in slowest]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    measured = {row["row"]: row for row in rows if row["part"] == "decode"}
    assert not [row for row in measured.values() if "error" in row]
    full, small = measured["full"], measured["condense 0.2"]
    assert small["cache_mb"] < full["cache_mb"]
    assert all(row["ms"] > 0 for row in measured.values())


@pytest.mark.slow
def test_failing_part_is_passed_over(tmp_path, monkeypatch):
    """Each part is a process; one that does not exist fails alone."""
    monkeypatch.setitem(gpu.PARTS, "absent", 60)
    monkeypatch.setitem(gpu.PARTS, "card", 200)
    out = run("--out", str(tmp_path), "--tiny", "--only", "absent,card", "--minutes", "9")
    assert out.exit_code == 0
    rows = gpu.read(tmp_path / "gpu.jsonl")
    ends = {row["of"]: row["rc"] for row in rows if row["part"] == "driver"}
    assert ends == {"absent": 1, "card": 0}
    (card,) = (row for row in rows if row["part"] == "card")
    assert card["torch"] == torch.__version__
    assert (tmp_path / "report.md").read_text() == gpu.tables(rows)


def test_parts_without_time_are_named_and_not_run(tmp_path):
    run("--out", str(tmp_path), "--tiny", "--only", "card,decode", "--minutes", "0.05")
    rows = gpu.read(tmp_path / "gpu.jsonl")
    assert [(row["part"], row["note"]) for row in rows] == [
        ("card", "no time was left"),
        ("decode", "no time was left"),
    ]


def test_tables_show_rows_and_errors():
    rows = [
        {"part": "prefill", "N": 8, "row": "full", "ms": 1.5, "launches": 3},
        {"part": "prefill", "N": 8, "row": "snapkv", "error": "out of memory"},
        {"part": "driver", "of": "prefill", "rc": 0},
    ]
    lines = gpu.tables(rows).splitlines()
    assert "| 8 | full | 1.5 | 3 |" in lines
    assert "| 8 | snapkv |  | out of memory |" in lines
    assert len(lines) == 6


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "gpu").glob("*.jsonl")), ids=str)
def test_page_shows_the_committed_rows(path):
    """Each file's tables stand in docs/gpu.md between comments that name the file."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    found = re.search(rf"<!-- {path.name} -->\n(.*?)<!-- /{path.name} -->", page, re.DOTALL)
    assert found, f"docs/gpu.md has no place for {path.name}"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[1].strip() == gpu.tables(rows).strip()
