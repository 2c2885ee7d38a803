"""Models and conversations of the image chat, without its page.

Each turn is answered twice, token by token in turn: by the model as it is, with the full cache, and
by a wrapped one. Both share weights and nothing else, so conversations with different policies
never meet. What a user can get wrong is a `ValueError` whose message is one line.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mmkv import chat
from mmkv.cache.compressed import CompressedCache
from mmkv.wrapping import comparing, wrap

from .outcome import Kept, kept_of, rouge_l
from .stepping import Draw, Stepper, Turnstile
from .talk import NoPictureError, Talk
from .turns import Tokens, next_turn
from .values import Settings, Side, Turn

if TYPE_CHECKING:
    from PIL import Image
    from torch import nn

    from mmkv.policy import Policy

_INTERVAL = 0.1  # seconds between two looks at the answers


class Engine:
    """One model that serves many conversations, whose tokens take turns on it."""

    def __init__(self, loaded: chat.Loaded) -> None:
        self.loaded = loaded
        self.turnstile = Turnstile()
        # A first run pays for what later ones find ready; its time would be the full cache's.
        inputs = chat.encode(loaded, "?", [])
        loaded.model.generate(**inputs, max_new_tokens=2, do_sample=False)

    def twin(self) -> Any:
        """A model of its own structure and state that shares every weight."""
        model: nn.Module = self.loaded.model
        shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, cast("dict[int, Any]", shared))

    @property
    def reads_pictures(self) -> bool:
        """Whether the model does."""
        return self.loaded.reads_pictures

    def conversation(self) -> Conversation:
        """A new one."""
        return Conversation(self)

    @property
    def longest(self) -> int | None:
        """Tokens that the model's positions reach; None if unknown."""
        config = self.loaded.model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None)


@dataclass
class _Branch:
    """One side of a conversation: its model, its tokens and its cache."""

    model: Any
    tokens: Tokens | None = None
    cache: Any = None


