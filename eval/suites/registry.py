"""The suites by name, and how to load one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmkv.eval.samples import DataError, Sample, open_images, suite_notes
from mmkv.eval.suites import description, longbench, mmvet, needle, summaries

__all__ = ["SUITES", "DataError", "Sample", "Suite", "load_suite", "open_images", "suite_notes"]

BUILTIN = "builtin"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite: its name, one line on what it is, its loader, and whether it has several tasks.

    `load(data="builtin", *, limit=None, tasks=None, image_folder=None)` returns the samples.
    """

    name: str
    description: str
    load: Callable[..., list[Sample]]
    has_tasks: bool = False


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="description",
            description="describe a picture (LLaVA-Description)",
            load=description.load,
        ),
        Suite(
            name="mmvet",
            description="questions about pictures, by capability (MM-Vet)",
            load=mmvet.load,
        ),
        Suite(
            name="longbench",
            description="sixteen English tasks over long texts (LongBench)",
            load=longbench.load,
            has_tasks=True,
        ),
        Suite(
            name="needle",
            description="find one record in a long text, over depth and length",
            load=needle.load,
        ),
        Suite(
            name="cnn_dailymail",
            description="summarise an article (CNN/DailyMail)",
            load=summaries.load_cnn_dailymail,
        ),
        Suite(
            name="xsum",
            description="summarise an article in one sentence (XSum)",
            load=summaries.load_xsum,
        ),
    )
}


def load_suite(
    name: str,
    data: str | Path = BUILTIN,
    *,
    limit: int | None = None,
    tasks: list[str] | None = None,
    image_folder: Path | None = None,
) -> list[Sample]:
    """Return the samples of a suite, from the built-in data or from published files.

    `limit` takes the first samples; where a suite has tasks, they take turns. `tasks` selects
    LongBench datasets (or kinds of built-in task). `image_folder` is where pictures are looked up,
    by default `images` beside the data file, else the file's own folder.

    Raises:
        ValueError: The suite, a task or the limit is not possible.
        DataError: A file is not what the suite expects.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {sorted(SUITES)}, got {name!r}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if tasks and not SUITES[name].has_tasks:
        raise ValueError(f"suite {name!r} has no tasks to select from, got {tasks}")
    if str(data) == BUILTIN:
        data = BUILTIN
        if image_folder is not None:
            raise ValueError(f"image folder {image_folder}: the built-in data has its own pictures")
    return SUITES[name].load(data, limit=limit, tasks=tasks, image_folder=image_folder)
