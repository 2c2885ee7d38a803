"""Shared by all commands: the console, errors of one line, tables that fit the terminal."""

from __future__ import annotations

import errno
import functools
import logging
import math
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

from mmkv.names import PLUGIN

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

P = ParamSpec("P")
T = TypeVar("T")

# Seconds between two lines of progress in a pipe.
_PROGRESS_INTERVAL = 10.0
# Columns where there is no terminal: lines of a file are long, for grep.
_FILE_WIDTH = 200
_TRACEBACK = "MMKV_TRACEBACK"


def console() -> Console:
    """Return the console of standard output, as wide as the terminal that shows it."""
    from rich.console import Console

    screen = Console()
    seen = screen.is_terminal or "COLUMNS" in os.environ or os.isatty(0) or os.isatty(2)
    return screen if seen else Console(width=_FILE_WIDTH)


def of_bytes(held: int, full: int) -> str:
    """Return a cache's bytes and the full cache's as text: "1.3 of 10.0 MiB (13%)"."""
    power = min(3, max(1, (max(full, 1).bit_length() - 1) // 10))
    unit, factor = " KMG"[power], 1024**power
    share = held / max(full, 1)
    digits = 1 if share < 0.0995 else 0
    return f"{held / factor:.1f} of {full / factor:.1f} {unit}iB ({share:.{digits}%})"


def plain(shown: Any) -> str:
    """Return an object as rich prints it in the terminal, without colours."""
    from io import StringIO

    from rich.console import Console

    file = StringIO()
    Console(file=file, width=console().width).print(shown)
    return file.getvalue().rstrip("\n")


def write(screen: Console, text: Any, style: str | None = None) -> None:
    """Print a line, without wrapping or markup, or a table."""
    wrap = isinstance(text, str)
    screen.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)


def say(text: str) -> None:
    """Print one line on standard error, over the last line of `tell`."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    typer.echo(f"{clear}mmkv: {printable(text)}", err=True)


def check_utf8(text: str) -> None:
    """Raise ValueError for a text of bytes that are not UTF-8, which Python reads as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text[:60]!a} is not in UTF-8") from None


def printable(text: str) -> str:
    """Return a text, which may be someone else's, without control characters but line breaks."""
    return "".join(
        x if x in "\n\t" or ord(x) > 159 or 32 <= ord(x) < 127 else "\ufffd" for x in text
    )


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


class _Warnings(logging.Handler):
    """Prints each warning once, as caches repeat them for every prompt; exceptions always."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message in one line, and the traceback of its exception."""
        text = " ".join(record.getMessage().splitlines())
        if record.exc_info:
            say(f"{text}\n{logging.Formatter().formatException(record.exc_info)}")
        elif text not in self._seen:
            if len(self._seen) >= 1000:  # a demo that runs for long could cause any number
                self._seen.clear()
            self._seen.add(text)
            say(text)


