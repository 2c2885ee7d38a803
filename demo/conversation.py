"""Models and conversations of the image chat, without its page.

Each turn is answered twice, token by token in turn: by the model as it is, with the full cache, and
by a wrapped one. Both share weights and nothing else. One conversation is answered at a time: the
page's queue lets others wait. What a user can get wrong is a `ValueError` of one line.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmkv import chat
from mmkv.budgets import named, number
from mmkv.cache import quantize
from mmkv.loading import untrusted
from mmkv.registry import get_policy
from mmkv.wrapping import comparing, wrap

from .answer import Answer, Kept, Side, kept_of

if TYPE_CHECKING:
    from mmkv.policy import Policy
    from mmkv.report import CacheReport

MOST_BYTES = 20 * 2**20  # of a picture
MOST_PIXELS = 40_000_000
LONGEST_SIDE = 1024  # pixels of a picture that is kept
_INTERVAL = 0.1  # seconds between two looks at the answers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the controls say."""

    policy: str = "condense"
    budget: float | int | None = 0.2
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # that differ from defaults
    kv_dtype: str | None = None  # "int8" or "int4" to hold what is kept in 8 or 4 bits
    profile: Path | None = None
    max_new_tokens: int = 80
    temperature: float = 0.0  # takes the likeliest token
    seed: int = 0

    @property
    def label(self) -> str:
        """What the compressed answer is called."""
        policy, budget = self.chosen()
        size = "" if budget is None else f" {named(budget)}"
        return policy.name + size + ("" if self.kv_dtype is None else f" in {self.kv_dtype}")

    def chosen(self) -> tuple[Policy, float | int | None]:
        """The policy and its budget; None for a policy that takes none.

        Raises:
            ValueError: an unknown policy or type, a wrong option, or a budget out of range.
        """
        quantize.check(self.kv_dtype)
        policy = get_policy(self.policy, **self.options)
        unsized = policy.keeps_all or policy.retention is not None or self.budget is None
        return policy, None if unsized else number(self.budget)


@dataclass(frozen=True)
class Turn:
    """A question, the pictures that came with it, and its two answers."""

    question: str
    pictures: Sequence[Image.Image]
    label: str  # of the compressed side: policy and budget
    full: Side = field(default_factory=Side)
    compressed: Side = field(default_factory=Side)
    notes: tuple[str, ...] = ()
    kept: Kept | None = None  # by the compressed cache, of the prompt; None while answers stream
    report: CacheReport | None = None  # of the compressed cache; None likewise
    rouge: float | None = None  # ROUGE-L F-measure between the answers; None likewise
    done: bool = False


class Models:
    """The models on offer, each loaded when it is first asked; `names` are as the page shows."""

    def __init__(self, names: Sequence[str], load: Callable[[str], chat.Loaded]) -> None:
        # A path goes by its last part: where it lies is nobody's business on the page.
        short = [Path(x).name if Path(x).exists() else x for x in names]
        self._paths = {
            x if short.count(x) == 1 else f"{x} ({i})": path
            for i, (x, path) in enumerate(zip(short, names, strict=True), start=1)
        }
        self.names = list(self._paths)
        self._load = load
        self._loaded: dict[str, chat.Loaded] = {}

    def get(self, name: str) -> chat.Loaded:
        """Load a model once; raises a ValueError if it is not on offer or cannot be loaded."""
        if name not in self.names:
            raise ValueError(f"model {name!r} is not on offer here: {', '.join(self.names)}")
        if name not in self._loaded:
            self._loaded[name] = loaded = self._load(self._paths[name])
            warm(loaded, loaded.model)
        return self._loaded[name]


def warm(loaded: chat.Loaded, model: Any) -> None:
    """Run a model once: a first run pays for what later ones find ready, and would be timed."""
    shown = [Image.new("RGB", (64, 64))] if loaded.places_pictures else []
    inputs = chat.encode(loaded, "?", shown)
    with suppress(ValueError):  # such as a budget that is too small for so short a prompt
        model.generate(**inputs, max_new_tokens=2, do_sample=False)


