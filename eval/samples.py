"""Samples of a suite, their pictures, requests for them, and the error for bad data files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmkv.loading import untrusted
from mmkv.names import unknown

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")


class DataError(ValueError):
    """A data file is not what a suite expects; the message names file, entry and field."""


def words(text: str) -> int:
    """Return the number of words of a text."""
    return len(text.split())


@dataclass(frozen=True, kw_only=True)
class Request:
    """The selection of a suite's samples that a user wants."""

    data: Path  # a file or folder, or a word that stands for other data, such as "novels"
    limit: int | None = None  # number of samples; the tasks of a suite take turns
    tasks: list[str] | None = None
    image_folder: Path | None = None  # None: `images` beside the data file, else its folder
    length: int | None = None  # tokens of a prompt and its answer, if the suite makes prompts
    count: Callable[[str], int] = words  # returns the number of tokens of a text
    questions: int = 1  # at most so many on each context, if the suite makes them

    def chosen(self, known: Iterable[str]) -> list[str]:
        """Return the requested tasks, by default all. Raises ValueError if one is unknown."""
        names = list(known)
        if wrong := [name for name in self.tasks or () if name not in names]:
            raise ValueError(unknown("task", wrong[0], names))
        return list(dict.fromkeys(self.tasks or names))

    def in_turns(
        self, known: Iterable[str], each: int, make: Callable[[str, int], list[Sample]]
    ) -> Iterator[Sample]:
        """Yield `make`'s samples for the first `each` numbers, or as many as the limit needs, of
        every requested task; tasks take turns."""
        tasks = self.chosen(known)
        if self.limit is not None:
            each = -(-self.limit // len(tasks))
        return interleave([s for n in range(each) for s in make(task, n)] for task in tasks)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt of a suite, with the settings to run and to score it."""

    id: str = ""
    suite: str = ""  # its name, which `load_suite` sets
    task: str = ""  # the LongBench dataset or kind of task, else the suite's name
    turns: tuple[tuple[str, str], ...] = ()  # roles and texts of earlier messages
    prompt: str  # without placeholders for images
    # The end of `prompt` that is left out if questions are hidden; "": all of it, after pictures.
    question: str = ""
    images: tuple[Any, ...] = ()  # shown before the prompt; Pillow images, or paths
    answers: tuple[str, ...] = ()  # references; the first is teacher-forced for perplexity
    chat: bool = True  # whether the chat template is applied
    max_new_tokens: int = 128
    metric: str | None = None  # a name in `mmkv.eval.scoring.SCORERS` for the generated text
    classes: tuple[str, ...] = ()  # all class names of a classification task
    tags: tuple[str, ...] = ()  # groups of a report's tables, such as "ocr" or "depth=0.5"
    truncate: bool = False  # whether a prompt beyond the model's length is cut in its middle
    first_line: bool = False  # whether only the first line of the output is scored
    note: str = ""  # why its figures do not compare with published ones; "": they do

    @classmethod
    def about(cls, text: str, question: str, answers: tuple[str, ...], **others: Any) -> Sample:
        """Return a sample that asks about a text; a reply has 8 tokens unless `others` say more."""
        fields: dict[str, Any] = {"max_new_tokens": 8, "answers": answers, **others}
        return cls(prompt=text + question, question=question, **fields)

    @property
    def facts(self) -> dict[str, Any]:
        """All fields, as plain data that tells samples apart, with hashes of the pictures."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.turns:  # runs of suites without them go on
            del data["turns"]
        return data | {"images": list(map(_picture_digest, self.images))}

    @property
    def is_continuation(self) -> bool:
        """Whether the prompt is a plain text and the answer its continuation."""
        return bool(self.answers) and not self.chat and self.metric is None

    @property
    def asked(self) -> str:
        """The question at the end of `prompt`; "" if there is no context before it, so that it
        cannot be hidden."""
        question = self.question or (self.prompt if self.images else "")
        return question if self.prompt.endswith(question) else ""

    @property
    def context(self) -> tuple[object, ...]:
        """A key that is equal for samples about the same text and pictures."""
        pictures = (str(i) if isinstance(i, str | Path) else id(i) for i in self.images)
        return (self.prompt.removesuffix(self.asked), *pictures) if self.asked else (self.id,)


@dataclass(frozen=True)
class Suite:
    """A suite's loaders of files and of drawings, and the options that it supports."""

    load: Callable[[Request], Iterable[Sample]]
    drawn: Callable[[Request], Iterable[Sample]] | None = None
    size: int | None = None  # number of drawn samples; None: those that there are
    note: str = ""  # why figures on published data do not compare with published ones
    metric: str | None = None  # of every sample; None: each has its own, or none
    options: tuple[str, ...] = ()  # of a request, that it takes: "tasks", "length", ...
    words: tuple[str, ...] = ()  # that `data` may be, "drawings" or "novels"; the default first
    wants: str = ""  # description of `data`, for a suite without `words`


def _picture_digest(image: Any) -> str:
    """Return a hash of a picture's content, "" if there is no such file."""
    from mmkv.digest import of_bytes, of_file

    if isinstance(image, str | Path):
        return of_file(image) if Path(image).is_file() else ""
    head = str((image.mode, image.size, image.getpalette()))
    return of_bytes(head.encode() + image.tobytes())


def read_image(path: str | Path, *, decode: bool = True) -> Image.Image:
    """Return a picture's first frame as RGB, upright, or its checked header without pixels.

    Raises:
        DataError: it is no picture, broken or too large.
    """
    try:
        return untrusted.read_picture(path, untrusted.upright if decode else lambda x: x)
    except untrusted.PictureError as error:
        raise DataError(f"{path}: picture: {error}") from error


def interleave(groups: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the first item of every group, then the second of each, so that a limit is fair."""
    turns = itertools.zip_longest(*groups)
    return (item for turn in turns for item in turn if item is not None)
