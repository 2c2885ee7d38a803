"""Models and conversations of the image chat, without its page.

The unwrapped model with the full cache and a wrapped copy answer each question, one token at a time
each. They share weights only. One conversation is answered at a time; others wait in the page's
queue. A user's mistakes raise `ValueError`s of one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmkv import chat
from mmkv.budgets import DEFAULT, named, number
from mmkv.cache import codes
from mmkv.calls import twin
from mmkv.loading import untrusted
from mmkv.memory import Memory
from mmkv.planning import comparing
from mmkv.registry import get_policy
from mmkv.rouge import rouge
from mmkv.wrapping import wrap

from .answer import Answer, Kept, Side, kept_of

if TYPE_CHECKING:
    from mmkv.policy import Policy
    from mmkv.report import CacheReport

MOST_BYTES = 20 * 2**20  # of a picture
MOST_PIXELS = 40_000_000
LONGEST_SIDE = 1024  # pixels, to which larger uploads are scaled
_READ_AGAIN = "The compressed side read the whole conversation again."
_INTERVAL = 0.1  # seconds between two states that are yielded


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of the page's controls."""

    policy: str = "condense"
    budget: float | int | None = DEFAULT  # a `Memory` is a share of bytes
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # that differ from defaults
    kv_dtype: str | None = None  # "int8" or "int4" to store kept pairs in 8 or 4 bits
    profile: Path | None = None
    max_new_tokens: int = 80
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0

    @property
    def label(self) -> str:
        """Title of the compressed answer."""
        policy, budget = self.chosen()
        size = "" if budget is None else f" {named(budget)}"
        return policy.name + size + ("" if self.kv_dtype is None else f" in {self.kv_dtype}")

    @property
    def details(self) -> str:
        """The settings that the label leaves out and that differ from the defaults, else ""."""
        texts = [f"{name}={value}" for name, value in self.options.items()]
        texts += [f"temperature {self.temperature:g}"] if self.temperature else []
        return ", ".join(texts)

    def chosen(self) -> tuple[Policy, float | int | None]:
        """Return the policy and its budget; None for a policy that takes none.

        Raises:
            ValueError: unknown policy or type, wrong option, budget out of range, or a type beside
                a share of bytes, which sets it.
        """
        codes.check(self.kv_dtype)
        policy = get_policy(self.policy, **self.options)
        if isinstance(self.budget, Memory):
            if self.kv_dtype is not None:
                raise ValueError(
                    f"kv_dtype={self.kv_dtype!r} beside a memory of {self.budget}, which sets the "
                    "type too: choose a budget first"
                )
            return policy, self.budget
        if self.budget is None or not policy.takes_budget:
            return policy, None
        return policy, number(self.budget)


@dataclass(frozen=True)
class Turn:
    """A question, the pictures that came with it, and its two answers."""

    question: str
    pictures: Sequence[Image.Image]
    label: str  # of the compressed side: policy and budget
    details: str  # the model's name, and settings that are not in the label
    full: Side = field(default_factory=Side)
    compressed: Side = field(default_factory=Side)
    notes: tuple[str, ...] = ()
    kept: Kept | None = None  # of the prompt, by the compressed cache; None until the end
    report: CacheReport | None = None  # of the compressed cache; None until the end
    rouge: float | None = None  # ROUGE-L F-measure between the answers; None until the end
    done: bool = False


class Models:
    """The models to choose from, each loaded at its first use; the page shows `names`."""

    def __init__(self, names: Sequence[str], load: Callable[[str], chat.Loaded]) -> None:
        # Of a path only the last part is shown, as the page may be public.
        labels = list(map(_shown_name, names))
        self._paths = {
            x if labels.count(x) == 1 else f"{x} ({i})": path
            for i, (x, path) in enumerate(zip(labels, names, strict=True), start=1)
        }
        self.names = list(self._paths)
        self._load = load
        self._loaded: dict[str, chat.Loaded] = {}

    def get(self, name: str) -> chat.Loaded:
        """Return a model, loaded once; a ValueError if it is not listed or cannot be loaded."""
        if name not in self.names:
            raise ValueError(f"model {name!r} is not offered here: use {', '.join(self.names)}")
        if name not in self._loaded:
            self._loaded[name] = loaded = self._load(self._paths[name])
            warm(loaded, loaded.model)
        return self._loaded[name]


def _shown_name(name: str) -> str:
    return Path(name).name if Path(name).exists() else name


def warm(loaded: chat.Loaded, model: Any) -> None:
    """Run a model once, so that its setup is not part of the first answer's time."""
    images = [Image.new("RGB", (64, 64))] if loaded.places_pictures else []
    inputs = chat.encode(loaded, "?", images)
    with suppress(ValueError):  # such as a budget that is too small for so short a prompt
        model.generate(**inputs, max_new_tokens=2, do_sample=False)


