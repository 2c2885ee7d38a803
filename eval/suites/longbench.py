"""LongBench: sixteen English tasks over long texts (arXiv 2308.14508).

Published data is a folder with one JSONL file for each task, named after it, with the fields
`input, context, answers, length, dataset, language, all_classes, _id`. Prompts and output lengths
come from the benchmark's own `dataset2prompt.json` and `dataset2maxlen.json` beside the data;
without them the prompts are worded here, and figures do not compare with published ones. Built-in
data is composed in `longbench_builtin`.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mmkv.eval.samples import DataError, Sample, interleave
from mmkv.eval.suites import files, longbench_builtin

NAME = "longbench"
PROMPTS_FILE, LENGTHS_FILE = "dataset2prompt.json", "dataset2maxlen.json"
OWN_WORDING = f"prompts are worded here: {PROMPTS_FILE} and {LENGTHS_FILE} are not beside the data"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Task:
    """How a dataset is asked and scored; `kind` is one of LongBench's categories."""

    kind: str
    metric: str
    chat: bool = True
    first_line: bool = False


_SINGLE = Task(kind="single-document QA", metric="token_f1")
_MULTI = Task(kind="multi-document QA", metric="token_f1")
_SUMMARY = Task(kind="summarisation", metric="rouge_l")
_CODE = Task(kind="code", metric="edit_similarity", chat=False)

TASKS: dict[str, Task] = {
    "narrativeqa": _SINGLE,
    "qasper": _SINGLE,
    "multifieldqa_en": _SINGLE,
    "hotpotqa": _MULTI,
    "2wikimqa": _MULTI,
    "musique": _MULTI,
    "gov_report": _SUMMARY,
    "qmsum": _SUMMARY,
    "multi_news": _SUMMARY,
    "trec": Task(kind="few-shot", metric="classification", chat=False, first_line=True),
    "triviaqa": Task(kind="few-shot", metric="token_f1", chat=False, first_line=True),
    "samsum": Task(kind="few-shot", metric="rouge_l", chat=False, first_line=True),
    "passage_count": Task(kind="synthetic", metric="count"),
    "passage_retrieval_en": Task(kind="synthetic", metric="retrieval"),
    "lcc": _CODE,
    "repobench-p": _CODE,
}

# Our own wording and output lengths, by kind and, where a task differs from its kind, by task.
_OWN: dict[str, tuple[str, int]] = {
    "single-document QA": (
        "{context}\n\nFrom the text above, answer this in a few words: {input}\nAnswer:",
        64,
    ),
    "multi-document QA": (
        "{context}\n\nFrom the documents above, answer this in a few words: {input}\nAnswer:",
        32,
    ),
    "summarisation": ("{context}\n\nSummarise the text above. {input}\nSummary:", 512),
    "few-shot": ("{context}\n{input}", 64),
    "passage_count": (
        "{context}\n\nSome of the paragraphs above occur more than once. How many different "
        "ones are there? Reply with the number alone.\nNumber:",
        32,
    ),
    "passage_retrieval_en": (
        "{context}\n\nOne of the paragraphs above is summarised here: {input}\nReply with its "
        'name alone, such as "Paragraph 4".\nName:',
        32,
    ),
    "code": ("{context}{input}", 64),
}


def load(
    data: str | Path = "builtin",
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
) -> list[Sample]:
    """Return the samples; the tasks take turns, so that a limit covers all of them.

    `data` is "builtin", a folder with task files (in itself or in `data/`), or one task's file.

    Raises:
        ValueError: A name in `tasks` is not a task.
        DataError: A file is missing or is not as published.
    """
    if data == "builtin":
        return longbench_builtin.builtin(limit, tasks)
    wrong = [name for name in tasks or () if name not in TASKS]
    if wrong:
        raise ValueError(f"tasks must be among {list(TASKS)}, got {wrong}")
    paths = _task_files(Path(data), tasks)
    folder = next(iter(paths.values())).parent
    prompts = _read_config(folder, PROMPTS_FILE, str)
    lengths = _read_config(folder, LENGTHS_FILE, int)
    note = "" if prompts is not None and lengths is not None else OWN_WORDING
    groups, names = [], files.Names()
    for name, path in paths.items():
        task = TASKS[name]
        own = _OWN.get(name) or _OWN[task.kind]
        template = own[0] if prompts is None else _pick(folder, PROMPTS_FILE, prompts, name)
        length = own[1] if lengths is None else _pick(folder, LENGTHS_FILE, lengths, name)
        pieces = _parse(template, f"{PROMPTS_FILE}: entry {name!r}")
        entries = files.read_lines(path, limit)
        groups.append([_sample(e, name, pieces, length, note, names) for e in entries])
    return interleave(groups)[:limit]


