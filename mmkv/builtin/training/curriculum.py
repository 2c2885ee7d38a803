"""Training batches: several turns of questions over one context, supervised on the answers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from mmkv.builtin import scenes, texts

if TYPE_CHECKING:
    from PIL import Image

IGNORE = -100
IMAGE_TOKENS = 144
# Until which share of a run texts of 128, 256, 512 and 1152 tokens come how often.
_TEXTS = ((0.04, (1, 1, 0, 0)), (0.15, (1, 3, 1, 0)), (0.4, (0, 2, 3, 1)), (1.0, (0, 1, 1, 2)))
Batch = dict[str, torch.Tensor]


@dataclass
class Writer:
    """Writes one training sequence of at most `length` tokens in the chat template's format.

    With `length` 0 it holds pictures alone, for the vision tower.
    """

    tokenizer: Any
    length: int
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    pictures: list[Image.Image] = field(default_factory=list)
    scenes: list[scenes.Scene] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.length:
            self._extend(self._encode("<s>"), supervised=False)

    def _encode(self, text: str) -> tuple[int, ...]:
        return _encoded(self.tokenizer, text)

    def _extend(self, ids: tuple[int, ...], supervised: bool) -> None:
        self.ids += ids
        self.labels += ids if supervised else [IGNORE] * len(ids)

    def turn(self, question: str, answer: str, *pictures: Image.Image) -> bool:
        """Add one turn if it fits and say whether it did."""
        ask = self._encode("USER:")
        for i, _ in enumerate(pictures, len(self.pictures) + 1):
            ask += self._encode(f" Picture {i}:") + self._encode("<image>") * IMAGE_TOKENS
        ask += self._encode(f" {question}") + self._encode(" ASSISTANT:")
        reply = self._encode(f" {answer}") + self._encode("</s>")
        if len(self.ids) + len(ask) + len(reply) > self.length:
            return False
        self.pictures += pictures
        self._extend(ask, supervised=False)
        self._extend(reply, supervised=True)
        return True

    def show(self, rng: random.Random, sizes: tuple[int, ...] = (192, 256, 384)) -> Image.Image:
        """Draw a new training scene."""
        self.scenes.append(scene := scenes.make_scene(rng.randrange(2**40), "train"))
        return scenes.draw(scene, rng.choice(sizes))


@lru_cache(maxsize=20_000)
def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def write_pictures(writer: Writer, rng: random.Random, pictures: int) -> None:
    """Questions over `pictures` training scenes."""
    drawn = [writer.show(rng) for _ in range(pictures)]
    names = ["the picture"] if pictures == 1 else [f"the {o} picture" for o in scenes.ORDINALS]
    turns: list[scenes.Question] = []
    for scene, name in zip(writer.scenes, names, strict=False):
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
    writer.turn(turns[0].text, turns[0].answer, *drawn)
    for turn in turns[1:]:
        writer.turn(turn.text, turn.answer)


def write_text(writer: Writer, rng: random.Random, picture: bool = False) -> None:
    """Look-ups in a text of a third to nearly all of the length, `picture`: behind a scene."""
    room = writer.length - (IMAGE_TOKENS + 50 if picture else 10)
    size = max(32, int(room * rng.uniform(0.35, 0.85)))
    count = min(len(texts.KEYS), max(3, size // rng.choice((6, 8, 12, 16, 16, 24))))
    lookup = texts.make_lookup(rng.randrange(2**40), size, "train", records=count)
    asked = rng.sample(lookup.questions, min(40, count))
    shown = [writer.show(rng)] if picture else []
    if picture:
        asked = asked[:4] + scenes.ask(writer.scenes[0], rng, 3)
        rng.shuffle(asked)
    writer.turn(f"{lookup.text} {asked[0].text}", asked[0].answer, *shown)
    for question in asked[1:]:
        if not writer.turn(question.text, question.answer):
            break


def collate(processor: Any, writers: list[Writer]) -> Batch:
    """Sequences padded on the right: `input_ids` and `labels` [B, L], and of pictures the rest.

    `pixel_values` are [N, 3, 96, 96]; `cells` [N, 9, 2] holds what is in each grid cell of each
    picture: 1 + the number of the colour and of the shape, 0 where the cell is empty.
    """
    shape, pad = (len(writers), writers[0].length), processor.tokenizer.pad_token_id
    batch = {"input_ids": torch.full(shape, pad), "labels": torch.full(shape, IGNORE)}
    for row, writer in enumerate(writers):
        batch["input_ids"][row, : len(writer.ids)] = torch.tensor(writer.ids)
        batch["labels"][row, : len(writer.labels)] = torch.tensor(writer.labels)
    if pictures := [p for writer in writers for p in writer.pictures]:
        shown = [scene for writer in writers for scene in writer.scenes]
        images = processor.image_processor(pictures, return_tensors="pt")
        batch["pixel_values"] = images.pixel_values
        batch["cells"] = torch.tensor([_cells(scene) for scene in shown])
    return batch


def _cells(scene: scenes.Scene) -> list[list[int]]:
    found = [[0, 0] for _ in scenes.PLACES]
    for item in scene.objects:
        color = 1 + tuple(scenes.COLORS).index(item.color)
        found[scenes.PLACES.index(item.place)] = [color, 1 + scenes.SHAPES.index(item.shape)]
    return found


def draw_batches(processor: Any, done: float, step: int, small: bool) -> list[tuple[str, Batch]]:
    """The batches of one step, by task, when the share `done` of the run has passed.

    At first the vision tower learns alone, from the probe, beside short texts: its steps are
    several times cheaper without the text model. They go on beside the rest, while texts grow from
    128 to 1152 tokens; several pictures, and pictures with texts, come in last. `small` shrinks
    everything for a smoke run.
    """
    rng = random.Random(f"train:{step}")
    plan = [("cells", 0, 4 if small else 32)]
    if step % 4 == 0:  # look-up is learnt early, then only kept and lengthened
        weights = next(weights for until, weights in _TEXTS if done < until)
        length, count = rng.choices([(128, 20), (256, 10), (512, 4), (1152, 2)], weights)[0]
        plan.append(("text", 128, 2) if small else ("text", length, count))
    several = 0.0 if done < 0.15 else 0.1 if done < 0.62 else 0.35
    kind = rng.random()
    if done >= 0.08 and kind >= several:
        plan.append(("one picture", 304, 2 if small else 16))
    elif done >= 0.08 and kind >= several / 3:
        plan.append(("two or three pictures", 640, 1 if small else 6))
    elif done >= 0.08:
        plan.append(("picture and text", 512, 1 if small else 8))
    batches: list[tuple[str, Batch]] = []
    for task, length, count in plan:
        writers = [Writer(processor.tokenizer, length) for _ in range(count)]
        for row, writer in enumerate(writers):
            if task == "cells":
                writer.pictures.append(writer.show(rng, (192,)))
            elif task.endswith("text"):
                write_text(writer, rng, picture=task != "text")
            else:
                # Always 16 pictures in six rows: compiled code is kept for few shapes only.
                write_pictures(writer, rng, 1 if task == "one picture" else 3 - (row % 3 == 0))
        batches.append((task, collate(processor, writers)))
    return batches
