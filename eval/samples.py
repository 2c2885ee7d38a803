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
# A picture of more pixels or bytes than this is refused; both are far above any published one.
MAX_PIXELS = 50_000_000
MAX_IMAGE_BYTES = 64 * 2**20
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")


class DataError(ValueError):
    """A data file is not what a suite expects; the message names file, entry and field."""


def words(text: str) -> int:
    """How many a text has, where no tokenizer counts."""
    return len(text.split())


@dataclass(frozen=True, kw_only=True)
class Request:
    """What of a suite is asked for.

    Attributes:
        data: None for the built-in data.
        limit: take the first samples; where a suite has tasks, they take turns.
        tasks: LongBench datasets, tasks of RULER or of documents, or kinds of built-in task.
        image_folder: by default `images` beside the data file, else the file's own folder.
        length: tokens of a prompt and its answer, for suites that make prompts of any length.
        count: how many tokens a text has; words by default.
        questions: most on each context, for suites that make them; published data has its own.
    """

    data: Path | None = None
    limit: int | None = None
    tasks: list[str] | None = None
    image_folder: Path | None = None
    length: int | None = None
    count: Callable[[str], int] = words
    questions: int = 1

    def chosen(self, known: Iterable[str]) -> list[str]:
        """The tasks that are asked for, by default all.

        Raises:
            ValueError: no such task.
        """
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
    """One prompt of a suite, with what is needed to run and to score it.

    Attributes:
        id: unique within a run.
        suite: its name, which `load_suite` sets.
        task: the LongBench dataset or kind of task, else the suite's name.
        prompt: the user's text, without placeholders for images.
        question: the end of `prompt` that a hidden question leaves out of what is compressed; "":
            all of it, where there are pictures.
        images: before the prompt; Pillow images, or paths that `open_images` reads.
        answers: reference answers; the first is teacher-forced for perplexity.
        chat: whether the chat template is applied.
        max_new_tokens: most tokens to generate.
        metric: a name in `mmkv.eval.scoring.SCORERS` for the generated text, or None.
        classes: all classes of a classification task.
        tags: groups that the sample counts in, such as "ocr" or "depth=0.5".
        truncate: whether a prompt beyond the model's length is cut in its middle.
        first_line: whether only the first line of the output is scored.
        note: why figures of this sample do not compare with published ones; "" if they do.
    """

    id: str
    suite: str = ""
    task: str = ""
    prompt: str
    question: str = ""
    images: tuple[Any, ...] = ()
    answers: tuple[str, ...] = ()
    chat: bool = True
    max_new_tokens: int = 128
    metric: str | None = None
    classes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    truncate: bool = False
    first_line: bool = False
    note: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether it is a plain text, and its answer how that goes on."""
        return bool(self.answers) and not self.chat and self.metric is None

    @property
    def asked(self) -> str:
        """The question apart from its context, the end of `prompt`.

        Raises:
            ValueError: there is no context apart from it.
        """
        if end := self._end:
            return end
        raise ValueError(
            f"sample {self.id}: its prompt is not a context and then a question, so that the "
            "question cannot be hidden"
        )

    @property
    def _end(self) -> str:
        """The question as the end of the prompt; "" where it is not."""
        question = self.question or (self.prompt if self.images else "")
        return question if self.prompt.endswith(question) else ""

    @property
    def context(self) -> tuple[object, ...]:
        """What samples share that ask about the same text and pictures; of the sample alone where
        its question cannot be hidden."""
        pictures = (str(i) if isinstance(i, str | Path) else id(i) for i in self.images)
        return (self.prompt.removesuffix(self._end), *pictures) if self._end else (self.id,)


def suite_notes(samples: Iterable[Sample]) -> tuple[str, ...]:
    """Why figures of `samples` do not compare with published ones, each reason once."""
    return tuple(dict.fromkeys(sample.note for sample in samples if sample.note))


def open_images(sample: Sample) -> list[Image.Image]:
    """The pictures of a sample as RGB, reading those that are paths. Raises DataError."""
    return [read_image(i) if isinstance(i, str | Path) else i for i in sample.images]


def read_image(path: str | Path, *, decode: bool = True) -> Image.Image:
    """One picture as RGB, its first frame if it has several; or its checked header. Raises
    DataError."""
    limits: Any = {"formats": FORMATS, "most_pixels": MAX_PIXELS, "most_bytes": MAX_IMAGE_BYTES}
    try:
        return untrusted.read_picture(path, lambda x: x.convert("RGB") if decode else x, **limits)
    except untrusted.PictureError as error:
        raise DataError(f"{path}: picture: {error}") from error


def check_image(path: str | Path) -> None:
    """Check a picture's size and header without decoding it. Raises DataError."""
    read_image(path, decode=False)


def interleave(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of every group, then the second of each: a limit covers all groups alike."""
    turns = itertools.zip_longest(*groups)
    return [item for turn in turns for item in turn if item is not None]
