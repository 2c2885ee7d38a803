"""Writes which heads of the built-in model are visual: `python -m mmkv.builtin.training.visual`.

On held-out scenes that no evaluation uses: seeds from 50,000 on. The reply is the scene's
description; the words of an object's sentence are read from the object's cell of the 3 x 3 grid.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmkv.builtin import WEIGHTS, load_builtin, scenes
from mmkv.builtin.training.calibrate import FIRST, encoded
from mmkv.builtin.training.evaluate import user
from mmkv.calibration import calibrate
from mmkv.profiles import VISUAL_FILE


def samples(processor: Any, image_token: int, n: int) -> Iterator[dict[str, Any]]:
    """Descriptions of `n` scenes, with what each of their words is read from."""
    for seed in range(FIRST, FIRST + n):
        scene, rng = scenes.make_scene(seed), random.Random(f"visual:{seed}")
        question = scenes.describe_question("the picture", rng)
        inputs = dict(encoded(processor, user(question, scenes.draw(scene))))
        places = (inputs["input_ids"][0] == image_token).nonzero()[:, 0].tolist()
        text, regions = scenes.describe(scene), list[list[int]]()
        found = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [i + 1 for i, letter in enumerate(text) if letter == "."]
        for start, _ in found["offset_mapping"]:
            sentence = sum(end <= start for end in ends)  # 0 counts the objects
            item = scene.objects[sentence - 1] if sentence else None
            regions.append([] if item is None else cell(places, item.place))
        yield {**inputs, "reply": found["input_ids"], "regions": regions}


def cell(places: list[int], place: str) -> list[int]:
    """The image tokens of a cell, of the square that `places` are row by row."""
    side = math.isqrt(len(places))
    row, column = divmod(scenes.PLACES.index(place), 3)
    return [
        token
        for i, token in enumerate(places)
        if i // side * 3 // side == row and i % side * 3 // side == column
    ]


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkv.builtin.training.visual", description=__doc__
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of the model")
    parser.add_argument("--n", type=int, default=50, help="scenes")
    options = parser.parse_args(argv)
    model, processor = load_builtin(weights=options.weights)
    given = samples(processor, model.config.image_token_id, options.n)
    profile = calibrate(model, given, "sparsemm")
    profile.save(options.weights / VISUAL_FILE)
    print(f"{profile.samples} scenes: wrote {options.weights / VISUAL_FILE}")


if __name__ == "__main__":
    main()
