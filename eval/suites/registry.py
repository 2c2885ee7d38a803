"""The suites by name, and the function that loads one."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from mmkv.eval.samples import Request, Sample, Suite
from mmkv.loading.names import SMOLLM2_VISION
from mmkv.names import unknown

from . import continuation, description, documents, longbench, mmvet, needle, ruler, summaries
from . import prompts as prompts_suite
from .files import DRAWINGS, stands_for

_DRAWN_NOTE = "the pictures are drawn by the package"
SUITES: dict[str, Suite] = {
    "description": description.SUITE,
    "mmvet": mmvet.SUITE,
    "longbench": longbench.SUITE,
    "needle": needle.SUITE,
    "ruler": ruler.SUITE,
    "continuation": continuation.SUITE,
    "documents": documents.SUITE,
    "prompts": prompts_suite.SUITE,
    "cnn_dailymail": summaries.CNN_DAILYMAIL,
    "xsum": summaries.XSUM,
}


def default_data(name: str, model: str) -> str | None:
    """Return the default data of a suite; None if it needs a file.

    Where a suite has both pictures and texts, only smollm2-vision gets drawings: it was trained on
    them.
    """
    suite = SUITES.get(name)
    words = suite.words if suite else ()
    fitting = [x for x in words if x != DRAWINGS or model == SMOLLM2_VISION]
    return next(iter([*fitting, *words]), None)


def load_suite(name: str, data: str | Path | None = None, **fields: Any) -> list[Sample]:
    """Return a suite's samples; `fields` are others of `Request`.

    Args:
        name: of the suite.
        data: a path, or a word of the suite, such as "novels"; None is its first word.

    Raises:
        ValueError: the suite, a task, the length or the limit is not possible, or the suite needs
            a file and `data` is None.
        DataError: a file is not what the suite expects.
    """
    if name not in SUITES:
        raise ValueError(unknown("suite", name, sorted(SUITES)))
    suite = SUITES[name]
    if data is None and not suite.words:
        raise ValueError(f"suite {name!r} needs your data: give --data, {suite.wants}")
    request = Request(data=Path(suite.words[0] if data is None else data), **fields)
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit must be at least 1, got {request.limit}")
    if request.tasks and "tasks" not in suite.options:
        raise ValueError(f"suite {name!r} has no tasks to select from, got {request.tasks}")
    if request.length is not None and "length" not in suite.options:
        raise ValueError(
            f"length={request.length}: suite {name!r} has lengths of its own: leave it out"
        )
    drawn = suite.drawn if stands_for(request.data, DRAWINGS) else None
    if drawn is None and stands_for(request.data, DRAWINGS):
        drawing_suites = ", ".join(x for x, other in SUITES.items() if other.drawn)
        raise ValueError(f"suite {name!r} does not read drawings: {drawing_suites} do")
    fixed_questions = "questions" not in suite.options or (suite.drawn and not drawn)
    if request.questions < 1 or (fixed_questions and request.questions != 1):
        raise ValueError(
            f"questions={request.questions}: expected 1 or more for ruler and mmvet's drawings, "
            f"and 1 for suite {name!r} with {request.data}, whose data has the questions"
        )
    shows_files = "image_folder" in suite.options and not drawn
    if (folder := request.image_folder) is not None and not shows_files:
        raise ValueError(
            f"image folder {folder}: suite {name!r} with {request.data} reads no picture files, "
            "leave it out"
        )
    size, note = (suite.size, _DRAWN_NOTE) if drawn else (None, suite.note)

    def completed(sample: Sample) -> Sample:
        metric, task = suite.metric or sample.metric, sample.task or name
        return replace(sample, suite=name, task=task, metric=metric, note=sample.note or note)

    samples = (drawn or suite.load)(request)
    return list(map(completed, islice(samples, request.limit or size)))
