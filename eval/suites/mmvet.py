"""MM-Vet: open questions about pictures, each with the capabilities it needs (arXiv 2308.02490).

In published answers "<OR>" separates alternatives and "<AND>" joins parts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from mmkv.builtin import drawings
from mmkv.eval.samples import Request, Sample, Suite
from mmkv.eval.suites import files
from mmkv.eval.suites.description import IMAGE_MARK

NOTE = "MM-Vet's own score is given by GPT-4; here it is the F1 of the answer's words"


def load(request: Request) -> Iterator[Sample]:
    """Yield the samples of a published file."""
    for name, entry, folder in files.read_entries(request, "mm-vet.json"):
        question = entry.text("question").replace(IMAGE_MARK, "").strip()
        if not question:
            raise entry.error("question", "has no text but the image mark")
        alternatives = entry.text("answer").replace("<AND>", " and ").split("<OR>")
        answers = tuple(" ".join(text.split()) for text in alternatives if text.strip())
        if not answers:
            raise entry.error("answer", "has no text but its marks")
        image = entry.image("imagename" if "imagename" in entry.fields else "image", folder)
        tags = entry.texts("capability") if "capability" in entry.fields else ()
        fields: Any = {"images": (image,), "answers": answers, "tags": tags}
        yield Sample(id=name, prompt=question, max_new_tokens=256, **fields)


def drawn(request: Request) -> Iterator[Sample]:
    """Yield samples, up to `request.questions` different ones about each drawn scene."""
    questions = request.questions
    for seed in itertools.count():
        rng = random.Random(f"mmvet:{seed}")
        number = 2 if seed % 4 == 3 else 1
        shown = [drawings.make_scene(1000 + seed + i * 100_000) for i in range(number)]
        index = rng.randrange(number)
        title = "the picture" if number == 1 else f"the {drawings.ORDINALS[index]} picture"
        tries = range(1 if questions == 1 else 4 * questions)
        pool = [drawings.ask(shown[index], rng, title) for _ in tries]
        answers_by_question = {question.text: question.answer for question in pool}
        pictures = tuple(drawings.draw(scene) for scene in shown)
        for i, (text, answer) in enumerate([*answers_by_question.items()][:questions]):
            name = f"question-{seed}" + (f"-{i}" if i else "")
            tags = _capabilities(text) + (("several",) if number > 1 else ())
            fields: Any = {"images": pictures, "answers": (answer,), "tags": tags}
            yield Sample(id=name, prompt=text, max_new_tokens=24, **fields)


def _capabilities(question: str) -> tuple[str, ...]:
    """Return the tags of a question: recognition, spatial relations, counting, reading print."""
    if question.startswith("How many"):
        return ("count",) if question.startswith("How many things") else ("rec", "count")
    if "printed" in question or question.startswith(("What is the word", "What is the number")):
        return ("ocr", "spat")
    return ("rec", "spat")


_OPTIONS = ("questions", "image_folder")
SUITE = Suite(load, drawn, 24, NOTE, "token_f1", _OPTIONS, (files.DRAWINGS,))
