"""What the page's controls do: sessions on one side, HTML and updates on the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from . import options, views
from .session import Engines, Session, blank_sheet, read_upload
from .talk import NoPictureError
from .values import Settings, Turn

log = logging.getLogger(__name__)

QUESTIONS = (
    "Describe the picture.",
    "How many objects are in the picture?",
    "What is at the top right?",
    "Where is the yellow circle?",
)
FULL = "the model's type"  # what kept pairs are held as where nothing else is chosen
_LOST = "this page has no session: wait a moment, or reload it"


def policy_chosen(names: list[str], policy: str) -> list[Any]:
    """Show the options that this policy reads, at its defaults."""
    known = options.defaults(policy)
    by_name = {x.name: x for x in options.all_options()}
    return [
        gr.update(visible=True, value=by_name[name].shown(known[name]))
        if name in known
        else gr.update(visible=False)
        for name in names
    ]


def enter(engines: Engines) -> tuple[Session, Any]:
    """A tab has opened: its session, and it may ask."""
    return Session(engines), gr.update(interactive=True)


def leave(session: Session | None) -> None:
    """The tab has gone."""
    if session is not None:
        session.close()


def path_of(payload: Any) -> str | None:
    """Where an upload lies."""
    return getattr(payload, "path", None)


def _use(session: Session | None, choose: Callable[[], Image.Image]) -> tuple[Any, str]:
    """Ask about another picture from now on: what the pad shows, and a message."""
    try:
        if session is None:
            raise ValueError(_LOST)
        session.use(choose())
    except ValueError as error:
        return gr.skip(), views.message(str(error))
    assert session.picture is not None
    return views.data_uri(session.picture, side=640), ""


def uploaded(session: Session | None, path: str | None) -> tuple[Any, str]:
    """Take a picture from an upload, and remove the file."""
    folder = Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    file = None if path is None else Path(path).resolve()
    if file is None or not file.is_relative_to(folder) or not file.is_file():
        return gr.skip(), views.message("no file arrived: upload it again")
    try:
        return _use(session, partial(read_upload, file))
    finally:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # two uploads of the same file share the folder
            file.parent.rmdir()


def blank(session: Session | None) -> tuple[Any, str]:
    """Take an empty sheet."""
    return _use(session, blank_sheet)


def example(samples: list[Any], session: Session | None, event: gr.EventData) -> tuple[Any, str]:
    """Take an example picture."""

    def choose() -> Image.Image:
        index = _index(event, len(samples))
        if index is None:
            raise ValueError("there is no such example")
        return samples[index]

    return _use(session, choose)


def question(event: gr.EventData) -> Any:
    """Put an example question into the box."""
    index = _index(event, len(QUESTIONS))
    return gr.skip() if index is None else QUESTIONS[index]


def _index(event: gr.EventData, size: int) -> int | None:
    index = event._data.get("index") if isinstance(event._data, dict) else None  # pyright: ignore
    return index if isinstance(index, int) and 0 <= index < size else None


def drawn(session: Session | None, event: gr.EventData) -> str:
    """Remember what was drawn."""
    try:
        if session is None:
            raise ValueError(_LOST)
        session.draw((event._data or {}).get("strokes"))  # pyright: ignore
    except ValueError as error:
        return views.message(str(error))
    return ""


def ask(
    names: list[str],
    session: Session | None,
    question: str,
    policy: str,
    budget: float,
    protect: bool,
    longest: int,
    temperature: float,
    held: str,
    model: str,
    *values: Any,
) -> Generator[tuple[Any, ...]]:
    """Stream a turn; the outputs are those of `shown` in `build`."""
    idle = (gr.update(interactive=True), gr.update(interactive=False))
    busy = (gr.update(interactive=False), gr.update(interactive=True))
    rest = (gr.skip(),) * 6  # the outcome and the question
    if session is None:
        yield gr.skip(), views.message(_LOST), "", *idle, *rest
        return
    try:
        chosen = options.changed(policy, dict(zip(names, values, strict=True)))
        if protect:
            chosen["protect"] = "instruction"
        settings = Settings(
            policy=policy,
            budget=float(budget),
            options=chosen,
            kv_dtype=None if held == FULL else held,
            max_new_tokens=int(longest),
            temperature=float(temperature),
        )
        yield gr.skip(), "", "Answering", *busy, *rest
        turn: Turn | None = None
        for turn in session.ask(question or "", settings, model):
            if not turn.done:
                shown = views.conversation(session.turns, turn)
                yield shown, gr.skip(), gr.skip(), gr.skip(), gr.skip(), *rest
        assert turn is not None
        yield _answered(session, turn, idle)
    except Exception as error:
        text = views.message(_explained(error))
        yield views.conversation(session.turns), text, "", *idle, *rest


def _explained(error: Exception) -> str:
    if isinstance(error, NoPictureError):
        return f"{error}: choose an example or upload one"
    if isinstance(error, ValueError):
        return str(error)
    log.error("an answer failed", exc_info=error)
    return f"the model failed: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _answered(session: Session, turn: Turn, idle: tuple[Any, Any]) -> tuple[Any, ...]:
    kept, full = turn.kept, "" if turn.full is None else f"Full cache: {turn.full.text} "
    share = f", {turn.compressed.kept:.0%} kept" if turn.compressed.nbytes else ""
    shown = (
        views.conversation(session.turns),
        "",
        views.status(f"Answered. {full}Compressed{share}: {turn.compressed.text}"),
    )
    if kept is None:
        return (*shown, *idle, gr.update(visible=False), *(gr.skip(),) * 4, "")
    return (
        *shown,
        *idle,
        gr.update(visible=True),
        gr.update(
            maximum=max(len(kept.layers) - 1, 1),
            value=0,
            visible=bool(kept.patches) and len(kept.layers) > 1,
        ),
        views.patches(kept, 0),
        views.layer_bars(kept),
        views.words(kept),
        "",
    )


def stop(session: Session | None) -> None:
    """End the answers that stream."""
    if session is not None:
        session.stop()


def clear(session: Session | None) -> tuple[Any, ...]:
    """Forget the conversation."""
    try:
        if session is None:
            raise ValueError(_LOST)
        session.clear()
    except ValueError as error:
        return gr.skip(), views.message(str(error)), gr.skip(), gr.skip()
    return views.conversation([]), "", "Cleared", gr.update(visible=False)


def layer(session: Session | None, place: int) -> Any:
    """Show another layer's patches."""
    kept = session.turns[-1].kept if session is not None and session.turns else None
    return gr.skip() if kept is None else views.patches(kept, int(place))