def show_warnings() -> None:
    """Print the library's warnings in the form of a command's other messages."""
    logger = logging.getLogger("mmkv")
    for handler in [h for h in logger.handlers if isinstance(h, _Warnings)]:
        logger.removeHandler(handler)
    logger.addHandler(_Warnings())


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not listening yet: a model is loaded first."""
    try:
        family, *_, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            undo.pop_all()
        return bound
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} is in use: choose another by --port, or --port 0 for a free one"
            ) from None
        option = f"--port {port}" if error.errno == errno.EACCES else f"--host {host}"
        raise ValueError(f"{option}: {error.strerror}") from None


def check_place(folder: Path, option: str = "--out") -> None:
    """Raise ValueError if the folder of an option neither exists nor can be made."""
    existing = next(x for x in (folder, *folder.parents) if x.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {folder}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {existing.absolute()} is not writable")


def show_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Print a command's error in one line; exit with code 2 for wrong use, 1 for failure."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            name = command.__name__.split("_")[0]
            if isinstance(error, ModuleNotFoundError):
                needs = install_hint(error, name, *command.__module__.split("."))
                error = error if needs is None else ValueError(f"mmkv {name} {needs}")
            raise typer.Exit(_explain(error)) from None

    return run


def install_hint(error: ModuleNotFoundError, *preferred: str) -> str | None:
    """Return what to install, in words, if the missing module is of an extra; else None.

    If several extras have it, the first of `preferred` is named.
    """
    module = (error.name or "").partition(".")[0]
    package = module.replace("_", "-").lower()
    matches = (re.match(r'([\w.-]+).*extra == "(\w+)"', x) for x in metadata.requires("mmkv") or ())
    extras = [x[2] for x in matches if x and x[1].replace("_", "-").lower() == package]
    for extra in (*(x for x in preferred if x in extras), *extras):
        return f"needs {module}: pip install 'mmkv[{extra}]'"
    return None


def _explain(error: Exception) -> int:
    """Print an error; return its exit code."""
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    text, line = " ".join(str(error).split()), _plugin_line(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    wrong_path = FileNotFoundError | FileExistsError | PermissionError
    if isinstance(error, ValueError | wrong_path | IsADirectoryError | NotADirectoryError):
        say(f"error: {text}{line}")
        return 2
    if isinstance(error, OSError):
        say(f"failed: {text}{line}")
    elif type(error).__name__ == "OutOfMemoryError" or "not enough memory" in text:
        say("failed: out of memory: use a smaller model, fewer tokens at once, or --dtype bfloat16")
    else:
        more = f" ({_TRACEBACK}=1 shows where)"
        say(f"failed: {type(error).__name__}: {text[:300]}{line}{more}")
    return 1


def _plugin_line(error: BaseException) -> str:
    """Return which line of a plugin was running when an error was raised, in words; "" if none."""
    found = "" if error.__cause__ is None else _plugin_line(error.__cause__)
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(PLUGIN):
            found = f" (in line {line} of {frame.f_code.co_filename})"
    return found


@dataclass(frozen=True)
class Table:
    """A table that is printed in parts where the terminal is too narrow for all of its columns.

    Every part begins with the first column, whose name is `corner`. Markdown's "**" is left out in
    the terminal.
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
        """Yield the parts, none of them wider than the console."""
        from rich.measure import Measurement

        if self.title:
            yield _text(self.title, "bold")
        wide, rest = options.update(width=10_000), list(range(len(self.columns)))
        while rest:
            n, width = len(rest), options.max_width
            while n > 1 and Measurement.get(console, wide, self._part(rest[:n])).maximum > width:
                n -= 1
            yield self._part(rest[:n])
            rest = rest[n:]
        yield from (_text(note, "dim") for note in self.notes)

    def _part(self, columns: Sequence[int]) -> RichTable:
        from rich.table import Table as RichTable

        table = RichTable()
        table.add_column(_text(self.corner), overflow="fold")
        for i in columns:
            table.add_column(_text(self.columns[i]), justify="right", overflow="fold")
        for name, cells in self.rows:
            shown = (name, *(cells[i] for i in columns))
            table.add_row(*(_text(text.replace("**", "")) for text in shown))
        return table


@contextmanager
def bar(total: int | None, *, shown: bool = True) -> Generator[Callable[..., None]]:
    """Show a progress bar on standard error; in a pipe, a line every few seconds.

    Yields:
        A function of the number of items done since its last call, of the name of the work, and of
        how many of these items were done before, in an earlier run (0 by default).
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (*progress.Progress.get_default_columns(), progress.MofNCompleteColumn())
    hidden = not (shown and console.is_terminal)
    bars = progress.Progress(*columns, console=console, disable=hidden)
    task, started = bars.add_task("", total=total), time.monotonic()
    printed, done_before = started, 0

    def advance(n: int, what: str, earlier: int = 0) -> None:
        nonlocal printed, done_before
        done_before += earlier
        bars.update(task, advance=n, description=what)
        now = time.monotonic()
        if shown and not console.is_terminal and now - printed >= _PROGRESS_INTERVAL:
            done = bars.tasks[task].completed
            of = "" if total is None else f" of {total}"
            if total and done > done_before:
                seconds = (now - started) / (done - done_before) * (total - done)
                of += f", about {math.ceil(seconds / 60)} min left"
            print(f"{done:.0f}{of}: {what}", file=sys.stderr, flush=True)
            printed = now

    with bars:
        yield advance


def tell(text: str) -> None:
    """Show the current work on standard error: over the last such line, or as a line in a pipe.
    An empty text clears the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
