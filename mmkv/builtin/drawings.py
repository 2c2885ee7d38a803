"""Drawn scenes of shapes, printed words and numbers on a 3x3 grid, with questions and a scorer.

These are `--data drawings` of the suites, and train a LLaVA around SmolLM2. Everything is
deterministic in `(seed, split)`; a scene belongs to exactly one split by a checksum of its content,
so no held-out scene (same things at the same places) is ever trained on.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageFont

from mmkv.loading.names import ORDINALS

Point = tuple[float, float]
Kind = Literal["shape", "word", "number"]
Split = Literal["train", "heldout"]

# The scene of a seed depends on this order.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 40, 40),
    "orange": (245, 140, 25),
    "yellow": (245, 220, 50),
    "green": (40, 150, 60),
    "blue": (45, 85, 215),
    "purple": (130, 50, 160),
    "pink": (250, 150, 190),
    "brown": (120, 75, 40),
    "black": (25, 25, 25),
    "white": (252, 252, 252),
}
PLACES = (
    *("top left", "top center", "top right"),
    *("middle left", "center", "middle right"),
    *("bottom left", "bottom center", "bottom right"),
)
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZES = {"small": (0.36, 0.48), "large": (0.74, 0.9)}  # shares of a cell
_WORDS = (
    "apple arm baby back ball bank bath bear bed bell bird boat body bone book boot bowl box boy "
    "brain bread brick bridge bus cake camp car card cat chair city clock cloud coat coffee corn "
    "cow crown cup dance day desk dog door dress drum duck ear earth egg eye face farm fire fish "
    "flag floor flower fly food foot fork fox frog fruit game garden gate ghost girl glass goat "
    "gold grass guitar hair hammer hand hat heart hill home honey horse house ice island jacket "
    "jelly juice key king kite knife lake lamp leaf leg lemon letter light lion lock love map "
    "market milk mirror money moon mouse mouth music nail neck nest night nose nurse ocean oil "
    "onion page paint paper park party pen piano picture pig plane plant plate pocket pool potato "
    "prince queen rabbit radio rain rice ring river road robot rock roof room rope rose salt sand "
    "school sea seed sheep ship shirt shoe shop silver sister snake snow soap song soup spoon "
    "spring stone story street sugar summer sun table tail taxi tea teeth tent tiger toast town "
    "toy train tree truck uncle valley village violin wall watch water wheel wind window winter "
    "wolf wood yard zebra"
)
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class Object:
    """One thing in a cell: a shape, or a printed word or number.

    Its `name` is the shape's, the word, or the digits; `size` is "small" or "large", "" of print;
    `dx`, `dy` and `extent` are fractions of a grid cell; `tint` is added to the colour.
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


def make_scene(
    seed: int, split: Split = "heldout", count: int | None = None, printed: int | None = None
) -> Scene:
    """Return scene number `seed` of a split, with `count` (else 2 to 6) things.

    `printed` of them are words or numbers, by default at most one of each.
    """
    if count is not None and not 1 <= count <= len(PLACES):
        raise ValueError(f"count must be 1 to {len(PLACES)}, got {count}")
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    rng = random.Random(f"drawing:{split}:{seed}:{count}:{printed}")
    while True:
        scene = _random_scene(rng, count if count is not None else rng.randint(2, 6), printed)
        if _is_heldout(scene) == (split == "heldout"):
            return scene


def _is_heldout(scene: Scene) -> bool:
    """Return whether a scene is held out, as one in eight is by a checksum of its content."""
    content = ";".join(f"{x.phrase} {x.place}" for x in scene.objects)
    return zlib.crc32(content.encode()) % 8 == 0


def _random_scene(rng: random.Random, count: int, printed: int | None) -> Scene:
    places = sorted(rng.sample(range(len(PLACES)), count))
    things: list[Object] = []
    kinds: list[Kind] = ["shape"] * count
    if printed is not None:
        for cell in rng.sample(range(count), min(printed, count)):
            kinds[cell] = rng.choice(("word", "word", "number"))
    else:  # a word in half the pictures, a number in a third
        if rng.random() < 0.5:
            kinds[rng.randrange(count)] = "word"
        if rng.random() < 0.33:
            kinds[rng.randrange(count)] = "number"
    for kind, place in zip(kinds, places, strict=True):
        thing = _random_thing(rng, kind, PLACES[place])
        while thing.short in [x.short for x in things]:
            thing = _random_thing(rng, kind, PLACES[place])
        things.append(thing)
    return Scene(objects=tuple(things), background=_tinted(rng, rng.randint(140, 205)))


def _tinted(rng: random.Random, grey: int = 0) -> tuple[int, int, int]:
    """Return a grey with a slight random tint."""
    return (
        grey + rng.randint(-12, 12),
        grey + rng.randint(-12, 12),
        grey + rng.randint(-12, 12),
    )


