"""CNN/DailyMail and XSum: summarise an article; ROUGE-2 against the reference.

The tasks are two of SqueezeAttention's (arXiv 2404.04793). Built-in data is what the built-in model
can do: for CNN/DailyMail describe the picture before a text, for XSum repeat one record.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from mmkv.builtin import scenes, texts
from mmkv.eval.samples import Request, Sample, qa_fields
from mmkv.eval.suites import files
from mmkv.eval.suites.description import BUILTIN_NOTE

BUILTIN_SIZE = 20
NOTE = "prompts are worded here; papers do not agree on any"


@dataclass(frozen=True)
class Articles:
    """A set of articles: its fields, the request for a summary, and the first built-in seed."""

    name: str
    source: str
    target: str
    request: str
    max_new_tokens: int
    seed: int

    def load(self, request: Request) -> list[Sample]:
        """Return the built-in samples, or those of a published file."""
        if request.data is None:
            return _builtin(self, request.limit or BUILTIN_SIZE)
        path = files.find_file(request.data, ".jsonl", f"{self.name}.jsonl", "test.jsonl")
        question = f"{self.request}\nSummary:"
        extra: Any = {"metric": "rouge_2", "truncate": True, "note": NOTE}
        extra |= {"max_new_tokens": self.max_new_tokens}
        samples: list[Sample] = []
        for entry in files.read_lines(path, request.limit):
            text, answer = f"{entry.text(self.source)}\n\n", entry.text(self.target).strip()
            fields: Any = qa_fields(text, question, (answer,), **extra)
            samples.append(Sample(id=entry.name("id"), **fields))
        return samples


_CNN = "Summarise the article above in three or four sentences."
_XSUM = "Summarise the article above in one sentence."
CNN_DAILYMAIL = Articles("cnn_dailymail", "article", "highlights", _CNN, 128, seed=200_000)
XSUM = Articles("xsum", "document", "summary", _XSUM, 64, seed=300_000)


def _builtin(articles: Articles, size: int) -> list[Sample]:
    samples: list[Sample] = []
    for number in range(size):
        rng, seed = random.Random(f"{articles.name}:{number}"), articles.seed + number
        extra: Any = {"metric": "rouge_2", "note": BUILTIN_NOTE}
        if articles is CNN_DAILYMAIL:
            lookup = texts.make_lookup(seed, rng.choice((160, 240, 320)))
            scene = scenes.make_scene(seed)
            question, answer = scenes.describe_question("the picture", rng), scenes.describe(scene)
            extra |= {"images": (scenes.draw(scene),), "max_new_tokens": 96}
        else:
            lookup = texts.make_lookup(seed, rng.choice((384, 512, 640)))
            record_question = rng.choice(lookup.questions)
            question, answer = record_question.text, record_question.answer
        fields: Any = qa_fields(f"{lookup.text} ", question, (answer,), **extra)
        samples.append(Sample(id=f"text-{number}", **fields))
    return samples
