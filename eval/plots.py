"""Metric against budget, tokens kept by layer, Lorenz curves, importance, and what heads cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import COLOURS, finish, log_axis, panels, save, style_of, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from mmkv.curves import Curves

    from .report import Report
    from .variants import Variant

_HINTS = {
    "ppl": " (lower is better)",
    "divergence": " (lower is better)",
    "rouge": " against the full cache's reply",
    "retained": ", mean over layers",
}


def plot_report(report: Report, folder: Path) -> list[Path]:
    """A run's curves, and a heat-map where samples lie on a grid of depth and length."""
    from mmkv.budgets import named

    paths = []
    if len(report.every) > 1:
        paths.append(save(curves(report), folder / "curves.png"))
    if {t.split("=")[0] for t in report.tags} >= {"depth", "length"}:
        for budget in report.budgets:
            name = f"needle-{named(budget)}.png"
            paths.append(save(heat_map(report, budget), folder / name))
    return paths


def curves(report: Report) -> Figure:
    """One panel a metric: the metric against the budget, one line a policy."""
    from .measure import FULL, LABELS

    metrics = [*report.shown]
    every = [report.figures(p, b) for p in report.policies for b in report.budgets]
    metrics += ["retained"] if any(f and f.retained is not None for f in every) else []
    figure, axes = panels(len(metrics))
    full = report.figures(FULL, 1.0)
    budgets = sorted(report.budgets, key=float)
    fractions = all(isinstance(b, float) for b in budgets)
    places = [100 * b for b in budgets] if fractions else [float(b) for b in budgets]
    for axis, metric in zip(axes, metrics, strict=True):
        top = 100.0 if metric == "score" else 1.0
        for policy in report.policies:
            found = [report.figures(policy, b) for b in budgets]
            values = [getattr(f, metric) if f else None for f in found]
            known = [(x, top * y) for x, y in zip(places, values, strict=True) if y is not None]
            if known:
                axis.plot(*zip(*known, strict=True), label=policy, **style_of(policy))
        value = getattr(full, metric) if full else None
        if value is not None:
            axis.axhline(top * value, label="full cache", color=COLOURS[FULL], lw=1.2, ls=":")
        if metric == "ppl":
            log_axis(axis)
        axis.set_title(LABELS[metric] + _HINTS.get(metric, ""), fontsize=10, loc="left")
        axis.set_xlabel(
            "kept, % of the prompt" if fractions else "kept, tokens per head", fontsize=9
        )
        axis.set_xticks(places, [f"{x:g}" for x in places])
    s = report.settings
    finish(figure, axes, f"{s['suite']} ({s['data']}), {s['model']}, n = {s['n']}")
    return figure