def _random_thing(rng: random.Random, kind: Kind, place: str) -> Object:
    if kind == "shape":
        size = rng.choice(tuple(SIZES))
        name, extent, shift = rng.choice(SHAPES), rng.uniform(*SIZES[size]), (1 - 0.82) / 2
    else:
        name = rng.choice(WORDS) if kind == "word" else str(rng.randint(0, 99))
        size, extent, shift = "", rng.uniform(0.78, 0.95), 0.06
    return Object(
        kind=kind,
        name=name,
        color=rng.choice(tuple(COLORS)),
        place=place,
        size=size,
        dx=rng.uniform(-shift, shift),
        dy=rng.uniform(-shift, shift),
        extent=extent,
        tint=_tinted(rng),
    )


def draw(scene: Scene, size: int = 384) -> Image.Image:
    """Draw a scene as an RGB picture of `size` x `size` pixels."""
    image = Image.new("RGB", (size, size), scene.background)
    canvas = ImageDraw.Draw(image)
    for thing in scene.objects:
        left, top, right, bottom = (size * x for x in box(thing))
        x, y, r = (left + right) / 2, (top + bottom) / 2, (right - left) / 2
        base = COLORS[thing.color]
        fill = tuple(min(255, max(0, c + t)) for c, t in zip(base, thing.tint, strict=True))
        if thing.kind != "shape":
            # As wide as the extent, but short words no higher than a third of the cell.
            font = _font(max(8, round(min(_font_size(thing.name) * r, size / 9))))
            canvas.text((x, y), thing.name, fill=fill, font=font, anchor="mm")
        elif thing.name == "ring":
            width = max(1, round(0.36 * r))
            canvas.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=width)
        else:
            canvas.polygon([(x + a * r, y + b * r) for a, b in _CORNERS[thing.name]], fill=fill)
    return image


