"""The tables of policies, parts and models: for the terminal and, as Markdown, for the pages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from mmkv.parts import KINDS
from mmkv.policy import Policy
from mmkv.registry import list_parts, list_policies, policy_class

_POLICIES = ("policy", "score", "layer budgets", "head budgets", "decoding", "paper", "options")
_PARTS = ("part", "what it does", "options")
# Options that have a column of their own.
_OWN_COLUMN = ("score", "layers", "heads", "decode")


def shared_options() -> dict[str, Any]:
    """Options that every policy reads (but one that keeps all), with their usual defaults."""
    classes = [policy_class(name) for name in list_policies()]
    common = set.intersection(*(set(cls.options()) for cls in classes if not cls.keeps_all))
    return {k: v for k, v in Policy.options().items() if k in common and k not in _OWN_COLUMN}


def _policy_rows() -> list[tuple[Sequence[str], list[str], str, Sequence[str]]]:
    """Of each policy: names, parts, paper, and options beside parts and shared ones."""
    rows, shared = [], shared_options()
    for cls in map(policy_class, list_policies()):
        policy = cls()
        parts = ["none" if policy.keeps_all else getattr(policy, x).name for x in _OWN_COLUMN]
        own = {k: v for k, v in cls.options().items() if k not in _OWN_COLUMN}
        options = _texts({k: v for k, v in own.items() if (k, v) not in shared.items()})
        rows.append(((cls.name, *cls.aliases), parts, cls.paper, options))
    return rows


def _texts(options: dict[str, Any]) -> list[str]:
    """Options with their values as the command line takes them."""
    texts: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool) or value is None:
            value = str(value).lower()
        texts.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return texts


def policy_tables() -> Group:
    """All policies in two rich tables: their parts; their papers and options."""
    rows = _policy_rows()
    also = ", ".join(_texts(shared_options()))
    return Group(
        _table(_POLICIES[:5], [("\n".join(names), *parts) for names, parts, *_ in rows]),
        _table(
            ("policy", *_POLICIES[5:]),
            [(x[0][0], x[2].replace(", arXiv", ",\narXiv"), ", ".join(x[3])) for x in rows],
        ),
        f"\nEvery policy but full also has {also}.\n"
        "score, layers, heads, decode, merge and protect are options too; set one with "
        "--option name=value. mmkv policies --parts lists them with their own options.",
    )


def policy_markdown() -> str:
    """One table in Markdown; `docs/policies.md` holds it, and a test compares the two."""
    rows = [(_code(n), *parts, paper, _code(o)) for n, parts, paper, o in _policy_rows()]
    also = _code(_texts(shared_options()))
    return _markdown(_POLICIES, rows) + f"\nEvery policy but `full` also has {also}.\n"


def _part_rows() -> list[tuple[str, str, dict[str, str]]]:
    """Of each part: "kind=name", what it does, and its options, from their docstrings."""
    rows = list[tuple[str, str, dict[str, str]]]()
    for kind in KINDS:
        for name, cls in list_parts(kind).items():
            text = inspect.cleandoc(cls.__doc__ or "")
            section = text.partition("\nOptions:\n")[2].split("\n\n")[0]
            # A line that begins deeper than an option's name goes on with the option before.
            entries = re.split(r"\n {4}(?! )", "\n" + section.removeprefix("\n"))[1:]
            said = {k: " ".join(v.split()) for k, _, v in (x.partition(":") for x in entries)}
            options = {x: said.get(x.partition("=")[0], "") for x in _texts(cls().options())}
            rows.append((f"{kind}={name}", " ".join(text.split("\n\n")[0].split()), options))
    return rows


def part_table() -> Table:
    """All parts as a rich table."""
    rows = [(x, y, "\n".join(f"{k}: {v}" for k, v in z.items())) for x, y, z in _part_rows()]
    return _table(_PARTS, rows)


def part_markdown() -> str:
    """The same in Markdown; `docs/policies.md` holds it, and a test compares the two."""
    rows = _part_rows()
    options = ["<br>".join(f"`{k}`: {v}" for k, v in row[2].items()) for row in rows]
    cells = [(f"`{x}`", y, z) for (x, y, _), z in zip(rows, options, strict=True)]
    return _markdown(_PARTS, cells)


def model_markdown() -> str:
    """Every known model class, from the adapters; `docs/models.md` holds it, as a test checks."""
    from mmkv import adapters

    rows = [(f"`{x['class']}`", x["status"], x["compressed"]) for x in adapters.table()]
    return _markdown(("class", "status", "what is compressed"), rows)


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (columns, ("---",) * len(columns), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)
