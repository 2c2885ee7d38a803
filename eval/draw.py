"""Figures: quality against bytes, and the tokens that policies keep in each layer."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from .store import FULL, percent
from .tabulate import LABELS, LOWER_IS_BETTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .variants import Variant

_BLACK = "#222222"


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a line style by label; one with options is dashed, in its policy's colour."""
    names = list(dict.fromkeys(label.split(":")[0] for label in labels))
    # The dark colours come first.
    palette = [mpl.colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
    style: dict[str, dict[str, Any]] = {}
    for label, marker in zip(dict.fromkeys(labels), itertools.cycle("oD^vP<>Xph*d"), strict=False):
        colour = palette[names.index(label.split(":")[0]) % len(palette)]
        line, inside = ("-", colour) if ":" not in label else ((0, (3, 1.5)), "white")
        style[label] = {"color": colour, "marker": marker, "linestyle": line, "linewidth": 1.6}
        style[label] |= {"markerfacecolor": inside, "markersize": 4.5}
    return style


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix."""
    # Without the library's version in a PNG, the same rows give the same file.
    metadata = {"Software": None} if path.suffix.lower() == ".png" else None
    figure.savefig(path, dpi=150, metadata=metadata)
    return path


def _panels(across: int, down: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, row by row; the panels of a row have the same x-axis."""
    figure = Figure(figsize=(1.9 + 3.7 * across, 3.7 * down), layout="constrained")
    axes = list(figure.subplots(down, across, sharex="row", squeeze=False).flat)
    for axis in axes:
        axis.grid(True, color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#888888")
        axis.tick_params(labelsize=8, color="#888888")
    return figure, axes


def _head(axis: Axes, title: str, below: str, beside: str = "") -> None:
    # A name with two dollar signs is no formula.
    axis.set_title(textwrap.fill(title, 42), fontsize=10, loc="left", parse_math=False)
    axis.set_xlabel(below, fontsize=9)
    axis.set_ylabel(textwrap.fill(beside, 30), fontsize=9)


def _finish(figure: Figure, title: str) -> Figure:
    """Add a title above, and one legend for all panels on the right."""
    lines: dict[str, Any] = {}
    for axis in figure.axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
    legend_style: dict[str, Any] = {"loc": "outside right center", "frameon": False, "fontsize": 8}
    columns = 1 + (len(lines) - 1) // 20
    figure.set_figwidth(figure.get_figwidth() + 2.5 * (columns - 1))
    legend = figure.legend(lines.values(), lines.keys(), ncols=columns, **legend_style)
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left", parse_math=False)
    return figure


def _log(axis: Any) -> None:
    """Make an x or y axis logarithmic, with plain numbers at 1, 2, 5, 10, ..."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high / low < 500 else (1.0,)
    if high / low < 4:
        subs = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def frontier(sections: Sequence[tuple[str, list[str], Any]]) -> Figure:
    """Draw quality against bytes, a row of panels for each section of a `Comparison`.

    Bytes are a share of the full cache's in the model's own type. A line joins the budgets of a
    policy; the dotted line is the full cache.
    """
    drawn = [_drawn(points) for *_, points in sections]
    panels = max(map(len, drawn))
    figure, axes = _panels(panels, len(sections))
    named = [(title, _with_lines(points)) for title, _, points in sections]
    lines = [str(name) for _, points in named for name in points["line"].unique()]
    style = styles(lines) | {FULL: {"color": _BLACK, "marker": "s", "markersize": 4.5}}
    for row, ((title, points), metrics) in enumerate(zip(named, drawn, strict=True)):
        for axis in axes[row * panels + len(metrics) : (row + 1) * panels]:
            axis.set_visible(False)
        for axis, metric in zip(axes[row * panels :], metrics, strict=False):
            top = 1.0 if metric in (*LOWER_IS_BETTER, "rouge") else 100.0
            for name, group in points.groupby("line", sort=False):
                line = group.sort_values("share")
                look: Any = style[str(name)]
                axis.plot(100 * line["share"], top * line[metric], label=name, **look)
            full = points[points["policy"] == FULL][metric]
            if len(full) and metric not in LOWER_IS_BETTER:
                axis.axhline(top * full.iloc[0], color=_BLACK, lw=1, ls=":", zorder=0)
            _log(axis.xaxis)
            if metric in LOWER_IS_BETTER:
                _log(axis.yaxis)
            below = "bytes held, % of the full cache's"
            _head(axis, title if axis is axes[row * panels] else "", below, LABELS[metric])
    return _finish(figure, "Quality against bytes")


def _with_lines(points: Any) -> Any:
    """Add the name of each point's line: its policy, and whether shares are of bytes."""
    in_bytes = points["kept"].str.endswith(" of bytes") & (points["policy"] != FULL)
    return points.assign(line=points["policy"] + in_bytes.map({True: ":memory", False: ""}))


def _drawn(points: Any) -> list[str]:
    """Return the figures of quality that some policy but the full cache has."""
    others = points[points["policy"] != FULL]
    names = ("ppl", "divergence", "worst", "next", "rouge", "score")
    return [name for name in names if others[name].notna().any()]


def layers(
    model: Any,
    inputs: Mapping[str, Any],
    variants: Sequence[Variant],
    budget: float | int,
    source: str,
) -> Figure:
    """Draw the tokens that policies keep of one prompt, by layer; the model is not wrapped yet.

    `source` names model and prompt in the title.
    """
    import torch

    from mmkv.calls import cache_in

    figure, (axis,) = _panels(1)
    style, seen = styles([v.label for v in variants]), 0
    lines: dict[tuple[float, ...], list[str]] = {}  # policies by the values they share
    for variant in variants:
        size = budget if variant.policy.takes_budget else None
        with variant.wrapped(model, size), torch.no_grad():
            report = cache_in(model(**inputs, use_cache=True)).report()
        kept = tuple(x.mean_kept for x in report.layers if x.compressed)
        seen = report.seen[0]
        lines.setdefault(kept, []).append(variant.label)
    for values, (label, *others) in lines.items():
        name = f"{', '.join((label, *others))}: the same" if others else label
        axis.plot(values, label=name, **style[label])
    axis.axhline(seen, label="full cache", color=_BLACK, lw=1.2, ls=":")
    axis.set_ylim(bottom=0)
    _head(axis, "kept tokens per head, by layer", "layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, f"{source}, kept: {percent(budget)}")