def box(thing: Object) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a thing, as shares of the picture."""
    row, column = thing.row_column
    x, y = column + 0.5 + thing.dx, row + 0.5 + thing.dy
    half = thing.extent / 2
    high = half if thing.kind == "shape" else 0.17
    return (x - half) / 3, (y - high) / 3, (x + half) / 3, (y + high) / 3


@lru_cache(maxsize=256)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


@lru_cache(maxsize=1024)
def _font_size(text: str) -> float:
    """Return the font size at which `text` is two units wide."""
    return 2 * 100 / _font(100).getlength(text)


def _round(corners: int, radii: tuple[float, ...] = (1.0,), turn: float = -0.25) -> list[Point]:
    polar = [(radii[i % len(radii)], 2 * math.pi * (i / corners + turn)) for i in range(corners)]
    return [(r * math.cos(angle), r * math.sin(angle)) for r, angle in polar]


def _heart() -> list[Point]:
    angles = [2 * math.pi * i / 40 for i in range(40)]
    high = [
        13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        for t in angles
    ]
    return [(math.sin(t) ** 3, -y / 15) for t, y in zip(angles, high, strict=True)]


def _crescent() -> list[Point]:
    angles = [2 * math.pi * (0.14 + 0.72 * i / 30) for i in range(31)]
    outer = [(math.cos(t), math.sin(t)) for t in angles]
    return outer + [(0.4 + 0.72 * x, 0.98 * y) for x, y in reversed(outer)]


# Corners of polygons, in units of the radius around the centre.
_CORNERS: dict[str, list[Point]] = {
    "circle": _round(60),
    "square": [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)],
    "triangle": [(0, -1), (1, 0.8), (-1, 0.8)],
    "star": _round(10, (1.08, 0.45)),
    "diamond": [(0, -1), (0.7, 0), (0, 1), (-0.7, 0)],
    "cross": [
        *((-0.33, -1), (0.33, -1), (0.33, -0.33), (1, -0.33), (1, 0.33), (0.33, 0.33)),
        *((0.33, 1), (-0.33, 1), (-0.33, 0.33), (-1, 0.33), (-1, -0.33), (-0.33, -0.33)),
    ],
    "ring": [],  # an outline, see `draw`
    "heart": _heart(),
    "hexagon": _round(6, turn=0.0),
    "crescent": _crescent(),
    "arrow": [(-1, -0.3), (0.1, -0.3), (0.1, -0.8), (1, 0), (0.1, 0.8), (0.1, 0.3), (-1, 0.3)],
    "bar": [(-1, -0.32), (1, -0.32), (1, 0.32), (-1, 0.32)],
}
SHAPES = tuple(_CORNERS)
_SENTENCE = re.compile(
    r"(?:the (?:word \"\w+\"|number \d+) in|an? (?:small|large)) "
    rf"(?:{'|'.join(COLORS)})(?: (?:{'|'.join(SHAPES)}))? is at the (?:{'|'.join(PLACES)})(?=\.)",
    re.IGNORECASE,
)


def describe(scene: Scene) -> str:
    """Return the full description: a sentence for each thing, in reading order."""
    return " ".join(thing.sentence for thing in scene.objects)


def score_description(text: str, scene: Scene) -> tuple[int, int]:
    """Return how many things `text` has right (kind, name, size, colour, place), and their number.

    The number is that of the claims if `text` claims more things than there are.
    """
    truth = {thing.sentence.lower().rstrip(".") for thing in scene.objects}
    claims = {claim.lower() for claim in _SENTENCE.findall(text)}
    return len(truth & claims), max(len(truth), len(claims))


def describe_question(which: str, rng: random.Random) -> str:
    """Return one phrasing of the request to describe `which` (such as "the picture")."""
    questions = f"What is in {which}?", f"What do you see in {which}?"
    return rng.choice((f"Describe {which}.", f"Describe {which} in detail.", *questions))


def ask(scene: Scene, rng: random.Random, which: str = "the picture") -> Question:
    """Return a short question about `scene`; `which` names the picture in it."""
    kinds = ("at", "at", "where", "count", "shapes", "colors", "color", "exists", "size", "beside")
    shapes = [x for x in scene.objects if x.kind == "shape"]
    printed = [x for x in scene.objects if x.kind != "shape"]
    kind = rng.choice(kinds)
    if printed and rng.random() < 0.3:
        kind = "read"
    elif kind in ("color", "size", "shapes", "colors") and not shapes:
        kind = "at"
    inside = f"in {which}"
    thing = rng.choice(scene.objects)
    shape = rng.choice(shapes) if shapes else thing
    if kind == "read":
        thing = rng.choice(printed)
        request = rng.choice((f"Which {thing.kind} is printed", f"What is the {thing.kind}"))
        text, answer = f"{request} {inside}?", thing.sentence.replace(f" in {thing.color}", "")
    elif kind == "at":
        place = rng.choice(PLACES) if rng.random() < 0.25 else thing.place
        at_place = [x for x in scene.objects if x.place == place]
        text = f"What is at the {place} of {which}?"
        answer = at_place[0].sentence if at_place else f"Nothing is at the {place}."
    elif kind == "count":
        text, answer = f"How many things are {inside}?", _count_of(len(scene.objects), "thing")
    elif kind == "shapes":
        name = rng.choice((shape.name, rng.choice(SHAPES)))
        text = f"How many {_plural(name)} are {inside}?"
        answer = _count_of(sum(x.name == name for x in scene.objects), name)
    elif kind == "colors":
        color = rng.choice((shape.color, rng.choice(tuple(COLORS))))
        text = f"How many {color} shapes are {inside}?"
        answer = _count_of(sum(x.color == color for x in shapes), f"{color} shape")
    elif kind == "color":
        text = f"What color is the {shape.name} at the {shape.place} of {which}?"
        answer = f"The {shape.name} is {shape.color}."
    elif kind == "size":
        text = f"Is the {shape.short} {inside} small or large?"
        answer = f"The {shape.short} is {shape.size}."
    elif kind == "exists":
        name = shape.short
        if rng.random() >= 0.5 and shapes:
            other = (
                f"{rng.choice(tuple(COLORS))} {shape.name}",
                f"{shape.color} {rng.choice(SHAPES)}",
            )
            name = rng.choice(other)
        text = f"Is there a {name} {inside}?"
        known = any(x.short == name for x in scene.objects)
        answer = "Yes, there is." if known else "No, there is not."
    elif kind == "beside" and len(scene.objects) > 1:
        first, second = rng.sample(scene.objects, 2)
        (row, column), (other_row, other_column) = first.row_column, second.row_column
        if row != other_row and (column == other_column or rng.random() < 0.5):
            relation, opposite, right = "above", "below", row < other_row
        else:
            relation, opposite, right = "to the left of", "to the right of", column < other_column
        if rng.random() < 0.5:
            relation, right = opposite, not right
        text = f"Is the {first.short} {relation} the {second.short} {inside}?"
        answer = "Yes, it is." if right else "No, it is not."
    else:
        text = f"Where is the {thing.short} {inside}?"
        answer = f"The {thing.short} is at the {thing.place}."
    return Question(text=text, answer=answer)


def _count_of(number: int, noun: str) -> str:
    """Return the number in a sentence: "There are two objects in the picture."."""
    amount = f"is one {noun}" if number == 1 else f"are {NUMBERS[number]} {_plural(noun)}"
    return f"There {amount} in the picture."


def _plural(noun: str) -> str:
    """Return the plural of `noun`."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def find_question(
    shown: Sequence[Scene], rng: random.Random, number: int | None = None
) -> Question | None:
    """Return the question which picture shows a thing that no other shows; None without one.

    The picture is that of index `number`, or a random one.
    """
    names = [{thing.short for thing in scene.objects} for scene in shown]
    number = rng.randrange(len(names)) if number is None else number
    others = set[str]().union(*(x for i, x in enumerate(names) if i != number))
    if not (unique := sorted(names[number] - others)):
        return None
    name = rng.choice(unique)
    return Question(
        text=f"Which picture shows the {name}?",
        answer=f"The {ORDINALS[number]} picture shows the {name}.",
    )
