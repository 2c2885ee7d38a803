"""The suites by name, and how to load one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmkv.eval.samples import DataError, Request, Sample, open_images, suite_notes
from mmkv.eval.suites import (
    continuation,
    description,
    documents,
    longbench,
    mmvet,
    needle,
    ruler,
)
from mmkv.eval.suites.summaries import CNN_DAILYMAIL, XSUM

__all__ = ["SUITES", "DataError", "Sample", "Suite", "load_suite", "open_images", "suite_notes"]

BUILTIN = "builtin"


@dataclass(frozen=True)
class Suite:
    """A suite: its name, one line on what it is, its loader, and what may be chosen.

    That is its tasks, with `has_length` how many tokens a prompt has, and with `has_questions` how
    many questions each context has. `builtin`: it has data for the built-in model.
    """

    name: str
    description: str
    load: Callable[[Request], list[Sample]]
    has_tasks: bool = False
    has_length: bool = False
    has_questions: bool = False
    builtin: bool = True


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("description", "describe a picture (LLaVA-Description)", description.load),
        Suite(
            "mmvet",
            "questions about pictures, by capability (MM-Vet)",
            mmvet.load,
            has_questions=True,
        ),
        Suite(
            "longbench", "sixteen English tasks over long texts (LongBench)", longbench.load, True
        ),
        Suite("needle", "find one record in a long text, over depth and length", needle.load),
        Suite("ruler", "needles, variables and common words (RULER)", ruler.load, True, True, True),
        Suite(
            "continuation",
            "continue a text (perplexity)",
            continuation.load,
            has_length=True,
            builtin=False,
        ),
        Suite(
            "documents",
            "real documents: text that goes on, summaries, questions and a planted number",
            documents.load,
            has_tasks=True,
            has_length=True,
            builtin=False,
        ),
        Suite("cnn_dailymail", "summarise an article (CNN/DailyMail)", CNN_DAILYMAIL.load),
        Suite("xsum", "summarise an article in one sentence (XSum)", XSUM.load),
    )
}


def load_suite(
    name: str,
    data: str | Path = BUILTIN,
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
    length: int | None = None,
    count: Callable[[str], int] | None = None,
    questions: int = 1,
) -> list[Sample]:
    """The samples of a suite, from the built-in data or from published files.

    Args:
        name: the suite's.
        data: "builtin", or a path.
        limit: take the first samples; where a suite has tasks, they take turns.
        tasks: LongBench datasets, tasks of RULER or of documents, or kinds of built-in task.
        image_folder: by default `images` beside the data file, else the file's own folder.
        length: tokens of a prompt and its answer, for suites that make prompts of any length.
        count: how many tokens a text has; words by default.
        questions: most questions on each context, for suites that make them. Of published data,
            all questions are asked.

    Raises:
        ValueError: the suite, a task or the limit is not possible.
        DataError: a file is not what the suite expects.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {sorted(SUITES)}, got {name!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if tasks and not SUITES[name].has_tasks:
        raise ValueError(f"suite {name!r} has no tasks to select from, got {tasks}")
    path = None if str(data) == BUILTIN else Path(data)
    if path is None and not SUITES[name].builtin:
        made = {documents.NAME: "such as python -m mmkv.eval.corpus FOLDER writes"}
        more = made.get(name, f"or {continuation.STDLIB}")
        raise ValueError(f"suite {name!r} has no built-in data: --data names a folder, {more}")
    if length is not None and (path is None or not SUITES[name].has_length):
        what = "the built-in data" if SUITES[name].has_length else f"suite {name!r}"
        raise ValueError(f"length={length}: {what} has lengths of its own")
    if questions != 1 and (
        questions < 1 or not SUITES[name].has_questions or (path and name == mmvet.NAME)
    ):
        what = f"suite {name!r}" if path is None else f"suite {name!r} of {path}"
        raise ValueError(
            f"questions={questions}: expected 1 or more, of ruler or the built-in mmvet; {what} "
            "has the questions that its data has"
        )
    if path is None and image_folder is not None:
        raise ValueError(f"image folder {image_folder}: the built-in data has its own pictures")
    chosen = Request(
        data=path,
        limit=limit,
        tasks=tasks,
        image_folder=image_folder,
        length=length,
        count=count,
        questions=questions,
    )
    return SUITES[name].load(chosen)
