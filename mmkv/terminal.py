"""What all commands share: the console, errors of one line, and tables that fit the terminal."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable

P = ParamSpec("P")
T = TypeVar("T")

# Between two lines of progress in a pipe.
_SECONDS = 10.0
# Columns where no terminal says its own: in a file, lines are found by grep, not by eye.
_FILE_WIDTH = 200
# Operating system errors that say that a path, a port or a device was wrong.
_NO_FOLDER = (IsADirectoryError, NotADirectoryError)
_WRONG_USE = (FileNotFoundError, FileExistsError, PermissionError, *_NO_FOLDER)
_TRACEBACK = "MMKV_TRACEBACK"


def console() -> Console:
    """Standard output, as wide as the terminal that a pipe's reader looks at."""
    from rich.console import Console

    found = Console()
    watched = found.is_terminal or "COLUMNS" in os.environ or os.isatty(0) or os.isatty(2)
    return found if watched else Console(width=_FILE_WIDTH)


def write(screen: Console, text: Any, style: str | None = None) -> None:
    """A line as it is, however long; or a table."""
    wrap = isinstance(text, str)
    screen.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)


def say(text: str) -> None:
    """One line on standard error, in place of what `Progress` left there."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    typer.echo(f"{clear}mmkv: {text}", err=True)


# Warnings that are remembered as printed.
_MOST_SEEN = 1000


class _Warnings(logging.Handler):
    """Prints each warning once, as a cache warns with every prompt; an exception each time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message in one line, and what was raised."""
        text = " ".join(record.getMessage().splitlines())
        if record.exc_info:
            say(f"{text}\n{logging.Formatter().formatException(record.exc_info)}")
        elif text not in self._seen:
            if len(self._seen) >= _MOST_SEEN:  # they may come from clients of a server
                self._seen.clear()
            self._seen.add(text)
            say(text)


def show_warnings() -> None:
    """Let the library's warnings read like a command's other messages."""
    logger = logging.getLogger("mmkv")
    for handler in [h for h in logger.handlers if isinstance(h, _Warnings)]:
        logger.removeHandler(handler)
    logger.addHandler(_Warnings())


def wait_asleep() -> None:
    """Have torch's threads sleep while they wait for each other; to be called before its import.

    By default they spin, and beside a server a thread that spins keeps the processors from the one
    that it waits for. What the environment says already stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet: a model is loaded first."""
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as undo:
            found = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            undo.pop_all()
        return found
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} is in use: choose another by --port, or --port 0 for a free one"
            ) from None
        option = f"--port {port}" if error.errno == errno.EACCES else f"--host {host}"
        raise ValueError(f"{option}: {error.strerror}") from None


def check_place(folder: Path) -> None:
    """Refuse a folder that neither is there nor can be made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"--out {folder}: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--out {folder}: nothing can be written in {there.absolute()}")


def told(command: Callable[P, T]) -> Callable[P, T]:
    """Turn what goes wrong in a command into a line: exit code 2 for wrong use, 1 for failure."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            name = command.__name__.split("_")[0]
            if isinstance(error, ModuleNotFoundError):
                needs = need(error, name, *command.__module__.split("."))
                error = error if needs is None else ValueError(f"mmkv {name} {needs}")
            raise typer.Exit(_explain(error)) from None

    return run


def need(error: ModuleNotFoundError, *preferred: str) -> str | None:
    """What to install, in words, where a module of an extra is missing; None for other modules.

    Of several extras that have it, the first of `preferred` is named.
    """
    module = (error.name or "").partition(".")[0]
    package = module.replace("_", "-").lower()
    known = (re.match(r'([\w.-]+).*extra == "(\w+)"', x) for x in metadata.requires("mmkv") or ())
    extras = [x[2] for x in known if x and x[1].replace("_", "-").lower() == package]
    for extra in (*(x for x in preferred if x in extras), *extras):
        return f"needs {module}: pip install 'mmkv[{extra}]'"
    return None


def _explain(error: Exception) -> int:
    """Print an error; its exit code."""
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, (ValueError, *_WRONG_USE)):
        say(f"error: {text}")
        return 2
    if isinstance(error, OSError):
        say(f"failed: {text}")
    elif type(error).__name__ == "OutOfMemoryError" or "not enough memory" in text:
        say("failed: out of memory: use a smaller model, fewer tokens at once, or --dtype bfloat16")
    else:
        say(f"failed: {type(error).__name__}: {text[:300]} ({_TRACEBACK}=1 shows where)")
    return 1


@dataclass(frozen=True)
class Table:
    """A table that is printed in parts where the terminal is too narrow for all of its columns.

    Every part begins with the first column, whose name is `corner`. The terminal shows no "**" of
    Markdown.
    """

    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def markdown(self) -> str:
        """The table in Markdown, with its title and notes."""
        rows = [(self.corner, *self.columns), *((name, *cells) for name, cells in self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "| --- |" + " ---: |" * len(self.columns))
        return "\n\n".join([f"### {self.title}", "\n".join(lines), *self.notes]) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The parts, none of them wider than the console."""
        from rich.measure import Measurement
        from rich.text import Text

        if self.title:
            yield Text(self.title, style="bold")
        wide, rest = options.update(width=10_000), list(range(len(self.columns)))
        while rest:
            n, most = len(rest), options.max_width
            while n > 1 and Measurement.get(console, wide, self._part(rest[:n])).maximum > most:
                n -= 1
            yield self._part(rest[:n])
            rest = rest[n:]
        yield from (Text(note, style="dim") for note in self.notes)

    def _part(self, columns: Sequence[int]) -> RichTable:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable()
        table.add_column(Text(self.corner), overflow="fold")
        for i in columns:
            table.add_column(Text(self.columns[i]), justify="right", overflow="fold")
        for name, cells in self.rows:
            # A row may have fewer cells: what is not there is left empty.
            shown = (name, *(cells[i] for i in columns if i < len(cells)))
            table.add_row(*(Text(text.replace("**", "")) for text in shown))
        return table


@contextmanager
def bar(total: int | None, *, shown: bool = True) -> Generator[Callable[[int, str], None]]:
    """A bar with the time left on standard error; in a pipe, a line now and then.

    Yields:
        what to call with how much more is done, and with the name of the work.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
    hidden = not (shown and console.is_terminal)
    drawn = progress.Progress(*columns, console=console, disable=hidden)
    task, said = drawn.add_task("", total=total), time.monotonic()

    def advance(n: int, what: str) -> None:
        nonlocal said
        drawn.update(task, advance=n, description=what)
        if shown and not console.is_terminal and time.monotonic() - said >= _SECONDS:
            of = "" if total is None else f" of {total}"
            print(f"{drawn.tasks[task].completed:.0f}{of}: {what}", file=sys.stderr, flush=True)
            said = time.monotonic()

    with drawn:
        yield advance


class Progress:
    """What is being done, on standard error: a line that is overwritten, or lines in a pipe."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        """Show a text; an empty one clears the line."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")
        elif text and text != self._last:
            sys.stderr.write(f"{text}\n")
        self._last = text
        sys.stderr.flush()
