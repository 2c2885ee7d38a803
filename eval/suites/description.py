"""LLaVA-Description: describe a picture; the reference is a description of it.

Published data is a JSON list of `{"id", "image", "conversations": [{"from": "human", "value":
"<image>\\n..."}, {"from": "gpt", "value": ...}]}` and a folder of pictures. The suite is the one
that PrefixKV reports perplexity and ROUGE on (arXiv 2412.03409). With "drawings" as
data, pictures are held-out drawn scenes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from mmkv.builtin import drawings
from mmkv.eval.samples import Request, Sample, Suite
from mmkv.eval.suites import files

IMAGE_MARK = "<image>"


def load(request: Request) -> Iterator[Sample]:
    """Yield the samples of a published file."""
    for name, entry, folder in files.read_entries(request):
        question, answer = _turns(entry)
        fields: Any = {"images": (entry.image("image", folder),), "max_new_tokens": 512}
        yield Sample(id=name, prompt=question, answers=(answer,), **fields)


def _turns(entry: files.Entry) -> tuple[str, str]:
    turns = entry.fields.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2:
        raise entry.error("conversations", "expected a list of a human and a gpt turn")
    texts = []
    for i, speaker in enumerate(("human", "gpt")):
        turn = files.as_entry(entry.path, f"{entry.place}: conversations[{i}]", turns[i])
        if turn.text("from") != speaker:
            raise turn.error("from", f"expected {speaker!r}, got {turn.text('from')!r}")
        text = turn.text("value").strip()
        if speaker == "human":
            text = text.removeprefix(IMAGE_MARK).removesuffix(IMAGE_MARK).strip()
        if not text:
            raise turn.error("value", "has no text but the image mark")
        if IMAGE_MARK in text:
            raise turn.error("value", f"expected one {IMAGE_MARK}, at the start or the end")
        texts.append(text)
    return texts[0], texts[1]


def drawn(request: Request) -> Iterator[Sample]:
    """Yield samples of drawn scenes, each with its description as reference."""
    for seed in itertools.count():
        scene, rng = drawings.make_scene(seed), random.Random(f"description:{seed}")
        yield Sample(
            id=f"scene-{seed}",
            prompt=drawings.describe_question("the picture", rng),
            images=(drawings.draw(scene),),
            answers=(drawings.describe(scene),),
            tags=(f"objects={len(scene.objects)}",),
            max_new_tokens=160,
        )


SUITE = Suite(load, drawn, 20, options=("image_folder",), words=(files.DRAWINGS,))
