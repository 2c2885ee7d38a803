"""LLaVA-Description: describe a picture; the reference is a description of it.

Published data is a JSON list of `{"id", "image", "conversations": [{"from": "human", "value":
"<image>\\n..."}, {"from": "gpt", "value": ...}]}` and a folder of pictures. The suite is the one
that PrefixKV reports perplexity and ROUGE on (arXiv 2412.03409). Built-in data are held-out scenes.
"""

from __future__ import annotations

import random
from pathlib import Path

from . import files
from .samples import DataError, Sample

NAME = "description"
IMAGE_MARK = "<image>"
BUILTIN_SIZE = 50
BUILTIN_NOTE = "the data is built in, drawn and composed by the package"


def load(
    data: str | Path = "builtin",
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
) -> list[Sample]:
    """Return the samples, from the built-in data or a published file. Raises DataError."""
    if data == "builtin":
        return builtin(BUILTIN_SIZE if limit is None else limit)
    path = files.find_file(data, ".json")
    content = files.read_json(path)
    if not isinstance(content, list) or not content:
        raise DataError(f"{path}: expected a list of entries")
    folder = files.find_image_folder(path, image_folder)
    names = files.Names()
    return [
        _sample(files.as_entry(path, f"entry {i}", value), i, folder, names)
        for i, value in enumerate(content[:limit])
    ]


def _sample(entry: files.Entry, number: int, folder: Path, names: files.Names) -> Sample:
    question, answer = _turns(entry)
    name = entry.optional("id")
    return Sample(
        id=names.unique(str(number if name is None else name)),
        suite=NAME,
        task=NAME,
        prompt=question,
        images=(entry.image("image", folder),),
        answers=(answer,),
        max_new_tokens=512,
    )


def _turns(entry: files.Entry) -> tuple[str, str]:
    """Return the first turn of the human, without the image mark, and the reply to it."""
    turns = entry.optional("conversations")
    if not isinstance(turns, list) or len(turns) < 2:
        raise entry.error("conversations", "expected a list of a human and a gpt turn")
    texts = []
    for i, speaker in enumerate(("human", "gpt")):
        turn = turns[i]
        if not isinstance(turn, dict) or turn.get("from") != speaker:
            raise entry.error(f"conversations[{i}].from", f"expected {speaker!r}")
        text = turn.get("value")
        if isinstance(text, str) and speaker == "human":
            text = text.strip().removeprefix(IMAGE_MARK).removesuffix(IMAGE_MARK)
        if not isinstance(text, str) or not text.strip():
            raise entry.error(f"conversations[{i}].value", "expected a text that is not empty")
        if IMAGE_MARK in text:
            raise entry.error(f"conversations[{i}].value", "expected one image at the start or end")
        texts.append(text.strip())
    return texts[0], texts[1]


def builtin(size: int) -> list[Sample]:
    """Return `size` held-out scenes, each with its full description as the reference."""
    from mmkv.builtin import scenes

    samples = []
    for seed in range(size):
        scene = scenes.make_scene(seed)
        rng = random.Random(f"description:{seed}")
        samples.append(
            Sample(
                id=f"scene-{seed}",
                suite=NAME,
                task=NAME,
                prompt=scenes.describe_question("the picture", rng),
                images=(scenes.draw(scene),),
                answers=(scenes.describe(scene),),
                max_new_tokens=96,
                tags=(f"objects={len(scene.objects)}",),
                note=BUILTIN_NOTE,
            )
        )
    return samples
