"""Prints the built-in model's figures: `python -m mmkv.builtin.training.evaluate`.

Greedy decoding with the full cache. Objects count as right with colour, shape and place; a look-up
counts as right with the value of the key that was asked for.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.builtin import WEIGHTS, load_builtin, scenes, texts

Message = dict[str, Any]
# A conversation, and what of the reply is right, of how much.
Asked = tuple[list[Message], Callable[[str], tuple[int, int]]]


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


def _measure(
    name: str, model: Any, processor: Any, asked: Sequence[Asked], longest: int, first: int
) -> Figure:
    """Count what is right in the replies, of at most `longest` tokens, to all that is asked."""
    replies = reply(model, processor, [conversation for conversation, _ in asked], longest)
    scores = [score(text) for (_, score), text in zip(asked, replies, strict=True)]
    right, total = sum(found for found, _ in scores), sum(wanted for _, wanted in scores)
    return Figure(name=name, right=right, total=total, first=first, n=len(asked))


def descriptions(model: Any, processor: Any, n: int, first: int = 0) -> Figure:
    """Describe `n` held-out scenes and count the objects that are right."""
    asked: list[Asked] = []
    for seed in range(first, first + n):
        scene = scenes.make_scene(seed)
        score = partial(scenes.score_description, scene=scene)
        asked.append((user("Describe the picture.", scenes.draw(scene)), score))
    return _measure("objects described", model, processor, asked, 80, first)


def several_pictures(model: Any, processor: Any, n: int, first: int = 0) -> Figure:
    """Describe one of two or three held-out scenes and count the objects that are right."""
    asked: list[Asked] = []
    for seed in range(first, first + n):
        rng = random.Random(f"several:{seed}")
        shown = [scenes.make_scene(3 * seed + i) for i in range(rng.choice((2, 3)))]
        target = rng.randrange(len(shown))
        text = f"Describe the {scenes.ORDINALS[target]} picture."
        score = partial(scenes.score_description, scene=shown[target])
        asked.append((user(text, *map(scenes.draw, shown)), score))
    name = "objects described, one of 2-3 pictures"
    return _measure(name, model, processor, asked, 80, first)


def short_questions(model: Any, processor: Any, n: int, first: int = 0) -> Figure:
    """Ask one short question on each of `n` held-out scenes; the whole answer must be right."""

    def score(text: str, answer: str) -> tuple[int, int]:
        return int(text.strip() == answer), 1

    asked: list[Asked] = []
    for seed in range(first, first + n):
        scene = scenes.make_scene(seed)
        question = scenes.ask(scene, random.Random(f"short:{seed}"), 1)[0]
        conversation = user(question.text, scenes.draw(scene))
        asked.append((conversation, partial(score, answer=question.answer)))
    return _measure("short questions answered", model, processor, asked, 24, first)


def lookups(model: Any, processor: Any, n: int, tokens: int, first: int = 0) -> Figure:
    """Ask for one value in each of `n` held-out texts of `tokens` tokens."""

    def score(text: str, question: scenes.Question) -> tuple[int, int]:
        return int(texts.score_answer(text, question)), 1

    asked: list[Asked] = []
    for seed in range(first, first + n):
        lookup = texts.make_lookup(seed, tokens)
        question = random.Random(f"ask:{seed}").choice(lookup.questions)
        conversation = user(f"{lookup.text} {question.text}")
        asked.append((conversation, partial(score, question=question)))
    return _measure(f"values looked up, {tokens} tokens", model, processor, asked, 6, first)


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
