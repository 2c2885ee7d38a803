"""Writes the profiles that the built-in model comes with: `python -m
mmkv.builtin.training.calibrate`, of what its heads cost, and with `--visual` of which are visual.

On held-out scenes and texts that no evaluation uses: seeds from 50,000 on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from mmkv.builtin import WEIGHTS, load_builtin, scenes, texts
from mmkv.builtin.training.evaluate import encode, user
from mmkv.calibration import calibrate
from mmkv.sizes.profiled import FILE, VISUAL_FILE

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


def described(processor: Any, n: int) -> Iterator[dict[str, Any]]:
    """Descriptions of `n` scenes, with the cell of the grid that each of their words is read from.

    The words of an object's sentence are read from the object's cell.
    """
    for seed in range(FIRST, FIRST + n):
        scene, rng = scenes.make_scene(seed), random.Random(f"visual:{seed}")
        question = scenes.describe_question("the picture", rng)
        inputs = dict(encode(processor, user(question, scenes.draw(scene))))
        tokens = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0].tolist()
        text, regions = scenes.describe(scene), list[list[int]]()
        found = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [i + 1 for i, letter in enumerate(text) if letter == "."]
        for start, _ in found["offset_mapping"]:
            sentence = sum(end <= start for end in ends)  # 0 counts the objects
            place = scene.objects[sentence - 1].place if sentence else None
            regions.append([] if place is None else _cell(tokens, place))
        yield {**inputs, "reply": found["input_ids"], "regions": regions}


def _cell(tokens: list[int], place: str) -> list[int]:
    """The image tokens of a place, of the square that they are row by row."""
    side = math.isqrt(len(tokens))
    cells = [(i // side * 3 // side, i % side * 3 // side) for i in range(len(tokens))]
    wanted = divmod(scenes.PLACES.index(place), 3)
    return [token for token, cell in zip(tokens, cells, strict=True) if cell == wanted]


def main(weights: Path = WEIGHTS, n: int = 200, visual: bool = False) -> None:
    """Measure `n` prompts of each kind, or with --visual `n` scenes, and write the profile."""
    model, processor = load_builtin(weights=weights)
    samples = described(processor, n) if visual else prompts(processor, n)
    profile = calibrate(model, samples, "sparsemm" if visual else "condense")
    path = weights / (VISUAL_FILE if visual else FILE)
    profile.save(path)
    print(f"{profile.samples} prompts: wrote {path}")


if __name__ == "__main__":
    typer.run(main)
