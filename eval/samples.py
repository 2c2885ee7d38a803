"""What a suite is made of: one sample, its pictures, and the error for bad data files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmkv.loading import untrusted

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")


class DataError(ValueError):
    """A data file is not what a suite expects; the message names file, entry and field."""


def words(text: str) -> int:
    """How many a text has."""
    return len(text.split())


@dataclass(frozen=True, kw_only=True)
class Request:
    """What of a suite is asked for."""

    data: Path | None = None  # None: the built-in data
    limit: int | None = None  # the first samples only; where a suite has tasks, they take turns
    tasks: list[str] | None = None
    image_folder: Path | None = None  # by default `images` beside the data file, or its own folder
    length: int | None = None  # tokens of a prompt and its answer, where a suite makes prompts
    count: Callable[[str], int] = words  # how many tokens a text has
    questions: int = 1  # most on each context, where a suite makes them

    def chosen(self, known: Iterable[str]) -> list[str]:
        """The tasks that are asked for, by default all. Raises ValueError where one is unknown."""
        names = list(known)
        if wrong := [name for name in self.tasks or () if name not in names]:
            raise ValueError(f"tasks must be among {names}, got {wrong}")
        return list(dict.fromkeys(self.tasks or names))

    def in_turns(
        self, tasks: Sequence[str], each: int, make: Callable[[str, int], list[Sample]]
    ) -> list[Sample]:
        """What `make` gives for numbers 0 to `each` of every task; the tasks take turns."""
        if self.limit is not None:
            each = -(-self.limit // len(tasks))
        made = [[s for number in range(each) for s in make(task, number)] for task in tasks]
        return interleave(made)[: self.limit]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt of a suite, with what is needed to run and to score it."""

    id: str
    suite: str = ""  # its name, which `load_suite` sets
    task: str = ""  # the LongBench dataset or kind of task, else the suite's name
    prompt: str  # without placeholders for images
    # The end of `prompt` that is left out where questions are hidden; "": all, beside pictures.
    question: str = ""
    images: tuple[Any, ...] = ()  # before the prompt; Pillow images, or paths
    answers: tuple[str, ...] = ()  # for reference; the first is teacher-forced for perplexity
    chat: bool = True  # whether the chat template is applied
    max_new_tokens: int = 128
    metric: str | None = None  # a name in `mmkv.eval.scoring.SCORERS` for the generated text
    classes: tuple[str, ...] = ()  # all of a classification task
    tags: tuple[str, ...] = ()  # groups that it counts in, such as "ocr" or "depth=0.5"
    truncate: bool = False  # whether a prompt beyond the model's length is cut in its middle
    first_line: bool = False  # whether only the first line of the output is scored
    note: str = ""  # why its figures do not compare with published ones; "" if they do

    @property
    def goes_on(self) -> bool:
        """Whether it is a plain text, and its answer how that goes on."""
        return bool(self.answers) and not self.chat and self.metric is None

    @property
    def asked(self) -> str:
        """The question as the end of `prompt`; "" where there is no context apart from it, so that
        it cannot be hidden."""
        question = self.question or (self.prompt if self.images else "")
        return question if self.prompt.endswith(question) else ""

    @property
    def context(self) -> tuple[object, ...]:
        """What samples share that ask about the same text and pictures."""
        pictures = (str(i) if isinstance(i, str | Path) else id(i) for i in self.images)
        return (self.prompt.removesuffix(self.asked), *pictures) if self.asked else (self.id,)


def asked_about(text: str, question: str, answers: tuple[str, ...], **more: Any) -> dict[str, Any]:
    """Fields of a sample that asks about a text; `more` are others."""
    made: dict[str, Any] = {"prompt": f"{text}{question}", "question": question, "answers": answers}
    return made | {"max_new_tokens": 8} | more


def suite_notes(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Why figures of `samples` do not compare with published ones, each reason once."""
    return tuple(dict.fromkeys(sample.note for sample in samples if sample.note))


def open_images(sample: Sample) -> list[Image.Image]:
    """The pictures of a sample as RGB, reading those that are paths. Raises DataError."""
    return [read_image(i) if isinstance(i, str | Path) else i for i in sample.images]


def read_image(path: str | Path, *, decode: bool = True) -> Image.Image:
    """One picture as RGB, the first of several frames; or its checked header. Raises DataError."""
    try:
        return untrusted.read_picture(path, lambda x: x.convert("RGB") if decode else x)
    except untrusted.PictureError as error:
        raise DataError(f"{path}: picture: {error}") from error


def interleave(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of every group, then the second of each: a limit covers all groups alike."""
    turns = itertools.zip_longest(*groups)
    return [item for turn in turns for item in turn if item is not None]
