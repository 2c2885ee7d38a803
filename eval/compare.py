"""Several runs side by side: quality against bytes, time to the first token and speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.terminal import Table, printable

from . import store
from .store import FULL, HIDDEN, METRICS, QUESTION, RunError
from .tabulate import COSTS, LABELS, LOWER_IS_BETTER, Report, keeps_all, pd, shown_figure


class Comparison:
    """All runs below some folders: quality against bytes, time and speed. Raises RunError if a run
    is damaged, or if no policy other than the full cache was measured."""

    def __init__(self, folders: Sequence[Path]) -> None:
        runs: dict[str, list[Path]] = {}
        for folder in folders:
            paths = [path.parent for path in sorted(folder.rglob("run.json"))]
            if not paths:
                raise RunError(f"{folder}: no run here")
            for path in paths:
                settings = store.read_settings(path)["settings"]
                runs.setdefault(store.digest(settings), []).append(path)
        # Folders with the same settings hold parts of one run: their rows are merged.
        self.reports = [Report(*paths) for paths in runs.values()]
        parts = [_points(report, hidden) for report in self.reports for hidden in (False, True)]
        self.points = pd.concat(parts, ignore_index=True)
        if self.points.empty:
            raise RunError(f"{folders[0]}: no policy but the full cache was measured")
        if not self.sections():
            raise RunError(f"{folders[0]}: no metric was measured in every run of a suite")

    def sections(self) -> list[tuple[str, list[str], Any]]:
        """Return title, metrics and points of each section; all of its runs have these metrics."""
        sections: list[tuple[str, list[str], Any]] = []
        by = ["model", "suite", "data", "question", "data_digest"]
        for key, points in self.points.groupby(by, sort=False):
            model, suite, data, question, _ = map(str, key)
            counts = points.groupby("run")[[*METRICS]].count().min()
            if metrics := [m for m in METRICS if counts[m]]:
                title = printable(f"{suite} ({data}), question {question}: {model}")
                sections.append((title, metrics, points))
        return sections

    def tables(self) -> list[Table]:
        """Return a table a section; points on the front of quality against bytes are bold."""
        tables: list[Table] = []
        for title, metrics, points in self.sections():
            front_rows = front(points, "held_bytes", metrics[-1]).index
            also = ["worst"] if points["worst"].notna().any() else []
            names, rows = [*metrics, *also, "share", *COSTS], list[tuple[str, list[str]]]()
            for i, point in points.iterrows():
                label = f"**{point['label']}**" if i in front_rows else str(point["label"])
                cells = [shown_figure(name, point[name]) for name in names]
                rows.append((label, [*cells, str(point["n"] - point["errors"]), point["run"]]))
            columns = [*(LABELS[name] for name in names), "prompts", "run"]
            tables.append(Table("policy, kept", columns, rows, title))
        return tables

    def write(self, folder: Path) -> list[Path]:
        """Write runs.md and runs.csv into a folder; return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        text, data = folder / "runs.md", folder / "runs.csv"
        parts = [table.markdown for table in self.tables()]
        for report in self.reports:
            title = f"## {report.settings['suite']}, {report.settings['model']}\n"
            parts.append("\n".join([title, *(f"- {note}" for note in report.notes()), ""]))
        text.write_text("\n".join(parts), encoding="utf-8")
        self.points.to_csv(data, index=False)
        return [text, data]


def _points(report: Report, hidden: bool) -> Any:
    """Return a run's points with the question visible, or hidden; the full cache is in both.

    Its bytes are those of its pairs, without empty slots; with a hidden question, of the context
    alone. `share` divides by them.
    """
    points, suffix = report.summaries[""].reset_index(), f":{QUESTION}={HIDDEN}"
    matches = (points["policy"] == FULL) | (points["policy"].str.endswith(suffix) == hidden)
    points = points[matches & (points["errors"] < points["n"])]
    full = points["policy"] == FULL
    if full.all():
        return points.head(0)
    full_bytes = points["full_bytes"] + points["other_bytes"].fillna(0)
    full_bytes = full_bytes.mask(full & hidden, full_bytes[~full].max())
    held = points["held_bytes"].mask(full, full_bytes)
    points = points.assign(held_bytes=held, share=held / full_bytes)
    policy = points["policy"].str.removesuffix(suffix)
    kept = list(map(report.percent, points["kept"]))
    label = policy.where(policy.map(keeps_all), policy + " " + kept)
    facts = {name: report.settings[name] for name in ("model", "suite", "data")}
    facts |= {"question": HIDDEN if hidden else "visible", "run": report.made_by[-1]["id"]}
    facts["data_digest"] = report.settings.get("data_digest", "")  # of the prompts
    return points.assign(**facts, policy=policy, kept=kept, label=label)


def front(points: Any, cost: str, metric: str) -> Any:
    """Return, by rising cost, the points that no cheaper or equally cheap one beats in a metric."""
    finite = points[np.isfinite(points[[cost, metric]]).all(axis=1)]
    price, loss = (finite[x] * (1 if x in LOWER_IS_BETTER else -1) for x in (cost, metric))
    order = finite.assign(price=price, loss=loss).sort_values(["price", "loss"], kind="stable")
    return finite.loc[order.index[order["loss"] < order["loss"].cummin().shift(fill_value=np.inf)]]
