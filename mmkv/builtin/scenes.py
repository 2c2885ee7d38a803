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
from typing import Literal, TypeVar

from PIL import Image, ImageDraw

Split = Literal["train", "heldout"]
S = TypeVar("S")

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
    """One coloured shape; `dx`, `dy`, `size` are fractions of a grid cell."""

    color: str
    shape: str
    place: str
    dx: float = 0.0
    dy: float = 0.0
    size: float = 0.7
    tint: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Objects in reading order, at most one in a cell, on a plain background."""

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
    return of_split(split, count, rng, lambda n: _random_scene(rng, n), _content)


def of_split(
    split: Split,
    count: int | None,
    rng: random.Random,
    make: Callable[[int], S],
    content: Callable[[S], str],
) -> S:
    """Make scenes of `count` (else 2 to 6) objects; return the first one of the split."""
    if count is not None and not 1 <= count <= len(PLACES):
        raise ValueError(f"count must be 1 to {len(PLACES)}, got {count}")
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    while True:
        scene = make(count if count is not None else rng.randint(2, 6))
        if belongs(content(scene), split):
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
            shape=shape,
            place=PLACES[place],
            dx=rng.uniform(-0.12, 0.12),
            dy=rng.uniform(-0.12, 0.12),
            size=rng.uniform(0.58, 0.82),
            tint=(rng.randint(-12, 12), rng.randint(-12, 12), rng.randint(-12, 12)),
        )
        for (color, shape), place in zip(kinds, places, strict=True)
    )
    grey = rng.randint(150, 205)
    background = tuple(grey + rng.randint(-12, 12) for _ in range(3))
    return Scene(objects=objects, background=background)  # type: ignore[arg-type]


def _content(scene: Scene) -> str:
    return ";".join(f"{o.color} {o.shape} {o.place}" for o in scene.objects)


def draw(scene: Scene, size: int = 384) -> Image.Image:
    """Draw a scene as an RGB picture of `size` x `size` pixels."""
    image = Image.new("RGB", (size, size), scene.background)
    canvas = ImageDraw.Draw(image)
    cell = size / 3
    for item in scene.objects:
        row, column = divmod(PLACES.index(item.place), 3)
        x, y = (column + 0.5 + item.dx) * cell, (row + 0.5 + item.dy) * cell
        base = COLORS[item.color]
        fill = tuple(min(255, max(0, c + t)) for c, t in zip(base, item.tint, strict=True))
        _draw_shape(canvas, item.shape, x, y, item.size * cell / 2, fill)
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


def _sentence(item: Object) -> str:
    article = "An" if item.color[0] in "aeiou" else "A"
    return f"{article} {item.color} {item.shape} is at the {item.place}."


def count_of(number: int, noun: str) -> str:
    """Return the number in a sentence: "There are two objects in the picture."."""
    amount = f"is one {noun}" if number == 1 else f"are {NUMBERS[number]} {plural(noun)}"
    return f"There {amount} in the picture."


def plural(noun: str) -> str:
    """Return the plural of `noun`."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def describe(scene: Scene) -> str:
    """Return the full description: the number of objects, then a sentence for each."""
    return " ".join([count_of(len(scene.objects), "object"), *map(_sentence, scene.objects)])


def score_description(text: str, scene: Scene) -> tuple[int, int]:
    """Return how many objects `text` has right (colour, shape, place), and their number.

    The number is that of the claims if `text` claims more objects than there are.
    """
    truth = {(o.color, o.shape, o.place) for o in scene.objects}
    claims = set(_SENTENCE.findall(text))
    return len(truth & claims), max(len(truth), len(claims))


def describe_question(which: str, rng: random.Random) -> str:
    """Return one phrasing of the request to describe `which` (such as "the picture")."""
    phrasings = f"Describe {which}.", f"Describe {which} in detail.", f"What is in {which}?"
    return rng.choice(phrasings)


def ask(scene: Scene, rng: random.Random, count: int, which: str = "the picture") -> list[Question]:
    """Return `count` short questions about `scene`; `which` names the picture in them."""
    return [_ask(scene, rng, which) for _ in range(count)]


def _ask(scene: Scene, rng: random.Random, which: str) -> Question:
    several, inside = which != "the picture", f"in {which}"
    kind = rng.choice(("at", "at", "at", "where", "count", "shapes", "colors", "color"))
    item = rng.choice(scene.objects)
    of_it = f" of {which}" if several else ""
    if kind == "at":
        place = rng.choice(PLACES) if rng.random() < 0.25 else item.place
        at_place = [o for o in scene.objects if o.place == place]
        text = f"What is at the {place}{of_it}?"
        answer = _sentence(at_place[0]) if at_place else f"Nothing is at the {place}."
    elif kind == "where":
        name = f"{item.color} {item.shape}"
        text = f"Where is the {name}{f' {inside}' if several else ''}?"
        answer = f"The {name} is at the {item.place}."
    elif kind == "count":
        text = f"How many objects are {inside}?"
        answer = count_of(len(scene.objects), "object")
    elif kind == "shapes":
        shape = rng.choice((item.shape, rng.choice(SHAPES)))
        text = f"How many {plural(shape)} are {inside}?"
        answer = count_of(sum(o.shape == shape for o in scene.objects), shape)
    elif kind == "colors":
        color = rng.choice((item.color, rng.choice(tuple(COLORS))))
        text = f"How many {color} objects are {inside}?"
        answer = count_of(sum(o.color == color for o in scene.objects), f"{color} object")
    else:
        text = f"What color is the {item.shape} at the {item.place}{of_it}?"
        answer = f"The {item.shape} is {item.color}."
    return Question(text=text, answer=answer)
