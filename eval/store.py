"""A run's folder: `run.json`, its settings and environments, and `rows.jsonl`, a JSON line a row.

Rows are appended and flushed line by line, so a killed run keeps everything it finished; a last
line that was cut short is dropped and done again. In a run of several processes, process r appends
to `rows.<r>.jsonl`, and the files are merged at the end. The folder must be seen by all processes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mmkv.budgets import named
from mmkv.memory import Memory

Row = dict[str, Any]
Key = tuple[str, str, int]

# Names in rows: the full cache, metrics, and a policy's option that hides questions.
FULL, METRICS = "full", ("ppl", "divergence", "next", "rouge", "score")
QUESTION, HIDDEN = "question", "hidden"
QUESTIONS = ("visible", HIDDEN, "both")
_SETTINGS, _ROWS, _LOCK = "run.json", "rows.jsonl", ".lock"


class RunError(ValueError):
    """A run's folder cannot be used; the message names the file."""


def check_metrics(names: Sequence[str]) -> None:
    """Raise ValueError if a metric is unknown, or none is named."""
    if unknown := [name for name in names or [""] if name not in METRICS]:
        raise ValueError(f"metric {unknown[0]!r}: expected some of {', '.join(METRICS)}")


def key_of(row: Row) -> Key:
    """Return the policy, budget and sample number of a row."""
    return row["policy"], json.dumps(row["budget"]), row["index"]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of one file, [] if it does not exist, without a last line that was cut short.
    Raises RunError if another line is not a row."""
    if not path.exists():
        return []
    rows: list[Row] = []
    # Bytes after the last newline are an unfinished row of a killed run.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
            key_of(rows[-1])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RunError(f"{path}: line {number} is not a row of a run") from None
    return rows


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`. Raises RunError if the folder has no valid one."""
    path = folder / _SETTINGS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{folder}: no run here ({_SETTINGS} is missing)") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: {error}") from None
    if not isinstance(data, dict) or "settings" not in data or "made_by" not in data:
        raise RunError(f"{path}: 'settings' or 'made_by' is missing")
    return data


def read_run(folder: Path, figures: Iterable[str]) -> tuple[dict[str, Any], list[Row]]:
    """Return a run's settings and environments, and its rows, whose `figures` are numbers or null.
    Raises RunError if a field is missing or of another type: the files may be someone else's."""
    from pydantic import ConfigDict, Field, ValidationError, create_model

    def schema(**fields: Any) -> Any:
        """Return a model of fields by type, or by type and default; others are not read."""
        types: Any = {name: x if isinstance(x, tuple) else (x, ...) for name, x in fields.items()}
        config = ConfigDict(extra="allow", allow_inf_nan=False)
        return create_model("_Schema", __config__=config, **types)

    texts = dict.fromkeys(("model", "suite", "data", "dtype"), str)
    policies, budgets = dict[str, dict[str, Any]], list[int | float]
    notes = list[str], []
    settings = schema(**texts, n=int, policies=policies, budgets=budgets, notes=notes)
    made = schema(**dict.fromkeys(("id", "mmkv", "torch", "transformers", "device"), str))
    facts: Any = {"policy": str, "task": str, "index": int, "n": int, "budget": int | float}
    facts |= {
        "divergences": (list[float], []),
        "tags": list[str],
        "error": (str, ""),
        **{x: (float | None, Field(None, ge=0 if "bytes" in x else None)) for x in figures},
    }
    of_run = schema(settings=settings, made_by=(list[made], Field(min_length=1)))
    of_row = schema(**facts)
    run, rows = read_settings(folder), Store(folder).rows()
    parts = [("run.json", of_run, run)]
    parts += [(f"row {i}", of_row, row) for i, row in enumerate(rows, start=1)]
    for part, expected, data in parts:
        try:
            expected.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise RunError(f"{folder}: {part}: field {name!r}: {first['msg']}") from None
    known = {"policy": run["settings"]["policies"], "budget": [1, *run["settings"]["budgets"]]}
    for i, row in enumerate(rows, start=1):
        for name, values in known.items():
            if row[name] not in values:
                raise RunError(f"{folder}: row {i}: run.json has no {name} {row[name]!r}")
    return run, rows