class Conversation:
    """One user's turns with one model, `loaded`; `ask` adds a turn.

    `closed` is True once the user has left or cleared it. If answers are `timed`, a wrapped model
    runs once before its first one. `earlier` are turns with other models, which are only shown.
    """

    def __init__(
        self, loaded: chat.Loaded, *, timed: bool = True, earlier: Sequence[Turn] = ()
    ) -> None:
        self.loaded, self._timed, self.earlier = loaded, timed, tuple(earlier)
        self.turns: list[Turn] = []
        self.closed = self._stopped = False
        self._wrapped: tuple[Any, ...] | None = None
        self._sides: tuple[Answer, Answer] | tuple[None, None] = (None, None)

    @property
    def shown(self) -> list[Turn]:
        """All complete turns, those with other models first."""
        return [*self.earlier, *self.turns]

    def stop(self) -> None:
        """Stop the answers that are streaming; their text stays."""
        self._stopped = True

    def close(self) -> None:
        """Stop the answers, and mark the conversation as closed."""
        self.closed = self._stopped = True

    def ask(self, question: str, settings: Settings, *pictures: Image.Image) -> Generator[Turn]:
        """Answer a question; yield the turn as it grows, and at last the complete turn.

        Args:
            question: the user's text.
            settings: if they differ from the last turn's, the conversation is read again.
            pictures: RGB; none, or the last ones again, for a question about the earlier ones.
                Models that read no pictures do not get them.

        Raises:
            ValueError: empty question, setting out of range, budget below the pinned tokens,
                or more tokens than the model reads. The conversation is unchanged.
        """
        loaded, question = self.loaded, question.strip()
        if not question:
            raise ValueError("the question is empty")
        token = getattr(loaded.processor, "image_token", None)
        if token and token in question:
            raise ValueError(
                f"the question, or a text file before it, holds {token!r}, which stands for a "
                "picture: reword it"
            )
        all_pictures = [x for turn in self.turns for x in turn.pictures]
        if not loaded.reads_pictures or list(pictures) == all_pictures[-len(pictures) :]:
            pictures = ()
        chat.check_pictures(loaded, pictures)
        all_pictures += pictures
        self._stopped = False
        options: Any = {"kv_dtype": settings.kv_dtype, "profile": settings.profile}
        policy, budget = settings.chosen()
        wrap_args, last_sides = (policy, budget, options), self._sides
        if last_sides[0] is not None and wrap_args == self._wrapped:
            model = last_sides[0].model
        else:
            with comparing():
                model = wrap(twin(loaded.model), policy, budget, **options)
            if self._timed:
                warm(loaded, model)
        compressed = Answer(loaded, model, last_sides[0], question, pictures, settings)
        full = Answer(loaded, loaded.model, last_sides[1], question, pictures, settings)
        notes = (_READ_AGAIN,) if compressed.reads_again else ()
        details = ", ".join(filter(None, (_shown_name(loaded.name), settings.details)))
        turn = Turn(question, pictures, settings.label, details, notes=notes)
        kept, yielded_at = None, 0.0
        try:
            yield turn
            # The compressed side steps first: only its cache can raise a ValueError.
            while compressed.step() | full.step():
                # The kept tokens of the prompt, read before the first decode step.
                kept = kept or kept_of(loaded, compressed.prompt, compressed.cache, all_pictures)
                if self._stopped:
                    break
                if time.perf_counter() - yielded_at > _INTERVAL:
                    yielded_at = time.perf_counter()
                    yield replace(turn, full=full.side(), compressed=compressed.side())
            report = compressed.cache.report()
            notes += tuple(x.removeprefix("row 0: ") for x in report.notes)
            if not (full.done and compressed.done):
                notes += ("Stopped before the end.",)
        finally:
            full.close()
            compressed.close()
        # The turn is added only now: an error before leaves the conversation unchanged.
        self._sides, self._wrapped = (compressed, full), wrap_args
        turn = replace(turn, full=full.side(), compressed=compressed.side(), notes=notes, done=True)
        similarity = rouge_l(turn.full.text, turn.compressed.text)
        turn = replace(turn, kept=kept, report=report, rouge=similarity)
        self.turns.append(turn)
        yield turn


def rouge_l(one: str, other: str) -> float | None:
    """Return the ROUGE-L F-measure of two texts, in [0, 1]; equal texts, also empty ones, have 1.

    None if rouge-score is not installed: `mmkv chat` works without any extra.
    """
    if one == other:
        return 1.0
    try:
        return rouge(other, one)
    except ModuleNotFoundError:
        return None


def read_upload(path: str | Path) -> Image.Image | None:
    """Return an upload as RGB, upright, at most `LONGEST_SIDE` wide and high; None if it is empty.

    Raises:
        ValueError: too large, broken, or of no known format; the message has no folder.
    """
    try:
        upload = untrusted.read_picture(
            path, untrusted.upright_rgba, most_pixels=MOST_PIXELS, most_bytes=MOST_BYTES
        )
    except untrusted.PictureError as error:
        raise ValueError(f"cannot read {Path(path).name!r}: {error}") from None
    if upload.getchannel("A").getextrema() == (0, 0):
        return None
    canvas = Image.new("RGBA", upload.size, "#b4b4b4")
    canvas.alpha_composite(upload)
    canvas.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return canvas.convert("RGB")
