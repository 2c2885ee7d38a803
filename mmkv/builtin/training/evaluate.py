"""Prints a built-in model's accuracies: `python -m mmkv.builtin.training.evaluate`.

Greedy decoding with the full cache, on held-out seeds. An object is right if all its properties in
the description are, a short question if the whole answer is, a look-up if the value is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from mmkv.builtin import drawings, load_builtin, scenes, texts
from mmkv.loading.names import SMOLLM2_VISION

Message = dict[str, Any]
# A conversation, and a function of the reply: the number of right items, and of all items.
Prompt = tuple[list[Message], Callable[[str], tuple[int, int]]]
_BATCH = 20


def user(text: str, *pictures: Any) -> list[Message]:
    """Return a conversation of one user message: the pictures, then the text."""
    content: list[Message] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def encode(processor: Any, conversation: Any, **options: Any) -> Any:
    """Return the model's inputs for a conversation, or for several."""
    arguments: Any = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **options}
    return processor.apply_chat_template(conversation, add_generation_prompt=True, **arguments)


def _description(seed: int, dataset: Any) -> Prompt:
    scene = dataset.make_scene(seed)
    score = partial(dataset.score_description, scene=scene)
    return user("Describe the picture.", dataset.draw(scene)), score


def _several(seed: int, dataset: Any) -> Prompt:
    rng = random.Random(f"several:{seed}")
    pictured = [dataset.make_scene(3 * seed + i) for i in range(rng.choice((2, 3)))]
    target = rng.randrange(len(pictured))
    text = f"Describe the {dataset.ORDINALS[target]} picture."
    score = partial(dataset.score_description, scene=pictured[target])
    return user(text, *map(dataset.draw, pictured)), score


def _short(seed: int, dataset: Any) -> Prompt:
    scene = dataset.make_scene(seed)
    question = dataset.ask(scene, random.Random(f"short:{seed}"))
    return user(question.text, dataset.draw(scene)), partial(_equals, question.answer)


def _equals(answer: str, text: str) -> tuple[int, int]:
    return int(text.strip() == answer), 1


def _print(seed: int) -> Prompt:
    """Return a prompt about one word or number among shapes."""
    scene = drawings.make_scene(seed, count=3, printed=1)
    (thing,) = [x for x in scene.objects if x.kind != "shape"]
    question = f"Which {thing.kind} is printed in the picture?"
    return user(question, drawings.draw(scene)), lambda text: (int(thing.short in text), 1)


def _which(seed: int) -> Prompt:
    """Return a prompt with four pictures: which one shows a thing."""
    rng = random.Random(f"which:{seed}")
    while True:
        pictured = [drawings.make_scene(rng.randrange(2**40)) for _ in range(4)]
        if question := drawings.find_question(pictured, rng):
            conversation = user(question.text, *map(drawings.draw, pictured))
            return conversation, partial(_equals, question.answer)


def _lookup(seed: int, tokens: int) -> Prompt:
    lookup = texts.make_lookup(seed, tokens)
    question = random.Random(f"ask:{seed}").choice(lookup.questions)
    conversation = user(f"{lookup.text} {question.text}")
    return conversation, lambda text: (int(texts.score_answer(text, question)), 1)


# Functions from a seed to a prompt, and the most tokens of a reply, by name.
Figures = dict[str, tuple[Callable[[int], Prompt], int]]


def _figures(dataset: Any, longest: int) -> Figures:
    return {
        "objects described": (partial(_description, dataset=dataset), longest),
        "short questions answered": (partial(_short, dataset=dataset), 24),
        "objects described, one of 2-3 pictures": (partial(_several, dataset=dataset), longest),
    }


FIGURES: dict[str, Figures] = {
    "builtin": {
        **_figures(scenes, 80),
        **{
            f"values looked up, {n} tokens": (partial(_lookup, tokens=n), 6)
            for n in (256, 512, 1024)
        },
    },
    "smollm2-vision": {
        **_figures(drawings, 160),
        "printed words and numbers read": (_print, 24),
        "which of four pictures shows a thing": (_which, 24),
    },
}


def measure(
    model: Any, processor: Any, figure: tuple[Callable[[int], Prompt], int], n: int, first: int = 0
) -> tuple[int, int]:
    """Return how many items are right, and how many there are, over `n` seeds from `first` on."""
    make, longest = figure
    right = total = 0
    for start in range(first, first + n, _BATCH):
        prompts = [make(seed) for seed in range(start, min(start + _BATCH, first + n))]
        padded = {"processor_kwargs": {"padding": True}}
        inputs = encode(processor, [conversation for conversation, _ in prompts], **padded)
        ids = model.generate(**inputs.to(model.device), max_new_tokens=longest, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        replies = processor.batch_decode(new, skip_special_tokens=True)
        for (_, score), reply in zip(prompts, replies, strict=True):
            n_right, n_total = score(reply)
            right, total = right + n_right, total + n_total
    return right, total


def perplexity(model: Any, tokenizer: Any, paths: list[Path], n: int, length: int = 512) -> float:
    """Return the perplexity of `length` tokens from the middle of each of `n` texts."""
    total = 0.0
    for path in paths[:: max(1, len(paths) // n)][:n]:
        text = path.read_text(encoding="utf-8")
        middle = text[len(text) // 2 :][: 8 * length]
        ids = tokenizer(middle, return_tensors="pt", truncation=True, max_length=length).input_ids
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids, use_cache=False).loss)
    return math.exp(total / n)


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(FIGURES)}.")] = SMOLLM2_VISION,
    n: Annotated[int, typer.Option(help="Prompts of each figure.")] = 200,
    first: Annotated[int, typer.Option(help="The first held-out seed.")] = 0,
    texts: Annotated[
        Path | None, typer.Option(help="Texts on which its perplexity is set beside SmolLM2's.")
    ] = None,
) -> None:
    """Print each figure over `n` held-out seeds from `first` on."""
    loaded, processor = load_builtin(model)
    for name, figure in FIGURES[model].items():
        right, total = measure(loaded, processor, figure, n, first)
        seeds = f"{n} prompts, held-out seeds {first}..{first + n - 1}"
        print(f"{name}: {right / total:.1%} ({right}/{total}; {seeds})", flush=True)
    if texts is not None:
        paths = sorted(texts.glob("*.txt"))
        score = perplexity(loaded, processor.tokenizer, paths, 20)
        base = perplexity(*load_builtin("smollm2"), paths, 20)
        print(f"perplexity of 20 texts: {score:.2f}, SmolLM2 {base:.2f} ({score / base - 1:+.1%})")


if __name__ == "__main__":
    typer.run(main)
