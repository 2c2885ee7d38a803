"""Pictures of coloured shapes on a 3x3 grid, with questions, answers and a scorer.

Everything is deterministic in `(seed, split)`. A scene belongs to exactly one split by a checksum
of its content, so training never uses a held-out scene (same objects at the same places).
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw

Kind = Literal["shape", "word", "number"]
Split = Literal["train", "heldout"]

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "orange": (245, 140, 25),
    "yellow": (245, 220, 50),
    "green": (40, 150, 60),
    "blue": (45, 85, 215),
    "purple": (130, 50, 160),
    "black": (25, 25, 25),
    "white": (252, 252, 252),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "ring")
PLACES = (
    *("top left", "top center", "top right"),
    *("middle left", "center", "middle right"),
    *("bottom left", "bottom center", "bottom right"),
)
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third")

_SENTENCE = re.compile(rf"({'|'.join(COLORS)}) ({'|'.join(SHAPES)}) is at the ({'|'.join(PLACES)})")


@dataclass(frozen=True, kw_only=True)
class Object:
    """One thing in a cell: a shape, or a printed word or number.

    Its `name` is the shape's, the word, or the digits; `size` is how a shape's size is called, ""
    where all are alike; `dx`, `dy` and `extent` are fractions of a grid cell; `tint` is added to
    the colour.
    """

    kind: Kind = "shape"
    name: str
    color: str
    place: str
    size: str = ""
    dx: float = 0.0
    dy: float = 0.0
    extent: float = 0.7
    tint: tuple[int, int, int] = (0, 0, 0)

    @property
    def phrase(self) -> str:
        """Noun phrase without an article: "large red circle", 'word "apple" in red'."""
        if self.kind == "shape":
            return f"{self.size} {self.color} {self.name}".lstrip()
        name = f'"{self.name}"' if self.kind == "word" else self.name
        return f"{self.kind} {name} in {self.color}"

    @property
    def short(self) -> str:
        """Short name: "red circle", 'word "apple"'."""
        return f"{self.color} {self.name}" if self.kind == "shape" else self.phrase.split(" in ")[0]

    @property
    def sentence(self) -> str:
        """Sentence that tells its place: "A large red circle is at the top left."."""
        article = "A" if self.kind == "shape" else "The"
        if self.phrase[0] in "aeiou":
            article = "An"
        return f"{article} {self.phrase} is at the {self.place}."

    @property
    def row_column(self) -> tuple[int, int]:
        """Row and column of the cell, from 0."""
        return divmod(PLACES.index(self.place), 3)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Things in reading order, at most one in a cell, on a plain background."""

    objects: tuple[Object, ...]
    background: tuple[int, int, int] = (185, 185, 185)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a picture and its right answer."""

    text: str
    answer: str


def make_scene(seed: int, split: Split = "heldout", count: int | None = None) -> Scene:
    """Return scene number `seed` of a split, with `count` (else 2 to 6) objects."""
    rng = random.Random(f"scene:{split}:{seed}:{count}")
    return of_split(split, count, rng, lambda n: _random_scene(rng, n))


def of_split(
    split: Split, count: int | None, rng: random.Random, make: Callable[[int], Scene]
) -> Scene:
    """Make scenes of `count` (else 2 to 6) objects; return the first one of the split."""
    if count is not None and not 1 <= count <= len(PLACES):
        raise ValueError(f"count must be 1 to {len(PLACES)}, got {count}")
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    while True:
        scene = make(count if count is not None else rng.randint(2, 6))
        if belongs(";".join(f"{x.phrase} {x.place}" for x in scene.objects), split):
            return scene


def belongs(content: str, split: Split) -> bool:
    """Return whether a scene or text is of a split; a checksum holds out one in eight."""
    return (zlib.crc32(content.encode()) % 8 == 0) == (split == "heldout")


def _random_scene(rng: random.Random, count: int) -> Scene:
    kinds = rng.sample([(c, s) for c in COLORS for s in SHAPES], count)
    places = sorted(rng.sample(range(len(PLACES)), count))
    objects = tuple(
        Object(
            color=color,
            name=shape,
            place=PLACES[place],
            dx=rng.uniform(-0.12, 0.12),
            dy=rng.uniform(-0.12, 0.12),
            extent=rng.uniform(0.58, 0.82),
            tint=tinted(rng),
        )
        for (color, shape), place in zip(kinds, places, strict=True)
    )
    return Scene(objects=objects, background=tinted(rng, rng.randint(150, 205)))


def tinted(rng: random.Random, grey: int = 0) -> tuple[int, int, int]:
    """Return a grey with a slight random tint."""
    return (
        grey + rng.randint(-12, 12),
        grey + rng.randint(-12, 12),
        grey + rng.randint(-12, 12),
    )


def draw(scene: Scene, size: int = 384) -> Image.Image:
    """Draw a scene as an RGB picture of `size` x `size` pixels."""
    image = Image.new("RGB", (size, size), scene.background)
    canvas = ImageDraw.Draw(image)
    cell = size / 3
    for item in scene.objects:
        row, column = item.row_column
        x, y = (column + 0.5 + item.dx) * cell, (row + 0.5 + item.dy) * cell
        base = COLORS[item.color]
        fill = tuple(min(255, max(0, c + t)) for c, t in zip(base, item.tint, strict=True))
        _draw_shape(canvas, item.name, x, y, item.extent * cell / 2, fill)
    return image


def _draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, ...]
) -> None:
    if shape == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        s = 0.86 * r
        canvas.rectangle((x - s, y - s, x + s, y + s), fill=fill)
    elif shape == "triangle":
        canvas.polygon([(x, y - r), (x + r, y + 0.8 * r), (x - r, y + 0.8 * r)], fill=fill)
    elif shape == "star":
        polar = [((0.45 if i % 2 else 1.08) * r, math.pi * i / 5 - math.pi / 2) for i in range(10)]
        canvas.polygon([(x + a * math.cos(t), y + a * math.sin(t)) for a, t in polar], fill=fill)
    elif shape == "diamond":
        canvas.polygon([(x, y - r), (x + 0.75 * r, y), (x, y + r), (x - 0.75 * r, y)], fill=fill)
    elif shape == "cross":
        w = 0.33 * r
        canvas.rectangle((x - w, y - r, x + w, y + r), fill=fill)
        canvas.rectangle((x - r, y - w, x + r, y + w), fill=fill)
    else:
        canvas.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=max(1, round(0.38 * r)))


def count_of(number: int, noun: str) -> str:
    """Return the number in a sentence: "There are two objects in the picture."."""
    amount = f"is one {noun}" if number == 1 else f"are {NUMBERS[number]} {plural(noun)}"
    return f"There {amount} in the picture."


def plural(noun: str) -> str:
    """Return the plural of `noun`."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def describe(scene: Scene) -> str:
    """Return the full description: the number of objects, then a sentence for each."""
    return " ".join([count_of(len(scene.objects), "object"), *(x.sentence for x in scene.objects)])


