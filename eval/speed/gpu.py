"""Measure on one GPU, in minutes: kernels, tests, decode steps and prefill. `make gpu` runs it.

    python -m mmkv.eval.speed.gpu --out DIR --minutes 7.5
    python -m mmkv.eval.speed.gpu --tables docs/gpu/h100.jsonl    the tables of docs/gpu.md

The most important parts run first, each in a process with a time limit, so that one that fails or
hangs does not affect the others. Each row is written to DIR/gpu.jsonl as soon as it is measured.
Only torch, transformers, accelerate and mmkv are needed, and pytest for the tests. `--tiny` tries
the command itself, with toy sizes on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mmkv.eval.speed import gpu_parts
from mmkv.eval.speed.gpu_parts import Bench, Row

# Seconds that each part may take, in the order of running.
PARTS = {"card": 20, "decode": 230, "tests": 100, "kernels": 60, "prefill": 60}
COLUMNS = {  # of the tables in docs/gpu.md
    "decode": ("B", "N", "row", "prefill_s", "prefill_peak_gb", "ms", "tokens_s", "cache_mb"),
    "prefill": ("N", "row", "ms", "launches"),
    "operations": ("N", "row", "operation", "calls", "device_ms", "host_ms"),
    "kernels": ("R", "G", "U", "D", "way", "us", "gb_s", "first_ms"),
}


def tables(rows: list[Row]) -> str:
    """Return the Markdown tables of rows, one for each part of `COLUMNS`; rows that failed name
    their error in the last column."""
    text: list[str] = []
    for part, columns in COLUMNS.items():
        mine = [row for row in rows if row["part"] == part and "note" not in row]
        if not mine:
            continue
        text += [f"### {part}", "", f"| {' | '.join(columns)} |"]
        text += ["|" + " --- |" * len(columns)]
        for row in mine:
            cells = [str(row.get(x, "")) for x in columns]
            cells[-1] = row.get("error", cells[-1])
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def read(path: Path) -> list[Row]:
    """Return the rows of a gpu.jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(
    out: Annotated[Path, typer.Option(help="Folder for gpu.jsonl and report.md.")] = Path(
        "out/gpu"
    ),
    minutes: Annotated[float, typer.Option(help="For all parts together.")] = 7.5,
    only: Annotated[str, typer.Option(help="Parts, commas between.")] = ",".join(PARTS),
    tiny: Annotated[bool, typer.Option(help="Toy sizes on a CPU.")] = False,
    tables_of: Annotated[
        Path | None, typer.Option("--tables", help="Print the tables of this gpu.jsonl instead.")
    ] = None,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
    seconds: Annotated[float, typer.Option(hidden=True)] = 1e9,
) -> None:
    """Measure on one GPU; every finished row is in DIR/gpu.jsonl, tables are in DIR/report.md."""
    if tables_of is not None:
        typer.echo(tables(read(tables_of)), nl=False)
        return
    out.mkdir(parents=True, exist_ok=True)
    if part is not None:
        getattr(gpu_parts, part)(Bench(out, tiny, seconds))
        return
    end, driver = time.monotonic() + 60 * minutes, Bench(out, tiny, 0)
    for name in only.split(","):
        limit = min(end - time.monotonic() - 2, PARTS[name])
        if limit < 10:
            driver.put(name, note="no time was left")
            continue
        start = time.monotonic()
        child = [sys.executable, "-m", "mmkv.eval.speed.gpu", "--out", str(out), "--part", name]
        child += ["--seconds", str(limit - 8), *(["--tiny"] if tiny else [])]
        with (out / "log.txt").open("a") as log:
            try:
                rc: int | str = subprocess.run(child, stderr=log, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                rc = "timeout"
        driver.put("driver", of=name, rc=rc, s=round(time.monotonic() - start, 1))
        (out / "report.md").write_text(tables(read(out / "gpu.jsonl")), encoding="utf-8")
    typer.echo(tables(read(out / "gpu.jsonl")), nl=False)


if __name__ == "__main__":
    typer.run(command)
