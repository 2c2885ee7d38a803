"""Tables of one run's rows in the papers' layout: policies by budgets, cells "ppl / ROUGE"."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from mmkv.memory import Memory
from mmkv.terminal import Table

from . import store
from .store import FULL, METRICS, Row, RunError, percent

COSTS = ("held_bytes", "first_token_s", "tokens_per_s")  # that quality is compared with
LOWER_IS_BETTER = ("ppl", "divergence", "worst", *COSTS[:2])
# Titles of the figures of a run, and the factor and number of digits with which they are shown.
_SHOWN: dict[str, tuple[str, float, int]] = {
    "ppl": ("perplexity", 1, 2),
    "divergence": ("divergence from the full cache, nats a token", 1, 3),
    "worst": ("99.9th percentile of the divergence over tokens", 1, 2),
    "next": ("share of next tokens that are the full cache's", 100, 1),
    "rouge": ("ROUGE-L", 1, 2),
    "score": ("score", 100, 1),
    "same": ("share of replies identical to the full cache's", 100, 1),
    "kept_fraction": ("share of pairs kept after the prefill", 1, 3),
    "cache_bytes": ("KiB of kept pairs a sample", 1 / 1024, 0),
    "held_bytes": ("KiB held after the prompt, a sample", 1 / 1024, 0),
    "share": ("% of the full cache's bytes", 100, 1),
    "rouge_reference": ("ROUGE-L against the reference answer", 1, 2),
    "first_token_s": ("seconds to a batch's first token", 1, 3),
    "tokens_per_s": ("tokens per second of a batch, prefill included", 1, 0),
}
LABELS = {name: label for name, (label, *_) in _SHOWN.items()}
# `Any`, as its stubs type a cell as a union of all possible types.
pd: Any = pandas
NONE, AVERAGE = "–", "average"
_MEANS = (
    *("rouge", "rouge_reference", "same", "kept_fraction", "cache_bytes"),
    *("full_bytes", "other_bytes", "held_bytes", "first_token_s", "tokens_per_s"),
)
_SUMS = ("nll", "answer_tokens", "divergence_sum", "next_sum", "next_tokens")
FIGURES = ("n", "errors", "ppl", "divergence", "worst", "next", *_MEANS[:3], "score", *_MEANS[3:])
_NUMBERS = [*_MEANS, *_SUMS, "score"]


def summarise(rows: Any, by: list[str]) -> Any:
    """Return `FIGURES` of each group of rows; NaN where nothing was measured.

    Means are over samples, but `ppl`, `divergence` and `next` are over all tokens, and `worst` is
    the 99.9th percentile of the divergence over all tokens; `score`, in [0, 1], is the mean of the
    tasks' means, as in LongBench; bytes are of one sample, `first_token_s` and `tokens_per_s` of a
    batch. `errors` of `n` samples could not be measured.
    """
    groups = rows.groupby(by, sort=False)
    table, sums = groups[[*_MEANS]].mean(), groups[[*_SUMS]].sum()
    table["n"], table["errors"] = groups.size(), groups["error"].count()
    with np.errstate(over="ignore"):
        table["ppl"] = np.exp(sums["nll"] / sums["answer_tokens"])
    for name in ("divergence", "next"):
        table[name] = sums[f"{name}_sum"] / sums["next_tokens"]
    table["worst"] = groups["divergences"].agg(_worst)
    tasks = [*by, *([] if "task" in by else ["task"])]
    table["score"] = rows.groupby(tasks, sort=False)["score"].mean().groupby(by, sort=False).mean()
    return table[[*FIGURES]]


def _worst(divergences: Any) -> float:
    """Return the 99.9th percentile of lists of divergences together; NaN without any."""
    found = [x for row in divergences if isinstance(row, list) for x in row]
    return float(np.quantile(found, 0.999)) if found else np.nan


class Report:
    """A run, read from its folder, or from several with parts of it. Raises RunError.

    `policies` are those compared; `every` has the full cache before them. `summaries` has `FIGURES`
    by policy and budget, under "task" and "tag" also by task or tag.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        self.folder = Path(folders[0])
        self.made_by: list[dict[str, Any]] = []
        rows: dict[Any, Row] = {}
        for folder in map(Path, folders):
            run, folder_rows = store.read_run(folder, _NUMBERS)
            self.settings: dict[str, Any] = run["settings"]
            self.made_by += [made for made in run["made_by"] if made not in self.made_by]
            rows = {store.key_of(row): row for row in folder_rows} | rows
        if not rows:
            raise RunError(f"{self.folder}: no finished row yet")
        self.policies = [p for p in self.settings["policies"] if p != FULL] or [FULL]
        self.every = list(dict.fromkeys([FULL, *self.policies]))
        all_keep_all = all(map(keeps_all, self.policies))
        budgets = map(self.size_of, self.settings["budgets"])
        self.budgets: list[float | int] = [1.0] if all_keep_all else [*budgets]
        columns = ["policy", "task", "tags", "error", "divergences", *_NUMBERS]
        frame = pd.DataFrame(list(rows.values())).reindex(columns=columns)
        frame[_NUMBERS] = frame[_NUMBERS].astype(float)
        frame["answer_tokens"] = frame["answer_tokens"].where(frame["nll"].notna())
        # `repr` tells a budget of one token, 1, from the whole prompt, 1.0.
        frame["kept"] = [repr(row["budget"]) for row in rows.values()]
        self.rows, keys = frame, ["policy", "kept"]
        tagged = frame.explode("tags").rename(columns={"tags": "tag"})
        self.tasks: list[str] = list(frame["task"].unique())
        self.tags: list[str] = list(tagged["tag"].dropna().unique())
        self.summaries = {"": summarise(frame, keys), "task": summarise(frame, [*keys, "task"])}
        self.summaries["tag"] = summarise(tagged, [*keys, "tag"])
        # The metrics in the cells of the main table.
        self.shown = [m for m in METRICS if self.summaries[""][m].notna().any()]

    def size_of(self, budget: float | int) -> float | int:
        """Return a row's budget, or share of bytes if the run's are."""
        return Memory(budget) if self.settings.get("memory") else budget

    def figures(self, policy: str, budget: float | int, what: str = "", name: str = "") -> Any:
        """Return a cell's `FIGURES`, of all samples or a "task" or "tag"; NaN without rows."""
        key = (policy, repr(1.0 if keeps_all(policy) else budget), *([name] if what else []))
        summary = self.summaries[what]
        return summary.loc[key] if key in summary.index else pd.Series(np.nan, [*FIGURES])

    def budgets_of(self, policy: str) -> list[float | int]:
        """Return the budgets that a policy ran at: one that keeps all has only one."""
        return [1.0] if keeps_all(policy) else self.budgets

    @property
    def measured(self) -> bool:
        """Whether any sample of any compared policy was measured."""
        summary = self.summaries[""]
        compared = summary[summary.index.get_level_values(0).isin(self.policies)]
        return bool((compared["errors"] < compared["n"]).any())

    @property
    def missing(self) -> int:
        """How many rows of the run are not measured yet."""
        counts = [len(self.budgets_of(policy)) for policy in self.settings["policies"]]
        return max(0, self.settings["n"] * sum(counts) - len(self.rows))

    def tables(self) -> list[Table]:
        """Return the main table, and for several tasks or tags a table of them at each budget."""
        tables = [self.main_table()]
        if len(self.tasks) > 1:
            tables += self.group_tables("task", self.tasks)
        if len(self.tags) > 1 and self.tags != self.tasks:
            tables += self.group_tables("tag", self.tags)
        return tables

    def main_table(self) -> Table:
        """Return the table of policies by budgets, the best of each bold if the run is complete.

        A full cache in 8 or 4 bits stands at 100 %.
        """
        # By text, which tells a budget of one token, 1, from the whole prompt, 1.0.
        ran = {p: set(map(repr, self.budgets_of(p))) for p in self.policies}
        budgets = {repr(b): b for b in self.budgets}
        if any(map(keeps_all, self.policies)):
            budgets |= {repr(1.0): 1.0}
        cells: dict[str, list[str]] = {policy: [] for policy in self.policies}
        for text, budget in budgets.items():
            figures = {p: self.figures(p, budget) for p in self.policies if text in ran[p]}
            best = self._best(figures.values()) if self.missing == 0 else None
            for policy, column in cells.items():
                at = figures.get(policy)
                column.append(NONE if at is None else _cell(at, self.shown, best))
        title = f"{self.settings['suite']} ({self.settings['data']}), {self.settings['model']}"
        if self.shown:
            title += ": " + " / ".join(LABELS[m] for m in self.shown)
        columns = list(map(percent, budgets.values()))
        return Table("kept", columns, [*cells.items()], title, self.notes())

    def _best(self, figures: Iterable[Any]) -> dict[str, str]:
        """Return the best value of each metric among policies, as it is shown."""
        values = pd.DataFrame(list(figures))
        low, high = values.min(), values.max()
        best = {m: low if m in LOWER_IS_BETTER else high for m in self.shown}
        return {m: shown_figure(m, values[m]) for m, values in best.items()}

    def group_tables(self, what: str, names: Sequence[str]) -> list[Table]:
        """Return a table for each budget: policies by tasks, or by tags such as capabilities."""
        scored = "score" in self.shown
        shown = [m for m in self.shown if not scored or m in ("divergence", "next", "score")]
        averaged = what == "task" and scored
        tables: list[Table] = []
        for budget in self.budgets:
            rows: list[tuple[str, list[str]]] = []
            for policy in self.every:
                group = pd.DataFrame([self.figures(policy, budget, what, n) for n in names])
                if group["n"].isna().all():
                    continue
                cells = [_cell(f, shown) for _, f in group.iterrows()]
                if averaged:
                    cells.append(" / ".join(shown_figure(m, group[m].mean()) for m in shown))
                rows.append((policy, cells))
            title = f"{' / '.join(LABELS[m] for m in shown)} by {what}, kept: {percent(budget)}"
            columns = [*names, AVERAGE] if averaged else [*names]
            tables.append(Table(what, columns, rows, title))
        return tables

    def notes(self) -> list[str]:
        """Return the notes below the main table, such as errors, options and versions."""
        s = self.settings
        notes, full = list[str](), self.figures(FULL, 1.0)
        if full["n"] > 0:
            values = ", ".join(f"{LABELS[m]} {_cell(full, [m])}" for m in self.shown)
            notes.append(f"Full cache: {values}.")
        if full["score"] == 0:
            reason = "the model cannot do this task, so scores tell nothing of policies"
            notes.append(f"The full cache scores 0: {reason}.")
        if self.missing:
            total = len(self.rows) + self.missing
            notes.append(f"Not finished: {len(self.rows)} of {total} rows; none is marked as best.")
        notes += self.errors()
        options = [
            f"{label} with {', '.join(f'{k}={v}' for k, v in chosen.items())}"
            for label, chosen in s["policies"].items()
            if chosen and ":" not in label
        ]
        if options:
            notes.append(f"Options: {'; '.join(options)}.")
        notes += [f"Not comparable with published figures: {note}." for note in s.get("notes", [])]
        for m in self.made_by:
            commit = f", commit {m['commit']}" if m.get("commit") else ""
            notes.append(
                f"n = {s['n']}, {s['dtype']} on {m['device']}, mmkv {m['mmkv']}{commit}, "
                f"torch {m['torch']}, transformers {m['transformers']}; run {m['id']}."
            )
        return notes

    def errors(self) -> list[str]:
        """Return a line for each policy and budget with samples that could not be measured."""
        failed = self.rows[self.rows["error"].notna()].groupby(["policy", "kept"], sort=False)
        return [
            f"{policy} at {self.percent(kept)}: {len(rows)} of {self.settings['n']} samples "
            f"could not be measured ({rows['error'].iloc[0]})."
            for (policy, kept), rows in failed
        ]

    def percent(self, kept: str) -> str:
        """Return the budget of a row for display, from its text in `summaries`."""
        return percent(self.size_of(json.loads(kept)))

    def write(self) -> list[Path]:
        """Write report.md and report.csv into the run's folder; return their paths."""
        tables = "\n".join(t.markdown for t in self.tables())
        text, data = self.folder / "report.md", self.folder / "report.csv"
        title = f"# {self.settings['suite']}, {self.settings['model']}"
        text.write_text(f"{title}\n\n{tables}", encoding="utf-8")
        groups = [("", "all"), *(("task", t) for t in self.tasks), *(("tag", t) for t in self.tags)]
        records = [
            {"group": f"{what} {name}".strip(), "policy": p, "budget": repr(b), **figures}
            for what, name in groups
            for p in self.every
            for b in self.budgets_of(p)
            if (figures := self.figures(p, b, what, name))["n"] > 0
        ]
        pd.DataFrame(records).astype({"n": int, "errors": int}).to_csv(data, index=False)
        return [text, data]


def keeps_all(policy: str) -> bool:
    """Return whether a policy is the full cache, quantised or not, which has one budget."""
    return policy.split(":")[0] == FULL


def shown_figure(metric: str, value: float | None) -> str:
    """Return a figure as tables show it, with its unit's factor and digits."""
    if value is None or np.isnan(value):
        return NONE
    if metric == "ppl":  # three digits, as in the papers
        return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"
    _, scale, digits = _SHOWN[metric]
    return f"{scale * value:.{digits}f}"


def _cell(figures: Any, shown: Sequence[str], best: dict[str, str] | None = None) -> str:
    """Return metrics joined by slashes; the best are bold; "†": some samples are missing."""
    if not figures["errors"] < figures["n"]:
        return NONE
    texts = [shown_figure(m, figures[m]) for m in shown]
    if best is not None:
        pairs = zip(shown, texts, strict=True)
        texts = [f"**{x}**" if x == best[m] != NONE else x for m, x in pairs]
    return " / ".join(texts) + ("†" if figures["errors"] else "")
