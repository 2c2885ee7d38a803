"""CNN/DailyMail and XSum: summarise an article; ROUGE-2 against the reference.

The tasks are two of SqueezeAttention's (arXiv 2404.04793).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmkv.eval.samples import Request, Sample, Suite
from mmkv.eval.suites import files

NOTE = "prompts are worded here: papers use different ones"


@dataclass(frozen=True)
class Articles:
    """A set of articles: its fields, and the request for a summary."""

    name: str
    source: str
    target: str
    request: str
    max_new_tokens: int

    def load(self, request: Request) -> Iterator[Sample]:
        """Yield the samples of a published file."""
        path = files.find_file(request.data, ".jsonl", f"{self.name}.jsonl", "test.jsonl")
        extra: Any = {"max_new_tokens": self.max_new_tokens, "truncate": True}
        for entry in files.read_lines(path):
            text, answer = f"{entry.text(self.source)}\n\n", entry.text(self.target).strip()
            question = f"{self.request}\nSummary:"
            yield Sample.about(text, question, (answer,), id=entry.name("id"), **extra)


_CNN = "Summarise the article above in three or four sentences."
_XSUM = "Summarise the article above in one sentence."
_WANTS = "a JSONL file"
CNN_DAILYMAIL = Suite(
    Articles("cnn_dailymail", "article", "highlights", _CNN, 128).load,
    note=NOTE,
    metric="rouge_2",
    wants=_WANTS,
)
XSUM = Suite(
    Articles("xsum", "document", "summary", _XSUM, 64).load,
    note=NOTE,
    metric="rouge_2",
    wants=_WANTS,
)