def heat_map(report: Report, budget: float | int) -> Figure:
    """Mean score by depth and length, one panel a policy (needle in a haystack)."""
    import matplotlib.pyplot as plt

    from .measure import FULL
    from .variants import percent

    def values(tag: str) -> list[str]:
        found = [t.split("=")[1] for t in report.tags if t.startswith(f"{tag}=")]
        return sorted(found, key=float)

    depths, lengths = values("depth"), values("length")
    policies = [p for p in [FULL, *report.policies] if report.figures(p, budget)]
    across = min(4, len(policies))
    down = -(-len(policies) // across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(1.2 + 2.3 * across, 0.9 + 1.9 * down),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    image = None
    for axis, policy in zip(grid.flat, policies, strict=False):
        cells = [
            [
                report.figures(
                    policy,
                    budget,
                    lambda r, d=d, n=n: f"depth={d}" in r["tags"] and f"length={n}" in r["tags"],
                )
                for n in lengths
            ]
            for d in depths
        ]
        shares = [
            [float("nan") if not f or f.score is None else 100 * f.score for f in row]
            for row in cells
        ]
        image = axis.imshow(shares, vmin=0, vmax=100, cmap="YlGnBu", aspect="auto")
        axis.set_xticks([i - 0.5 for i in range(1, len(lengths))], minor=True)
        axis.set_yticks([i - 0.5 for i in range(1, len(depths))], minor=True)
        axis.grid(which="minor", color="white", linewidth=1.2)
        axis.tick_params(which="both", length=0)
        axis.spines[:].set_visible(False)
        axis.set_title(policy, fontsize=9)
        axis.set_xticks(range(len(lengths)), lengths, fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{100 * float(d):g}" for d in depths], fontsize=7)
    for axis in grid.flat[len(policies) :]:
        axis.set_visible(False)
    figure.supxlabel("length of the text", fontsize=9)
    figure.supylabel("depth of the needle, %", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, label="found, %", shrink=0.8)
    s = report.settings
    figure.suptitle(
        f"{s['suite']}, {s['model']}, kept: {percent(budget)}", fontsize=10.5, x=0.01, ha="left"
    )
    return figure


def plot_prompt(
    model: Any,
    inputs: Mapping[str, Any],
    kind: str,
    variants: Sequence[Variant],
    budget: float | int,
    about: str,
) -> Figure:
    """What policies make of one prompt.

    Args:
        model: not wrapped.
        inputs: the prompt, one row.
        kind: "layers" (kept tokens), "lorenz" (of the first policy's score) or "retention".
        variants: the policies.
        budget: for "layers" and "retention".
        about: model and prompt, for the title.
    """
    import torch

    from mmkv.registry import get_policy

    from .variants import percent

    if kind == "lorenz":
        first = variants[0]
        scores = layer_scores(model, inputs, get_policy(first.name, **first.options))
        what = f"share of importance held, %, by the score of {first.label}"
        return lorenz([s[0] for s in scores], title=about, what=what)
    values: dict[str, list[float | None]] = {}
    full = None
    for variant in variants:
        with variant.wrapped(model, budget), torch.no_grad():
            report = model(**inputs, use_cache=True).past_key_values.report()
        layers = [x for x in report.layers if x.compressed]
        kept: list[float | None] = [x.mean_kept for x in layers]
        values[variant.label] = kept if kind == "layers" else [x.retained for x in layers]
        full = float(report.seen[0])
    title = f"{about}, kept: {percent(budget)}"
    if kind == "layers":
        return layer_lines(values, title=title, what="kept tokens per head, by layer", full=full)
    return layer_lines(values, title=title, what="retained importance, by layer", full=1.0)


def layer_lines(
    values: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    what: str,
    full: float | None = None,
) -> Figure:
    """One value a layer, one line a policy: kept tokens, or retained importance."""
    figure, (axis,) = panels(1)
    for label, numbers in values.items():
        known = [(i, v) for i, v in enumerate(numbers) if v is not None]
        if known:
            axis.plot(*zip(*known, strict=True), label=label, **style_of(label))
    if full is not None:
        axis.axhline(full, label="full cache", color=COLOURS["full"], lw=1.2, ls=":")
    axis.set_ylim(bottom=0)
    axis.set_title(what, fontsize=10, loc="left")
    axis.set_xlabel("layer", fontsize=9)
    whole_ticks(axis.xaxis)
    finish(figure, [axis], title)
    return figure


def lorenz(scores: Sequence[Tensor], *, title: str, what: str) -> Figure:
    """Share of importance held by the most important tokens, one line a layer.

    Args:
        scores: importance of one prompt in each layer, [H or 1, C]; heads are averaged after
            each is sorted, as each keeps its own best.
        title: above the figure.
        what: above the panel.
    """
    import matplotlib.pyplot as plt
    import torch

    figure, (axis,) = panels(1)
    colours = plt.get_cmap("viridis")
    last = max(1, len(scores) - 1)
    for layer, s in enumerate(scores):
        ranked = s.float().cpu().clamp(min=0).sort(dim=-1, descending=True).values.mean(0)
        share = torch.cat([torch.zeros(1), ranked.cumsum(0)]) / ranked.sum()
        x = torch.linspace(0, 100, len(share))
        axis.plot(
            x, 100 * share, color=colours(0.92 * layer / last), lw=1.4, label=f"layer {layer}"
        )
    axis.plot([0, 100], [0, 100], color="#bbbbbb", lw=1, ls=":", label="all alike")
    axis.set_title(what, fontsize=10, loc="left")
    axis.set_xlabel("most important tokens, % of the prompt", fontsize=9)
    finish(figure, [axis], title)
    return figure


def head_costs(measured: Curves, budgets: Sequence[float], *, title: str) -> Figure:
    """What shrinking a head costs, one line a layer, and each head's share at some budgets."""
    import matplotlib.pyplot as plt

    figure, (axis, *maps) = panels(1 + len(budgets))
    colours = plt.get_cmap("viridis")
    last = max(1, len(measured.costs) - 1)
    places = [100 * level for level in measured.levels]
    for layer, heads in enumerate(measured.costs):
        mean = [sum(costs) / len(heads) for costs in zip(*heads, strict=True)]
        known = [(x, y) for x, y in zip(places, mean, strict=True) if y > 0]
        if known:
            colour = colours(0.92 * layer / last)
            axis.plot(*zip(*known, strict=True), color=colour, lw=1.4, label=f"layer {layer}")
    axis.set_yscale("log")
    axis.set_title("cost of one head alone, nats a token", fontsize=10, loc="left")
    axis.set_xlabel("kept by the head, % of the prompt", fontsize=9)
    image = None
    for place, budget in zip(maps, budgets, strict=True):
        shares = measured.shares(budget, range(len(measured.costs)))
        percents = [[100 * share for share in heads] for heads in shares]
        image = place.imshow(percents, vmin=0, vmax=100, cmap="YlGnBu", aspect="auto")
        place.grid(False)
        if len(percents) * len(percents[0]) <= 100:
            for y, row in enumerate(percents):
                for x, value in enumerate(row):
                    dark = "white" if value > 55 else "black"
                    place.text(
                        x, y, f"{value:.0f}", ha="center", va="center", fontsize=7, color=dark
                    )
        place.set_title(f"kept at a budget of {100 * budget:g} %", fontsize=10, loc="left")
        place.set_xlabel("head", fontsize=9)
        place.set_ylabel("layer", fontsize=9)
        whole_ticks(place.xaxis, place.yaxis)
    if image is not None:
        figure.colorbar(image, ax=maps, label="% of the prompt", shrink=0.8)
    finish(figure, [axis], title)
    return figure


def layer_scores(model: Any, inputs: Mapping[str, Any], policy: Any) -> list[Tensor]:
    """A policy's importance of a prompt's tokens in each layer, [B, H or 1, N].

    Args:
        model: not wrapped.
        inputs: what a processor returns.
        policy: a `Policy` with an attention score.

    Raises:
        ValueError: the policy has none, or the prompt is too short to lose a token.
    """
    import torch

    from mmkv.parts.sizing import UniformHeads, UniformLayers
    from mmkv.wrapping import comparing, wrapped

    if not policy.score.ranks or policy.keeps_all:
        raise ValueError(f"policy {policy.name!r} has no attention score")
    found: list[Tensor] = []

    class Recording(type(policy.score)):  # type: ignore[misc]
        def __call__(self, layer: Any) -> Tensor:
            found.append(super().__call__(layer))
            return found[-1]

    # Equal layers in one pass: each layer is scored once, in order.
    recording = replace(
        policy,
        score=Recording(**policy.score.options()),
        layers=UniformLayers(),
        heads=UniformHeads(),
        least=0,
    )
    with comparing(), wrapped(model, recording, 0.9), torch.no_grad():
        model(**inputs, use_cache=True)
    if not found:
        raise ValueError("the prompt is too short to lose a token, so none is scored")
    return found
