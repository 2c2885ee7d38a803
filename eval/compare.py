"""Runs side by side: what quality costs in bytes, in time to the first token and in speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.terminal import Table

from .store import RunError, digest, read_settings
from .tabulate import LABELS, LOWER_IS_BETTER, Report, pd, shown_figure
from .variants import FULL, HIDDEN, METRICS, QUESTION, percent

# What quality is set against, and whether less of it is better.
COSTS = {"held_bytes": True, "first_token_s": True, "tokens_per_s": False}
_HIDDEN = f":{QUESTION}={HIDDEN}"


class Comparison:
    """All runs below some folders, side by side: what quality costs in bytes, time and speed.
    Raises RunError where there is none of a policy but the full cache, or a damaged one."""

    def __init__(self, folders: Sequence[Path]) -> None:
        runs: dict[str, list[Path]] = {}
        for folder in folders:
            found = [path.parent for path in sorted(folder.rglob("run.json"))]
            if not found:
                raise RunError(f"{folder}: no run here")
            for path in found:
                runs.setdefault(digest(read_settings(path)["settings"]), []).append(path)
        # Rows of a run that lie in several folders are put together.
        self.reports = [Report(*paths) for paths in runs.values()]
        parts = [_points(report, hidden) for report in self.reports for hidden in (False, True)]
        self.points = pd.concat(parts)
        if self.points.empty:
            raise RunError(f"{folders[0]}: no policy but the full cache was measured")

    def sections(self) -> list[tuple[str, list[str], Any]]:
        """A title, the metrics that all of its runs have, and its points."""
        found: list[tuple[str, list[str], Any]] = []
        for key, points in self.points.groupby(["model", "suite", "data", "question"], sort=False):
            model, suite, data, question = map(str, key)
            counts = points.groupby("run")[[*METRICS]].count().min()
            if metrics := [m for m in METRICS if counts[m]]:
                title = f"{suite} ({data}), question {question}: {model}"
                found.append((title, metrics, points))
        return found

    def tables(self) -> list[Table]:
        """One a section; points on the front of quality against bytes are bold."""
        found: list[Table] = []
        for title, metrics, points in self.sections():
            best = front(points, "held_bytes", metrics[-1]).index
            names, rows = [*metrics, *COSTS], list[tuple[str, list[str]]]()
            for i, point in points.iterrows():
                label = f"**{point['label']}**" if i in best else str(point["label"])
                cells = [shown_figure(name, point[name]) for name in names]
                rows.append((label, [*cells, str(point["n"] - point["errors"]), point["run"]]))
            columns = [*(LABELS[name] for name in names), "prompts", "run"]
            found.append(Table("policy, kept", columns, rows, title))
        return found

    def write(self, folder: Path) -> list[Path]:
        """Write runs.md and runs.csv into a folder; returns their paths."""
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
    """A run's points with the question visible, or hidden; the full cache counts as both."""
    found = report.found[""].reset_index()
    there = (found["policy"] == FULL) | (found["policy"].str.endswith(_HIDDEN) == hidden)
    found = found[there & (found["errors"] < found["n"])]
    if (found["policy"] == FULL).all():
        return found.head(0)
    policy = found["policy"].str.removesuffix(_HIDDEN)
    kept = [percent(json.loads(text)) for text in found["kept"]]
    label = policy.where(policy == FULL, policy + " " + kept)
    about = {name: report.settings[name] for name in ("model", "suite", "data")}
    about |= {"question": HIDDEN if hidden else "visible", "run": report.made_by[-1]["id"]}
    found = found.assign(**about, policy=policy, kept=kept, label=label)
    return found.set_axis([f"{about}{x}" for x in label])


def front(points: Any, cost: str, metric: str) -> Any:
    """The points that no other beats in a metric at the same cost or a lower one, by cost."""
    known = points[np.isfinite(points[[cost, metric]]).all(axis=1)]
    price = known[cost] * (1 if COSTS[cost] else -1)
    loss = known[metric] * (1 if metric in LOWER_IS_BETTER else -1)
    order = known.assign(price=price, loss=loss).sort_values(["price", "loss"], kind="stable")
    return known.loc[order.index[order["loss"] < order["loss"].cummin().shift(fill_value=np.inf)]]
