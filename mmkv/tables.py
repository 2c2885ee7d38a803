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
    """Return the options of every policy that evicts, with their usual defaults."""
    classes = [policy_class(name) for name in list_policies()]
    common = set.intersection(*(set(cls.options()) for cls in classes if not cls.keeps_all))
    return {k: v for k, v in Policy.options().items() if k in common and k not in _OWN_COLUMN}


def _policy_rows() -> list[tuple[Sequence[str], list[str], str, Sequence[str]]]:
    """Return each policy's names, parts, paper, and options other than parts and shared ones."""
    rows, shared = [], shared_options()
    for cls in map(policy_class, list_policies()):
        policy = cls()
        parts = ["none" if policy.keeps_all else getattr(policy, x).name for x in _OWN_COLUMN]
        unshared = {k: v for k, v in cls.options().items() if k not in _OWN_COLUMN}
        options = _texts({k: v for k, v in unshared.items() if (k, v) not in shared.items()})
        rows.append(((cls.name, *cls.aliases), parts, cls.paper, options))
    return rows


def _texts(options: dict[str, Any]) -> list[str]:
    """Return options with their values as the command line takes them."""
    texts: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool) or value is None:
            value = str(value).lower()
        texts.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return texts


def policy_tables() -> Group:
    """Return all policies in two rich tables: their parts; their papers and options."""
    rows = _policy_rows()
    shared = ", ".join(_texts(shared_options()))
    return Group(
        _table(_POLICIES[:5], [("\n".join(names), *parts) for names, parts, *_ in rows]),
        _table(
            ("policy", *_POLICIES[5:]),
            [(x[0][0], x[2].replace(", arXiv", ",\narXiv"), ", ".join(x[3])) for x in rows],
        ),
        f"\nEvery policy but full also has {shared}, unless its row says otherwise.\n"
        "score, layers, heads, decode, merge and protect are options too; set one with "
        "--option name=value. mmkv policies --parts lists them with their own options.",
    )


def policy_table(name: str) -> Group:
    """Return what a policy does, and its options with their defaults and texts.

    Raises:
        ValueError: the name is unknown.
    """
    cls = policy_class(name)
    policy, (summary, texts) = cls(), _documented(cls)
    for x in (Policy, *map(type, policy.parts.values())):
        texts = _documented(x)[1] | texts
    texts |= {kind: _documented(type(part))[0] for kind, part in policy.parts.items()}
    rows = [(x, texts.get(x.partition("=")[0], "")) for x in _texts(cls.options())]
    names = ", ".join((cls.name, *cls.aliases))
    table = _table(("option", "what it does"), rows)
    paper = f" ({cls.paper})" if cls.paper else ""
    return Group(f"{names}: {summary}{paper}\n", *([table] if rows else []))


def policy_markdown() -> str:
    """Return all policies in Markdown; a test compares it with `docs/policies.md`."""
    rows = [(_code(n), *parts, paper, _code(o)) for n, parts, paper, o in _policy_rows()]
    shared = _code(_texts(shared_options()))
    return (
        _markdown(_POLICIES, rows)
        + f"\nEvery policy but `full` also has {shared}, unless its row says otherwise.\n"
    )


def _part_rows() -> list[tuple[str, str, dict[str, str]]]:
    """Return each part as "kind=name", with purpose and options from its docstring."""
    rows = list[tuple[str, str, dict[str, str]]]()
    for kind in KINDS:
        for name, cls in list_parts(kind).items():
            summary, texts = _documented(cls)
            options = {x: texts.get(x.partition("=")[0], "") for x in _texts(cls().options())}
            rows.append((f"{kind}={name}", summary, options))
    return rows


def _documented(cls: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the texts of the options it lists."""
    text = inspect.cleandoc(cls.__doc__ or "")
    if text.startswith(f"{cls.__name__}("):  # made by `dataclass`
        text = ""
    section = text.partition("\nOptions:\n")[2].split("\n\n")[0]
    # A line that is indented more than an option's name continues that option.
    entries = re.split(r"\n {4}(?! )", "\n" + section.removeprefix("\n"))[1:]
    texts = {k: " ".join(v.split()) for k, _, v in (x.partition(":") for x in entries)}
    return " ".join(text.split("\n\n")[0].split()), texts


def part_table() -> Table:
    """Return all parts as a rich table."""
    rows = [(x, y, "\n".join(f"{k}: {v}" for k, v in z.items())) for x, y, z in _part_rows()]
    return _table(_PARTS, rows)


def part_markdown() -> str:
    """Return all parts in Markdown; a test compares it with `docs/policies.md`."""
    rows = _part_rows()
    options = ["<br>".join(f"`{k}`: {v}" for k, v in row[2].items()) for row in rows]
    cells = [(f"`{x}`", y, z) for (x, y, _), z in zip(rows, options, strict=True)]
    return _markdown(_PARTS, cells)


def model_markdown() -> str:
    """Return all model classes in Markdown; a test compares it with `docs/models.md`."""
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
