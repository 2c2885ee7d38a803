"""Command-line options that several commands share, with one help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmkv.terminal import show_errors


@show_errors
def _plugins(files: list[Path] | None) -> list[Path] | None:
    """Load plugin files at once: later options may name policies that they register."""
    for file in files or []:
        from mmkv.registry import load_plugin

        load_plugin(file)
    return files


MODELS = (
    "builtin, smollm2, smollm2-vision, a folder, a .gguf file, or an id that transformers loads"
)
ModelOption = Annotated[str, typer.Option(help=f"{MODELS}.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.py",
        callback=_plugins,
        help="A file with policies or scores of your own; repeatable.",
    ),
]
PolicyName = Annotated[str, typer.Option(help="Eviction policy; `mmkv policies` lists them.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        help="How much to keep: a fraction of the prompt (0.2 or 20%), or the mean number of "
        "tokens per layer and head (200). [default: 0.2, or the profile's]"
    ),
]
PairsOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the policy.")
]
ProfileOption = Annotated[Path | None, typer.Option(help="File of measured layer or head sizes.")]
KvDtypeOption = Annotated[
    str | None, typer.Option(help="int8 or int4: store kept keys and values in 8 or 4 bits.")
]
