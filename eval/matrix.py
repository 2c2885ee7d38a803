"""Many runs on one page: what quality costs in bytes, in time to the first token and in speed.

A matrix is a folder of runs, one a model and suite, each as `mmkv.eval.store` describes it.
`mmkv eval matrix` measures one, `mmkv eval merge` adds runs that were measured elsewhere.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import FULL, LABELS
from .report import LOWER_IS_BETTER, METRICS, Figures, Report, shown_figure
from .store import RunError, Store, digest, read_settings
from .variants import HIDDEN, QUESTION, percent

PAGE, PICTURE = "matrix.html", "matrix.png"
# What quality is drawn against: the figure, and whether less of it is better.
COSTS = (("held_bytes", True), ("first_token_s", True), ("tokens_per_s", False))
_TEMPLATE = "matrix.html.j2"
_HIDDEN = f":{QUESTION}={HIDDEN}"


@dataclass(frozen=True)
class Point:
    """A policy at a budget in one run; `policy` without the question's place."""

    policy: str
    budget: float | int
    run: str
    figures: Figures

    @property
    def label(self) -> str:
        """As charts and tables name it."""
        return self.policy if self.policy == FULL else f"{self.policy} {percent(self.budget)}"

    def text(self, name: str) -> str:
        """A figure with its digits."""
        return shown_figure(name, getattr(self.figures, name))


@dataclass(frozen=True)
class Section:
    """All points of one model, suite and place of the question; the full cache is in both places.

    Attributes:
        about: what the prompts are and how many.
        metrics: which of `METRICS` were measured; the last is what is drawn.
    """

    model: str
    suite: str
    question: str
    about: str
    metrics: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def metric(self) -> str:
        """What is drawn against cost."""
        return self.metrics[-1]

    def front(self, cost: str, *, less: bool) -> list[Point]:
        """The points that no other beats in quality at the same cost or a lower one, by cost.

        Args:
            cost: a figure.
            less: whether less of it is better.
        """
        sign = 1 if less else -1
        better = 1 if self.metric in LOWER_IS_BETTER else -1

        def place(point: Point) -> tuple[float, float]:
            values = getattr(point.figures, cost), getattr(point.figures, self.metric)
            return sign * values[0], better * values[1]

        found: list[Point] = []
        for point in sorted(self.known(cost), key=place):
            if not found or place(point)[1] < place(found[-1])[1]:
                found.append(point)
        return found

    def known(self, cost: str) -> list[Point]:
        """The points of which both figures were measured."""
        pairs = [
            (p, getattr(p.figures, cost), getattr(p.figures, self.metric)) for p in self.points
        ]
        return [
            p for p, *values in pairs if all(x is not None and math.isfinite(x) for x in values)
        ]


class Matrix:
    """The runs below a folder, read back.

    Raises:
        RunError: none is there, or one cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.runs = [Report(path.parent) for path in sorted(self.folder.rglob("run.json"))]
        if not self.runs:
            raise RunError(f"{self.folder}: no run here")

    def sections(self) -> list[Section]:
        """One for each model, suite, data and place of the question."""
        groups: dict[tuple[str, ...], list[Report]] = {}
        for run in self.runs:
            s = run.settings
            groups.setdefault((s["model"], s["suite"], s["data"], s["data_digest"]), []).append(run)
        found: list[Section] = []
        for (model, suite, data, _), runs in groups.items():
            metrics = tuple(m for m in METRICS if all(m in run.shown for run in runs))
            if not metrics:
                continue
            about = f"{data} data, {runs[0].settings['n']} prompts"
            for question in ("visible", HIDDEN):
                points = tuple(p for run in runs for p in _points(run, question))
                if any(p.policy != FULL for p in points):
                    found.append(Section(model, suite, question, about, metrics, points))
        return found

    def write(self) -> list[Path]:
        """Write the page and its front picture into the folder; their paths."""
        from . import fronts

        sections = self.sections()
        if not sections:
            raise RunError(f"{self.folder}: no policy but the full cache was measured")
        page = self.folder / PAGE
        page.write_text(self.page(sections), encoding="utf-8")
        return [page, fronts.save(fronts.overview(sections), self.folder / PICTURE)]

    def page(self, sections: Sequence[Section]) -> str:
        """The page: HTML with its charts inside, which needs nothing else."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from . import fronts

        environment = Environment(
            loader=PackageLoader("mmkv.eval", "."), autoescape=True, undefined=StrictUndefined
        )
        shown = [
            {
                "section": section,
                "charts": [
                    (LABELS[cost], fronts.svg(fronts.chart(section, cost, less=less)))
                    for cost, less in COSTS
                    if section.known(cost)
                ],
                "front": {p for cost, less in COSTS[:1] for p in section.front(cost, less=less)},
            }
            for section in sections
        ]
        return environment.get_template(_TEMPLATE).render(
            sections=shown, labels=LABELS, columns=[cost for cost, _ in COSTS], runs=self.made()
        )

    def made(self) -> list[dict[str, Any]]:
        """What each run was made with."""
        return [
            {**made, "run": made["id"], **{k: run.settings[k] for k in _SHOWN}}
            for run in self.runs
            for made in run.made_by
        ]


# What of a run's settings the page shows.
_SHOWN = ("model", "suite", "data", "n", "batch_size", "max_length", "dtype", "policies", "notes")


def _points(run: Report, question: str) -> list[Point]:
    """The points of a run with the question visible, or hidden."""
    name = run.made_by[-1]["id"]
    found: list[Point] = []
    for policy in run.every:
        if policy != FULL and policy.endswith(_HIDDEN) != (question == HIDDEN):
            continue
        for budget in run.budgets_of(policy):
            figures = run.figures(policy, budget)
            if figures is not None and figures.errors < figures.n:
                found.append(Point(policy.removesuffix(_HIDDEN), budget, name, figures))
    return found


def merge(sources: Sequence[Path], out: Path) -> list[Path]:
    """Add the runs below each source to the matrix `out`, and rows that a run there has not.

    Returns:
        The folders of these runs in `out`.

    Raises:
        RunError: a source holds no run, or what is no run; nothing is written then.
    """
    runs: list[tuple[dict[str, Any], list[Any]]] = []
    for source in sources:
        found = sorted(source.rglob("run.json"))
        if not found:
            raise RunError(f"{source}: no run here")
        runs += [(check_run(path.parent), Store(path.parent).rows()) for path in found]
    written: list[Path] = []
    for run, rows in runs:
        settings = run["settings"]
        name = f"{settings['suite']}-{Path(settings['model']).name}-{digest(settings)}"
        store = Store(out / re.sub(r"[^\w.-]+", "_", name))
        for made in run["made_by"]:
            store.claim(settings, {k: v for k, v in made.items() if k != "id"})
        store.append(store.missing(rows))
        written.append(store.folder)
    return list(dict.fromkeys(written))


def check_run(folder: Path) -> dict[str, Any]:
    """The content of a run's `run.json`, once it and all rows are what a run writes.

    Raises:
        RunError: names the file, the line and the field.
    """
    from pydantic import ValidationError

    from .schema import RowData, RunData

    run = read_settings(folder)
    checks = [("run.json", RunData, run)]
    checks += [(f"row {i}", RowData, row) for i, row in enumerate(Store(folder).rows(), start=1)]
    for place, schema, data in checks:
        try:
            schema.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise RunError(f"{folder}: {place}: field {field!r}: {first['msg']}") from None
    return run
