"""From a run's rows to tables in the papers' layout: policies by budgets, "ppl / ROUGE" cells."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv import terminal
from mmkv.report import mean_known

from .measure import FULL, LABELS
from .papers import AVERAGE, PaperTable, tables_for
from .perplexity import perplexity
from .store import Row, RunError, Store, read_settings
from .variants import percent

if TYPE_CHECKING:
    from rich.console import Group

NONE = "–"
Only = Callable[[Row], bool]  # which rows count
METRICS = ("ppl", "divergence", "next", "rouge", "score")
_BY_TASK = ("divergence", "next", "score")  # alone, where there are scores
LOWER_IS_BETTER = ("ppl", "divergence")
# How figures are shown: in which unit, with how many digits.
_SHOWN = {
    "score": (100, 1),
    "divergence": (1, 3),
    "next": (100, 1),
    "same": (100, 1),
    "cache_bytes": (1 / 1024, 0),
    "held_bytes": (1 / 1024, 0),
    "first_token_s": (1, 3),
    "tokens_per_s": (1, 0),
    "retained": (1, 3),
    "kept_fraction": (1, 3),
}
_BESIDE = (
    *("same", "retained", "kept_fraction", "cache_bytes", "held_bytes", "rouge_reference"),
    *("first_token_s", "tokens_per_s"),
)


@dataclass(frozen=True)
class Figures:
    """What a policy reached at a budget over a set of samples; None where nothing was measured.

    Means are over samples. Beside the fields of a row: `n` samples, of which `errors` could not be
    measured; `ppl`, `divergence` and `next` are over the tokens of all; `score`, in [0, 1], is with
    several tasks the mean of their means, as LongBench averages; bytes are of one sample,
    `first_token_s` and `tokens_per_s` of a batch.
    """

    n: int
    errors: int
    ppl: float | None
    divergence: float | None
    next: float | None
    rouge: float | None
    rouge_reference: float | None
    same: float | None
    score: float | None
    kept_fraction: float | None
    retained: float | None
    cache_bytes: float | None
    full_bytes: float | None
    held_bytes: float | None
    first_token_s: float | None
    tokens_per_s: float | None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Figures:
        """Summarise rows of one policy and budget."""
        tasks: dict[str, list[Row]] = {}
        for row in rows:
            tasks.setdefault(row["task"], []).append(row)
        scored = [r for r in rows if r.get("nll") is not None]
        compared = sum(r.get("next_tokens") or 0 for r in rows)
        own: dict[str, Any] = {
            "n": len(rows),
            "errors": sum("error" in r for r in rows),
            "ppl": perplexity([r["nll"] for r in scored], [r["answer_tokens"] for r in scored]),
            "score": mean_known(_mean(group, "score") for group in tasks.values()),
        }
        for name in ("divergence", "next") if compared else ():
            own[name] = sum(r.get(f"{name}_sum") or 0 for r in rows) / compared
        means: dict[str, Any] = {
            f.name: _mean(rows, f.name) for f in fields(cls) if f.name not in own
        }
        return cls(**own, **means)


@dataclass(frozen=True)
class Table:
    """A table to print: a title, the first column's name, columns, rows and remarks."""

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """As Markdown."""
        rows = [[self.corner, *self.columns], *([name, *cells] for name, cells in self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "|---" + "|---:" * len(self.columns) + "|")
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"{x}\n" for x in self.notes)])

    def __rich__(self) -> Group:
        """For the terminal, in parts where it is narrow."""
        from rich.console import Group
        from rich.text import Text

        rows = [(name, [cell.replace("**", "") for cell in cells]) for name, cells in self.rows]
        shown = terminal.Table(self.corner, self.columns, rows, self.title)
        notes = [Text(note, style="dim") for note in self.notes]
        return Group(shown, *notes, Text())


