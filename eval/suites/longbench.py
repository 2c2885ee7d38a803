"""LongBench: sixteen English tasks over long texts (arXiv 2308.14508).

Published data is a folder with one JSONL file for each task, named after it. Prompts and output
lengths come from the benchmark's own `dataset2prompt.json` and `dataset2maxlen.json` beside the
data; without them this file's own prompts are used, and figures do not compare with published ones.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mmkv.eval.samples import DataError, Request, Sample, Suite, interleave
from mmkv.eval.suites import files

PROMPTS_FILE, LENGTHS_FILE = "dataset2prompt.json", "dataset2maxlen.json"
OWN_WORDING = f"prompts are worded here: {PROMPTS_FILE} and {LENGTHS_FILE} are not beside the data"
T = TypeVar("T")


def _task(kind: str, metric: str, prompt: str, max_new_tokens: int = 32, **others: Any) -> Sample:
    """Return what the samples of a dataset share; `kind` is one of LongBench's categories, and the
    prompt has fields for context and input."""
    shared: Any = {"tags": (kind,), "metric": metric, "truncate": True, **others}
    return Sample(prompt=prompt, max_new_tokens=max_new_tokens, **shared)


_ASK = "{context}\n\nFrom the %s above, answer this in a few words: {input}\nAnswer:"
_COUNT = (
    "{context}\n\nSome of the paragraphs above occur more than once. How many different ones are "
    "there? Reply with the number alone.\nNumber:"
)
_RETRIEVE = (
    "{context}\n\nOne of the paragraphs above is summarised here: {input}\nReply with its name "
    'alone, such as "Paragraph 4".\nName:'
)
_SINGLE = _task("single-document QA", "token_f1", _ASK % "text", 64)
_MULTI = _task("multi-document QA", "token_f1", _ASK % "documents")
_SUMMARISE = "{context}\n\nSummarise the text above. {input}\nSummary:"
_SUMMARY = _task("summarisation", "rouge_l", _SUMMARISE, 512)
_FEW_SHOT = _task("few-shot", "token_f1", "{context}\n{input}", 64, chat=False, first_line=True)
_CODE = _task("code", "edit_similarity", "{context}{input}", 64, chat=False)
# With this file's own prompts and lengths.
TASKS: dict[str, Sample] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), _SINGLE),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), _MULTI),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), _SUMMARY),
    "trec": replace(_FEW_SHOT, metric="classification"),
    "triviaqa": _FEW_SHOT,
    "samsum": replace(_FEW_SHOT, metric="rouge_l"),
    "passage_count": _task("synthetic", "count", _COUNT),
    "passage_retrieval_en": _task("synthetic", "retrieval", _RETRIEVE),
    **dict.fromkeys(("lcc", "repobench-p"), _CODE),
}


def load(request: Request) -> Iterator[Sample]:
    """Return the samples; the tasks take turns, so that a limit covers all of them.

    Published data is a folder with task files, also below its `data/`, or one task's file.
    """
    request.chosen(TASKS)
    paths = _task_files(request.data, request.tasks)
    folder = next(iter(paths.values())).parent
    prompts = _read_config(folder, PROMPTS_FILE, str, list(paths))
    lengths = _read_config(folder, LENGTHS_FILE, int, list(paths))
    note = "" if prompts and lengths else OWN_WORDING
    groups: list[Iterator[Sample]] = []
    for name, path in paths.items():
        task = replace(TASKS[name], task=name, note=note)
        prompt, length = prompts.get(name, task.prompt), lengths.get(name, task.max_new_tokens)
        groups.append(_read_task(replace(task, prompt=prompt, max_new_tokens=length), path))
    return interleave(groups)


def _task_files(data: Path, tasks: list[str] | None) -> dict[str, Path]:
    """Return the file of each requested task, by default of each that has one."""
    if data.is_file():
        if data.stem not in TASKS or tasks not in (None, [data.stem]):
            raise DataError(f"{data}: expected a file named after its task, one of {list(TASKS)}")
        return {data.stem: data}
    if not data.is_dir():
        raise DataError(f"{data}: no such file or folder")
    folder = data / "data" if (data / "data").is_dir() else data
    paths = {name: folder / f"{name}.jsonl" for name in tasks or TASKS}
    existing = {name: path for name, path in paths.items() if path.is_file()}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if not existing or (tasks and missing):
        raise DataError(f"{folder}: has no {', '.join(missing)}")
    return existing


def _read_config(folder: Path, name: str, kind: type[T], tasks: list[str]) -> dict[str, T]:
    """Return values by task from the benchmark's file in or near the folder; {} without one."""
    places = (folder, folder / "config", folder.parent, folder.parent / "config")
    config_files = [place / name for place in places if (place / name).is_file()]
    if not config_files:
        return {}
    path, content = config_files[0], files.read_json(config_files[0])
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected an object of values by task")
    for task in tasks:
        if task not in content:
            raise DataError(f"{path}: entry {task!r}: is missing")
        value = content[task]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DataError(f"{path}: entry {task!r}: expected {kind.__name__}, got {value!r}")
        if isinstance(value, int) and value < 1:
            raise DataError(f"{path}: entry {task!r}: must be at least 1, got {value}")
    return {task: content[task] for task in tasks}


def _parse(template: str, place: str) -> list[tuple[str, str | None]]:
    """Return a template's (text, field) pairs, so that braces in the data need no escaping."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error
    for _, field, spec, conversion in parsed:
        if field not in (None, "context", "input") or spec or conversion:
            raise DataError(f"{place}: expected only {{context}} and {{input}}, got {field!r}")
    return [(text, field) for text, field, _, _ in parsed]


def _read_task(task: Sample, path: Path) -> Iterator[Sample]:
    name = task.task
    pieces = _parse(task.prompt, f"{PROMPTS_FILE}: entry {name!r}")
    fields = [field for _, field in pieces]
    end = fields.index("context") + 1 if "context" in fields else len(fields)
    for entry in files.read_lines(path):
        dataset = entry.fields.get("dataset")
        if dataset not in (None, name):
            raise entry.error("dataset", f"expected {name!r} as the file is named, got {dataset!r}")
        # `input` may be empty for summaries and code.
        values = {"context": entry.text("context"), "input": entry.text("input", empty=True)}
        filled = [text + (values[field] if field else "") for text, field in pieces]
        yield replace(
            task,
            id=f"{name}/{entry.name('_id')}",
            prompt="".join(filled),
            question="".join(filled[end:]).lstrip(),
            answers=entry.texts("answers"),
            classes=entry.texts("all_classes") if task.metric == "classification" else (),
        )


SUITE = Suite(load, options=("tasks",), wants="a folder of JSONL files, one a task")