class Conversation(Talk):
    """One user's turns on one model."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._full = _Branch(None)
        self._compressed = _Branch(None)
        self._wrapped: tuple[Policy, float | None, str | None] | None = None
        self._counts: list[int] = []
        self._pictures: list[Image.Image] = []

    def _forget(self) -> None:
        """Free both caches."""
        self._counts, self._pictures, self._wrapped = [], [], None
        self._full, self._compressed = _Branch(None), _Branch(None)

    @property
    def nbytes(self) -> int:
        """Bytes of both caches between turns."""
        caches = (self._full.cache, self._compressed.cache)
        return sum(chat.cache_nbytes(x) for x in caches if x is not None)

    def _answered(
        self, question: str, picture: Image.Image | None, settings: Settings
    ) -> Generator[Turn]:
        policy, budget = settings.chosen()
        loaded = self.engine.loaded
        pictures = [] if picture is None else [picture]
        if loaded.reads_pictures and not self._pictures and not pictures:
            raise NoPictureError("there is no picture yet")
        mark = getattr(loaded.processor, "image_token", None)
        if mark and mark in question:
            raise ValueError(f"the question holds {mark!r}, which stands for a picture: reword it")
        notes: tuple[str, ...] = ()
        compressed, wrapped = self._compressed, (policy, budget, settings.kv_dtype)
        with self.engine.turnstile.turn():
            if self._full.model is None:
                self._full.model = self.engine.twin()
            if wrapped != self._wrapped:
                with comparing():
                    model = wrap(self.engine.twin(), policy, budget, kv_dtype=settings.kv_dtype)
                compressed = _Branch(model, self._compressed.tokens)
                if self.turns:
                    notes = ("The settings changed: it read the whole conversation again.",)
        turn = Turn(question, picture, settings.label, notes=notes)
        seen = [*self._pictures, *pictures]
        runs = [
            _Run(self.engine, x, self._counts, question, pictures, settings)
            for x in (compressed, self._full)
        ]
        try:
            yield turn
            yield from self._stream(turn, runs, seen)
            kept = runs[0].kept
            assert kept is not None
            said = runs[0].stepper.cache.report().notes
            notes += tuple(x.removeprefix("row 0: ") for x in said)
            if not all(run.stepper.done for run in runs):
                notes += ("Stopped before the end.",)
        finally:
            for run in runs:
                run.stepper.close()
        # From here on the turn counts; before, an error left everything as it was.
        for run in runs:
            run.keep()
        self._compressed, self._wrapped = compressed, wrapped
        self._counts.append(len(pictures))
        self._pictures += pictures
        sides = {"full": runs[1].side(done=True), "compressed": runs[0].side(done=True)}
        rouge = rouge_l(sides["full"].text, sides["compressed"].text)
        turn = dataclasses.replace(turn, **sides, notes=notes, kept=kept, rouge=rouge, done=True)
        self.turns.append(turn)
        yield turn

    def _stream(
        self, turn: Turn, runs: Sequence[_Run], pictures: Sequence[Image.Image]
    ) -> Generator[Turn]:
        """A token of each answer in turn. The compressed one leads: it alone can be refused."""
        looked = 0.0
        while not (self._stop and runs[1].stepper.seconds):
            going = False
            for run in runs:
                going |= run.step(pictures)
            if not going:
                return
            if time.perf_counter() - looked > _INTERVAL:
                looked = time.perf_counter()
                compressed, full = (x.side() for x in runs)
                yield dataclasses.replace(turn, full=full, compressed=compressed)


class _Run:
    """One side of one turn while it is answered."""

    def __init__(
        self,
        engine: Engine,
        branch: _Branch,
        counts: Sequence[int],
        question: str,
        pictures: Sequence[Image.Image],
        settings: Settings,
    ) -> None:
        self.branch, self.engine = branch, engine
        loaded, before = engine.loaded, branch.tokens
        if before is None:
            self.prompt = new = Tokens.of(chat.encode(loaded, question, pictures))
        else:
            new = next_turn(loaded, before, counts, question, pictures)
            self.prompt = before.extended(new)
        self.length = self.prompt.ids.shape[1]
        needed, longest = self.length + settings.max_new_tokens, engine.longest
        if longest is not None and needed > longest:
            raise ValueError(
                f"the conversation and a new answer take up to {needed} tokens, the model reads "
                f"{longest}: clear the conversation, or ask for fewer new tokens"
            )
        unseen = self.prompt if branch.cache is None else new
        options: dict[str, Any] = {
            **self.prompt.inputs(unseen.pictures),
            "max_new_tokens": settings.max_new_tokens,
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
        }
        if branch.cache is not None:
            # A copy, so that an error or a refusal leaves the conversation as it was.
            options["past_key_values"] = copy.deepcopy(branch.cache)
        if settings.temperature:
            draw = Draw(settings.temperature, settings.seed, loaded.model.device)
            options["logits_processor"] = [draw]
        self.stepper = Stepper(branch.model, options)
        self.kept: Kept | None = None

    def step(self, pictures: Sequence[Image.Image]) -> bool:
        """One more token, when it is this answer's turn."""
        with self.engine.turnstile.turn():
            going = self.stepper.step()
            if going and self.kept is None and isinstance(self.stepper.cache, CompressedCache):
                # Before the first decode step: what is held now is what the prompt left.
                self.kept = kept_of(self.engine.loaded, self.prompt, self.stepper.cache, pictures)
        return going

    def side(self, *, done: bool = False) -> Side:
        """The answer as it stands."""
        stepper = self.stepper
        if stepper.sequence is None:
            return Side()
        seconds, cache = stepper.seconds, stepper.cache
        text: str = self.engine.loaded.processor.decode(
            stepper.sequence[self.length :], skip_special_tokens=True
        )
        nbytes = full = chat.cache_nbytes(cache)
        kept = 1.0
        if isinstance(cache, CompressedCache):
            report = cache.report()
            full, kept = report.full_nbytes, report.prompt_fraction
        return Side(
            text=text.strip().removesuffix("�"),
            tokens=len(seconds),
            first=seconds[0],
            rate=(len(seconds) - 1) / sum(seconds[1:]) if len(seconds) > 1 else None,
            nbytes=nbytes,
            full_nbytes=full,
            kept=kept,
            done=done or stepper.done,
        )

    def keep(self) -> None:
        """Make this turn part of the conversation."""
        sequence = self.stepper.sequence
        assert sequence is not None
        answer = sequence[None, self.length :].to(self.prompt.ids.device)
        self.branch.tokens = self.prompt.extended(Tokens(answer, {}, {}))
        self.branch.cache = self.stepper.cache
