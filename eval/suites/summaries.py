"""CNN/DailyMail and XSum: summarise an article; ROUGE-2 against the reference.

The tasks are two of SqueezeAttention's (arXiv 2404.04793). Built-in data is what the built-in model
can do: for CNN/DailyMail describe the picture before a text, for XSum repeat one record.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mmkv.builtin import scenes, texts
from mmkv.eval.samples import Request, Sample, Suite
from mmkv.eval.suites import files, longbench_builtin

NOTE = "prompts are worded here; papers do not agree on any"


@dataclass(frozen=True)
class Articles:
    """A set of articles: its fields, the request for a summary, and its built-in texts' first seed
    and lengths in tokens."""

    name: str
    source: str
    target: str
    request: str
    max_new_tokens: int
    seed: int
    lengths: tuple[int, ...]

    def load(self, request: Request) -> Iterator[Sample]:
        """Yield the samples of a published file."""
        path = files.find_file(request.data, ".jsonl", f"{self.name}.jsonl", "test.jsonl")
        extra: Any = {"max_new_tokens": self.max_new_tokens, "truncate": True}
        for entry in files.read_lines(path):
            text, answer = f"{entry.text(self.source)}\n\n", entry.text(self.target).strip()
            question = f"{self.request}\nSummary:"
            yield Sample.about(text, question, (answer,), id=entry.name("id"), **extra)

    def builtin(self, request: Request) -> Iterator[Sample]:
        """Yield samples of the built-in data."""
        for number in itertools.count():
            rng, seed = random.Random(f"{self.name}:{number}"), self.seed + number
            lookup = texts.make_lookup(seed, rng.choice(self.lengths))
            if self is _CNN_DAILYMAIL:
                sample = longbench_builtin.describe(lookup, scenes.make_scene(seed), rng)
            else:
                sample = longbench_builtin.look_up(lookup, rng)
            yield replace(sample, id=f"text-{number}")


_CNN = "Summarise the article above in three or four sentences."
_XSUM = "Summarise the article above in one sentence."
_CNN_DAILYMAIL = Articles(
    "cnn_dailymail", "article", "highlights", _CNN, 128, seed=200_000, lengths=(160, 240, 320)
)
_BBC = Articles("xsum", "document", "summary", _XSUM, 64, seed=300_000, lengths=(384, 512, 640))
CNN_DAILYMAIL = Suite(_CNN_DAILYMAIL.load, _CNN_DAILYMAIL.builtin, 20, NOTE, "rouge_2")
XSUM = Suite(_BBC.load, _BBC.builtin, 20, NOTE, "rouge_2")
