"""From raw times to medians, paired ratios, break-even lengths, a table and JSON."""

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

_FORMAT, _VERSION = "mmkv-bench", 2
_SHORT = 16  # a note this long fits into the table
# Columns that compare with the unwrapped row, and what `Result.summary` calls them.
_RATIOS = {
    "x prefill": "prefill",
    "x tokens/s": "tokens_per_s",
    "x cache": "cache_bytes",
    "x peak": "peak_bytes",
}
_COLUMNS = (
    *("batch", "prefill ms", "ms/token", "capture ms", "bound ms", "reached", "tokens/s"),
    *("cache MB", "peak MB", *_RATIOS, "pays from"),
)
_RESAMPLES = 2000
# Student's t at 97.5 %, by the number of values less one.
_STUDENT = {2: 4.303, 3: 3.182, 4: 2.776}


@dataclass(frozen=True)
class Estimate:
    """A median of n values, and an interval that holds the true one with 95 %.

    `low` and `high` are None where there are fewer than three values.
    """

    median: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """By bootstrap; of fewer than six values, too few to resample, Student's of logarithms."""
        x, n = np.asarray(values), len(values)
        median = float(np.median(x))
        if n < 3:
            return cls(median, None, None, n)
        if n - 1 in _STUDENT:
            logs = np.log(x)
            middle, half = logs.mean(), _STUDENT[n - 1] * logs.std(ddof=1) / math.sqrt(n)
            low, high = np.exp([middle - half, middle + half]).tolist()
        else:
            draws = np.random.default_rng(0).integers(n, size=(_RESAMPLES, n))
            low, high = np.percentile(np.median(x[draws], axis=1), (2.5, 97.5)).tolist()
        return cls(median, min(low, median), max(high, median), n)

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Of what is counted, not timed."""
        return cls(value, value, value, 1)

    def __str__(self) -> str:
        if self.low is None or self.high is None or self.low == self.high:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


def ratio(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """How many times the base, pair by pair, which cancels a machine's drift."""
    return Estimate.of([a / b for a, b in zip(values, base, strict=True)])


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
        kind: "unwrapped", "again", "policy" or "kvpress".
        policy: its name, or the attention implementation, or the press.
        budget: what is kept; None where nothing is evicted.
        options: what differs from the policy's defaults.
        prefill_s: seconds to the first token, one a round of prefills.
        step_s: seconds a decode step, mean of a block; the same blocks for all rows.
        start_s: seconds to the first token in the warm-up.
        warm_s: of the warm-up's decode steps, a GPU's capture among them.
        warm_steps: how many these were.
        prefill_cache_bytes: held after the prompt.
        cache_bytes: held at the end.
        prefill_peak_bytes: most allocated above the weights until the first token.
        peak_bytes: the same until the end of the warm-up.
        note: why there are no numbers, or what a reader should know.
    """

    label: str
    kind: str
    policy: str
    budget: float | int | None
    options: dict[str, Any]
    batch: int
    prefill_s: list[float] = field(default_factory=list["float"])
    step_s: list[float] = field(default_factory=list["float"])
    start_s: float | None = None
    warm_s: float = 0.0
    warm_steps: int = 0
    prefill_cache_bytes: int | None = None
    cache_bytes: int | None = None
    prefill_peak_bytes: int | None = None
    peak_bytes: int | None = None
    note: str = ""

    @property
    def tokens_per_s(self) -> list[float]:
        """Generated tokens a second while decoding, one a block."""
        return [self.batch / s for s in self.step_s]


@dataclass
class Result:
    """One setting: a model, a prompt, a batch, and its rows.

    Attributes:
        name: the preset's setting, or "bench".
        new: tokens that may be generated.
        steps: decode steps timed of each row.
        about: versions, threads, dtype, date, how peaks were taken.
        weight_bytes: all weights.
        step_weight_bytes: what a decode step reads of them.
        plain_peak_bytes: most allocated by a forward without any cache.
        bandwidth: bytes a second from and to memory, where it was measured.
        growth: by policy, how much more a decode step allocates and writes where the cache is
            longer: {"nbytes", "slots", "ops"}; see `mmkv.eval.speed.runner.step_growth`.
    """

    name: str
    model: str
    prompt: int
    new: int
    device: str
    about: dict[str, Any]
    weight_bytes: int
    step_weight_bytes: int
    layers: int
    steps: int = 0
    plain_peak_bytes: int | None = None
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
        """A row's medians, and its ratios to the unwrapped row; {} if it was not measured."""
        if not row.step_s:
            return {}
        step = statistics.median(row.step_s)
        found: dict[str, Any] = {
            "prefill_ms": 1e3 * statistics.median(row.prefill_s),
            "step_ms": 1e3 * step,
            "tokens_per_s": row.batch / step,
            "capture_ms": 1e3 * (row.warm_s - row.warm_steps * step),
        }
        if self.bandwidth is not None and row.cache_bytes is not None:
            bound = (self.step_weight_bytes + row.cache_bytes) / self.bandwidth
            found |= {"bound_ms": 1e3 * bound, "reached": bound / step}
        base = self.base
        if base is None or base is row:
            return found
        found["to_unwrapped"] = {
            "prefill": dataclasses.asdict(ratio(row.prefill_s, base.prefill_s)),
            "tokens_per_s": dataclasses.asdict(ratio(row.tokens_per_s, base.tokens_per_s)),
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
        warm = max((r.warm_steps for r in self.rows), default=0)
        first = self.prompt + warm + 1
        texts = [
            f"{self.device}, {self.about.get('dtype')}",
            f"{self.steps} steps of each row in random order, at lengths of {first:,} to "
            f"{first + max(0, self.steps - 1):,} tokens",
            f"peak: {self.about.get('peak')}",
            "medians; ratios to the unwrapped model, pair by pair, with 95 % intervals",
            "pays from: decoded tokens after which the whole run is faster",
        ]
        if any(r.kind == "kvpress" and r.step_s for r in self.rows):
            texts.append("kvpress's steps alternate with the others, in a process of its own")
        if self.bandwidth is not None:
            speed = f"{self.bandwidth / 1e9:.1f} GB/s"
            texts.append(f"bound: weights and cache moved once at {speed}")
        return "; ".join([*texts, *self.notes])

    def table(self) -> Table:
        """A table for the terminal."""
        batches = sorted({r.batch for r in self.rows if not r.note} or {0})
        batch = f"{batches[0]}" if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
        cells = [(row.label, self._cells(row)) for row in self.rows]
        shown = {name for _, found in cells for name in found}
        if len(batches) == 1:
            shown.discard("batch")
        columns = [name for name in _COLUMNS if name in shown]
        rows = [(label, [found.get(name, "") for name in columns]) for label, found in cells]
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
            "prefill ms": f"{found['prefill_ms']:,.0f}",
            "ms/token": f"{found['step_ms']:.2f}",
            "tokens/s": f"{found['tokens_per_s']:.1f}",
            "cache MB": _megabytes(row.cache_bytes),
            "peak MB": _megabytes(row.peak_bytes),
        }
        if "CUDA" in self.about.get("peak", ""):
            cells["capture ms"] = f"{found['capture_ms']:.1f}"
        if "bound_ms" in found:
            cells["bound ms"] = f"{found['bound_ms']:.2f}"
            cells["reached"] = f"{found['reached']:.0%}"
        ratios = found.get("to_unwrapped", {})
        for column, name in _RATIOS.items():
            value = ratios.get(name)
            if isinstance(value, dict):
                cells[column] = str(Estimate(**value))
            elif value is not None:
                cells[column] = f"{value:.2f}"
        if "pays_from_steps" in found:
            pays = found["pays_from_steps"]
            cells["pays from"] = "never" if pays is None else str(pays)
        return cells


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


def _over(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.1f}"