class Store:
    """Reader and writer of a run's folder, which is created if it is missing.

    `rank` is this process's number in a run of several processes, else None.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int | None = None) -> None:
        self.folder, name = Path(folder), _ROWS if rank is None else f"rows.{rank}.jsonl"
        # This process appends only to the second file.
        self.rows_file, self.append_file = self.folder / _ROWS, self.folder / name

    def claim(
        self, settings: dict[str, Any], environment: dict[str, Any], *, main: bool = True
    ) -> None:
        """Start a run in the folder, or continue its run; the `main` process writes `run.json`.
        It has called `lock`, which creates the folder.
        Raises RunError if the run there has other settings."""
        run: dict[str, Any] = {"settings": settings, "made_by": []}
        if (self.folder / _SETTINGS).exists():
            run = read_settings(self.folder)
            stored, new = run["settings"], json.loads(json.dumps(settings))
            for name in {**stored, **new}:
                if stored.get(name) != new.get(name):
                    differs = f"{name}={stored.get(name)!r}, this one has {name}={new.get(name)!r}"
                    if name == "data_digest":
                        differs = f"other prompts or lengths of replies ({differs})"
                    raise RunError(
                        f"{self.folder} holds a run with {differs}: choose another --out for a "
                        "new run, or the same data and options to resume that one"
                    )
        made_by = {"id": digest([settings, environment]), **environment}
        if main and made_by not in run["made_by"]:
            run["made_by"].append(made_by)
            replace(self.folder / _SETTINGS, json.dumps(run, indent=2) + "\n")

    def lock(self) -> AbstractContextManager[Any]:
        """Keep other commands from writing to the folder. Raises RunError if one does already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return FileLock(self.folder / _LOCK).acquire(timeout=0)
        except Timeout:
            raise RunError(
                f"{self.folder}: another process is writing this run: wait until it has ended, "
                "or choose another --out"
            ) from None

    def rows(self) -> list[Row]:
        """Return all rows of all processes, each once, in the order of the files."""
        rows_by_key: dict[Key, Row] = {}
        for path in [self.rows_file, *sorted(self.folder.glob("rows.*.jsonl"))]:
            for row in read_rows(path):
                rows_by_key.setdefault(key_of(row), row)
        return list(rows_by_key.values())

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows to this process's file and flush them to disk."""
        with self.append_file.open("a", encoding="utf-8", buffering=1) as file:
            file.writelines(map(_line, rows))
            os.fsync(file.fileno())

    def merge(self, policies: Sequence[str], budgets: Sequence[float | int]) -> list[Row]:
        """Move all rows into `rows.jsonl`, in order of policy, budget and sample; return them.

        Call it in one process while no other writes, and before rows are appended: it drops a
        last line that was cut short.
        """
        budget_texts = list(map(json.dumps, budgets))

        def order(row: Row) -> tuple[int, int, int]:
            policy, budget, index = key_of(row)
            return policies.index(policy), budget_texts.index(budget), index

        rows, parts = sorted(self.rows(), key=order), list(self.folder.glob("rows.*.jsonl"))
        if parts or self.rows_file.exists():
            replace(self.rows_file, "".join(map(_line, rows)))
        for part in parts:
            part.unlink()
        return rows


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def percent(budget: float | int) -> str:
    """Return a budget as a percentage, of tokens or bytes, or a number of tokens, for display."""
    if isinstance(budget, Memory):
        return named(budget)
    return f"{100 * budget:g}%" if isinstance(budget, float) else f"{budget} tokens"


def digest(data: Any) -> str:
    """Return a hash of plain data in eight hexadecimal digits."""
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
