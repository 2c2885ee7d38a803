"""Figures: a run's curves, quality against bytes, what policies keep, costs of heads."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from .store import FULL, percent
from .tabulate import LABELS, LOWER_IS_BETTER, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

    from .variants import Variant

_HINTS = {
    "ppl": " (lower is better)",
    "divergence": " (lower is better)",
    "rouge": " against the full cache's reply",
    "retained": ", mean over layers",
}
_BLACK = "#222222"


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a line style by label; one with options is dashed, in its policy's colour."""
    names = list(dict.fromkeys(label.split(":")[0] for label in labels))
    # The dark colours come first.
    palette = [mpl.colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
    style: dict[str, dict[str, Any]] = {}
    for label, marker in zip(dict.fromkeys(labels), itertools.cycle("osD^vP<>Xph*d"), strict=False):
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
    """Return a figure and its panels, row by row."""
    figure = Figure(figsize=(1.9 + 3.7 * across, 3.7 * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes:
        axis.grid(True, color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#888888")
        axis.tick_params(labelsize=8, color="#888888")
    return figure, axes


def _head(axis: Axes, title: str, below: str, beside: str = "") -> None:
    axis.set_title(textwrap.fill(title, 42), fontsize=10, loc="left")
    axis.set_xlabel(below, fontsize=9)
    axis.set_ylabel(beside, fontsize=9)


def _finish(figure: Figure, title: str) -> Figure:
    """Add a title above, and one legend for all panels on the right."""
    lines: dict[str, Any] = {}
    for axis in figure.axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
    legend_style: dict[str, Any] = {"loc": "outside right center", "frameon": False, "fontsize": 8}
    columns = 1 + (len(lines) - 1) // 20
    figure.set_figwidth(figure.get_figwidth() + 2.5 * (columns - 1))
    figure.legend(lines.values(), lines.keys(), ncols=columns, **legend_style)
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
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


def curves(report: Report) -> Figure:
    """Draw each metric against the budget in a panel of its own, one line a policy."""
    budgets = sorted(report.budgets, key=float)
    metrics = report.curves
    figure, axes = _panels(len(metrics))
    full = report.figures(FULL, 1.0)
    in_fractions = all(isinstance(b, float) for b in budgets)
    x_values = np.array(budgets, dtype=float) * (100 if in_fractions else 1)
    style = styles(report.policies)
    for axis, metric in zip(axes, metrics, strict=True):
        top = 100.0 if metric == "score" else 1.0
        for policy in report.policies:
            values = top * np.array([report.figures(policy, b)[metric] for b in budgets])
            if (known := np.isfinite(values)).any():
                axis.plot(x_values[known], values[known], label=policy, **style[policy])
        if np.isfinite(full[metric]):
            axis.axhline(top * full[metric], label="full cache", color=_BLACK, lw=1.2, ls=":")
        if metric == "ppl":
            _log(axis.yaxis)
        below = "kept, % of the prompt" if in_fractions else "kept, tokens per head"
        if report.settings.get("memory"):
            below = "% of the full cache's bytes"
        _head(axis, LABELS[metric] + _HINTS.get(metric, ""), below)
        axis.set_xticks(x_values, [f"{x:g}" for x in x_values])
    s = report.settings
    return _finish(figure, f"{s['suite']} ({s['data']}), {s['model']}, n = {s['n']}")


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
                axis.set_yscale("log")
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


def plot_prompt(
    model: Any,
    inputs: Mapping[str, Any],
    kind: str,
    variants: Sequence[Variant],
    budget: float | int,
    source: str,
) -> Figure:
    """Draw what policies keep of one prompt; the model is not wrapped yet.

    `kind` is "layers" (kept tokens), "lorenz" (of the first policy's score) or "retention";
    `source` names model and prompt in the title.
    """
    import torch

    from mmkv.calls import cache_in

    if kind == "lorenz":
        return _lorenz(model, inputs, variants[0], source)
    figure, (axis,) = _panels(1)
    full, style = 1.0, styles([v.label for v in variants])
    lines: dict[tuple[float | None, ...], list[str]] = {}  # policies by the values they share
    for variant in variants:
        with variant.wrapped(model, budget), torch.no_grad():
            report = cache_in(model(**inputs, use_cache=True)).report()
        layers = [x for x in report.layers if x.compressed]
        values = tuple(x.mean_kept if kind == "layers" else x.retained for x in layers)
        full = float(report.seen[0]) if kind == "layers" else 1.0
        lines.setdefault(values, []).append(variant.label)
    for values, (label, *others) in lines.items():
        known = [(i, value) for i, value in enumerate(values) if value is not None]
        if known:
            name = f"{', '.join((label, *others))}: the same" if others else label
            axis.plot(*zip(*known, strict=True), label=name, **style[label])
    axis.axhline(full, label="full cache", color=_BLACK, lw=1.2, ls=":")
    axis.set_ylim(bottom=0)
    quantity = "kept tokens per head" if kind == "layers" else "retained importance"
    _head(axis, f"{quantity}, by layer", "layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, f"{source}, kept: {percent(budget)}")


def _draw_layers(axis: Axes, lines: Sequence[tuple[Any, Any]]) -> None:
    """Draw a line of x and y for each layer, from dark to light."""
    for layer, (x, y) in enumerate(lines):
        colour = mpl.colormaps["viridis"](0.92 * layer / max(1, len(lines) - 1))
        axis.plot(x, y, color=colour, lw=1.4, label=f"layer {layer}")


def _lorenz(model: Any, inputs: Mapping[str, Any], variant: Variant, about: str) -> Figure:
    """Draw the share of importance of the most important tokens, one line a layer."""
    scores = layer_scores(model, inputs, variant.policy)
    (figure, (axis,)), lines = _panels(1), list[tuple[Any, Any]]()
    for s in scores:
        # Heads are averaged after each is sorted, as each keeps its own best.
        ranked = s[0].float().cpu().clamp(min=0).sort(dim=-1, descending=True).values.mean(0)
        share = np.insert((ranked.cumsum(0) / ranked.sum()).numpy(), 0, 0.0)
        lines.append((np.linspace(0, 100, len(share)), 100 * share))
    _draw_layers(axis, lines)
    axis.plot([0, 100], [0, 100], color="#bbbbbb", lw=1, ls=":", label="all alike")
    heading = f"share of importance held, %, by the score of {variant.label}"
    _head(axis, heading, "most important tokens, % of the prompt")
    return _finish(figure, about)


def heads(path: Path | None, model: str) -> Figure:
    """Draw what shrinking a head costs, one line a layer, and each head's share at some budgets.

    The profile, by default that of the model's folder, must have cost curves. Raises ValueError.
    """
    from mmkv.loading import models
    from mmkv.profiles import FILE, Profile

    path = path or Path(models.find(model, convert=False).path) / FILE
    profile = Profile.load(path)
    measured, budgets = profile.curves, (0.1, 0.2, 0.4)
    if measured is None:
        raise ValueError(f"profile {path}: it has layer sizes alone: use one of condense")
    figure, (axis, *maps) = _panels(1 + len(budgets))
    costs = np.array(measured.costs)  # layers, heads, levels
    shares_kept = 100 * np.array(measured.levels)
    _draw_layers(axis, [(shares_kept[mean > 0], mean[mean > 0]) for mean in costs.mean(1)])
    axis.set_yscale("log")
    _head(axis, "cost of one head alone, nats a token", "kept by the head, % of the prompt")
    image: Any = None
    for panel, budget in zip(maps, budgets, strict=True):
        shares = 100 * np.array(measured.shares(budget, range(len(costs))))
        panel.grid(False)
        image = panel.imshow(shares, vmin=0, vmax=100, cmap="YlGnBu", aspect="auto")
        for (y, x), value in np.ndenumerate(shares) if shares.size <= 100 else ():
            text_style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            panel.text(x, y, f"{value:.0f}", color="white" if value > 55 else "black", **text_style)
        _head(panel, f"kept at a budget of {100 * budget:g} %", "head", "layer")
        for side in (panel.xaxis, panel.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=maps, label="% of the prompt", shrink=0.8)
    return _finish(figure, f"{path}: {profile.policy}, {profile.samples} prompts")


def layer_scores(model: Any, inputs: Mapping[str, Any], policy: Any) -> list[Tensor]:
    """Return a policy's scores of a prompt by layer, each [B, H or 1, N]. Raises ValueError if the
    policy has no attention score, or the prompt is too short to lose a token."""
    import torch

    from mmkv.sizes.heads import UniformHeads
    from mmkv.sizes.layers import UniformLayers
    from mmkv.wrapping import comparing, wrapped

    if not policy.score.ranks or policy.keeps_all:
        raise ValueError(f"policy {policy.name!r} has no attention score")
    scores: list[Tensor] = []

    class Recording(type(policy.score)):  # type: ignore[misc]
        def __call__(self, layer: Any) -> Tensor:
            scores.append(super().__call__(layer))
            return scores[-1]

    # With equal layer sizes one pass scores each layer once, in order.
    equal_sizes: Any = {"layers": UniformLayers(), "heads": UniformHeads(), "least": 0}
    recording = replace(policy, score=Recording(**policy.score.options()), **equal_sizes)
    with comparing(), wrapped(model, recording, 0.9), torch.no_grad():
        model(**inputs, use_cache=True)
    if not scores:
        raise ValueError("the prompt is too short to lose a token, so none is scored")
    return [x.mean(1, keepdim=True) if policy.score.average_heads else x for x in scores]