def score_description(text: str, scene: Scene) -> tuple[int, int]:
    """Return how many objects `text` has right (colour, shape, place), and their number.

    The number is that of the claims if `text` claims more objects than there are.
    """
    truth = {(o.color, o.name, o.place) for o in scene.objects}
    claims = set(_SENTENCE.findall(text))
    return len(truth & claims), max(len(truth), len(claims))


def describe_question(which: str, rng: random.Random) -> str:
    """Return one phrasing of the request to describe `which` (such as "the picture")."""
    phrasings = f"Describe {which}.", f"Describe {which} in detail.", f"What is in {which}?"
    return rng.choice(phrasings)


def ask(scene: Scene, rng: random.Random, which: str = "the picture") -> Question:
    """Return a short question about `scene`; `which` names the picture in it."""
    several, inside = which != "the picture", f"in {which}"
    kind = rng.choice(("at", "at", "at", "where", "count", "shapes", "colors", "color"))
    item = rng.choice(scene.objects)
    of_it = f" of {which}" if several else ""
    if kind == "at":
        place = rng.choice(PLACES) if rng.random() < 0.25 else item.place
        at_place = [o for o in scene.objects if o.place == place]
        text = f"What is at the {place}{of_it}?"
        answer = at_place[0].sentence if at_place else f"Nothing is at the {place}."
    elif kind == "where":
        text = f"Where is the {item.short}{f' {inside}' if several else ''}?"
        answer = f"The {item.short} is at the {item.place}."
    elif kind == "count":
        text = f"How many objects are {inside}?"
        answer = count_of(len(scene.objects), "object")
    elif kind == "shapes":
        shape = rng.choice((item.name, rng.choice(SHAPES)))
        text = f"How many {plural(shape)} are {inside}?"
        answer = count_of(sum(o.name == shape for o in scene.objects), shape)
    elif kind == "colors":
        color = rng.choice((item.color, rng.choice(tuple(COLORS))))
        text = f"How many {color} objects are {inside}?"
        answer = count_of(sum(o.color == color for o in scene.objects), f"{color} object")
    else:
        text = f"What color is the {item.name} at the {item.place}{of_it}?"
        answer = f"The {item.name} is {item.color}."
    return Question(text=text, answer=answer)
