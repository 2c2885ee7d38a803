"""What one browser tab holds: a picture that is being drawn on, and a conversation about it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

from mmkv.loading import untrusted

from .talk import Talk
from .values import Settings, Turn

if TYPE_CHECKING:
    from .backend import Engine
    from .remote import ServedModel

MOST_BYTES = 20 * 2**20  # of an uploaded file
MOST_PIXELS = 40_000_000
LONGEST_SIDE = 1024  # pixels of a picture that is kept
_BLANK_SIDE = 384
_MOST_POINTS = 20_000
_COLOUR = re.compile(r"#[0-9a-f]{6}")

Stroke = tuple[str, float, list[tuple[float, float]]]


def read_upload(path: str | Path) -> Image.Image:
    """An uploaded picture as RGB, upright, at most `LONGEST_SIDE` wide and high.

    Raises:
        ValueError: too large, broken, or of no known format; the message names the file only.
    """
    path = Path(path)
    try:
        whole = untrusted.read_picture(path, _small, most_pixels=MOST_PIXELS, most_bytes=MOST_BYTES)
    except untrusted.PictureError as error:
        raise ValueError(f"cannot read {path.name!r}: {error}") from None
    whole.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return whole


def _small(picture: Image.Image) -> Image.Image:
    picture.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))
    return untrusted.upright(picture)


def checked_strokes(data: Any) -> list[Stroke]:
    """Strokes as the page sends them: colour, width and points as shares of the picture's width.

    Raises:
        ValueError: anything else, or too many points.
    """
    strokes: list[Stroke] = []
    try:
        for stroke in data:
            colour, width = str(stroke["colour"]), float(stroke["width"])
            points = [(float(x), float(y)) for x, y in stroke["points"]]
            inside = all(-1 <= v <= 8 for point in points for v in point)
            if not _COLOUR.fullmatch(colour) or not 0 < width <= 1 or not inside:
                raise ValueError
            strokes.append((colour, width, points))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError("the drawing could not be read: erase it and draw again") from None
    if sum(len(points) for _, _, points in strokes) > _MOST_POINTS:
        raise ValueError("the drawing has too many lines: erase some")
    return strokes


def drawn(picture: Image.Image, strokes: Sequence[Stroke]) -> Image.Image:
    """A copy of a picture with strokes on it."""
    picture, side = picture.copy(), picture.width
    pen = ImageDraw.Draw(picture)
    for colour, width, points in strokes:
        scaled = [(x * side, y * side) for x, y in points]
        thick = max(1, round(width * side))
        pen.line(scaled, fill=colour, width=thick, joint="curve")
        for x, y in (scaled[:1] + scaled[-1:]) if scaled else ():
            r = thick / 2
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    return picture


def blank_sheet() -> Image.Image:
    """An empty sheet to draw on."""
    return Image.new("RGB", (_BLANK_SIDE, _BLANK_SIDE), "#b4b4b4")


class Engines:
    """The models on offer, each made by its name when it is first asked for.

    The attribute `names` is as the page shows them; `server` is the address of the server whose
    models they are, or "".
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[str], Engine | ServedModel],
        *,
        server: str = "",
    ) -> None:
        # A path goes by its last part: where it lies is nobody's business on the page.
        short = [Path(x).name if Path(x).exists() else x for x in names]
        self._paths = {
            x if short.count(x) == 1 else f"{x} ({i})": path
            for i, (x, path) in enumerate(zip(short, names, strict=True), start=1)
        }
        self.names = list(self._paths)
        self.server = server
        self._make = make
        self._made: dict[str, Engine | ServedModel] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Engine | ServedModel:
        """The engine of a model.

        Raises:
            ValueError: a model that is not on offer or cannot be loaded.
        """
        if name not in self.names:
            raise ValueError(f"model {name!r} is not on offer here: {', '.join(self.names)}")
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(self._paths[name])
            return self._made[name]


class Session:
    """One tab's picture and conversation."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.model = engines.names[0]
        self.picture: Image.Image | None = None
        self.strokes: list[Stroke] = []
        # The picture, or what is drawn on it, has not been asked about yet.
        self.fresh = False
        self._conversation: Talk | None = None
        self._asked: Engine | ServedModel | None = None
        self._closed = False

    @property
    def turns(self) -> list[Turn]:
        """The conversation's turns."""
        return [] if self._conversation is None else self._conversation.turns

    def use(self, picture: Image.Image) -> None:
        """Ask about another picture from now on."""
        self.picture, self.strokes, self.fresh = picture, [], True

    def draw(self, data: Any) -> None:
        """Replace what is drawn on the picture.

        Raises:
            ValueError: not strokes.
        """
        self.strokes = checked_strokes(data)
        self.fresh = self.picture is not None

    def ask(self, question: str, settings: Settings, model: str) -> Generator[Turn]:
        """Continue the conversation, with the picture if it is new; as `Talk.ask`.

        Another model starts a new conversation.

        Raises:
            ValueError: as `Talk.ask`, or a model that is not on offer.
        """
        engine = self.engines.get(model)
        if self._conversation is None or self._asked is not engine:
            self.clear()
            self._conversation, self._asked, self.model = engine.conversation(), engine, model
        if self._closed:
            raise ValueError("this page was closed: reload it")
        picture = self.picture if self.fresh and engine.reads_pictures else None
        if picture is not None:
            picture = drawn(picture, self.strokes)
        asked = self.strokes
        for turn in self._conversation.ask(question, picture, settings):
            if turn.done and picture is not None and asked is self.strokes:
                self.fresh = False
            yield turn

    def stop(self) -> None:
        """End the answers that are streaming."""
        if self._conversation is not None:
            self._conversation.stop()

    def clear(self) -> None:
        """Forget the conversation and free its caches; the picture can be asked about again.

        Raises:
            ValueError: the answers did not stop in time.
        """
        if self._conversation is not None:
            self._conversation.clear()
        self.fresh = self.picture is not None

    def close(self) -> None:
        """The tab has gone: stop and free everything."""
        self._closed = True
        if self._conversation is not None:
            self._conversation.close()
