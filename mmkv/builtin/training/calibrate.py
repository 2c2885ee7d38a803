"""Writes what the heads of the built-in model cost: `python -m mmkv.builtin.training.calibrate`.

On held-out scenes and texts that no evaluation uses: seeds from 50,000 on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmkv.builtin import WEIGHTS, load_builtin, scenes, texts
from mmkv.builtin.training.evaluate import Message, user
from mmkv.calibration import calibrate
from mmkv.profiles import FILE

FIRST = 50_000


def prompts(n: int) -> Iterator[list[Message]]:
    """As many descriptions, short questions, and look-ups of 256 to 1,024 tokens, `n` of each."""
    for seed in range(FIRST, FIRST + n):
        rng = random.Random(f"calibrate:{seed}")
        picture = scenes.draw(scene := scenes.make_scene(seed))
        yield user(scenes.describe_question("the picture", rng), picture)
        yield user(scenes.ask(scene, rng, 1)[0].text, picture)
        lookup = texts.make_lookup(seed, (256, 512, 1024)[seed % 3])
        yield user(f"{lookup.text} {rng.choice(lookup.questions).text}")


def encoded(processor: Any, conversation: list[Message]) -> Any:
    """What the model takes."""
    how: Any = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(conversation, add_generation_prompt=True, **how)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mmkv.builtin.training.calibrate", description=__doc__
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of the model")
    parser.add_argument("--n", type=int, default=200, help="prompts of each kind")
    options = parser.parse_args(argv)
    model, processor = load_builtin(weights=options.weights)
    samples = (encoded(processor, conversation) for conversation in prompts(options.n))
    profile = calibrate(model, samples, "condense")
    profile.save(options.weights / FILE)
    print(f"{profile.samples} prompts: wrote {options.weights / FILE}")


if __name__ == "__main__":
    main()
