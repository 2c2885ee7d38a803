"""Writes the profiles that the built-in model comes with: `python -m
mmkv.builtin.training.calibrate`, of what its heads cost, and with `--visual` of which are visual.

On held-out scenes and texts that no evaluation uses: seeds from 50,000 on. `--visual` measures
smollm2-vision too, and says how its visual heads lie to those that the copy probe finds.
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
from mmkv.loading.models import BUILTIN, SMOLLM2_VISION
from mmkv.profiles import Profile
from mmkv.sizes.profiled import FILE, VISUAL_FILE
from mmkv.wrapping import probe

FIRST = 50_000


def prompts(processor: Any, n: int) -> Iterator[dict[str, Any]]:
    """As many descriptions, short questions, and look-ups of 256 to 1,024 tokens, `n` of each."""
    for seed in range(FIRST, FIRST + n):
        rng = random.Random(f"calibrate:{seed}")
        picture = scenes.draw(scene := scenes.make_scene(seed))
        lookup = texts.make_lookup(seed, (256, 512, 1024)[seed % 3])
        yield encode(processor, user(scenes.describe_question("the picture", rng), picture))
        yield encode(processor, user(scenes.ask(scene, rng, 1)[0].text, picture))
        yield encode(processor, user(f"{lookup.text} {rng.choice(lookup.questions).text}"))


def described(processor: Any, n: int, drawn: Any = scenes) -> Iterator[dict[str, Any]]:
    """Descriptions of `n` scenes, with the cell of the grid that each of their words is read from.

    The words of an object's sentence are read from the object's cell. `drawn` makes the scenes.
    """
    for seed in range(FIRST, FIRST + n):
        scene, rng = drawn.make_scene(seed), random.Random(f"visual:{seed}")
        question = drawn.describe_question("the picture", rng)
        inputs = dict(encode(processor, user(question, drawn.draw(scene))))
        tokens = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0].tolist()
        text, regions = drawn.describe(scene), list[list[int]]()
        found = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [i + 1 for i, letter in enumerate(text) if letter == "."]
        before = len(ends) - len(scene.objects)  # a sentence that counts the objects, or none
        for start, _ in found["offset_mapping"]:
            sentence = sum(end <= start for end in ends) - before
            known = 0 <= sentence < len(scene.objects)
            regions.append(_cell(tokens, scene.objects[sentence].place) if known else [])
        yield {**inputs, "reply": found["input_ids"], "regions": regions}


def _cell(tokens: list[int], place: str) -> list[int]:
    """The image tokens of a place, of the square that they are row by row."""
    side = math.isqrt(len(tokens))
    cells = [(i // side * 3 // side, i % side * 3 // side) for i in range(len(tokens))]
    wanted = divmod(scenes.PLACES.index(place), 3)
    return [token for token, cell in zip(tokens, cells, strict=True) if cell == wanted]


def beside_copies(visual: Profile, copies: Profile) -> str:
    """How much of what is visual the heads do that copy most, as many as half of it takes."""
    seen, copied = (np.array(x).ravel() for x in (visual.visual, copies.retrieval))
    most = np.argsort(-seen)
    half = 1 + int(np.searchsorted(seen[most].cumsum(), 0.5))
    copying = np.argsort(-copied)[:half]
    both = len(np.intersect1d(most[:half], copying))
    return (
        f"{half} of {len(seen)} heads do half of what is visual; {both} of them are among the "
        f"{half} that copy most, which do {seen[copying].sum():.0%} of it"
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
    drawn = drawings if model == SMOLLM2_VISION else scenes
    net, processor = loaded.model, loaded.processor
    samples = described(processor, n, drawn) if visual else prompts(processor, n)
    profile = calibrate(net, samples, "sparsemm" if visual else "condense")
    path = out / (VISUAL_FILE if visual else FILE)
    profile.save(path)
    print(f"{profile.samples} prompts: wrote {path}")
    if visual:
        print(beside_copies(profile, probe(net)))


if __name__ == "__main__":
    typer.run(main)
