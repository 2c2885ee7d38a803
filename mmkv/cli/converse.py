"""`mmkv chat` without a question: questions and commands line by line, of a terminal or a pipe."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mmkv.terminal import check_utf8, console, write

if TYPE_CHECKING:
    from PIL import Image
    from rich.console import Console
    from rich.text import Text

    from mmkv.chat import Loaded
    from mmkv.demo.conversation import Conversation, Settings, Turn

HELP = """\
/image PATH               add a picture to the next question
/policy NAME [OPTION=VALUE ...]   use another policy
/budget 0.2               keep this fraction of the prompt
/memory 6%                keep the prompt in this share of the full cache's bytes
/kv-dtype int8            store the cache in 8 or 4 bits (int4); none: in the model's type
/clear                    forget the conversation, but not its picture
/quit                     leave (or end the input)
Anything else is a question; Ctrl-C stops an answer."""


def converse(loaded: Loaded, settings: Settings, *pictures: Image.Image) -> int:
    """Chat on standard input; return the exit code: 2 if a line of a pipe was refused, else 0."""
    from mmkv.builtin import KNOWS
    from mmkv.demo.conversation import Conversation, warm

    def typed() -> Iterable[str]:
        while True:
            try:
                yield screen.input("[bold]> [/bold]")
            except (EOFError, KeyboardInterrupt):
                return

    screen, terminal = console(), sys.stdin.isatty()
    if terminal:
        knows = KNOWS.get(loaded.name)
        write(screen, HELP + (f"\n({knows}; --model takes another)" if knows else ""), "dim")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    warm(loaded, loaded.model)
    lines = Lines(Conversation(loaded), settings, screen, tuple(pictures))
    refused = lines.run(typed() if terminal else sys.stdin)
    return 2 if refused and not terminal else 0


@dataclasses.dataclass
class Lines:
    """Reads lines, each of which is a command, or a question about the pictures for both caches.

    A terminal shows answers as they grow, a pipe gets the finished ones. `pictures` are those of
    the next question, or of the last one if it was `asked`.
    """

    conversation: Conversation
    settings: Settings
    screen: Console
    pictures: tuple[Image.Image, ...] = ()
    asked: bool = False

    def run(self, lines: Iterable[str]) -> int:
        """Run until the lines end or /quit; return the number of refused lines."""
        refused = 0
        for text in filter(None, map(str.strip, lines)):
            if text == "/quit":
                break
            try:
                check_utf8(text)
                if text.startswith("/"):
                    self._command(*text[1:].split())
                else:
                    self._ask(text)
                    self.asked = True
            except ValueError as error:
                refused += 1
                write(self.screen, f"error: {error}", "red")
                if str(error).startswith("unknown command"):
                    write(self.screen, HELP, "dim")
        return refused

    def _command(self, name: str = "", *words: str) -> None:
        from mmkv import budgets
        from mmkv.chat import check_pictures
        from mmkv.demo.conversation import Conversation
        from mmkv.loading.untrusted import read_named_picture
        from mmkv.memory import BITS, Memory
        from mmkv.policy_options import parse_options

        match name, words:
            case "image", [_, *_]:
                new = read_named_picture(" ".join(words))
                check_pictures(self.conversation.loaded, [new])
                self.pictures = (new,) if self.asked else (*self.pictures, new)
                self.asked = False
                write(self.screen, f"picture: {' '.join(words)}", "dim")
            case "policy", [policy, *options]:
                self._choose(policy, parse_options(policy, options))
            case "budget", [text]:
                self._set(budget=budgets.parse(text))
            case "memory", [text]:
                self._set(budget=Memory.of(text), kv_dtype=None)
            case "kv-dtype", [text]:
                if text not in ("none", *BITS):
                    raise ValueError(f"/kv-dtype {text}: expected {', '.join(BITS)} or none")
                self._set(kv_dtype=None if text == "none" else text)
            case "clear", _:
                self.conversation = Conversation(self.conversation.loaded)
                self.asked = True  # so that the next picture is a new one
                left = "; the picture stays, /image replaces it" if self.pictures else ""
                write(self.screen, f"conversation cleared{left}", "dim")
            case _ if name in ("", "help") or f"/{name}" in HELP.split():
                write(self.screen, HELP, "dim")
            case _:
                raise ValueError(f"unknown command {'/' + name!r}")

    def _choose(self, name: str, options: dict[str, Any]) -> None:
        """Take another policy, with the size that was chosen, else its own default."""
        from mmkv.memory import DEFAULT, Memory
        from mmkv.policy_options import default_budget
        from mmkv.registry import get_policy

        size, changes = self.settings.budget, dict[str, Any]()
        if size is None or (isinstance(size, Memory) and size == DEFAULT):
            policy = get_policy(name, **options)
            changes["budget"] = default_budget(policy, None, self.settings.kv_dtype)
        if self.settings.profile is not None:
            write(self.screen, f"without the profile {self.settings.profile}", "dim")
        self._set(policy=name, options=options, profile=None, **changes)

    def _set(self, **changes: Any) -> None:
        from mmkv import budgets
        from mmkv.profiles import Profile

        settings = dataclasses.replace(self.settings, **changes)
        if settings.profile and "budget" in changes and Profile.load(settings.profile).fractions:
            raise ValueError(
                f"the profile {settings.profile} sets the size: /policy NAME leaves the profile out"
            )
        write(self.screen, f"from now on {settings.label}", "dim")
        policy, budget = settings.chosen()
        if budget is None and changes.get("budget") is not None:
            write(self.screen, f"policy {policy.name} takes no budget: it is ignored", "dim")
        elif note := budgets.note(changes.get("budget")):
            write(self.screen, note, "dim")
        self.settings = settings

    def _ask(self, question: str) -> None:
        from rich.live import Live

        turns = self.conversation.ask(question, self.settings, *self.pictures)
        if not self.screen.is_terminal:
            *_, last = turns
            self.screen.print(_view(last), soft_wrap=True)
            return
        with Live(console=self.screen, refresh_per_second=12) as live:
            try:
                for turn in turns:
                    live.update(_view(turn))
            except KeyboardInterrupt:
                self.conversation.stop()
                for turn in turns:
                    live.update(_view(turn))


def _view(turn: Turn) -> Text:
    """Return a turn as text: both answers so far, each with a line about its cache."""
    from rich.text import Text

    text = Text()
    for name, side in (("full cache", turn.full), (turn.label, turn.compressed)):
        bar = "#" * round(20 * min(1.0, side.nbytes / max(1, side.full_nbytes)))
        rate = "" if side.rate is None else f", {side.rate:.0f} tokens/s"
        text.append(f"{name}: ", "bold").append(f"{side.text.strip()}\n")
        text.append(
            f"  cache [{bar:<20}] {side.size}, "
            f"{side.kept:.1%} of the prompt kept, {side.tokens} generated tokens{rate}\n",
            "dim",
        )
    if turn.rouge is not None:
        text.append(f"  ROUGE-L between the answers {turn.rouge:.2f}", "dim")
    for note in turn.notes:
        text.append(f"\n  {note}", "dim")
    return text
