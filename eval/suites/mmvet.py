"""MM-Vet: open questions about pictures, each with the capabilities it needs (arXiv 2308.02490).

In published answers "<OR>" separates alternatives and "<AND>" joins parts.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from mmkv.builtin import drawings, scenes
from mmkv.eval.samples import Request, Sample
from mmkv.eval.suites import files
from mmkv.eval.suites.description import BUILTIN_NOTE, IMAGE_MARK

BUILTIN_SIZE = 48
NOTE = "MM-Vet's own score is given by GPT-4; here it is the F1 of the answer's words"


def load(request: Request) -> list[Sample]:
    """Return the built-in samples, those of drawings, or those of a published file."""
    drawn = files.stands_for(request.data, files.DRAWINGS)
    if request.data is None or drawn:
        return _builtin(request.limit or BUILTIN_SIZE, request.questions, drawn)
    entries, folder = files.read_entries(request, "mm-vet.json")
    samples: list[Sample] = []
    for name, entry in entries:
        question = entry.text("question").replace(IMAGE_MARK, "").strip()
        if not question:
            raise entry.error("question", "is empty beside the image mark")
        alternatives = entry.text("answer").replace("<AND>", " and ").split("<OR>")
        answers = tuple(" ".join(text.split()) for text in alternatives if text.strip())
        if not answers:
            raise entry.error("answer", "is empty beside its marks")
        image = entry.image("imagename" if "imagename" in entry.fields else "image", folder)
        tags = entry.texts("capability") if "capability" in entry.fields else ()
        extra: Any = {"max_new_tokens": 256, "metric": "token_f1", "tags": tags, "note": NOTE}
        samples.append(Sample(id=name, prompt=question, images=(image,), answers=answers, **extra))
    return samples


def _builtin(size: int, questions: int, drawn: bool) -> list[Sample]:
    """Return `size` samples, up to `questions` different ones about each held-out scene."""
    source: Any = drawings if drawn else scenes
    samples: list[Sample] = []
    for seed in itertools.count():
        rng = random.Random(f"mmvet:{seed}")
        number = 2 if seed % 4 == 3 else 1
        shown = [source.make_scene(1000 + seed + i * 100_000) for i in range(number)]
        index = rng.randrange(number)
        title = "the picture" if number == 1 else f"the {source.ORDINALS[index]} picture"
        pool = source.ask(shown[index], rng, 1 if questions == 1 else 4 * questions, title)
        answers_by_question = {question.text: question.answer for question in pool}
        pictures = tuple(source.draw(scene) for scene in shown)
        fields: Any = {"max_new_tokens": 24, "metric": "token_f1", "note": BUILTIN_NOTE}
        for i, (text, answer) in enumerate([*answers_by_question.items()][:questions]):
            if len(samples) == size:
                return samples
            name = f"question-{seed}" + (f"-{i}" if i else "")
            tags = _capabilities(text) + (("several",) if number > 1 else ())
            fields |= {"images": pictures, "answers": (answer,), "tags": tags}
            samples.append(Sample(id=name, prompt=text, **fields))
    return samples


def _capabilities(question: str) -> tuple[str, ...]:
    """Return the tags of a question: recognition, spatial relations, counting, reading print."""
    if question.startswith("How many"):
        whole = question.startswith(("How many objects", "How many things"))
        return ("count",) if whole else ("rec", "count")
    if "printed" in question or question.startswith(("What is the word", "What is the number")):
        return ("ocr", "spat")
    return ("rec", "spat")
