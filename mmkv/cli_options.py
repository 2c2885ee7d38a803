"""Command-line options that several commands share, with one help text each.

Each is checked as soon as it is read, as far as that is possible without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from mmkv import budgets, names
from mmkv.loading.names import DTYPES, file_of
from mmkv.memory import BITS, Memory
from mmkv.terminal import show_errors


def checked(check: Callable[[str], Any]) -> Any:
    """Return a callback that checks the texts of an option, and shows errors in one line."""

    @show_errors
    def callback(value: Any) -> Any:
        for text in [value] if isinstance(value, str) else value or ():
            check(text)
        return value

    return callback


def one_of(what: str, choices: Iterable[str]) -> Any:
    """Return a callback that refuses all texts but `choices`."""

    def check(text: str) -> None:
        if text not in choices:
            raise ValueError(f"{what} {text!r}: expected one of {', '.join(choices)}")

    return checked(check)


@show_errors
def _plugins(files: list[Path] | None) -> list[Path] | None:
    """Load plugin files before all other options, which may name policies that they register."""
    for file in files or []:
        names.check_plugin(file)
        from mmkv.registry import load_plugin

        load_plugin(file)
    return files


@show_errors
def _profile(path: Path | None) -> Path | None:
    """Refuse a file that cannot be read."""
    try:
        if path is not None:
            path.open("rb").close()
    except OSError as error:
        raise ValueError(f"profile {path}: {error.strerror}") from None
    return path


def size_of(
    budget: str | None, memory: str | None, kv_dtype: str | None = None
) -> float | int | None:
    """Return the size that --budget or --memory gives, in tokens or in bytes; None without either.

    Raises:
        ValueError: --memory is given together with --budget or --kv-dtype.
    """
    check_alone(memory, budget=budget, kv_dtype=kv_dtype)
    if memory is not None:
        return Memory.of(memory)
    return None if budget is None else budgets.parse(budget)


def check_alone(memory: str | None, **others: str | None) -> None:
    """Refuse --memory together with any of the others."""
    for name, value in others.items():
        if memory is not None and value is not None:
            raise ValueError(
                f"--memory {memory} sets the budget and the type of kept pairs: leave "
                f"--{name.replace('_', '-')} {value} out, or --memory"
            )


MODELS = "smollm2-vision, smollm2, a folder, a .gguf file, or an id that transformers loads"
ModelOption = Annotated[str, typer.Option(help=f"{MODELS}.", callback=checked(file_of))]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16.", callback=one_of("dtype", DTYPES)),
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.py",
        callback=_plugins,
        is_eager=True,
        help="A file with policies or parts of your own; repeatable.",
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        help="Eviction policy; `mmkv policies` lists them.", callback=checked(names.check_policy)
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        callback=checked(budgets.parse),
        help="How much to keep: a fraction of the prompt (0.2 or 20%), or the mean number of "
        "tokens per layer and head (200). [default: --memory 1/8; beside --kv-dtype "
        "0.2, or the profile's]",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        callback=checked(Memory.of),
        help="In place of --budget and --kv-dtype: the share of the full cache's bytes, such as "
        "6% or 16x.",
    ),
]
PairsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="An option of the policy.", callback=checked(names.check_pair)
    ),
]
ProfileOption = Annotated[
    Path | None, typer.Option(help="File of measured layer or head sizes.", callback=_profile)
]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        callback=one_of("kv_dtype", BITS),
        help="int8 or int4: store kept keys and values in 8 or 4 bits.",
    ),
]
