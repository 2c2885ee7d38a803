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
from .files import DRAWINGS, NOVELS, STDLIB, stands_for

BUILTIN = "builtin"
_BUILTIN_NOTE = "the data is built in, drawn and composed by the package"
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


def default_data(name: str, model: str) -> str:
    """Return the default data of a suite, which depends on what the model was trained on.

    Only the built-in model was trained on the built-in look-up texts, smollm2-vision on drawings.
    """
    suite = SUITES.get(name)
    if suite and DRAWINGS in suite.words and model == SMOLLM2_VISION:
        return DRAWINGS
    if suite and suite.words in ((NOVELS,), (prompts_suite.DOCUMENTATION,)):
        return suite.words[0]
    stdlib = suite and STDLIB in suite.words and (suite.builtin is None or model != BUILTIN)
    return STDLIB if stdlib else BUILTIN


def load_suite(
    name: str, data: str | Path = BUILTIN, *, first: int = 0, **fields: Any
) -> list[Sample]:
    """Return a suite's samples of "builtin" data or a path; `fields` are others of `Request`.

    Samples before number `first` are left out.

    Raises:
        ValueError: the suite, a task, the length or the limit is not possible.
        DataError: a file is not what the suite expects.
    """
    if name not in SUITES:
        raise ValueError(unknown("suite", name, sorted(SUITES)))
    suite, published = SUITES[name], str(data) != BUILTIN
    request = Request(data=Path(data), **fields)
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit must be at least 1, got {request.limit}")
    if request.tasks and "tasks" not in suite.options:
        raise ValueError(f"suite {name!r} has no tasks to select from, got {request.tasks}")
    if not published and suite.builtin is None:
        raise ValueError(f"suite {name!r} has no built-in data: --data names {suite.wants}")
    has_length = "length" in suite.options
    if request.length is not None and not (published and has_length):
        data_name = "the built-in data" if has_length else f"suite {name!r}"
        lengths = f" ({', '.join(map(str, suite.lengths))})" if has_length and suite.lengths else ""
        other = f", or read other data: --data {STDLIB}" if has_length else ""
        raise ValueError(
            f"length={request.length}: {data_name} has lengths of its own{lengths}: leave it "
            f"out{other}"
        )
    drawn = stands_for(request.data, DRAWINGS)
    if drawn and DRAWINGS not in suite.words:
        drawing_suites = ", ".join(x for x, other in SUITES.items() if DRAWINGS in other.words)
        raise ValueError(f"suite {name!r} does not read drawings: {drawing_suites} do")
    builtin = suite.builtin if drawn or not published else None
    fixed_questions = "questions" not in suite.options or (builtin is None and name == "mmvet")
    if request.questions < 1 or (fixed_questions and request.questions != 1):
        data_name = f"suite {name!r}" + (f" of {data}" if published else "")
        raise ValueError(
            f"questions={request.questions}: expected 1 or more, of ruler or the built-in mmvet; "
            f"{data_name} has the questions that its data has"
        )
    if builtin is not None and (folder := request.image_folder) is not None:
        raise ValueError(f"image folder {folder}: the built-in data has its own pictures")
    size, note = (suite.size, _BUILTIN_NOTE) if builtin else (None, suite.note)

    def completed(sample: Sample) -> Sample:
        metric, task = suite.metric or sample.metric, sample.task or name
        return replace(sample, suite=name, task=task, metric=metric, note=sample.note or note)

    samples = (builtin or suite.load)(request)
    return list(map(completed, islice(samples, first, request.limit or size)))
