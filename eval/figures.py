"""How figures look: a policy has the same colour in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Family by hue: recency grey to brown, accumulated attention blue to green, windows warm,
# keys alone olive.
COLOURS = {
    "full": "#222222",
    "local": "#9a9a9a",
    "streaming": "#8c6d4f",
    "h2o": "#7fb2e5",
    "elastic": "#3aa6a0",
    "squeeze": "#2e7d32",
    "prefixkv": "#1f4fb4",
    "snapkv": "#f2a93b",
    "pyramidkv": "#e07b39",
    "pyramidinfer": "#b98ad9",
    "adakv": "#d64f8a",
    "ada-pyramidkv": "#8e2f7a",
    "xkv": "#c62828",
    "random": "#5d6d7e",
    "knorm": "#a5b84c",
    "keydiff": "#6b7f12",
    "lagkv": "#3f5a36",
    "expected": "#ef7f92",
    "defensive": "#7b1fa2",
    "layer-defensive": "#4a148c",
    "kvzip": "#00695c",
    "kvzip-plus": "#26a69a",
    "mixkv": "#ffca28",
    "tova": "#00bcd4",
    "condense": "#00838f",
    "vlcache": "#b5179e",
    "lookm": "#795548",
    "sparsemm": "#ff7043",
}
_OTHERS = ("#5b8c5a", "#7a6ff0", "#a1887f", "#c0a000")
_MARKERS = "osD^vP<>Xph*d"


def style_of(label: str) -> dict[str, Any]:
    """Colour, marker and dash of a policy; one with options of its own is dashed."""
    name = label.split(":")[0]
    names = list(COLOURS)
    if name in COLOURS:
        place = names.index(name)
        colour = COLOURS[name]
    else:
        place = sum(name.encode())
        colour = _OTHERS[place % len(_OTHERS)]
    dashed = ":" in label
    return {
        "color": colour,
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": (0, (3, 1.5)) if dashed else "-",
        "markerfacecolor": "white" if dashed else colour,
        "markersize": 4.5,
        "linewidth": 1.6,
    }


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix."""
    import matplotlib.pyplot as plt

    # A PNG names no version, so that the same rows give the same file.
    metadata = {"Software": None} if path.suffix.lower() == ".png" else None
    figure.savefig(path, dpi=150, metadata=metadata)
    plt.close(figure)
    return path


def panels(n: int) -> tuple[Figure, list[Axes]]:
    """A figure of n panels side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, n, figsize=(1.9 + 3.7 * n, 3.7), squeeze=False, layout="constrained"
    )
    for axis in axes[0]:
        axis.grid(True, color="#e6e6e6", linewidth=0.7)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color("#888888")
        axis.tick_params(labelsize=8, color="#888888")
    return figure, list(axes[0])


def whole_ticks(*axes: Any) -> None:
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def log_axis(axis: Axes, which: Literal["x", "y"] = "y") -> None:
    """Logarithmic, with plain numbers at 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set(**{f"{which}scale": "log"})
    low, high = axis.get_xlim() if which == "x" else axis.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 500 else (1.0,)
    if high / low < 4:
        subs = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    chosen = axis.xaxis if which == "x" else axis.yaxis
    chosen.set_major_locator(LogLocator(base=10, subs=subs))
    chosen.set_major_formatter(StrMethodFormatter("{x:g}"))
    chosen.set_minor_formatter(NullFormatter())


def finish(figure: Figure, axes: Sequence[Axes], title: str) -> None:
    """Title above, one legend for all panels outside on the right."""
    shown: dict[str, Any] = {}
    for axis in axes:
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, line)
    figure.legend(
        shown.values(), shown.keys(), loc="outside right center", frameon=False, fontsize=8
    )
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
