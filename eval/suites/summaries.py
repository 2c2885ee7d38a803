"""CNN/DailyMail and XSum: summarise an article; ROUGE-2 against the reference.

The tasks are two of SqueezeAttention's (arXiv 2404.04793). Published data is JSONL with `article`
and `highlights` (CNN/DailyMail) or `document` and `summary` (XSum), and perhaps `id`. Built-in data
is what the built-in model can answer: for CNN/DailyMail several sentences on the picture beside a
text, for XSum one record of a text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from mmkv.eval.samples import Sample
from mmkv.eval.suites import files
from mmkv.eval.suites.description import BUILTIN_NOTE

BUILTIN_SIZE = 20
NOTE = "prompts are worded here; papers do not agree on any"


@dataclass(frozen=True, kw_only=True)
class _Set:
    name: str
    source: str
    target: str
    request: str
    max_new_tokens: int
    seed: int


_CNN = _Set(
    name="cnn_dailymail",
    source="article",
    target="highlights",
    request="Summarise the article above in three or four sentences.",
    max_new_tokens=128,
    seed=200_000,
)
_XSUM = _Set(
    name="xsum",
    source="document",
    target="summary",
    request="Summarise the article above in one sentence.",
    max_new_tokens=64,
    seed=300_000,
)


def load_cnn_dailymail(
    data: str | Path = "builtin",
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
) -> list[Sample]:
    """Return the samples of CNN/DailyMail. Raises DataError."""
    return _load(_CNN, data, limit)


def load_xsum(
    data: str | Path = "builtin",
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
) -> list[Sample]:
    """Return the samples of XSum. Raises DataError."""
    return _load(_XSUM, data, limit)


def _load(which: _Set, data: str | Path, limit: int | None) -> list[Sample]:
    if data == "builtin":
        return _builtin(which, BUILTIN_SIZE if limit is None else limit)
    path = files.find_file(data, ".jsonl", (f"{which.name}.jsonl", "test.jsonl"))
    names = files.Names()
    samples = []
    for entry in files.read_lines(path, limit):
        given = entry.optional("id")
        samples.append(
            Sample(
                id=names.unique(entry.place.split()[-1] if given is None else str(given)),
                suite=which.name,
                task=which.name,
                prompt=f"{entry.text(which.source)}\n\n{which.request}\nSummary:",
                answers=(entry.text(which.target).strip(),),
                max_new_tokens=which.max_new_tokens,
                metric="rouge_2",
                truncate=True,
                note=NOTE,
            )
        )
    return samples


def _builtin(which: _Set, size: int) -> list[Sample]:
    from mmkv.builtin import scenes, texts

    samples = []
    for number in range(size):
        rng = random.Random(f"{which.name}:{number}")
        if which is _CNN:
            lookup = texts.make_lookup(which.seed + number, rng.choice((160, 240, 320)))
            scene = scenes.make_scene(which.seed + number)
            images, question = (scenes.draw(scene),), scenes.describe_question("the picture", rng)
            answer, length = scenes.describe(scene), 96
        else:
            lookup = texts.make_lookup(which.seed + number, rng.choice((384, 512, 640)))
            asked = rng.choice(lookup.questions)
            images, question, answer, length = (), asked.text, asked.answer, 8
        samples.append(
            Sample(
                id=f"text-{number}",
                suite=which.name,
                task=which.name,
                prompt=f"{lookup.text} {question}",
                images=images,
                answers=(answer,),
                max_new_tokens=length,
                metric="rouge_2",
                note=BUILTIN_NOTE,
            )
        )
    return samples
