"""MM-Vet: open questions about pictures, each with the capabilities it needs (arXiv 2308.02490).

Published data has two shapes: a JSON object of id -> `{imagename, question, answer, imagesource,
capability}`, and a JSON list of `{image, question, answer}`. In answers, "<OR>" separates
alternatives and "<AND>" joins parts. Built-in data are questions about held-out scenes.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from mmkv.eval.samples import DataError, Request, Sample
from mmkv.eval.suites import files
from mmkv.eval.suites.description import BUILTIN_NOTE, IMAGE_MARK

BUILTIN_SIZE = 48
NOTE = "MM-Vet's own score is given by GPT-4; here it is the F1 of the answer's words"


def load(request: Request) -> list[Sample]:
    """The built-in samples, or those of a published file."""
    if request.data is None:
        return builtin(request.limit or BUILTIN_SIZE, request.questions)
    path = files.find_file(request.data, ".json", "mm-vet.json")
    content = files.read_json(path)
    if not isinstance(content, dict | list) or not content:
        raise DataError(f"{path}: expected an object of entries by id, or a list of entries")
    folder = files.find_image_folder(path, request.image_folder)
    listed = isinstance(content, list)
    numbered: list[tuple[Any, Any]] = list(enumerate(content) if listed else content.items())
    names, samples = files.Names(), []
    for key, value in numbered[: request.limit]:
        entry = files.as_entry(path, f"entry {key!r}", value)
        question = entry.text("question").replace(IMAGE_MARK, "").strip()
        if not question:
            raise entry.error("question", "is empty beside the image mark")
        given = entry.text("answer").replace("<AND>", " and ").split("<OR>")
        answers = tuple(" ".join(text.split()) for text in given if text.strip())
        if not answers:
            raise entry.error("answer", "is empty beside its marks")
        samples.append(
            Sample(
                id=names.unique(entry.name("id", "question_id") if listed else key),
                prompt=question,
                images=(entry.image("image" if listed else "imagename", folder),),
                answers=answers,
                max_new_tokens=256,
                metric="token_f1",
                tags=entry.texts("capability") if "capability" in entry.fields else (),
                note=NOTE,
            )
        )
    return samples


def builtin(size: int, questions: int = 1) -> list[Sample]:
    """`size` questions about held-out scenes, up to `questions` different ones about each.

    Capabilities: "rec" to recognise colour or shape, "spat" to place, "count" to count, and
    "several" where two pictures are shown and one is asked about. Scenes hold no text, so nothing
    stands for MM-Vet's "ocr".
    """
    from mmkv.builtin import scenes

    samples: list[Sample] = []
    for seed in itertools.count():
        rng = random.Random(f"mmvet:{seed}")
        number = 2 if seed % 4 == 3 else 1
        shown = [scenes.make_scene(1000 + seed + i * 100_000) for i in range(number)]
        about = rng.randrange(number)
        which = "the picture" if number == 1 else f"the {scenes.ORDINALS[about]} picture"
        asked = scenes.ask(shown[about], rng, 1 if questions == 1 else 4 * questions, which)
        different = list({question.text: question for question in asked}.values())
        pictures = tuple(scenes.draw(scene) for scene in shown)
        for i, question in enumerate(different[:questions]):
            if len(samples) == size:
                return samples
            tags = _capabilities(question.text)
            samples.append(
                Sample(
                    id=f"question-{seed}" + (f"-{i}" if i else ""),
                    prompt=question.text,
                    images=pictures,
                    answers=(question.answer,),
                    max_new_tokens=24,
                    metric="token_f1",
                    tags=(*tags, "several") if number > 1 else tags,
                    note=BUILTIN_NOTE,
                )
            )
    return samples


def _capabilities(question: str) -> tuple[str, ...]:
    if question.startswith("How many"):
        return ("count",) if question.startswith("How many objects") else ("rec", "count")
    return ("rec", "spat")
