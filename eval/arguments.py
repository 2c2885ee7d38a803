"""The Typer app of the evaluation commands, and the options that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from mmkv import names
from mmkv.budgets import note, parse_list
from mmkv.cli_options import check_alone, checked
from mmkv.memory import Memory
from mmkv.terminal import say

MEMORY = ("1/2", "1/4", "1/8", "1/16", "1/32")  # shares of bytes that a check measures by default

DataOption = Annotated[
    str | None,
    typer.Option(
        help="A published file or folder; novels, for continuation, documents, needle and ruler; "
        "or drawings, for description, mmvet and needle. [default: what the model can read]"
    ),
]
BudgetsOption = Annotated[
    str | None,
    typer.Option(help="Fractions of the prompt (0.2), or tokens per layer and head (128)."),
]
OneBudgetOption = Annotated[
    str | None, typer.Option(help="Fraction of the prompt (0.2), or tokens per layer and head.")
]
MEMORY_HELP = (
    "In place of budgets: shares of the full cache's bytes, such as 25%,16x. Each sets tokens and "
    "their type."
)
MemoryOption = Annotated[str | None, typer.Option(help=MEMORY_HELP)]
OneMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="In place of a budget: a share of the full cache's bytes, such as 25% or 16x. It sets "
        "tokens and their type."
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        callback=checked(names.check_pair),
        help="For every policy that has it; repeatable.",
    ),
]
MapOption = Annotated[
    str | None, typer.Option(help="auto spreads a model over all GPUs of this machine.")
]
ImagesOption = Annotated[Path | None, typer.Option(help="Pictures, if not beside the data.")]
LengthOption = Annotated[
    int | None,
    typer.Option(
        min=256,
        help="Tokens of a prompt of ruler (4096) or continuation (1024) with its answer, or of an "
        "excerpt of documents (900).",
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Your prompts: .txt, one a line (or longer ones between lines of ---), or .jsonl of "
        '{"prompt": ...} or {"messages": [...]}. [default: English ones that are shipped]',
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Use the first samples only.")]
RunOption = Annotated[
    Path | None,
    typer.Option(help="The run's folder; the same command resumes it. [default: in runs]"),
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        help="The suite of the prompts. [default: description, or prompts for a text model]"
    ),
]

# The app whose commands `mmkv` adds to its own.
commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def token_counter(name: str) -> Callable[[str], int]:
    """Return a function that counts a text's tokens; its first call loads the tokenizer."""

    @cache
    def tokenizer() -> Any:
        from mmkv.loading.models import load_tokenizer

        return load_tokenizer(name)

    options: Any = {"add_special_tokens": False, "verbose": False}  # no warning on long texts
    return lambda text: len(tokenizer()(text, **options)["input_ids"])


def check_variants(text: str) -> None:
    """Refuse names of policies, with options or without, of which one is wrong."""
    for part in split(text):
        names.check_variant(part)


def split(text: str) -> list[str]:
    """Return the names in a text that commas separate."""
    return [part.strip() for part in text.split(",") if part.strip()]


def budget_list(text: str | None, default: str, memory: str | None = None) -> list[float | int]:
    """Parse an option's budgets, or shares of bytes in their place; without both, the default's.

    Prints a note on each that may not be what the user meant.
    """
    check_alone(memory, budgets=text)
    if memory is not None:
        return parse_list(memory, Memory.of, "memory")
    budgets = parse_list(default if text is None else text)
    for warning in filter(None, map(note, budgets)):
        say(warning)
    return budgets
