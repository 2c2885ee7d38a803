"""What the commands of evaluation have in common: the group they are in, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mmkv.terminal import say

DataOption = Annotated[
    str, typer.Option(help="builtin, or a path to the published file or folder.")
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A policy option, for every policy that reads it. With the built-in data, window=8 "
        "unless given.",
    ),
]
MapOption = Annotated[
    str | None, typer.Option(help="auto spreads a model over all GPUs of this machine.")
]
ImagesOption = Annotated[
    Path | None, typer.Option(help="Where pictures lie, if not beside the data.")
]
LengthOption = Annotated[
    int | None,
    typer.Option(
        min=256,
        help="Tokens of a prompt of ruler (4096) or continuation (1024) with its answer, or of an "
        "excerpt of documents (900).",
    ),
]
QuestionsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Most questions on each context, of ruler and the built-in mmvet; a context whose "
        "question is hidden is read once for all of them.",
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Your own prompts: .txt, one a line (or longer ones between lines of ---), or .jsonl "
        'of {"prompt": ...} or {"messages": [...]}. [default: English ones that are shipped]',
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Use the first samples only.")]


class _Commands(TyperGroup):
    """Knows commands of two words, such as `eval matrix`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        two = " ".join(args[:2])
        if two in self.commands:
            return two, self.commands[two], args[2:]
        return super().resolve_command(ctx, args)


# What `mmkv` mounts.
commands = typer.Typer(
    name="mmkv",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def budget_list(text: str) -> list[float | int]:
    """Those of an option; a user who may have meant another is told."""
    from mmkv.budgets import note, parse_list

    found = parse_list(text)
    for doubt in filter(None, map(note, found)):
        say(doubt)
    return found
