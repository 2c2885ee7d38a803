"""From raw times to medians, ratios, break-even lengths, a table and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.terminal import Table

_FORMAT, _VERSION = "mmkv-bench", 1
_SHORT = 16  # a note this long fits into the table
# Columns that compare with the unwrapped row, and what `Result.summary` calls them.
_RATIOS = {
    "x prefill": "prefill",
    "x tokens/s": "tokens_per_s",
    "x cache": "cache_bytes",
    "x peak": "peak_bytes",
}
_COLUMNS = (
    *("batch", "prefill ms", "ms/token", "ideal ms", "tokens/s", "run tokens/s"),
    *("cache MB", "peak MB", *_RATIOS, "pays from"),
)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values, by linear interpolation."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        digits = 1 if self.median >= 100 else 2
        if self.n == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """How many times the base: the median over rounds, which cancels a machine's slow drift.

    Rows with another number of rounds are compared by their medians.
    """
    if len(values) == len(base):
        return statistics.median(a / b for a, b in zip(values, base, strict=True))
    return statistics.median(values) / statistics.median(base)


def break_even(
    prefill: float, step: float, base_prefill: float, base_step: float
) -> int | float | None:
    """From how many decode steps on a row is faster than the base in all; None for never.

    All are seconds: of the prompt, and of a decode step.
    """
    cost, gain = prefill - base_prefill, base_step - step
    if cost <= 0 <= gain:
        return 0
    if gain <= 0:
        return None
    return math.ceil(cost / gain)


@dataclass
class RowResult:
    """What was measured of one row; times in seconds, sizes in bytes.

    Attributes:
        kind: "unwrapped", "policy" or "kvpress".
        policy: its name, or the attention implementation, or the press.
        budget: what is kept; None where nothing is evicted.
        options: what differs from the policy's defaults.
        prefill_s: seconds to the first token, one a round.
        step_s: seconds a decode step, mean of a round's steps.
        prefill_cache_bytes: held after the prompt.
        cache_bytes: held at the end.
        prefill_peak_bytes: most allocated above the weights until the first token.
        peak_bytes: the same over the run.
        ideal_step_s: what reading the weights and the cache once takes at copy speed.
        note: why there are no numbers, or what a reader should know.
    """

    label: str
    kind: str
    policy: str
    budget: float | int | None
    options: dict[str, Any]
    batch: int
    new: int
    prefill_s: list[float] = field(default_factory=list["float"])
    step_s: list[float] = field(default_factory=list["float"])
    prefill_cache_bytes: int | None = None
    cache_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    peak_bytes: int | None = None
    ideal_step_s: float | None = None
    note: str = ""

    @property
    def tokens_per_s(self) -> list[float]:
        """Generated tokens a second while decoding, one a round."""
        return [self.batch / s for s in self.step_s]

    @property
    def run_tokens_per_s(self) -> list[float]:
        """Generated tokens a second of the whole run, the prompt's time included."""
        pairs = zip(self.prefill_s, self.step_s, strict=True)
        return [self.batch * self.new / (p + s * (self.new - 1)) for p, s in pairs]