class Conversation:
    """One user's turns on one model, `loaded`; `ask` continues it.

    The attribute `closed` says that its user has gone or forgot it. Where answers are `timed`, a
    wrapped model runs once before its first one.
    """

    def __init__(self, loaded: chat.Loaded, *, timed: bool = True) -> None:
        self.loaded, self._timed = loaded, timed
        self.turns: list[Turn] = []
        self.closed = self._stopped = False
        self._wrapped: tuple[Any, ...] | None = None
        self._sides: tuple[Answer, Answer] | tuple[None, None] = (None, None)

    def stop(self) -> None:
        """End the answers that are streaming; what they have said stays."""
        self._stopped = True

    def close(self) -> None:
        """End them for good; what the conversation holds goes with it."""
        self.closed = self._stopped = True

    def ask(self, question: str, settings: Settings, *pictures: Image.Image) -> Generator[Turn]:
        """Answer a question: the turn as it grows, and last the whole of it.

        Args:
            question: of the user.
            settings: where they differ from before, the conversation is read again.
            pictures: RGB; none, or the last ones again, asks on about the earlier ones. Models that
                read none do not get them.

        Raises:
            ValueError: an empty question, a setting out of range, a budget below what must be kept,
                or more tokens than the model reads. The conversation stays as it was.
        """
        loaded, question = self.loaded, question.strip()
        if not question:
            raise ValueError("the question is empty")
        mark = getattr(loaded.processor, "image_token", None)
        if mark and mark in question:
            raise ValueError(f"the question holds {mark!r}, which stands for a picture: reword it")
        every = [x for turn in self.turns for x in turn.pictures]
        if not loaded.reads_pictures or list(pictures) == every[-len(pictures) :]:
            pictures = ()
        chat.check_pictures(loaded, pictures)
        every += pictures
        self._stopped = False
        how: Any = {"kv_dtype": settings.kv_dtype, "profile": settings.profile}
        policy, budget = settings.chosen()
        wrapped, before = (policy, budget, how), self._sides
        if before[0] is not None and wrapped == self._wrapped:
            model = before[0].model
        else:
            # Of its own structure and state, with the same weights.
            weights = {id(x): x for x in (*loaded.model.parameters(), *loaded.model.buffers())}
            with comparing():
                model = wrap(copy.deepcopy(loaded.model, weights), policy, budget, **how)
            if self._timed:
                warm(loaded, model)
        compressed = Answer(loaded, model, before[0], question, pictures, settings)
        full = Answer(loaded, loaded.model, before[1], question, pictures, settings)
        notes = ("It read the whole conversation again.",) if compressed.again else ()
        turn = Turn(question, pictures, settings.label, notes=notes)
        kept, looked = None, 0.0
        try:
            yield turn
            # The compressed one leads: it alone can be refused.
            while compressed.step() | full.step():
                # What is held before the first decode step is what the prompt left.
                kept = kept or kept_of(loaded, compressed.prompt, compressed.cache, every)
                if self._stopped:
                    break
                if time.perf_counter() - looked > _INTERVAL:
                    looked = time.perf_counter()
                    yield replace(turn, full=full.side(), compressed=compressed.side())
            report = compressed.cache.report()
            notes += tuple(x.removeprefix("row 0: ") for x in report.notes)
            if not (full.done and compressed.done):
                notes += ("Stopped before the end.",)
        finally:
            full.close()
            compressed.close()
        # From here on the turn counts; before, an error left everything as it was.
        self._sides, self._wrapped = (compressed, full), wrapped
        turn = replace(turn, full=full.side(), compressed=compressed.side(), notes=notes, done=True)
        rouge = rouge_l(turn.full.text, turn.compressed.text)
        turn = replace(turn, kept=kept, report=report, rouge=rouge)
        self.turns.append(turn)
        yield turn


def rouge_l(one: str, other: str) -> float | None:
    """ROUGE-L F-measure between two texts, in [0, 1]; equal texts have 1, also empty ones.

    None where rouge-score is not installed: `mmkv chat` works without any extra.
    """
    if one == other:
        return 1.0
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        return None
    return float(RougeScorer(["rougeL"]).score(one, other)["rougeL"].fmeasure)


def read_upload(path: str | Path) -> Image.Image | None:
    """What the page's editor sent, as RGB, at most `LONGEST_SIDE` wide and high; None if empty.

    Raises:
        ValueError: too large, broken, or of no known format; the message names the file only.
    """
    try:
        sent = untrusted.read_picture(
            path, lambda x: x.convert("RGBA"), most_pixels=MOST_PIXELS, most_bytes=MOST_BYTES
        )
    except untrusted.PictureError as error:
        raise ValueError(f"cannot read {Path(path).name!r}: {error}") from None
    if sent.getchannel("A").getextrema() == (0, 0):
        return None
    sheet = Image.new("RGBA", sent.size, "#b4b4b4")
    sheet.alpha_composite(sent)
    sheet.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return sheet.convert("RGB")
