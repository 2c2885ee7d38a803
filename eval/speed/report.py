"""From raw times to medians, paired ratios, break-even lengths, tables and JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmkv.eval.speed.models import device_in_words
from mmkv.eval.speed.rows import Row, Setting
from mmkv.terminal import Table

# Columns that compare with the unwrapped row, and what `Result.summary` calls them.
_RATIOS = {
    "x prefill": "prefill",
    "x tokens/s": "tokens_per_s",
    "x cache": "cache_bytes",
    "x peak": "peak_bytes",
}


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """How many times the base, pair by pair, which cancels a machine's drift.

    The median, and the exact interval between two of the n ratios that holds the true one with at
    least 95 %, whatever their distribution; fewer than six have none.
    """
    found = sorted(a / b for a, b in zip(values, base, strict=True))
    n = len(found)
    below = itertools.accumulate(math.comb(n, i) for i in range(n + 1))
    k = next(i for i, count in enumerate(below) if 40 * count >= 2**n)
    low, high = (found[k - 1], found[n - k]) if k else (None, None)
    return {"median": median(found), "low": low, "high": high, "n": n}


def break_even(cost: float, gain: float) -> int | None:
    """Decode steps that win back a prefill's seconds more by seconds less each; None: never."""
    if cost <= 0 <= gain:
        return 0
    return math.ceil(cost / gain) if gain > 0 else None


@dataclass
class Result:
    """One setting's rows; about the model and the machine; and what could not be done."""

    setting: Setting
    rows: list[Row]
    about: dict[str, Any]
    notes: list[str]

    def summary(self, row: Row) -> dict[str, Any]:
        """A row's medians, and its ratios to the unwrapped row; {} if it was not measured."""
        if not row.step_s:
            return {}
        prefill, step = median(row.prefill_s), median(row.step_s)
        found: dict[str, Any] = {"prefill_ms": 1e3 * prefill, "step_ms": 1e3 * step}
        found["tokens_per_s"] = self.setting.batch / step
        base = next((r for r in self.rows if r.kind == "unwrapped" and r.step_s), row)
        if base is row:
            return found
        ratios: dict[str, Any] = {"prefill": ratio(row.prefill_s, base.prefill_s)}
        ratios["tokens_per_s"] = ratio(base.step_s, row.step_s)
        for name in ("cache_bytes", "peak_bytes"):
            whole = getattr(base, name)
            ratios[name] = None if whole is None else getattr(row, name) / whole
        found["to_unwrapped"] = ratios
        # By ratios as well: a machine that drifts moves each row's median by itself.
        cost = median(base.prefill_s) * (ratios["prefill"]["median"] - 1)
        gain = median(base.step_s) * (1 - 1 / ratios["tokens_per_s"]["median"])
        found["pays_from_steps"] = break_even(cost, gain)
        return found

    @property
    def missing(self) -> str:
        """Why no policy that evicts, where there is one, has numbers; "" if one has."""
        asked = [r for r in self.rows if r.kind == "policy"]
        asked = [r for r in asked if r.policy != "full"] or asked
        return "" if any(r.step_s for r in asked) else f"{asked[0].label}: {asked[0].note}"

    @property
    def table(self) -> Table:
        """The rows' figures, and what a reader must know of them."""
        cells = {row.label: self._cells(row) for row in self.rows}
        columns = list(dict.fromkeys(name for found in cells.values() for name in found))
        rows = [(label, [x.get(name, "") for name in columns]) for label, x in cells.items()]
        x = self.setting
        title = f"{x.name}: {x.model}, {x.batch} x ({x.prompt:,} + {x.new:,}) tokens"
        return Table("", columns, rows, title, self._notes())

    def _notes(self) -> list[str]:
        """What a reader of the table must know."""
        rounds = max(len(row.prefill_s) for row in self.rows)
        steps = max(len(row.step_s) for row in self.rows)
        texts = [
            f"{self.about['device']}, {self.about['dtype']}",
            f"each row {rounds} times its prompt and {steps} decode steps, in random order",
            "medians; ratios to the unwrapped model, pair by pair, with 95 % intervals from six "
            "pairs on: a machine that drifts moves medians, ratios less",
            "full is wrapped and evicts nothing: what it gains or loses is not compression's",
            "pays from: decoded tokens after which the whole run is faster",
            *self.notes,
        ]
        return ["; ".join(texts), *(f"{row.label}: {row.note}" for row in self.rows if row.note)]

    def _cells(self, row: Row) -> dict[str, str]:
        """By column, in the order of columns."""
        found = self.summary(row)
        if not found:
            return {"prefill ms": "see below"}
        sizes = {"cache MB": row.cache_bytes, "peak MB": row.peak_bytes}
        cells = {
            "prefill ms": f"{found['prefill_ms']:,.0f}",
            "ms/token": f"{found['step_ms']:.2f}",
            "tokens/s": f"{found['tokens_per_s']:.1f}",
            **{name: f"{size / 1e6:,.1f}" for name, size in sizes.items() if size is not None},
        }
        if "to_unwrapped" not in found:
            return cells
        for column, name in _RATIOS.items():
            value = found["to_unwrapped"][name]
            if isinstance(value, dict):
                low, high = value["low"], value["high"]
                between = "" if low is None else f" ({low:.3g}-{high:.3g})"
                cells[column] = f"{value['median']:.3g}{between}"
            elif value is not None:
                cells[column] = f"{value:.2f}"
        pays = found["pays_from_steps"]
        return cells | {"pays from": "never" if pays is None else str(pays)}


def about(model: Any) -> dict[str, Any]:
    """The model, the machine and the libraries that figures are of."""
    return {
        "device": device_in_words(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("mmkv", "torch", "transformers")},
    }


def save(path: Path, results: Sequence[Result]) -> None:
    """Write results as JSON, and their tables beside it as Markdown."""
    settings = [
        asdict(x.setting)
        | {"about": x.about, "notes": x.notes}
        | {"rows": [asdict(row) | {"summary": x.summary(row)} for row in x.rows]}
        for x in results
    ]
    data = {"format": "mmkv-bench", "version": 3, "settings": settings}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tables = "\n".join(result.table.markdown for result in results)
    path.with_suffix(".md").write_text(tables, encoding="utf-8")
