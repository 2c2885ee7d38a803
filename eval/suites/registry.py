"""The suites by name, and the function that loads one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmkv.eval.samples import Request, Sample
from mmkv.loading.models import SMOLLM2_VISION

from . import continuation, description, documents, longbench, mmvet, needle, ruler, summaries
from .files import DRAWINGS, STDLIB, stands_for

BUILTIN = "builtin"


@dataclass(frozen=True)
class Suite:
    """A suite's loader, and the options that it supports."""

    load: Callable[[Request], list[Sample]]
    has_tasks: bool = False
    has_length: bool = False  # `length` may set the tokens of a prompt
    has_questions: bool = False  # `questions` may be more than one on each context
    wants: str = ""  # description of `data`, for a suite without built-in data
    reads_stdlib: bool = False
    draws: bool = False  # `data` may be "drawings", scenes that mmkv draws


_CORPUS = "a folder, such as python -m mmkv.eval.corpus FOLDER writes"
SUITES: dict[str, Suite] = {
    "description": Suite(description.load, draws=True),
    "mmvet": Suite(mmvet.load, has_questions=True, draws=True),
    "longbench": Suite(longbench.load, has_tasks=True),
    "needle": Suite(needle.load, reads_stdlib=True, draws=True),
    "ruler": Suite(
        ruler.load, has_tasks=True, has_length=True, has_questions=True, reads_stdlib=True
    ),
    "continuation": Suite(
        continuation.load, has_length=True, wants="a folder, or stdlib", reads_stdlib=True
    ),
    "documents": Suite(documents.load, has_tasks=True, has_length=True, wants=_CORPUS),
    "cnn_dailymail": Suite(summaries.CNN_DAILYMAIL.load),
    "xsum": Suite(summaries.XSUM.load),
}


def default_data(name: str, model: str) -> str:
    """Return the default data of a suite, which depends on what the model was trained on.

    Only the built-in model was trained on the built-in look-up texts, smollm2-vision on drawings.
    """
    suite = SUITES.get(name)
    if suite and suite.draws and model == SMOLLM2_VISION:
        return DRAWINGS
    stdlib = suite and suite.reads_stdlib and (suite.wants or model != BUILTIN)
    return STDLIB if stdlib else BUILTIN


def load_suite(name: str, data: str | Path = BUILTIN, **fields: Any) -> list[Sample]:
    """Return a suite's samples of "builtin" data or a path; `fields` are others of `Request`.

    Raises:
        ValueError: the suite, a task, the length or the limit is not possible.
        DataError: a file is not what the suite expects.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {sorted(SUITES)}, got {name!r}")
    suite, path = SUITES[name], None if str(data) == BUILTIN else Path(data)
    request = Request(data=path, **fields)
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit must be at least 1, got {request.limit}")
    if request.tasks and not suite.has_tasks:
        raise ValueError(f"suite {name!r} has no tasks to select from, got {request.tasks}")
    if path is None and suite.wants:
        raise ValueError(f"suite {name!r} has no built-in data: --data names {suite.wants}")
    if request.length is not None and (path is None or not suite.has_length):
        data_name = "the built-in data" if suite.has_length else f"suite {name!r}"
        raise ValueError(f"length={request.length}: {data_name} has lengths of its own")
    drawn = stands_for(path, DRAWINGS)
    if drawn and not suite.draws:
        drawing_suites = ", ".join(other for other in SUITES if SUITES[other].draws)
        raise ValueError(f"suite {name!r} does not read drawings: {drawing_suites} do")
    is_builtin = path is None or drawn
    fixed_questions = not suite.has_questions or (not is_builtin and name == "mmvet")
    if request.questions < 1 or (fixed_questions and request.questions != 1):
        data_name = f"suite {name!r}" + ("" if path is None else f" of {path}")
        raise ValueError(
            f"questions={request.questions}: expected 1 or more, of ruler or the built-in mmvet; "
            f"{data_name} has the questions that its data has"
        )
    if is_builtin and (folder := request.image_folder) is not None:
        raise ValueError(f"image folder {folder}: the built-in data has its own pictures")
    return [replace(s, suite=name, task=s.task or name) for s in suite.load(request)]
