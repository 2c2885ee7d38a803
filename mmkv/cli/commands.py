"""The command line. Heavy imports stay inside the commands, so that `mmkv --help` is quick.

Packages add commands by a `commands` in their `cli`, a `typer.Typer`: see `_MOUNTED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from mmkv.cli.chat import chat
from mmkv.cli.serve import serve
from mmkv.options import MODELS, DeviceOption, DtypeOption
from mmkv.terminal import console, show_warnings, told

app = typer.Typer(
    name="mmkv",
    help="A several times smaller key-value cache for vision-language models and LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_MOUNTED = {
    "mmkv.eval": {
        "eval": "Measure policies on a suite.",
        "report": "Summarise measured results.",
        "plot": "Draw measured results.",
        "check": "Find the smallest cache that serves your prompts.",
        "calibrate": "Measure a profile of layer or head sizes.",
    },
    "mmkv.eval.speed": {
        "bench": "Time policies beside the unwrapped model.",
        "plan": "Bound bytes, times and batches from a model's config.",
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    show_warnings()
    app(args=None if argv is None else list(argv), prog_name="mmkv")


def _version(asked: bool) -> None:
    if asked:
        from mmkv import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command()
@told
def policies(
    parts: Annotated[
        bool, typer.Option("--parts", help="List the parts that policies are made of instead.")
    ] = False,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
) -> None:
    """List the policies: their parts, papers, options and defaults."""
    from mmkv import tables

    if markdown:
        typer.echo(tables.part_markdown() if parts else tables.policy_markdown(), nl=False)
        return
    out = console()
    table = tables.part_table() if parts else tables.policy_tables(out.width)
    out.print(table, highlight=False, markup=False)


app.command()(chat)


@app.command()
@told
def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{MODELS}; several can be chosen from.",
            show_default="builtin",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; the default is this computer only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7860,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Let the `mmkv serve` at this address answer instead."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MMKV_API_KEY", help="The key of that server.", show_envvar=True),
    ] = None,
) -> None:
    """Open the image chat in a browser: both answers side by side, and what was kept."""
    from mmkv.demo import server as page

    if server is not None and (model or device != "auto" or dtype != "auto"):
        raise ValueError("--server answers with its own models: leave out --model and where it is")
    page.run(
        models=model or ["builtin"],
        host=host,
        port=port or None,
        device=device,
        dtype=dtype,
        server=server,
        api_key=api_key or None,
    )


def _mount(package: str, commands: dict[str, str]) -> None:
    """Commands of a package, where it is installed; each imports it only when it runs."""
    if find_spec(package) is None or find_spec(f"{package}.cli") is None:
        return

    @told
    def forward(context: typer.Context) -> None:
        app: typer.Typer = import_module(f"{package}.cli").commands
        app(args=[str(context.info_name), *context.args], prog_name="mmkv")

    for name, summary in commands.items():
        app.command(
            name,
            help=summary,
            add_help_option=False,
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(forward)


def _mount_evaluation() -> None:
    """All of them: what measures quality, and what measures speed."""
    for package, commands in _MOUNTED.items():
        _mount(package, commands)


app.command()(serve)
_mount_evaluation()