@dataclass
class Result:
    """One setting: a model, a prompt, a batch, and its rows.

    Attributes:
        name: the preset's setting, or "bench".
        about: versions, threads, dtype, date, how peaks were taken.
        weight_bytes: all weights.
        step_weight_bytes: what a decode step reads of them.
        plain_peak_bytes: most allocated by a forward without any cache.
        bare_step_s: a token's seconds without any cache, which is the least a decode step takes.
        bandwidth: bytes a second of a copy, read and written, where it was measured.
        growth: by policy, how much more a decode step allocates and writes where the cache is
            longer: {"nbytes", "slots", "ops"}; see `mmkv.eval.speed.runner.step_growth`.
    """

    name: str
    model: str
    prompt: int
    new: int
    rounds: int
    device: str
    about: dict[str, Any]
    weight_bytes: int
    step_weight_bytes: int
    layers: int
    plain_peak_bytes: int | None = None
    bare_step_s: float | None = None
    bandwidth: float | None = None
    rows: list[RowResult] = field(default_factory=list["RowResult"])
    growth: dict[str, dict[str, float]] = field(default_factory=dict[str, "dict[str, float]"])
    notes: list[str] = field(default_factory=list["str"])

    @property
    def base(self) -> RowResult | None:
        """The row that ratios compare with: the first unwrapped one that was measured."""
        return next((r for r in self.rows if r.kind == "unwrapped" and r.step_s), None)

    def row(self, label: str) -> RowResult | None:
        """A measured row by its label, None where there is none."""
        return next((r for r in self.rows if r.label == label and r.step_s), None)

    def summary(self, row: RowResult) -> dict[str, Any]:
        """A row's medians, quartiles and ratios to the unwrapped row; {} if it was not measured."""
        if not row.step_s:
            return {}
        values = {
            "prefill_ms": [1e3 * s for s in row.prefill_s],
            "step_ms": [1e3 * s for s in row.step_s],
            "tokens_per_s": row.tokens_per_s,
            "run_tokens_per_s": row.run_tokens_per_s,
        }
        found: dict[str, Any] = {k: dataclasses.asdict(Spread.of(x)) for k, x in values.items()}
        base = self.base
        if base is None or base is row:
            return found
        found["to_unwrapped"] = {
            "prefill": ratio(row.prefill_s, base.prefill_s),
            "tokens_per_s": ratio(row.tokens_per_s, base.tokens_per_s),
            "run_tokens_per_s": ratio(row.run_tokens_per_s, base.run_tokens_per_s),
            "cache_bytes": _over(row.cache_bytes, base.cache_bytes),
            "peak_bytes": _over(row.peak_bytes, base.peak_bytes),
        }
        if row.batch == base.batch:
            times = (row.prefill_s, row.step_s, base.prefill_s, base.step_s)
            found["pays_from_steps"] = break_even(*map(statistics.median, times))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data: raw values, and each row's summary."""
        data = dataclasses.asdict(self)
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain["summary"] = self.summary(row)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Back from `to_dict`."""
        rows = [{k: v for k, v in row.items() if k != "summary"} for row in data["rows"]]
        plain: dict[str, Any] = {**data, "rows": [RowResult(**row) for row in rows]}
        return cls(**plain)

    @property
    def measured(self) -> bool:
        """Whether a row that was asked for has numbers: a policy, where there is one."""
        asked = [r for r in self.rows if r.kind == "policy"] or self.rows
        return any(r.step_s for r in asked)

    @property
    def missing(self) -> str:
        """Why a row has no numbers: the first such reason; "" if all have."""
        found = sorted((r for r in self.rows if r.note), key=lambda r: r.kind != "policy")
        return f"{found[0].label}: {found[0].note}" if found else ""

    @property
    def conditions(self) -> str:
        """What a reader of the table must know."""
        about = self.about
        texts = [
            f"{self.device}, {about.get('dtype')}, median (quartiles) of {self.rounds} interleaved "
            "rounds",
            f"peak: {about.get('peak')}",
            "ratios to the unwrapped model",
            "pays from: decoded tokens after which the whole run is faster",
        ]
        if self.bare_step_s is not None:
            texts.append(f"a token takes {1e3 * self.bare_step_s:.3g} ms without any cache")
        if self.bandwidth is not None:
            speed = f"{self.bandwidth / 1e9:.1f} GB/s"
            texts.append(f"ideal: weights and cache read once at {speed}")
        return "; ".join([*texts, *self.notes])

    def table(self) -> Table:
        """A table for the terminal."""
        batches = sorted({r.batch for r in self.rows})
        batch = f"{batches[0]}" if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
        hidden = {"batch"} if len(batches) == 1 else set[str]()
        if self.bandwidth is None:
            hidden.add("ideal ms")
        columns = [name for name in _COLUMNS if name not in hidden]
        rows: list[tuple[str, list[str]]] = []
        for row in self.rows:
            cells = self._cells(row)
            rows.append((row.label, [cells.get(name, "") for name in columns]))
        title = f"{self.name}: {self.model}, batch {batch}, {self.prompt} + {self.new} tokens"
        return Table("", columns, rows, title)

    def _cells(self, row: RowResult) -> dict[str, str]:
        """By column; what is not there is empty."""
        found = self.summary(row)
        if not found:
            why = row.note if len(row.note) <= _SHORT else "see below"
            return {"batch": str(row.batch), "prefill ms": why}
        cells = {
            "batch": str(row.batch),
            "prefill ms": str(Spread(**found["prefill_ms"])),
            "ms/token": str(Spread(**found["step_ms"])),
            "ideal ms": "" if row.ideal_step_s is None else f"{1e3 * row.ideal_step_s:.2f}",
            "tokens/s": f"{found['tokens_per_s']['median']:.1f}",
            "run tokens/s": f"{found['run_tokens_per_s']['median']:.1f}",
            "cache MB": _megabytes(row.cache_bytes),
            "peak MB": _megabytes(row.peak_bytes),
        }
        ratios = found.get("to_unwrapped", {})
        for column, name in _RATIOS.items():
            value = ratios.get(name)
            cells[column] = "" if value is None else f"{value:.2f}"
        pays = found.get("pays_from_steps", "")
        return cells | {"pays from": "never" if pays is None else str(pays)}


def save(path: Path, results: Sequence[Result], verdicts: Sequence[dict[str, Any]] = ()) -> None:
    """Write results and verdicts as JSON."""
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "settings": [r.to_dict() for r in results],
        "checks": list(verdicts),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def load(path: Path) -> list[Result]:
    """Read what `save` wrote.

    Raises:
        ValueError: not such a file.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{path}: expected an object with format={_FORMAT!r}")
    if data.get("version") != _VERSION:
        raise ValueError(f"{path}: version {data.get('version')!r}, expected {_VERSION}")
    return [Result.from_dict(x) for x in data["settings"]]


def _over(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.1f}"