def _task_files(data: Path, tasks: list[str] | None) -> dict[str, Path]:
    """Return the file of each task that is asked for, or of each that is there."""
    if data.is_file():
        if data.stem not in TASKS or tasks not in (None, [data.stem]):
            raise DataError(f"{data}: expected a file named after its task, one of {list(TASKS)}")
        return {data.stem: data}
    if not data.is_dir():
        raise DataError(f"{data}: no such file or folder")
    folder = data / "data" if (data / "data").is_dir() else data
    paths = {name: folder / f"{name}.jsonl" for name in tasks or TASKS}
    found = {name: path for name, path in paths.items() if path.is_file()}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if not found or (tasks and missing):
        raise DataError(f"{folder}: has no {', '.join(missing)}")
    return found


def _read_config(folder: Path, name: str, kind: type[T]) -> dict[str, T] | None:
    """Return the benchmark's file from the data's folder or nearby, None where there is none."""
    for place in (folder, folder / "config", folder.parent, folder.parent / "config"):
        path = place / name
        if not path.is_file():
            continue
        content = files.read_json(path)
        if not isinstance(content, dict):
            raise DataError(f"{path}: expected an object of values by task")
        for task, value in content.items():
            if not isinstance(value, kind) or isinstance(value, bool):
                raise DataError(f"{path}: entry {task!r}: expected {kind.__name__}, got {value!r}")
            if isinstance(value, int) and value < 1:
                raise DataError(f"{path}: entry {task!r}: must be at least 1, got {value}")
        return content
    return None


def _pick(folder: Path, name: str, values: dict[str, T], task: str) -> T:
    if task not in values:
        raise DataError(f"{folder}: {name}: entry {task!r}: is missing")
    return values[task]


def _parse(template: str, place: str) -> list[tuple[str, str | None]]:
    """Split a template into (text, field) pairs; braces in the data are then never looked at."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error
    for _, field, spec, conversion in parsed:
        if field not in (None, "context", "input") or spec or conversion:
            raise DataError(f"{place}: expected only {{context}} and {{input}}, got {field!r}")
    return [(text, field) for text, field, _, _ in parsed]


def _sample(
    entry: files.Entry,
    name: str,
    pieces: list[tuple[str, str | None]],
    length: int,
    note: str,
    names: files.Names,
) -> Sample:
    task = TASKS[name]
    dataset = entry.optional("dataset")
    if dataset is not None and dataset != name:
        raise entry.error("dataset", f"expected {name!r} as the file is named, got {dataset!r}")
    # Summaries and code may have nothing in `input`.
    values = {"context": entry.text("context"), "input": entry.text("input", empty=True)}
    prompt = "".join(text + (values[field] if field else "") for text, field in pieces)
    classes: tuple[str, ...] = ()
    if task.metric == "classification":
        classes = entry.texts("all_classes")
    given = entry.optional("_id")
    return Sample(
        id=names.unique(f"{name}/{entry.place.split()[-1] if given is None else given}"),
        suite=NAME,
        task=name,
        prompt=prompt,
        answers=entry.texts("answers"),
        chat=task.chat,
        max_new_tokens=length,
        metric=task.metric,
        classes=classes,
        tags=(task.kind,),
        truncate=True,
        first_line=task.first_line,
        note=note,
    )


def truncate_middle(ids: list[int], size: int) -> list[int]:
    """Return at most `size` of a prompt's tokens, its first and last halves, as LongBench does.

    Raises ValueError if `size` is below 2.
    """
    if size < 2:
        raise ValueError(f"size must be at least 2 tokens, got {size}")
    if len(ids) <= size:
        return ids
    half = size // 2
    return ids[:half] + ids[-half:]
