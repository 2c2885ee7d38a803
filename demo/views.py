"""The page's parts as HTML. Pictures are inside it, so that none has to lie in a file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from .outcome import Kept, Shares, Word

if TYPE_CHECKING:
    from PIL import Image

    from .values import Side, Turn

_THUMBNAIL = 96  # pixels
_SHADES = 5


def data_uri(picture: Image.Image, *, side: int | None = None) -> str:
    """A picture as a URI that holds it; `side` makes it smaller."""
    if side is not None:
        picture = picture.copy()
        picture.thumbnail((side, side))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def conversation(turns: Sequence[Turn], running: Turn | None = None) -> str:
    """All turns, the last of which may still be answered."""
    shown = [*turns, *([running] if running is not None else [])]
    if not shown:
        return (
            '<div class="mm-empty"><p>Choose an example or upload a picture, and ask about it.</p>'
            "<p>Two answers appear here side by side: one with the full cache, one with the "
            "compressed cache.</p></div>"
        )
    return "".join(_turn(x) for x in shown)


def _turn(turn: Turn) -> str:
    picture = ""
    if turn.picture is not None:
        uri = data_uri(turn.picture, side=_THUMBNAIL)
        picture = f'<img src="{uri}" alt="The picture of this question">'
    sides = _side("Full cache", "full", turn.full)
    sides += _side(turn.label, "compressed", turn.compressed)
    notes = "".join(f'<p class="mm-note">{escape(x)}</p>' for x in turn.notes)
    if turn.rouge is not None:
        notes = (
            f'<p class="mm-note"><b>ROUGE-L {turn.rouge:.2f}</b> between the two answers '
            f"(1 is the same words in the same order).</p>{notes}"
        )
    return (
        f'<article class="mm-turn"><div class="mm-question">{picture}'
        f"<p>{escape(turn.question)}</p></div>"
        f'<div class="mm-sides">{sides}</div>{notes}</article>'
    )


def _side(name: str, kind: str, side: Side) -> str:
    cursor = "" if side.done else '<span class="mm-cursor" aria-hidden="true"></span>'
    numbers = (
        ("First token", "–" if side.first is None else f"{side.first * 1000:.0f} ms"),
        ("Speed", "–" if side.rate is None else f"{side.rate:.0f} tokens/s"),
        ("Kept", f"{side.kept:.0%}" if side.tokens else "–"),
    )
    cells = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in numbers)
    share = 100 * side.nbytes / max(side.full_nbytes, 1)
    held = f"{_size(side.nbytes)} of {_size(side.full_nbytes)}" if side.tokens else "–"
    return (
        f'<section class="mm-side mm-{kind}" aria-label="{escape(name)}">'
        f"<h3>{escape(name)}</h3>"
        f'<p class="mm-answer" data-done="{str(side.done).lower()}">{escape(side.text)}{cursor}</p>'
        f'<dl class="mm-numbers">{cells}</dl>'
        f'<div class="mm-cache"><span>Cache</span><span>{held}</span></div>'
        f'<div class="mm-bar" role="meter" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{share:.0f}" aria-label="Cache against a full cache, {escape(name)}">'
        f'<span style="width:{min(share, 100):.1f}%"></span></div></section>'
    )


def _size(nbytes: int) -> str:
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.0f} KiB"
    if nbytes < 2**30:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes / 2**30:.2f} GiB"


def patches(kept: Kept, place: int) -> str:
    """The picture with one layer's kept patches lit, and beside it the mean over layers."""
    if kept.picture is None:
        why = kept.problem or "This conversation has no picture."
        return f'<p class="mm-note">{escape(why)}</p>'
    place = min(max(place, 0), len(kept.layers) - 1)
    shares, mean = kept.patches[place], kept.mean
    layer = kept.layers[place]
    uri, shape = data_uri(kept.picture, side=384), mean.shape
    ratio = kept.picture.width / kept.picture.height
    lit = _grid(_dimmed(shares), _edges(shares), shape)
    heat = _grid(_heated(mean), "", shape)
    count = f"{shares.sum():.0f} of {shares.size} patches"
    return (
        '<div class="mm-patches">'
        + _figure(uri, ratio, lit, f"Layer {layer}: {count} kept", "mm-lit")
        + _figure(uri, ratio, heat, f"All layers: {mean.mean():.0%} kept on average", "mm-heat")
        + "</div>"
        '<div class="mm-scale"><span>in no head</span><i aria-hidden="true"></i>'
        "<span>in every head and layer</span></div>"
    )


