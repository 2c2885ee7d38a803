"""Measures smollm2-vision: `python -m mmkv.builtin.training.evaluate figures`, or `visual`.

`figures` prints accuracies: greedy decoding with the full cache, on held-out seeds. A thing is
right if all its properties in the description are, a short question if the whole answer is.
`visual` measures its visual heads on scenes of no evaluation, seeds from 50,000 on, and prints how
many of them are among those that the copy probe finds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from mmkv.builtin import drawings, load_builtin
from mmkv.calibration import calibrate
from mmkv.loading.names import SMOLLM2
from mmkv.profiles import Profile
from mmkv.sizes.profiled import VISUAL_FILE
from mmkv.wrapping import probe

Message = dict[str, Any]
# A conversation, and a function of the reply: the number of right items, and of all items.
Prompt = tuple[list[Message], Callable[[str], tuple[int, int]]]
FIRST = 50_000  # seed of the scenes on which visual heads are measured
_BATCH = 20
app = typer.Typer(pretty_exceptions_enable=False)


def user(text: str, *pictures: Any) -> list[Message]:
    """Return a conversation of one user message: the pictures, then the text."""
    content: list[Message] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def encode(processor: Any, conversation: Any, **options: Any) -> Any:
    """Return the model's inputs for a conversation, or for several."""
    arguments: Any = {"tokenize": True, "return_dict": True, "return_tensors": "pt", **options}
    return processor.apply_chat_template(conversation, add_generation_prompt=True, **arguments)


def _description(seed: int) -> Prompt:
    scene = drawings.make_scene(seed)
    score = partial(drawings.score_description, scene=scene)
    return user("Describe the picture.", drawings.draw(scene)), score


def _several(seed: int) -> Prompt:
    rng = random.Random(f"several:{seed}")
    pictured = [drawings.make_scene(3 * seed + i) for i in range(rng.choice((2, 3)))]
    target = rng.randrange(len(pictured))
    text = f"Describe the {drawings.ORDINALS[target]} picture."
    score = partial(drawings.score_description, scene=pictured[target])
    return user(text, *map(drawings.draw, pictured)), score


def _short(seed: int) -> Prompt:
    scene = drawings.make_scene(seed)
    question = drawings.ask(scene, random.Random(f"short:{seed}"))
    return user(question.text, drawings.draw(scene)), partial(_equals, question.answer)


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


# By name: a function from a seed to a prompt, and the most tokens of a reply.
FIGURES: dict[str, tuple[Callable[[int], Prompt], int]] = {
    "things described": (_description, 160),
    "short questions answered": (_short, 24),
    "things described, one of 2-3 pictures": (_several, 160),
    "printed words and numbers read": (_print, 24),
    "which of four pictures shows a thing": (_which, 24),
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


def described(processor: Any, n: int) -> Iterator[dict[str, Any]]:
    """Yield descriptions of `n` scenes, with the image tokens that each token is read from.

    The tokens of an object's sentence are read from its grid cell.
    """
    for seed in range(FIRST, FIRST + n):
        scene, rng = drawings.make_scene(seed), random.Random(f"visual:{seed}")
        question = drawings.describe_question("the picture", rng)
        inputs = dict(encode(processor, user(question, drawings.draw(scene))))
        tokens = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0].tolist()
        text, regions = drawings.describe(scene), list[list[int]]()
        reply = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [i + 1 for i, letter in enumerate(text) if letter == "."]
        for start, _ in reply["offset_mapping"]:
            sentence = sum(end <= start for end in ends)
            regions.append(_cell(tokens, scene.objects[sentence].place))
        yield {**inputs, "reply": reply["input_ids"], "regions": regions}


def _cell(tokens: list[int], place: str) -> list[int]:
    """Return the image tokens of a place; `tokens` are those of a square, row by row."""
    side = math.isqrt(len(tokens))
    cells = [(i // side * 3 // side, i % side * 3 // side) for i in range(len(tokens))]
    target = divmod(drawings.PLACES.index(place), 3)
    return [token for token, cell in zip(tokens, cells, strict=True) if cell == target]


def beside_copies(visual: Profile, copies: Profile) -> str:
    """Return, in words, how many heads with half of the visual score are copying heads."""
    scores, copy_scores = (np.array(x).ravel() for x in (visual.visual, copies.retrieval))
    order = np.argsort(-scores)
    half = 1 + int(np.searchsorted(scores[order].cumsum(), 0.5))
    copying = np.argsort(-copy_scores)[:half]
    both = len(np.intersect1d(order[:half], copying))
    return (
        f"{half} of {len(scores)} heads do half of what is visual; {both} of them are among the "
        f"{half} that copy most, which do {scores[copying].sum():.0%} of it"
    )


@app.command()
def figures(
    n: Annotated[int, typer.Option(help="Prompts of each figure.")] = 200,
    first: Annotated[int, typer.Option(help="The first held-out seed.")] = 0,
    texts: Annotated[
        Path | None, typer.Option(help="Texts on which its perplexity is set beside SmolLM2's.")
    ] = None,
) -> None:
    """Print each figure over `n` held-out seeds from `first` on."""
    model, processor = load_builtin()
    for name, figure in FIGURES.items():
        right, total = measure(model, processor, figure, n, first)
        seeds = f"{n} prompts, held-out seeds {first}..{first + n - 1}"
        print(f"{name}: {right / total:.1%} ({right}/{total}; {seeds})", flush=True)
    if texts is not None:
        paths = sorted(texts.glob("*.txt"))
        score = perplexity(model, processor.tokenizer, paths, 20)
        base = perplexity(*load_builtin(SMOLLM2), paths, 20)
        print(f"perplexity of 20 texts: {score:.2f}, SmolLM2 {base:.2f} ({score / base - 1:+.1%})")


@app.command()
def visual(
    out: Annotated[Path, typer.Option(help="The folder for the profile.")],
    n: Annotated[int, typer.Option(help="How many scenes are described.")] = 200,
) -> None:
    """Measure the visual heads, and write their profile."""
    model, processor = load_builtin()
    out.mkdir(parents=True, exist_ok=True)
    profile = calibrate(model, described(processor, n), "sparsemm")
    profile.save(out / VISUAL_FILE)
    print(f"{profile.samples} prompts: wrote {out / VISUAL_FILE}")
    print(beside_copies(profile, probe(model)))


if __name__ == "__main__":
    app()
