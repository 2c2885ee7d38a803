"""The page's parts as HTML, by the macros of `views.html`.

Pictures are inside it, so that none has to lie in a file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from .outcome import Kept, Shares

if TYPE_CHECKING:
    from PIL import Image

    from .values import Turn

_THUMBNAIL = 96  # pixels
_SHADES = 5


@cache
def _macros() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mmkv.demo", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["size"] = _size
    return environment.get_template("views.html").module


def data_uri(picture: Image.Image, *, side: int = _THUMBNAIL) -> str:
    """A picture, at most `side` pixels wide and high, as a URI that holds it."""
    picture = picture.copy()
    picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def conversation(turns: Sequence[Turn], running: Turn | None = None) -> str:
    """All turns, the last of which may still be answered."""
    shown = [*turns, *([running] if running is not None else [])]
    return _macros().conversation(shown, data_uri)


def _size(nbytes: int) -> str:
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    if nbytes < 2**30:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes / 2**30:.2f} GiB"


def patches(kept: Kept, place: int) -> str:
    """The picture with one layer's kept patches lit, and beside it the mean over layers."""
    if kept.picture is None:
        return _macros().note(kept.problem or "This conversation has no picture.")
    place = min(max(place, 0), len(kept.layers) - 1)
    shares, mean = kept.patches[place], kept.mean
    rows, cols = mean.shape
    common = {
        "uri": data_uri(kept.picture, side=384),
        "ratio": kept.picture.width / kept.picture.height,
        "rows": rows,
        "cols": cols,
    }
    count = f"{shares.sum():.0f} of {shares.size} patches"
    # What no head holds is covered; what some hold, in part.
    dimmed = [
        (c, r, "#1f2430", f"{0.82 * (1 - share):.2f}")
        for (r, c), share in np.ndenumerate(shares)
        if share < 1
    ]
    heated = [
        (c, r, _colours()[round(float(share) * 100)], "0.8")
        for (r, c), share in np.ndenumerate(mean)
    ]
    lit = {
        "name": "mm-lit",
        "cells": dimmed,
        "edges": _edges(shares),
        "caption": f"Layer {kept.layers[place]}: {count} kept",
    }
    heat = {
        "name": "mm-heat",
        "cells": heated,
        "edges": None,
        "caption": f"All layers: {mean.mean():.0%} kept on average",
    }
    return _macros().patches([common | lit, common | heat])


@cache
def _colours() -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["cividis"](i / 100)) for i in range(101)]


def _edges(shares: Shares) -> str:
    """A thin line around what is kept, as an SVG path: objects stay apart from covered patches."""
    held = np.pad(shares > 0, 1)
    across = zip(*np.nonzero(held[:, :-1] != held[:, 1:]), strict=True)
    down = zip(*np.nonzero(held[:-1] != held[1:]), strict=True)
    return "".join([f"M{c} {r - 1}v1" for r, c in across] + [f"M{c - 1} {r}h1" for r, c in down])


def layer_bars(kept: Kept) -> str:
    """Kept tokens of each layer."""
    return _macros().layer_bars(kept)


def words(kept: Kept) -> str:
    """The prompt's text, each token shaded by how many layers kept it."""
    return _macros().words(kept.words, len(kept.layers), _SHADES)


def header(about: str) -> str:
    """What the page is."""
    return _macros().header(about)


def message(text: str) -> str:
    """An error for the user; empty for none."""
    return _macros().message(text)


def status(text: str) -> str:
    """What a screen reader says, unseen."""
    return _macros().status(text)


def examples(pictures: Sequence[tuple[str, Image.Image]]) -> str:
    """Pictures to choose from, as buttons; (description, picture)."""
    return _macros().examples(pictures, data_uri)


def questions(texts: Sequence[str]) -> str:
    """Questions to choose from, as buttons."""
    return _macros().questions(texts)
