"""Writes the profiles that the built-in model is shipped with: `python -m
mmkv.builtin.training.calibrate` measures the costs of its heads, with `--visual` the visual heads.

It uses held-out scenes and texts of no evaluation: seeds from 50,000 on. `--visual` also measures
smollm2-vision, and prints how many visual heads are among those that the copy probe finds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mmkv import chat
from mmkv.builtin import WEIGHTS, drawings, scenes, texts
from mmkv.builtin.training.evaluate import encode, user
from mmkv.calibration import calibrate
from mmkv.loading.names import BUILTIN, SMOLLM2_VISION
from mmkv.profiles import Profile
from mmkv.sizes.profiled import FILE, VISUAL_FILE
from mmkv.wrapping import probe

FIRST = 50_000


def prompts(processor: Any, n: int) -> Iterator[dict[str, Any]]:
    """Yield `n` descriptions, `n` short questions and `n` look-ups of 256 to 1,024 tokens."""
    for seed in range(FIRST, FIRST + n):
        rng = random.Random(f"calibrate:{seed}")
        picture = scenes.draw(scene := scenes.make_scene(seed))
        lookup = texts.make_lookup(seed, (256, 512, 1024)[seed % 3])
        yield encode(processor, user(scenes.describe_question("the picture", rng), picture))
        yield encode(processor, user(scenes.ask(scene, rng).text, picture))
        yield encode(processor, user(f"{lookup.text} {rng.choice(lookup.questions).text}"))


def described(processor: Any, n: int, dataset: Any = scenes) -> Iterator[dict[str, Any]]:
    """Yield descriptions of `n` scenes, with the image tokens that each token is read from.

    The tokens of an object's sentence are read from its grid cell. `dataset` makes the scenes.
    """
    for seed in range(FIRST, FIRST + n):
        scene, rng = dataset.make_scene(seed), random.Random(f"visual:{seed}")
        question = dataset.describe_question("the picture", rng)
        inputs = dict(encode(processor, user(question, dataset.draw(scene))))
        tokens = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0].tolist()
        text, regions = dataset.describe(scene), list[list[int]]()
        reply = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [i + 1 for i, letter in enumerate(text) if letter == "."]
        leading = len(ends) - len(scene.objects)  # a sentence that counts the objects, or none
        for start, _ in reply["offset_mapping"]:
            sentence = sum(end <= start for end in ends) - leading
            is_object = 0 <= sentence < len(scene.objects)
            regions.append(_cell(tokens, scene.objects[sentence].place) if is_object else [])
        yield {**inputs, "reply": reply["input_ids"], "regions": regions}


def _cell(tokens: list[int], place: str) -> list[int]:
    """Return the image tokens of a place; `tokens` are those of a square, row by row."""
    side = math.isqrt(len(tokens))
    cells = [(i // side * 3 // side, i % side * 3 // side) for i in range(len(tokens))]
    target = divmod(scenes.PLACES.index(place), 3)
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


def main(
    model: Annotated[str, typer.Option(help="A name, or a folder with new weights.")] = BUILTIN,
    n: Annotated[int, typer.Option(help="Prompts of each kind, or scenes.")] = 200,
    visual: bool = False,
    out: Annotated[Path, typer.Option(help="The folder for the profile.")] = WEIGHTS,
) -> None:
    """Measure, and write the profile."""
    out.mkdir(parents=True, exist_ok=True)
    loaded = chat.load(model)
    dataset = drawings if model == SMOLLM2_VISION else scenes
    network, processor = loaded.model, loaded.processor
    samples = described(processor, n, dataset) if visual else prompts(processor, n)
    profile = calibrate(network, samples, "sparsemm" if visual else "condense")
    path = out / (VISUAL_FILE if visual else FILE)
    profile.save(path)
    print(f"{profile.samples} prompts: wrote {path}")
    if visual:
        print(beside_copies(profile, probe(network)))


if __name__ == "__main__":
    typer.run(main)
