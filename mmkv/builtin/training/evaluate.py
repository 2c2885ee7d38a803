"""Prints the built-in model's figures: `python -m mmkv.builtin.training.evaluate`.

Greedy decoding with the full cache. Objects count as right with colour, shape and place; a look-up
counts as right with the value of the key that was asked for.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.builtin import WEIGHTS, load_builtin, scenes, texts

if TYPE_CHECKING:
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One held-out figure: `right` of `total`, over the seeds `first` to `first + n - 1`."""

    name: str
    right: int
    total: int
    first: int
    n: int

    def __str__(self) -> str:
        seeds = f"{self.n} prompts, held-out seeds {self.first}..{self.first + self.n - 1}"
        return f"{self.name}: {self.right / self.total:.1%} ({self.right}/{self.total}; {seeds})"


def user(text: str, *pictures: Any) -> list[Message]:
    """Return a conversation of one user message: the pictures, then the text."""
    content: list[Message] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def reply(
    model: Any,
    processor: Any,
    conversations: list[list[Message]],
    max_new_tokens: int,
    batch: int = 20,
) -> Iterator[str]:
    """Yield the greedy reply to each conversation."""
    for start in range(0, len(conversations), batch):
        inputs = processor.apply_chat_template(
            conversations[start : start + batch],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device)
        ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        yield from processor.batch_decode(new, skip_special_tokens=True)


def descriptions(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, n: int, first: int = 0
) -> Figure:
    """Describe `n` held-out scenes and count the objects that are right."""
    shown = [scenes.make_scene(seed) for seed in range(first, first + n)]
    asked = [user("Describe the picture.", scenes.draw(scene)) for scene in shown]
    right = total = 0
    for scene, text in zip(shown, reply(model, processor, asked, 80), strict=True):
        found, wanted = scenes.score_description(text, scene)
        right, total = right + found, total + wanted
    return Figure(name="objects described", right=right, total=total, first=first, n=n)


def several_pictures(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, n: int, first: int = 0
) -> Figure:
    """Describe one of two or three held-out scenes and count the objects that are right."""
    asked, targets = [], []
    for seed in range(first, first + n):
        rng = random.Random(f"several:{seed}")
        shown = [scenes.make_scene(3 * seed + i) for i in range(rng.choice((2, 3)))]
        target = rng.randrange(len(shown))
        text = f"Describe the {scenes.ORDINALS[target]} picture."
        asked.append(user(text, *(scenes.draw(scene) for scene in shown)))
        targets.append(shown[target])
    right = total = 0
    for scene, text in zip(targets, reply(model, processor, asked, 80), strict=True):
        found, wanted = scenes.score_description(text, scene)
        right, total = right + found, total + wanted
    name = "objects described, one of 2-3 pictures"
    return Figure(name=name, right=right, total=total, first=first, n=n)


def short_questions(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, n: int, first: int = 0
) -> Figure:
    """Ask one short question on each of `n` held-out scenes; the whole answer must be right."""
    asked, wanted = [], []
    for seed in range(first, first + n):
        scene = scenes.make_scene(seed)
        question = scenes.ask(scene, random.Random(f"short:{seed}"), 1)[0]
        asked.append(user(question.text, scenes.draw(scene)))
        wanted.append(question.answer)
    given = reply(model, processor, asked, 24)
    right = sum(text.strip() == answer for text, answer in zip(given, wanted, strict=True))
    return Figure(name="short questions answered", right=right, total=n, first=first, n=n)


def lookups(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    n: int,
    tokens: int,
    first: int = 0,
) -> Figure:
    """Ask for one value in each of `n` held-out texts of `tokens` tokens."""
    asked, questions = [], []
    for seed in range(first, first + n):
        lookup = texts.make_lookup(seed, tokens)
        question = random.Random(f"ask:{seed}").choice(lookup.questions)
        asked.append(user(f"{lookup.text} {question.text}"))
        questions.append(question)
    given = reply(model, processor, asked, 6)
    right = sum(texts.score_answer(t, q) for t, q in zip(given, questions, strict=True))
    name = f"values looked up, {tokens} tokens"
    return Figure(name=name, right=right, total=n, first=first, n=n)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkv.builtin.training.evaluate", description=__doc__
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of the model")
    parser.add_argument("--n", type=int, default=200, help="prompts for each figure")
    parser.add_argument("--first", type=int, default=0, help="first held-out seed")
    options = parser.parse_args(argv)
    model, processor = load_builtin(weights=options.weights)
    n, first = options.n, options.first
    print(descriptions(model, processor, n, first), flush=True)
    print(short_questions(model, processor, n, first), flush=True)
    print(several_pictures(model, processor, n, first), flush=True)
    for tokens in (256, 512, 1024):
        print(lookups(model, processor, n, tokens, first), flush=True)


if __name__ == "__main__":
    main()
