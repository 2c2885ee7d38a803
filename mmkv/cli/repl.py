"""The image chat in a terminal: questions and commands line by line, from a person or a pipe."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from mmkv.demo.session import Session
    from mmkv.demo.values import Settings, Side, Turn

HELP = """\
/image PATH               ask about another picture
/policy NAME [OPTION=VALUE ...]
/budget 0.2               the fraction kept
/kv-dtype int8            hold what is kept in 8 or 4 bits (int4); none: in the model's type
/clear                    forget the conversation and free its caches
/quit                     (or the end of the input)
Anything else is a question; Ctrl-C stops an answer."""
# With what they need missing, the help is shown; so it is for a slash alone.
_COMMANDS = ("", "help", "image", "policy", "budget", "kv-dtype", "quit")


class _UnknownCommandError(ValueError):
    """A line that begins with a slash and names no command."""


class Repl:
    """Reads lines; each is a command or a question for both caches.

    Args:
        session: the conversation.
        settings: policy, budget and how to generate.
        console: where to write; a terminal gets a live view, a pipe the finished answers.
    """

    def __init__(self, session: Session, settings: Settings, console: Console) -> None:
        self.session, self.settings, self.console = session, settings, console

    def run(self, lines: Iterable[str]) -> int:
        """Serve until the lines end or /quit; the number of lines that were refused."""
        from mmkv.demo.talk import NoPictureError

        refused = 0
        for line in lines:
            text = line.strip()
            if text == "/quit":
                break
            try:
                if text.startswith("/"):
                    self._command(*text[1:].split())
                elif text:
                    self._ask(text)
            except ValueError as error:
                refused += 1
                how = ": /image PATH chooses one" if isinstance(error, NoPictureError) else ""
                self._say(f"error: {error}{how}", "red")
                if isinstance(error, _UnknownCommandError):
                    self._say(HELP, "dim")
        return refused

    def _command(self, name: str = "", *words: str) -> None:
        from mmkv import budgets, chat

        if name == "image" and words:
            self.session.use(chat.read_picture(Path(" ".join(words))))
            self._say(f"picture: {' '.join(words)}", "dim")
        elif name == "policy" and words:
            options = chat.parse_options(words[0], list(words[1:]))
            self._set(policy=words[0], options=options)
        elif name == "budget" and len(words) == 1:
            self._set(budget=budgets.parse(words[0]))
        elif name == "kv-dtype" and len(words) == 1:
            self._set(kv_dtype=None if words[0] == "none" else words[0])
        elif name == "clear":
            self.session.clear()
            self._say("the conversation is forgotten", "dim")
        elif name in _COMMANDS:
            self._say(HELP, "dim")
        else:
            raise _UnknownCommandError(f"unknown command {'/' + name!r}")

    def _set(self, **changes: Any) -> None:
        from mmkv import budgets

        settings = dataclasses.replace(self.settings, **changes)
        self._say(f"from now on {settings.label}", "dim")
        policy, budget = settings.chosen()
        if budget is None and "budget" in changes:
            self._say(f"policy {policy.name} takes no budget: it is ignored", "dim")
        elif note := budgets.note(changes.get("budget")):
            self._say(note, "dim")
        self.settings = settings

    def _ask(self, question: str) -> None:
        turns = self.session.ask(question, self.settings, self.session.model)
        if not self.console.is_terminal:
            *_, last = turns
            self.console.print(_view(last), soft_wrap=True)
            return
        from rich.live import Live

        with Live(console=self.console, refresh_per_second=12) as live:
            try:
                for turn in turns:
                    live.update(_view(turn))
            except KeyboardInterrupt:
                self.session.stop()
                for turn in turns:
                    live.update(_view(turn))

    def _say(self, text: str, style: str) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _view(turn: Turn) -> Text:
    """A turn as it stands: both answers, and under each a line about its cache."""
    from rich.text import Text

    text = Text()
    for name, side in (("full cache", turn.full), (turn.label, turn.compressed)):
        assert side is not None  # no server answers here
        text.append(f"{name}: ", "bold").append(f"{side.text.strip()}\n")
        text.append(f"  {_cache_line(side)}\n", "dim")
    if turn.rouge is not None:
        text.append(f"  ROUGE-L between the answers {turn.rouge:.2f}", "dim")
    for note in turn.notes:
        text.append(f"\n  {note}", "dim")
    return text


def _cache_line(side: Side) -> str:
    share = side.nbytes / side.full_nbytes if side.full_nbytes else 0.0
    bar = "#" * round(20 * min(1.0, share))
    rate = "" if side.rate is None else f", {side.rate:.0f} tokens/s"
    return (
        f"cache [{bar:<20}] {side.nbytes / 1024:.1f} of {side.full_nbytes / 1024:.1f} KiB, "
        f"{side.kept:.1%} of the prompt kept, {side.tokens} generated tokens{rate}"
    )


def run(
    console: Console,
    settings: Settings,
    *,
    model: str,
    device: str,
    dtype: str,
    images: Iterable[Path],
) -> int:
    """Chat on standard input.

    Args:
        console: where to write.
        settings: what to start with.
        model: as for `mmkv.chat.load`.
        device: likewise.
        dtype: likewise.
        images: the first picture to ask about, if any.

    Returns:
        An exit code: 2 when a line of a pipe was refused, else 0.
    """
    from mmkv import chat
    from mmkv.builtin import KNOWS
    from mmkv.demo.backend import Engine
    from mmkv.demo.session import Engines, Session

    settings.chosen()
    pictures = [chat.read_picture(path) for path in images]
    session = Session(Engines([model], lambda name: Engine(chat.load(name, device, dtype))))
    for picture in pictures[:1]:
        session.use(picture)
    repl = Repl(session, settings, console)
    typed = sys.stdin.isatty()
    if typed:
        knows = f"\n({KNOWS}; --model takes another)" if model == "builtin" else ""
        console.print(HELP + knows, style="dim", markup=False, highlight=False)
    try:
        refused = repl.run(_typed(console) if typed else sys.stdin)
    finally:
        session.close()
    return 2 if refused and not typed else 0


def _typed(console: Console) -> Iterable[str]:
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            return
