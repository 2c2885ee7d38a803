"""The suites by name, and how to load one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmkv.eval.samples import Request, Sample
from mmkv.eval.suites import (
    continuation,
    description,
    documents,
    longbench,
    mmvet,
    needle,
    ruler,
    summaries,
)
from mmkv.eval.suites.files import DRAWINGS, STDLIB, is_drawings
from mmkv.loading.models import SMOLLM2_VISION

BUILTIN = "builtin"


@dataclass(frozen=True)
class Suite:
    """A suite's loader, and what may be chosen.

    That is its tasks, with `has_length` how many tokens a prompt has, and with `has_questions` how
    many questions each context has. `wants`: what `data` names, where nothing is built in.
    `reads_stdlib`: that may be texts that Python brings; `draws`: scenes that mmkv draws.
    """

    load: Callable[[Request], list[Sample]]
    has_tasks: bool = False
    has_length: bool = False
    has_questions: bool = False
    wants: str = ""
    reads_stdlib: bool = False
    draws: bool = False


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
DRAWN = [name for name, suite in SUITES.items() if suite.draws]


def default_data(name: str, model: str) -> str:
    """What a suite's prompts are from where nobody says: what the model can read.

    The built-in texts are look-ups that the built-in model was trained on; others cannot do them.
    Drawings are what smollm2-vision was trained on.
    """
    suite = SUITES.get(name)
    if suite is not None and suite.draws and model == SMOLLM2_VISION:
        return DRAWINGS
    stdlib = suite is not None and suite.reads_stdlib and (suite.wants or model != BUILTIN)
    return STDLIB if stdlib else BUILTIN


def load_suite(name: str, data: str | Path = BUILTIN, **asked: Any) -> list[Sample]:
    """The samples of a suite, from the built-in data or from published files.

    Args:
        name: the suite's.
        data: "builtin", or a path.
        asked: the other fields of `Request`.

    Raises:
        ValueError: the suite, a task or the limit is not possible.
        DataError: a file is not what the suite expects.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {sorted(SUITES)}, got {name!r}")
    suite, path = SUITES[name], None if str(data) == BUILTIN else Path(data)
    request = Request(data=path, **asked)
    if request.limit is not None and request.limit < 1:
        raise ValueError(f"limit must be at least 1, got {request.limit}")
    if request.tasks and not suite.has_tasks:
        raise ValueError(f"suite {name!r} has no tasks to select from, got {request.tasks}")
    if path is None and suite.wants:
        raise ValueError(f"suite {name!r} has no built-in data: --data names {suite.wants}")
    if request.length is not None and (path is None or not suite.has_length):
        what = "the built-in data" if suite.has_length else f"suite {name!r}"
        raise ValueError(f"length={request.length}: {what} has lengths of its own")
    if is_drawings(path) and not suite.draws:
        raise ValueError(f"suite {name!r} does not read drawings: {', '.join(DRAWN)} do")
    own = path is None or is_drawings(path)
    fixed = not suite.has_questions or (not own and name == "mmvet")
    if request.questions < 1 or (fixed and request.questions != 1):
        what = f"suite {name!r}" if path is None else f"suite {name!r} of {path}"
        raise ValueError(
            f"questions={request.questions}: expected 1 or more, of ruler or the built-in mmvet; "
            f"{what} has the questions that its data has"
        )
    if own and request.image_folder is not None:
        raise ValueError(
            f"image folder {request.image_folder}: the built-in data has its own pictures"
        )
    return [replace(s, suite=name, task=s.task or name) for s in suite.load(request)]