def _figure(uri: str, ratio: float, overlay: str, caption: str, name: str) -> str:
    return (
        f'<figure class="{name}"><div class="mm-frame" style="aspect-ratio:{ratio:.4f}">'
        f'<img src="{uri}" alt="{escape(caption)}">{overlay}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _grid(cells: Iterable[str], edges: str, shape: Sequence[int]) -> str:
    rows, cols = shape
    return (
        f'<svg viewBox="0 0 {cols} {rows}" preserveAspectRatio="none" aria-hidden="true" '
        f'shape-rendering="crispEdges">{"".join(cells)}{edges}</svg>'
    )


def _dimmed(shares: Shares) -> list[str]:
    """What no head holds is covered; what some hold, in part."""
    return [
        f'<rect x="{c}" y="{r}" width="1" height="1" fill="#1f2430" '
        f'fill-opacity="{0.82 * (1 - share):.2f}"/>'
        for (r, c), share in np.ndenumerate(shares)
        if share < 1
    ]


def _heated(shares: Shares) -> list[str]:
    colours = _colours()
    return [
        f'<rect x="{c}" y="{r}" width="1" height="1" fill="{colours[round(float(share) * 100)]}" '
        'fill-opacity="0.8"/>'
        for (r, c), share in np.ndenumerate(shares)
    ]


@lru_cache(maxsize=1)
def _colours() -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["cividis"](i / 100)) for i in range(101)]


def _edges(shares: Shares) -> str:
    """A thin line around what is kept: a dark object stays apart from a covered patch."""
    held = np.pad(shares > 0, 1)
    across = (
        f"M{c} {r - 1}v1" for r, c in zip(*np.nonzero(held[:, :-1] != held[:, 1:]), strict=True)
    )
    down = (f"M{c - 1} {r}h1" for r, c in zip(*np.nonzero(held[:-1] != held[1:]), strict=True))
    path = "".join([*across, *down])
    return f'<path d="{path}" fill="none" stroke="#fff" vector-effect="non-scaling-stroke"/>'


def layer_bars(kept: Kept) -> str:
    """Kept tokens of each layer."""
    rows = "".join(
        f'<tr><th scope="row">{layer}</th><td><span class="mm-bar">'
        f'<span style="width:{100 * size / kept.seen:.1f}%"></span></span></td>'
        f"<td>{size:.0f}</td></tr>"
        for layer, size in zip(kept.layers, kept.sizes, strict=True)
    )
    return (
        '<table class="mm-layers"><caption>Tokens each layer kept of '
        f"{kept.seen} (mean over heads)</caption><thead><tr>"
        '<th scope="col">Layer</th><th scope="col"><span class="mm-hidden">Share</span></th>'
        f'<th scope="col">Kept</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def words(kept: Kept) -> str:
    """The prompt's text, each token shaded by how many layers kept it."""
    n = len(kept.layers)
    spans = "".join(_word(x, n) for x in kept.words)
    steps = "".join(f'<i class="mm-s{i}"></i>' for i in range(_SHADES + 1))
    return (
        '<h4 class="mm-caption">The prompt, each token shaded by how many layers kept it</h4>'
        f'<p class="mm-words">{spans}</p>'
        f'<div class="mm-scale mm-steps"><span>no layer</span>{steps}<span>all {n}</span></div>'
    )


def _word(word: Word, n: int) -> str:
    if word.layers is None:
        about = f"picture: {word.tokens} tokens, {word.kept:.0%} kept"
        return f'<span class="mm-picture">{about}</span>'
    shade = -(-word.layers * _SHADES // n)  # only "no layer" is unshaded
    text = escape(word.text).replace("\n", "⏎")
    return f'<span class="mm-s{shade}" title="kept in {word.layers} of {n} layers">{text}</span>'


def message(text: str) -> str:
    """An error for the user; empty for none."""
    if not text:
        return ""
    return f'<p class="mm-error">{escape(text[:1].upper() + text[1:])}</p>'


def examples(pictures: Sequence[tuple[str, Image.Image]]) -> str:
    """Pictures to choose from, as buttons; (description, picture)."""
    buttons = "".join(
        f'<button type="button" class="mm-example" data-index="{i}" '
        f'aria-label="Use example {i + 1}: {escape(about)}">'
        f'<img src="{data_uri(picture, side=_THUMBNAIL)}" alt=""></button>'
        for i, (about, picture) in enumerate(pictures)
    )
    return f'<div class="mm-examples" role="group" aria-label="Example pictures">{buttons}</div>'


def questions(texts: Sequence[str]) -> str:
    """Questions to choose from, as buttons."""
    buttons = "".join(
        f'<button type="button" class="mm-chip" data-index="{i}">{escape(x)}</button>'
        for i, x in enumerate(texts)
    )
    return f'<div class="mm-chips" role="group" aria-label="Example questions">{buttons}</div>'
