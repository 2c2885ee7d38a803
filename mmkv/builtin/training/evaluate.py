"""Prints the built-in model's figures: `python -m mmkv.builtin.training.evaluate`.

Greedy decoding with the full cache. Objects count as right with colour, shape and place; a look-up
counts as right with the value of the key that was asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from mmkv.builtin import WEIGHTS, load_builtin, scenes, texts

Message = dict[str, Any]
# A conversation, and what of the reply is right, of how much.
Asked = tuple[list[Message], Callable[[str], tuple[int, int]]]
_BATCH = 20


def user(text: str, *pictures: Any) -> list[Message]:
    """A conversation of one user message: the pictures, then the text."""
    content: list[Message] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def encode(processor: Any, conversation: Any, **more: Any) -> Any:
    """What the model takes for a conversation, or for several."""
    how: Any = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **more}
    return processor.apply_chat_template(conversation, add_generation_prompt=True, **how)


def _description(seed: int) -> Asked:
    scene = scenes.make_scene(seed)
    score = partial(scenes.score_description, scene=scene)
    return user("Describe the picture.", scenes.draw(scene)), score


def _several(seed: int) -> Asked:
    rng = random.Random(f"several:{seed}")
    shown = [scenes.make_scene(3 * seed + i) for i in range(rng.choice((2, 3)))]
    target = rng.randrange(len(shown))
    text = f"Describe the {scenes.ORDINALS[target]} picture."
    score = partial(scenes.score_description, scene=shown[target])
    return user(text, *map(scenes.draw, shown)), score


def _short(seed: int) -> Asked:
    scene = scenes.make_scene(seed)
    question = scenes.ask(scene, random.Random(f"short:{seed}"), 1)[0]
    picture = scenes.draw(scene)
    return user(question.text, picture), lambda text: (int(text.strip() == question.answer), 1)


def _lookup(seed: int, tokens: int) -> Asked:
    lookup = texts.make_lookup(seed, tokens)
    question = random.Random(f"ask:{seed}").choice(lookup.questions)
    conversation = user(f"{lookup.text} {question.text}")
    return conversation, lambda text: (int(texts.score_answer(text, question)), 1)


# By name: what is asked for a seed, and the most tokens of a reply.
FIGURES: dict[str, tuple[Callable[[int], Asked], int]] = {
    "objects described": (_description, 80),
    "short questions answered": (_short, 24),
    "objects described, one of 2-3 pictures": (_several, 80),
    **{f"values looked up, {n} tokens": (partial(_lookup, tokens=n), 6) for n in (256, 512, 1024)},
}


def measure(model: Any, processor: Any, name: str, n: int, first: int = 0) -> tuple[int, int]:
    """How much of the replies to `n` held-out seeds from `first` on is right, of how much."""
    make, longest = FIGURES[name]
    right = total = 0
    for start in range(first, first + n, _BATCH):
        asked = [make(seed) for seed in range(start, min(start + _BATCH, first + n))]
        padded = {"processor_kwargs": {"padding": True}}
        inputs = encode(processor, [conversation for conversation, _ in asked], **padded)
        ids = model.generate(**inputs.to(model.device), max_new_tokens=longest, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        replies = processor.batch_decode(new, skip_special_tokens=True)
        for (_, score), reply in zip(asked, replies, strict=True):
            found, wanted = score(reply)
            right, total = right + found, total + wanted
    return right, total


def main(weights: Path = WEIGHTS, n: int = 200, first: int = 0) -> None:
    """Print each figure over `n` held-out seeds from `first` on."""
    model, processor = load_builtin(weights=weights)
    for name in FIGURES:
        right, total = measure(model, processor, name, n, first)
        seeds = f"{n} prompts, held-out seeds {first}..{first + n - 1}"
        print(f"{name}: {right / total:.1%} ({right}/{total}; {seeds})", flush=True)


if __name__ == "__main__":
    typer.run(main)
