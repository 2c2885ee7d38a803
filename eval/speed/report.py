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

from mmkv.terminal import Table

_FORMAT, _VERSION = "mmkv-bench", 1
_SHORT = 16  # a note this long fits into the table


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; one value is its own quartiles."""
        ordered = sorted(values)

        def at(share: float) -> float:
            place = share * (len(ordered) - 1)
            i = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
            rest = place - i
            return ordered[i] if rest == 0 else ordered[i] * (1 - rest) + ordered[i + 1] * rest

        return cls(at(0.5), at(0.25), at(0.75), len(ordered))


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

    Args:
        prefill: the row's seconds for the prompt.
        step: its seconds a decode step.
        base_prefill: the base's.
        base_step: the base's.
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
        label: what the table calls it.
        kind: "unwrapped", "policy" or "kvpress".
        policy: its name, or the attention implementation, or the press.
        budget: what is kept; None where nothing is evicted.
        options: what differs from the policy's defaults.
        batch: sequences at once.
        new: tokens generated for each.
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
        model: its name.
        prompt: tokens of the prompt.
        new: tokens generated.
        rounds: turns of each row.
        device: in words.
        about: versions, threads, dtype, date, how peaks were taken.
        weight_bytes: all weights.
        step_weight_bytes: what a decode step reads of them.
        layers: layers of the decoder.
        plain_peak_bytes: most allocated by a forward without any cache.
        bare_step_s: a token's seconds without any cache, which is the least a decode step takes.
        bandwidth: bytes a second of a copy, read and written, where it was measured.
        rows: in the order of their turns.
        growth: by policy, how much more a decode step allocates and writes where the cache is
            longer: {"nbytes", "slots", "ops"}; see `mmkv.eval.speed.runner.step_growth`.
        notes: what a reader should know.
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
        """A row's medians, quartiles and ratios to the unwrapped row."""
        if not row.step_s:
            return {}
        found: dict[str, Any] = {
            "prefill_ms": _spread([1e3 * s for s in row.prefill_s]),
            "step_ms": _spread([1e3 * s for s in row.step_s]),
            "tokens_per_s": _spread(row.tokens_per_s),
            "run_tokens_per_s": _spread(row.run_tokens_per_s),
        }
        base = self.base
        if base is None or base is row:
            return found
        ratios: dict[str, float | None] = {
            "prefill": ratio(row.prefill_s, base.prefill_s),
            "tokens_per_s": ratio(row.tokens_per_s, base.tokens_per_s),
            "run_tokens_per_s": ratio(row.run_tokens_per_s, base.run_tokens_per_s),
            "cache_bytes": _over(row.cache_bytes, base.cache_bytes),
            "peak_bytes": _over(row.peak_bytes, base.peak_bytes),
        }
        found["to_unwrapped"] = ratios
        if row.batch == base.batch:
            medians = [
                statistics.median(x)
                for x in (row.prefill_s, row.step_s, base.prefill_s, base.step_s)
            ]
            found["pays_from_steps"] = break_even(*medians)
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
        plain: dict[str, Any] = dict(data)
        plain["rows"] = [
            RowResult(**{k: v for k, v in row.items() if k != "summary"}) for row in data["rows"]
        ]
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
        return "; ".join([_conditions(self), *self.notes])

    def table(self) -> Table:
        """A table for the terminal."""
        batches = sorted({r.batch for r in self.rows})
        batch = f"{batches[0]}" if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
        columns = ["prefill ms", "ms/token", "tokens/s", "run tokens/s", "cache MB", "peak MB"]
        columns += ["x prefill", "x tokens/s", "x cache", "x peak", "pays from"]
        shown = len(batches) > 1
        if shown:
            columns.insert(0, "batch")
        if self.bandwidth is not None:
            columns.insert(2 + shown, "ideal ms")
        rows: list[tuple[str, list[str]]] = []
        for row in self.rows:
            cells = self._cells(row)
            if shown:
                cells.insert(0, str(row.batch))
            if self.bandwidth is not None:
                ideal = "" if row.ideal_step_s is None else f"{1e3 * row.ideal_step_s:.2f}"
                cells.insert(2 + shown, ideal)
            rows.append((row.label, cells))
        title = f"{self.name}: {self.model}, batch {batch}, {self.prompt} + {self.new} tokens"
        return Table("", columns, rows, title)

    def _cells(self, row: RowResult) -> list[str]:
        found = self.summary(row)
        if not found:
            return [row.note if len(row.note) <= _SHORT else "see below"]
        cells = [
            _interval(found["prefill_ms"]),
            _interval(found["step_ms"]),
            f"{found['tokens_per_s']['median']:.1f}",
            f"{found['run_tokens_per_s']['median']:.1f}",
            _mb(row.cache_bytes),
            _mb(row.peak_bytes),
        ]
        ratios = found.get("to_unwrapped")
        if ratios is None:
            return [*cells, "", "", "", "", ""]
        names = ("prefill", "tokens_per_s", "cache_bytes", "peak_bytes")
        cells += ["" if ratios[n] is None else f"{ratios[n]:.2f}" for n in names]
        pays = found.get("pays_from_steps", "")
        return [*cells, "never" if pays is None else str(pays)]


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


def _spread(values: Sequence[float]) -> dict[str, float]:
    return dataclasses.asdict(Spread.of(values))


def _over(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _interval(spread: dict[str, float]) -> str:
    digits = 1 if spread["median"] >= 100 else 2
    median, low, high = (f"{spread[k]:.{digits}f}" for k in ("median", "low", "high"))
    return median if spread["n"] == 1 else f"{median} ({low}-{high})"


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.1f}"


def _conditions(result: Result) -> str:
    about = result.about
    text = (
        f"{result.device}, {about.get('dtype')}, median (quartiles) of {result.rounds} interleaved "
        f"rounds; peak: {about.get('peak')}; ratios to the unwrapped model; pays from: decoded "
        "tokens after which the whole run is faster"
    )
    if result.bare_step_s is not None:
        text += f"; a token takes {1e3 * result.bare_step_s:.3g} ms without any cache"
    if result.bandwidth is not None:
        text += f"; ideal: weights and cache read once at {result.bandwidth / 1e9:.1f} GB/s"
    return text
