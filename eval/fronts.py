"""Charts of a matrix: quality against what it costs, and the front that nothing beats."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .figures import log_axis, save, style_of
from .measure import FULL, LABELS
from .report import LOWER_IS_BETTER
from .variants import percent

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .matrix import Section

__all__ = ["chart", "overview", "save", "svg"]

_OTHERS = "#c8ccd2"
_SCALE = {"held_bytes": 1 / 1024}


def chart(section: Section, cost: str, *, less: bool) -> Figure:
    """One section: the front in colour, all other points in grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 3.5), layout="constrained")
    axis = figure.subplots()
    _draw(axis, section, cost, less=less)
    axis.legend(fontsize=7, frameon=False, loc="best", handlelength=1.2)
    return figure


def overview(sections: Sequence[Section]) -> Figure:
    """The first picture: quality against bytes, a panel for each section."""
    from matplotlib.figure import Figure

    across = min(2, len(sections))
    down = -(-len(sections) // across)
    figure = Figure(figsize=(4.8 * across, 3.5 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axis, section in zip(grid.flat, sections, strict=False):
        _draw(axis, section, "held_bytes", less=True)
        axis.set_title(f"{section.suite}, question {section.question}", fontsize=9, loc="left")
        axis.legend(fontsize=7, frameon=False, loc="best", handlelength=1.2)
    for axis in grid.flat[len(sections) :]:
        axis.set_visible(False)
    return figure


def svg(figure: Figure) -> Markup:
    """A figure as a part of a page: text stays text, and its width is the page's."""
    from markupsafe import Markup
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mmkv"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    head, rest = text[text.index("<svg") :].split(">", 1)
    # matplotlib escapes what labels hold.
    return Markup(re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest)


def _draw(axis: Axes, section: Section, cost: str, *, less: bool) -> None:
    """The points of one section, and its front as a line."""
    scale = _SCALE.get(cost, 1)
    top = 100 if section.metric == "score" else 1

    def place(point: Any) -> tuple[float, float]:
        figures = point.figures
        return scale * getattr(figures, cost), top * getattr(figures, section.metric)

    known, front = section.known(cost), section.front(cost, less=less)
    rest = [place(p) for p in known if p not in front]
    if rest:
        axis.plot(*zip(*rest, strict=True), "o", color=_OTHERS, markersize=3.5, zorder=1)
    axis.plot(*zip(*map(place, front), strict=True), color="#9aa3ad", linewidth=1, zorder=2)
    for name in dict.fromkeys(p.policy for p in front):
        style: dict[str, Any] = style_of(name) | {"linestyle": "none", "markersize": 6}
        mine = [place(p) for p in front if p.policy == name]
        axis.plot(*zip(*mine, strict=True), label=name, zorder=3, **style)
    full = [place(p)[1] for p in known if p.policy == FULL]
    if full:
        axis.axhline(full[0], color="#222222", linewidth=1, linestyle=":", zorder=0)
    for point in front:
        if point.policy != FULL:
            axis.annotate(
                percent(point.budget),
                place(point),
                xytext=(4, -7),
                textcoords="offset points",
                fontsize=6,
                color="#5a6572",
            )
    if cost != "tokens_per_s":
        log_axis(axis, "x")
    if section.metric == "ppl":
        log_axis(axis)
    if section.metric in LOWER_IS_BETTER:
        axis.invert_yaxis()
    axis.set_xlabel(LABELS[cost], fontsize=8)
    axis.set_ylabel(LABELS[section.metric], fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#eceff2", linewidth=0.8)
