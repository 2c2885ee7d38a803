"""The tables of policies, parts and models: for the terminal and, as Markdown, for the pages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.parts import KINDS, Part
from mmkv.policy import Policy
from mmkv.registry import list_parts, list_policies, policy_class

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

COLUMNS: tuple[str, ...] = (
    "policy",
    "score",
    "layer budgets",
    "head budgets",
    "decoding",
    "paper",
    "options",
)
# Options that have a column of their own.
_PARTS = ("score", "layers", "heads", "decode")
# Columns of a terminal that all fit in.
_WIDTH = 126


@dataclass(frozen=True)
class PolicyRow:
    """One policy.

    Attributes:
        names: its name and its aliases.
        parts: score, layer budgets, head budgets, decoding.
        paper: where it comes from.
        options: what it reads beside the parts, with defaults; without the shared ones.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    paper: str
    options: tuple[str, ...]


def policy_rows() -> list[PolicyRow]:
    """One row for each registered policy, in alphabetical order."""
    shared = shared_options()
    return [_row(policy_class(name), shared) for name in list_policies()]


def shared_options() -> dict[str, Any]:
    """Options that every policy reads (but one that keeps all), with their usual defaults."""
    classes = [policy_class(name) for name in list_policies()]
    read = [set(cls.options()) for cls in classes if not cls.keeps_all]
    common = set.intersection(*read) if read else set[str]()
    return {k: v for k, v in Policy.options().items() if k in common and k not in _PARTS}


def _row(cls: type[Policy], shared: dict[str, Any]) -> PolicyRow:
    policy, options = cls(), cls.options()
    own = {k: v for k, v in options.items() if k not in _PARTS and (k, v) not in shared.items()}
    return PolicyRow(
        names=(cls.name, *cls.aliases),
        parts=tuple("none" if policy.keeps_all else getattr(policy, part).name for part in _PARTS),
        paper=cls.paper,
        options=_texts(own),
    )


def _texts(options: dict[str, Any]) -> tuple[str, ...]:
    """Options with their values as the command line takes them."""
    texts: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool) or value is None:
            value = str(value).lower()
        texts.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return tuple(texts)


def policy_tables(width: int) -> Group:
    """All policies as a rich table, or as two where `width` columns are too few for one."""
    from rich.console import Group

    from mmkv import terminal

    also = ", ".join(_texts(shared_options()))
    note = (
        f"\nEvery policy but full also has {also}.\n"
        "score, layers, heads, decode, merge and protect are options too; set one with "
        "--option name=value. mmkv policies --parts lists them with their own options."
    )
    if width >= _WIDTH:
        return Group(_table(COLUMNS), note)
    parts = [(row.names[0], row.parts) for row in policy_rows()]
    first = terminal.Table(COLUMNS[0], COLUMNS[1:5], parts, numbers=False)
    return Group(first, _table(("policy", "paper", "options")), note)


def _table(columns: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in policy_rows():
        paper = row.paper.replace(", arXiv", ",\narXiv")
        cells = ("\n".join(row.names), *row.parts, paper, ", ".join(row.options))
        by_name = dict(zip(COLUMNS, cells, strict=True))
        table.add_row(*(by_name[column] for column in columns))
    return table


def policy_markdown() -> str:
    """The same table in Markdown; `docs/policies.md` holds it, and a test compares the two."""
    rows = [(_code(row.names), *row.parts, row.paper, _code(row.options)) for row in policy_rows()]
    also = _code(_texts(shared_options()))
    return _markdown(COLUMNS, rows) + f"\nEvery policy but `full` also has {also}.\n"


@dataclass(frozen=True)
class PartRow:
    """One part.

    Attributes:
        kind, name: what it is chosen by.
        summary: what it does.
        options: its options with defaults, and what each is.
    """

    kind: str
    name: str
    summary: str
    options: dict[str, str]


def part_rows() -> list[PartRow]:
    """One row for each registered part, kind by kind, from their docstrings."""
    return [_part_row(kind, name, cls) for kind in KINDS for name, cls in list_parts(kind).items()]


def _part_row(kind: str, name: str, cls: type[Part]) -> PartRow:
    text = inspect.cleandoc(cls.__doc__ or "")
    summary = " ".join(text.split("\n\n")[0].split())
    section = text.partition("\nOptions:\n")[2].split("\n\n")[0]
    # A line that begins deeper than an option's name goes on with the option before.
    entries = re.split(r"\n {4}(?! )", "\n" + section.removeprefix("\n"))[1:]
    said = {k: " ".join(v.split()) for k, _, v in (entry.partition(":") for entry in entries)}
    texts = _texts(cls().options())
    return PartRow(kind, name, summary, {x: said.get(x.partition("=")[0], "") for x in texts})


def part_table() -> Table:
    """All parts as a rich table."""
    from rich.table import Table

    table = Table(show_lines=True)
    for column in ("part", "what it does", "options"):
        table.add_column(column, overflow="fold")
    for row in part_rows():
        options = "\n".join(f"{name}: {text}" for name, text in row.options.items())
        table.add_row(f"{row.kind}={row.name}", row.summary, options)
    return table


def part_markdown() -> str:
    """The same in Markdown; `docs/policies.md` holds it, and a test compares the two."""
    rows = [
        (
            f"`{row.kind}={row.name}`",
            row.summary,
            "<br>".join(f"`{name}`: {text}" for name, text in row.options.items()),
        )
        for row in part_rows()
    ]
    return _markdown(("part", "what it does", "options"), rows)


def model_markdown() -> str:
    """Every known model class, from the adapters; `docs/models.md` holds it, as a test checks."""
    from mmkv import adapters

    rows = [(f"`{x['class']}`", x["status"], x["compressed"]) for x in adapters.table()]
    return _markdown(("class", "status", "what is compressed"), rows)


def _markdown(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = (columns, ("---",) * len(columns), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(texts: tuple[str, ...]) -> str:
    return ", ".join(f"`{text}`" for text in texts)
