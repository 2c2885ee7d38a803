"""Training batches: several turns of questions over one context, supervised on the answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mmkv.builtin import scenes, texts
from mmkv.builtin.training.build import BOS, EOS, IMAGE, IMAGE_SIZE, IMAGE_TOKENS

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedTokenizerFast

IGNORE = -100


@dataclass
class Batch:
    """Tensors of one batch: ids and labels `[B, L]`, pixels `[N, 3, 96, 96]` or None.

    `cells` `[N, 9, 2]` holds what is in each grid cell of each picture: 1 + the number of the
    colour and of the shape, 0 where the cell is empty.
    """

    task: str
    input_ids: torch.Tensor
    labels: torch.Tensor
    pixel_values: torch.Tensor | None = None
    cells: torch.Tensor | None = None

    def to(self, device: torch.device) -> None:
        """Move its tensors."""
        for name, value in vars(self).items():
            if name != "task" and value is not None:
                setattr(self, name, value.to(device))


@dataclass
class Writer:
    """Writes one training sequence of at most `length` tokens in the chat template's format."""

    tokenizer: PreTrainedTokenizerFast
    length: int
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)
    scenes: list[scenes.Scene] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._encode = _encoder(self.tokenizer)
        self._extend(self._encode(BOS), supervised=False)

    def _extend(self, ids: tuple[int, ...], supervised: bool) -> None:
        self.ids += ids
        self.labels += ids if supervised else [IGNORE] * len(ids)

    def turn(self, question: str, answer: str, pictures: tuple[Image.Image, ...] = ()) -> bool:
        """Add one turn if it fits and say whether it did."""
        ask = self._encode("USER:")
        for picture in pictures:
            self.pictures.append(picture)
            ask += self._encode(f" Picture {len(self.pictures)}:")
            ask += self._encode(IMAGE) * IMAGE_TOKENS
        ask += self._encode(f" {question}") + self._encode(" ASSISTANT:")
        reply = self._encode(f" {answer}") + self._encode(EOS)
        if len(self.ids) + len(ask) + len(reply) > self.length:
            if pictures:
                raise ValueError(f"{len(pictures)} pictures do not fit in {self.length} tokens")
            return False
        self._extend(ask, supervised=False)
        self._extend(reply, supervised=True)
        return True


@lru_cache(maxsize=4)
def _encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], tuple[int, ...]]:
    backend = tokenizer.backend_tokenizer

    @lru_cache(maxsize=20_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(backend.encode(text, add_special_tokens=False).ids)

    return encode


def _drawn(scene: scenes.Scene, rng: random.Random) -> Image.Image:
    return scenes.draw(scene, rng.choice((192, 256, 384)))


def scene_alone(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Writer:
    """A sequence without tokens: one training scene, for the vision tower alone."""
    writer = Writer(tokenizer, 0)
    writer.ids, writer.labels = [], []
    scene = scenes.make_scene(rng.randrange(2**40), "train")
    writer.scenes.append(scene)
    writer.pictures.append(scenes.draw(scene, 192))
    return writer


def picture_sequence(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, pictures: int, length: int
) -> Writer:
    """A sequence of questions over `pictures` training scenes."""
    writer = Writer(tokenizer, length)
    shown = [scenes.make_scene(rng.randrange(2**40), "train") for _ in range(pictures)]
    drawn = tuple(_drawn(scene, rng) for scene in shown)
    writer.scenes += shown
    names = ["the picture"] if pictures == 1 else [f"the {o} picture" for o in scenes.ORDINALS]
    turns: list[scenes.Question] = []
    for scene, name in zip(shown, names, strict=False):
        # With one picture the description is the first or a later turn; with more, one or two of
        # them are described and the rest is asked about in short questions.
        if pictures == 1 or rng.random() < 0.7:
            text = scenes.describe_question(name, rng)
            turns.append(scenes.Question(text=text, answer=scenes.describe(scene)))
        turns += scenes.ask(scene, rng, 6, name)
    first = turns[0]
    rng.shuffle(turns)
    if pictures == 1 and rng.random() < 0.6:
        turns.remove(first)
        turns.insert(0, first)
    writer.turn(turns[0].text, turns[0].answer, drawn)
    for turn in turns[1:]:
        writer.turn(turn.text, turn.answer)
    return writer


def text_sequence(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, length: int, picture: bool = False
) -> Writer:
    """A look-up sequence, its text between a third and nearly all of `length`.

    With `picture`, a training scene stands before the text and is asked about as well.
    """
    writer = Writer(tokenizer, length)
    room = length - (IMAGE_TOKENS + 50 if picture else 10)
    size = max(32, int(room * rng.uniform(0.35, 0.85)))
    density = rng.choice((6, 8, 12, 16, 16, 24))
    count = min(len(texts.KEYS), max(3, size // density))
    lookup = texts.make_lookup(rng.randrange(2**40), size, "train", records=count)
    asked = list(lookup.questions)
    rng.shuffle(asked)
    asked = asked[:40]
    pictures: tuple[Image.Image, ...] = ()
    if picture:
        scene = scenes.make_scene(rng.randrange(2**40), "train")
        pictures = (_drawn(scene, rng),)
        writer.scenes.append(scene)
        asked = asked[:4] + scenes.ask(scene, rng, 3)
        rng.shuffle(asked)
    writer.turn(f"{lookup.text} {asked[0].text}", asked[0].answer, pictures)
    for question in asked[1:]:
        if not writer.turn(question.text, question.answer):
            break
    return writer


def collate(task: str, writers: list[Writer]) -> Batch:
    """Pad the sequences on the right to the length of the writers and stack them."""
    import torch

    length = writers[0].length
    pad: Any = writers[0].tokenizer.pad_token_id
    ids = torch.full((len(writers), length), int(pad))
    labels = torch.full((len(writers), length), IGNORE)
    pictures, shown = [], []
    for row, writer in enumerate(writers):
        ids[row, : len(writer.ids)] = torch.tensor(writer.ids)
        labels[row, : len(writer.labels)] = torch.tensor(writer.labels)
        pictures += writer.pictures
        shown += writer.scenes
    if not pictures:
        return Batch(task, ids, labels)
    return Batch(task, ids, labels, pixels(pictures), torch.tensor([_cells(s) for s in shown]))


def _cells(scene: scenes.Scene) -> list[list[int]]:
    found = [[0, 0] for _ in scenes.PLACES]
    for item in scene.objects:
        color = 1 + tuple(scenes.COLORS).index(item.color)
        found[scenes.PLACES.index(item.place)] = [color, 1 + scenes.SHAPES.index(item.shape)]
    return found


def pixels(pictures: list[Image.Image]) -> torch.Tensor:
    """Return `[N, 3, 96, 96]` values in -1..1, as the image processor makes them."""
    import numpy as np
    import torch
    from PIL import Image

    shape = (IMAGE_SIZE, IMAGE_SIZE)
    stack = np.stack([np.asarray(p.resize(shape, Image.Resampling.BICUBIC)) for p in pictures])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
