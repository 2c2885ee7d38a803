"""What takes turns: the unwrapped model, policies at budgets, their nearest presses; the figures.

`make_rows` lists a setting's rows, `mmkv.eval.speed.runner` times them, and `Result` makes medians,
paired ratios and tables of these times.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from mmkv.budgets import named
from mmkv.eval.speed.rival import nearest_press, press_label
from mmkv.eval.variants import parse_variants
from mmkv.registry import get_policy
from mmkv.terminal import Table

# The row that ratios compare with, and the same once more: a bench must not tell them apart.
UNWRAPPED, AGAIN = "unwrapped sdpa", "unwrapped sdpa again"
# Holds one token of the prompt, so that its step is nearly all that is not attention.
BOUND = "one token kept"
# The attention of what the unwrapped model is measured with, see `Setting.unwrapped`.
ATTENTION = {"eager": "eager", "static": "sdpa", "flash": "flash_attention_2"}


@dataclass(frozen=True)
class Setting:
    """One model, prompt and batch, and what is compared on them."""

    name: str
    model: str
    prompt: int  # tokens
    new: int  # tokens generated in each round
    batch: int  # sequences at once
    # "name" or "name:option=value:option=value", as for `mmkv eval`; and "graph=false"
    policies: tuple[str, ...]
    budgets: tuple[float | int, ...] = (0.2,)
    rounds: int = 6
    unwrapped: tuple[str, ...] = ()  # keys of `ATTENTION`


@dataclass
class Row:
    """What takes turns, and what was measured of it: seconds, and bytes."""

    label: str
    kind: str  # "unwrapped", "again", "bound", "policy" or "kvpress"
    policy: str  # its name, or what the unwrapped model has, or the press
    budget: float | int | None = None  # None: nothing is evicted
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    press: dict[str, Any] | None = None  # as kvpress's worker takes it
    prefill_s: list[float] = field(default_factory=list[float])  # to the first token
    step_s: list[float] = field(default_factory=list[float])  # the same steps for all rows
    warm_s: float | None = None  # these three are `models.Reply.start`'s of the first reply
    prefill_cache_bytes: int = 0
    peak_bytes: int | None = None
    cache_bytes: int | None = None  # held at the end of a reply
    note: str = ""  # why there are no numbers


def make_rows(setting: Setting, *, kvpress: bool) -> list[Row]:
    """A setting's rows. The full cache, wrapped, is always among them: what it gains or loses is
    not compression's; and a cache of one token, whose step bounds what compression can gain.

    Raises:
        ValueError: an unknown policy or option, or a value out of range.
    """
    rows = [
        Row(UNWRAPPED, "unwrapped", "sdpa"),
        Row(AGAIN, "again", "sdpa"),
        Row(BOUND, "bound", "local", 1),
    ]
    for name in setting.unwrapped:
        if name not in ATTENTION:
            raise ValueError(f"unwrapped {name!r}: expected {', '.join(ATTENTION)}")
        rows.append(Row(f"unwrapped {name}", "unwrapped", name))
    if len(setting.policies) > len(set(setting.policies)):
        raise ValueError(f"--policies {','.join(setting.policies)} names a policy twice")
    presses: dict[str, Row] = {}
    for text in dict.fromkeys(("full", *setting.policies)):
        replayed = text.replace(":graph=false", "")
        (variant,) = parse_variants([replayed])
        if variant.hidden or variant.evict_chunks:
            raise ValueError(f"policy {text!r}: the bench knows neither questions nor chunks")
        policy = get_policy(variant.name, **variant.options)
        options = variant.recorded | ({} if replayed == text else {"graph": False})
        if policy.keeps_all or policy.retention is not None:
            rows.append(Row(text, "policy", policy.name, options=options))
            continue
        for budget in setting.budgets:
            rows.append(Row(f"{text} {named(budget)}", "policy", policy.name, budget, options))
            if kvpress and (press := nearest_press(policy, budget, setting.prompt)):
                name = press_label(press)
                label = f"kvpress {name} {named(budget)}"
                presses[label] = Row(label, "kvpress", name, budget, press=press)
    return [*rows, *presses.values()]


_CI = ("full", "condense", "snapkv", "adakv", "prefixkv", "h2o", "xkv", "squeeze:base=local")
_PREFIXKV = ("full", "prefixkv", "prefixkv:graph=false", "condense")
_SQUEEZE, _SHARES = ("full", "squeeze", "local"), (0.2, 0.4, 0.6, 0.8)
_paper = partial(Setting, unwrapped=("static", "flash"))
PRESETS: dict[str, tuple[Setting, ...]] = {
    "ci": (Setting("ci", "llama-120m-random", 2048, 33, 1, _CI, rounds=20),),
    "prefixkv": tuple(
        _paper(f"prefixkv {batch} x ({n} + {new})", model, n, new, batch, _PREFIXKV, _SHARES)
        for model, batch, n, new in (
            ("llava-1.5-7b-random", 16, 1024, 512),
            ("llava-1.5-7b-random", 48, 624, 256),
            ("llava-1.5-13b-random", 8, 1024, 512),
        )
    ),
    "xkv": (_paper("xkv", "llama-8b-random", 8192, 128, 16, ("full", "xkv")),),
    "squeeze": tuple(
        _paper(f"squeeze batch {n}", "mistral-7b-random", 512, 1024, n, _SQUEEZE)
        for n in (1, 32, 64, 128, 224)
    ),
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
        base, bound = (
            next((r for r in self.rows if r.kind == kind and r.step_s), row)
            for kind in ("unwrapped", "bound")
        )
        found: dict[str, Any] = {
            "prefill_ms": 1e3 * prefill,
            "step_ms": 1e3 * step,
            "tokens_per_s": self.setting.batch / step,
            "of_bound": ratio(bound.step_s, row.step_s),
        }
        if base is row:
            return found
        slower, faster = ratio(row.prefill_s, base.prefill_s), ratio(base.step_s, row.step_s)
        ratios: dict[str, Any] = {"prefill": slower, "tokens_per_s": faster}
        for name in ("cache_bytes", "peak_bytes"):
            whole = getattr(base, name)
            ratios[name] = None if whole is None else getattr(row, name) / whole
        # By ratios as well: a machine that drifts moves each row's median by itself.
        cost = median(base.prefill_s) * (slower["median"] - 1)
        gain = median(base.step_s) * (1 - 1 / faster["median"])
        return found | {"to_unwrapped": ratios, "pays_from_steps": break_even(cost, gain)}

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
        rounds = max(len(row.prefill_s) for row in self.rows)
        steps = max(len(row.step_s) for row in self.rows)
        texts = [
            f"{self.about['device']}, {self.about['dtype']}",
            f"each row {rounds} times its prompt and {steps} decode steps, in random order",
            "medians; ratios to the unwrapped model, pair by pair, with 95 % intervals from six "
            "pairs on: a machine that drifts moves medians, ratios less",
            "full is wrapped and evicts nothing: what it gains or loses is not compression's",
            f"of bound: tokens/s beside those of {BOUND!r}, whose steps attend to next to nothing",
            "pays from: decoded tokens after which the whole run is faster",
            *self.notes,
        ]
        failed = [f"{row.label}: {row.note}" for row in self.rows if row.note]
        return Table("", columns, rows, title, ["; ".join(texts), *failed])

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
            "of bound": f"{found['of_bound']['median']:.2f}",
            **{name: f"{size / 1e6:,.1f}" for name, size in sizes.items() if size is not None},
        }
        if "to_unwrapped" not in found:
            return cells
        ratios = found["to_unwrapped"]
        for name, column in (("prefill", "x prefill"), ("tokens_per_s", "x tokens/s")):
            middle, low, high = (ratios[name][x] for x in ("median", "low", "high"))
            between = "" if low is None else f" ({low:.3g}-{high:.3g})"
            cells[column] = f"{middle:.3g}{between}"
        for name, column in (("cache_bytes", "x cache"), ("peak_bytes", "x peak")):
            if ratios[name] is not None:
                cells[column] = f"{ratios[name]:.2f}"
        pays = found["pays_from_steps"]
        return cells | {"pays from": "never" if pays is None else str(pays)}


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
