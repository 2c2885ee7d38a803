"""Pictures: their size after an image processor, the kept shares of their patches, and a figure.

Shape letters as in `mmkv.scores`; P is the number of pictures of a prompt.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

Shares = NDArray[np.float32]

# Suffixes of the files that figures are written to.
FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".pdf", ".svg")
# Pixels that an image processor may scale a picture to; in float32, 200 MB.
_MAX_PIXELS = 2**24
# Share of light and colour that remains of a patch that no head keeps.
_DIM = 0.2
_SHADE = np.array([34.0, 38.0, 48.0])
_INK, _QUIET, _LINE = "#22262e", "#6b7280", "#ffffff"


def check_format(path: str | os.PathLike[str]) -> None:
    """Refuse a file name that does not end as one of `FORMATS`."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{os.fspath(path)}: expected a name that ends in {', '.join(FORMATS)}")


def check_size(picture: Image.Image, processor: Any) -> None:
    """Refuse a picture that an image processor would scale to too many pixels.

    Only processors that scale the shorter side to a fixed length enlarge strips without bound.
    """
    size_options, (width, height) = dict(getattr(processor, "size", None) or {}), picture.size
    side = size_options.get("shortest_edge")
    if side is None or size_options.get("longest_edge") is not None:
        return
    new_width, new_height = (int(side * x / min(width, height)) for x in (width, height))
    if new_width * new_height > _MAX_PIXELS:
        raise ValueError(
            f"a picture of {width} x {height} pixels, which the model's image processor would "
            f"scale to {new_width} x {new_height}: give one whose sides differ less"
        )


def kept_patches(shares: Tensor, image: Tensor, pictures: int) -> Shares:
    """Return the kept share of each patch, mean over heads: float32 [P, rows, cols] in [0, 1].

    `shares` [H, T] is a row of `cache.shares(layer)`; `image` [N] is True for image tokens, which
    belong to P pictures, in order.

    Raises:
        ValueError: the pictures have no square grid of patches each.
    """
    tokens = image.nonzero()[:, 0]
    side = math.isqrt(len(tokens) // max(1, pictures))
    if side == 0 or pictures * side**2 != len(tokens):
        raise ValueError(
            f"the patch grid is not known: {len(tokens)} image tokens of {pictures} picture(s) "
            "are not one square grid for each picture"
        )
    patches = shares.to(tokens.device).mean(dim=0)[tokens]
    return patches.view(pictures, side, side).cpu().numpy()


def as_seen(picture: Image.Image, pixels: Any, processor: Any) -> Image.Image:
    """Return the part of a picture that the model sees, as sharp as the original if possible.

    It is RGB; `pixels` [3, height, width] are the image processor's output.
    """
    mean, std = (np.reshape(getattr(processor, f"image_{x}"), (3, 1, 1)) for x in ("mean", "std"))
    rgb = np.clip(np.asarray(pixels, dtype=np.float64) * std + mean, 0, 1).transpose(1, 2, 0) * 255
    seen = Image.fromarray(rgb.round().astype(np.uint8))
    width, height = picture.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    for candidate in (picture, picture.crop((left, top, left + side, top + side))):
        small = np.asarray(candidate.resize(seen.size, Image.Resampling.BICUBIC), dtype=np.float64)
        if np.abs(small - rgb).mean() < 6:  # of 255: the same part, up to rounding
            longest = max(256, *seen.size)
            return candidate.resize((longest, longest * seen.height // seen.width))
    return seen


def save(
    path: str | os.PathLike[str],
    picture: Image.Image,
    layers: Sequence[tuple[int, Shares]],
    title: str,
) -> None:
    """Write the picture once for each layer, evicted patches darkened, and the mean over layers.

    `picture` is RGB, as the model sees it; `layers` has the shares of `kept_patches` by layer. The
    suffix gives the format; missing folders are made.
    """
    from matplotlib.figure import Figure

    check_format(path)
    if not layers:
        raise ValueError("no compressed layer, so there is nothing to show")
    panels = len(layers) + 2
    cols = min(5 if panels <= 20 else 8, panels)
    rows = math.ceil(panels / cols)
    width, height = 2.3 * cols + 0.2, 2.6 * rows + 0.8  # inches
    figure = Figure(figsize=(width, height), dpi=110, facecolor="white")
    left = 0.15 / width
    edges = {"left": left, "right": 1 - left, "bottom": 0.25 / height, "top": 1 - 0.9 / height}
    figure.subplots_adjust(**edges, wspace=0.06, hspace=0.15)
    figure.text(left, 1 - 0.15 / height, title, va="top", fontsize=12, color=_INK)
    legend = (
        "Brightness: the share of heads that keep a patch; a patch in a group of m counts 1/m. "
        "Numbers: means over heads."
    )
    figure.text(left, 1 - 0.42 / height, legend, va="top", fontsize=8.5, color=_QUIET)

    def panel(i: int, caption: str) -> Axes:
        axis = figure.add_subplot(rows, cols, i + 1)
        axis.set_axis_off()
        axis.set_title(caption, y=1, fontsize=9, color=_INK, pad=4)
        return axis

    panel(0, "the picture").imshow(picture)
    for i, (layer, shares) in enumerate(layers, start=1):
        axis = panel(i, f"layer {layer}: {shares.sum():.0f} of {shares.size}")
        axis.imshow(_lit(picture, shares))
        # A thin line around kept patches, as dark objects look like darkened patches.
        outline = np.pad(_spread(shares > 0, picture), 1)
        x, y = np.arange(outline.shape[1]) - 1, np.arange(outline.shape[0]) - 1
        axis.contour(x, y, outline, levels=[0.5], colors=_LINE, linewidths=0.8, alpha=0.85)

    mean = np.mean([shares for _, shares in layers], axis=0)
    extent = (-0.5, picture.width - 0.5, picture.height - 0.5, -0.5)
    axis = panel(panels - 1, f"all layers: {mean.mean():.0%} kept")
    heatmap = axis.imshow(mean, cmap="cividis", vmin=0, vmax=1, extent=extent)
    scale = axis.inset_axes((0, -0.05, 1, 0.03))
    bar = figure.colorbar(heatmap, cax=scale, orientation="horizontal", ticks=[0.02, 0.98])
    bar.outline.set_visible(False)  # type: ignore[operator]
    scale.set_xticklabels(["in no layer and head", "in all"])
    scale.tick_params(labelsize=7, labelcolor=_QUIET, length=0, pad=2)
    for label, side in zip(scale.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(os.fspath(path))


def _lit(picture: Image.Image, shares: Shares) -> NDArray[np.uint8]:
    """Return the picture, each patch as bright as the share of heads that keep it."""
    rgb = np.asarray(picture, dtype=np.float64)
    light = _spread(shares, picture)[:, :, None]
    dark = _DIM * rgb + (1 - _DIM) * _SHADE
    return (light * rgb + (1 - light) * dark).round().astype(np.uint8)


def _spread(shares: NDArray[Any], picture: Image.Image) -> NDArray[Any]:
    """Return [rows, cols] enlarged to the picture's [height, width]."""
    rows, cols = shares.shape
    y = np.arange(picture.height) * rows // picture.height
    x = np.arange(picture.width) * cols // picture.width
    return shares[y[:, None], x[None, :]]