class Report:
    """A run's folder, read back.

    Raises:
        RunError: no run there, or no finished row yet.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        run = read_settings(self.folder)
        self.settings: dict[str, Any] = run["settings"]
        self.made_by: list[dict[str, Any]] = run["made_by"]
        self.rows = Store(self.folder).rows()
        if not self.rows:
            raise RunError(f"{self.folder}: no finished row yet")
        self._cells: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            self._cells.setdefault((row["policy"], repr(row["budget"])), []).append(row)
        self.policies = [p for p in self.settings["policies"] if p != FULL] or [FULL]
        self.every = list(dict.fromkeys([FULL, *self.policies]))
        whole = all(_keeps_all(p) for p in self.policies)
        self.budgets: list[float | int] = [1.0] if whole else self.settings["budgets"]
        self.tasks = list(dict.fromkeys(r["task"] for r in self.rows))
        self.tags = list(dict.fromkeys(t for r in self.rows for t in r["tags"]))

    def figures(self, policy: str, budget: float | int, only: Only | None = None) -> Figures | None:
        """One cell; None where there is no row."""
        rows = self._cells.get((policy, repr(1.0 if _keeps_all(policy) else budget)), [])
        found = [row for row in rows if only is None or only(row)]
        return Figures.of(found) if found else None

    def budgets_of(self, policy: str) -> list[float | int]:
        """The budgets that a policy ran at: what keeps all has only one."""
        return [1.0] if _keeps_all(policy) else self.budgets

    def _reached(self, policies: Sequence[str]) -> list[Figures]:
        return [f for p in policies for b in self.budgets if (f := self.figures(p, b))]

    @property
    def shown(self) -> list[str]:
        """The metrics of the main table's cells."""
        found = self._reached(self.every)
        return [m for m in METRICS if any(getattr(f, m) is not None for f in found)]

    @property
    def measured(self) -> bool:
        """Whether a policy reached any figure at any budget."""
        return any(f.errors < f.n for f in self._reached(self.policies))

    @property
    def papers(self) -> list[PaperTable]:
        """What the papers print for this model and suite; nothing where the data are our own."""
        if self.settings["data"] == "builtin":
            return []
        return tables_for(self.settings["model"], self.settings["suite"])

    def tables(self) -> list[Table]:
        """All tables, the main one first."""
        found = [self.main_table(), *self.side_tables()]
        if len(self.tasks) > 1:
            found += self.group_tables("task", self.tasks)
        if len(self.tags) > 1 and self.tags != self.tasks:
            found += self.group_tables("tag", self.tags)
        return found

    def first_tables(self) -> list[Table]:
        """Those that the papers print: the main one, and by task or capability."""
        named = [t for t in self.tags if "=" not in t]
        kinds = ["task", "tag"] if named else ["task"]
        return [self.main_table(), *(t for t in self.tables() if t.corner in kinds)]

    def main_table(self) -> Table:
        """Policies by budgets, with the papers' rows below ours."""
        shown = self.shown
        cells = {p: [self.figures(p, b) for b in self.budgets] for p in self.policies}
        columns = zip(*cells.values(), strict=True)
        best = [{m: _best(m, column) for m in shown} for column in columns]
        rows: list[tuple[str, list[str]]] = []
        for policy, found in cells.items():
            rows.append((policy, [_cell(f, shown, b) for f, b in zip(found, best, strict=True)]))
            rows += self._paper_rows(policy, shown)
        title = f"{self.settings['suite']} ({self.settings['data']}), {self.settings['model']}"
        if shown:
            title += ": " + " / ".join(LABELS[m] for m in shown)
        return self._by_budget(title, rows, self.notes())

    def _by_budget(self, title: str, rows: list[tuple[str, list[str]]], notes: list[str]) -> Table:
        return Table(title, "kept", [percent(b) for b in self.budgets], rows, notes)

    def _paper_rows(self, policy: str, shown: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        for table in self.papers:
            for name in table.names(policy):
                cells: list[str] = []
                for budget in self.budgets:
                    figures = table.figures(policy, name, budget)
                    if AVERAGE in figures:
                        figures["score"] = figures[AVERAGE] / 100
                    texts = [shown_figure(m, figures.get(m)) for m in shown]
                    cells.append(" / ".join(texts) if set(texts) != {NONE} else NONE)
                if set(cells) != {NONE}:
                    yield f"paper: {name}", cells

    def side_tables(self) -> list[Table]:
        """What goes beside quality: one table each."""
        found: list[Table] = []
        for metric in _BESIDE:
            rows: list[tuple[str, list[str]]] = []
            for policy in self.policies:
                figures = [self.figures(policy, b) for b in self.budgets]
                rows.append(
                    (policy, [shown_figure(metric, f and getattr(f, metric)) for f in figures])
                )
            if all(set(cells) == {NONE} for _, cells in rows):
                continue
            full = self.figures(FULL, 1.0)
            value = full and getattr(full, metric)
            notes = [] if value is None else [f"Full cache: {shown_figure(metric, value)}."]
            if metric == "retained":
                notes.append(
                    "A share of what the policy's own score finds: compare policies of one "
                    "score, such as xkv with xkv:layers=uniform."
                )
            found.append(self._by_budget(LABELS[metric], rows, notes))
        return found

    def group_tables(self, what: str, names: Sequence[str]) -> list[Table]:
        """One table a budget: policies by tasks, or by tags such as capabilities."""
        scored = "score" in self.shown
        shown = [m for m in self.shown if m in _BY_TASK] if scored else self.shown
        averaged = what == "task" and scored
        found: list[Table] = []
        for budget in self.budgets:
            rows: list[tuple[str, list[str]]] = []
            for policy in self.every:
                group = [self.figures(policy, budget, _belongs(what, n)) for n in names]
                if not any(group):
                    continue
                cells = [_cell(f, shown) for f in group]
                if averaged:
                    means = {m: mean_known(f and getattr(f, m) for f in group) for m in shown}
                    cells.append(" / ".join(shown_figure(*mean) for mean in means.items()))
                rows.append((policy, cells))
                if what == "task":
                    rows += self._paper_tasks(policy, budget, names)
            title = f"{' / '.join(LABELS[m] for m in shown)} by {what}, kept: {percent(budget)}"
            columns = [*names, AVERAGE] if averaged else [*names]
            found.append(Table(title, what, columns, rows))
        return found

    def _paper_tasks(
        self, policy: str, budget: float | int, names: Sequence[str]
    ) -> Iterator[tuple[str, list[str]]]:
        for table in self.papers:
            if AVERAGE not in table.columns:
                continue
            for name in table.names(policy):
                figures = table.figures(policy, name, 1.0 if policy == FULL else budget)
                if figures:
                    cells = [figures.get(n) for n in [*names, AVERAGE]]
                    yield f"paper: {name}", [NONE if x is None else f"{x:.1f}" for x in cells]

    def notes(self) -> list[str]:
        """What a reader of the tables must know."""
        s = self.settings
        full = self.figures(FULL, 1.0)
        notes = []
        if full is not None:
            values = ", ".join(f"{LABELS[m]} {_cell(full, [m])}" for m in self.shown)
            notes.append(f"Full cache: {values}.")
        each = [len(self.budgets_of(p)) for p in s["policies"]]
        expected = s["n"] * sum(each)
        if len(self.rows) < expected:
            notes.append(f"Not finished: {len(self.rows)} of {expected} rows.")
        notes += self.errors()
        options = [
            f"{label} with {', '.join(f'{k}={v}' for k, v in chosen.items())}"
            for label, chosen in s["policies"].items()
            if chosen and ":" not in label
        ]
        if options:
            notes.append(f"Options: {'; '.join(options)}.")
        notes += [f"Not comparable with published figures: {note}." for note in s.get("notes", [])]
        notes += [f"Rows 'paper:' are from {t.source} ({t.model})." for t in self.papers]
        for m in self.made_by:
            commit = f", commit {m['commit']}" if m.get("commit") else ""
            notes.append(
                f"n = {s['n']}, {s['dtype']} on {m['device']}, mmkv {m['mmkv']}{commit}, "
                f"torch {m['torch']}, transformers {m['transformers']}; run {m['id']}."
            )
        return notes

    def errors(self) -> list[str]:
        """Which policies could not be measured, and why, one line each."""
        groups: dict[tuple[str, float | int], list[Row]] = {}
        for row in self.rows:
            if "error" in row:
                groups.setdefault((row["policy"], row["budget"]), []).append(row)
        return [
            f"{policy} at {percent(budget)}: {len(rows)} of {rows[0]['n']} samples could not be "
            f"measured ({rows[0]['error']})."
            for (policy, budget), rows in groups.items()
        ]

    def write(self, *, plots: bool = True) -> list[Path]:
        """Write report.md, report.csv and the curves into the run's folder; returns their paths."""
        tables = "\n".join(t.markdown() for t in self.tables())
        text = self.folder / "report.md"
        text.write_text(f"# {self.settings['suite']}, {self.settings['model']}\n\n{tables}")
        written = [text, self.write_csv()]
        if plots:
            from .plots import plot_report

            written += plot_report(self, self.folder)
        return written

    def write_csv(self) -> Path:
        """All figures, one line for each policy, budget and group of samples."""
        groups: list[tuple[str, Only | None]] = [("all", None)]
        groups += [(f"task {t}", _belongs("task", t)) for t in self.tasks]
        groups += [(f"tag {t}", _belongs("tag", t)) for t in self.tags]
        path = self.folder / "report.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["group", "policy", "budget", *(f.name for f in fields(Figures))])
            for (group, only), policy in itertools.product(groups, self.every):
                for budget in self.budgets_of(policy):
                    found = self.figures(policy, budget, only)
                    if found is not None:
                        writer.writerow([group, policy, budget, *astuple(found)])
        return path


def _mean(rows: Sequence[Row], name: str) -> float | None:
    return mean_known(row.get(name) for row in rows)


def _keeps_all(policy: str) -> bool:
    """Whether it runs at one budget: the full cache, in 8 or 4 bits too."""
    return policy.split(":")[0] == FULL


def _belongs(what: str, name: str) -> Only:
    """Whether a row is of a task, or has a tag."""
    if what == "task":
        return lambda row: row["task"] == name
    return lambda row: name in row["tags"]


def shown_figure(metric: str, value: float | None) -> str:
    """A figure with its digits, in the unit that tables show it in."""
    if value is None:
        return NONE
    if metric == "ppl":  # three digits, as in the papers
        return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"
    scale, digits = _SHOWN.get(metric, (1, 2))
    return f"{scale * value:.{digits}f}"


def _cell(figures: Figures | None, shown: Sequence[str], best: dict[str, str] | None = None) -> str:
    """Metrics between slashes; the best are bold; "†" where some samples are missing."""
    if figures is None or figures.errors == figures.n:
        return NONE
    texts = []
    for metric in shown:
        text = shown_figure(metric, getattr(figures, metric))
        texts.append(f"**{text}**" if best and text == best[metric] and text != NONE else text)
    return " / ".join(texts) + ("†" if figures.errors else "")


def _best(metric: str, column: Sequence[Figures | None]) -> str:
    values = [v for f in column if f and (v := getattr(f, metric)) is not None]
    if not values:
        return NONE
    return shown_figure(metric, min(values) if metric in LOWER_IS_BETTER else max(values))
