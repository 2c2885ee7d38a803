"""The command line. Heavy imports stay inside the commands, so that `mmkv --help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from mmkv.cli.chat import chat
from mmkv.cli.serve import SETTINGS, probe, serve
from mmkv.cli_options import MODELS, DeviceOption, DtypeOption, PluginOption, checked
from mmkv.eval.sizing import commands as evaluation
from mmkv.loading.names import DEFAULT_MODEL, file_of
from mmkv.terminal import console, show_errors, show_warnings

app = typer.Typer(
    name="mmkv",
    help="A several times smaller key-value cache for vision-language models and LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    show_warnings()
    if isinstance(sys.stdout, TextIOWrapper):  # whose encoding may lack characters of a text
        sys.stdout.reconfigure(errors="replace")
    app(args=None if argv is None else list(argv), prog_name="mmkv")


def _version(requested: bool) -> None:
    if requested:
        from mmkv import __version__

        typer.echo(__version__)
        raise typer.Exit


@show_errors
def policies(
    name: Annotated[
        str | None,
        typer.Argument(help="A policy, whose options are explained.", show_default=False),
    ] = None,
    parts: Annotated[
        bool, typer.Option("--parts", help="List the parts of policies instead.")
    ] = False,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
    plugin: PluginOption = None,
) -> None:
    """List the policies: their parts, papers, options and defaults; or explain one of them."""
    from mmkv import tables

    if name is not None and (parts or markdown):
        raise ValueError(f"policies {name}: leave the name out, or --parts and --markdown")
    if markdown:
        typer.echo(tables.part_markdown() if parts else tables.policy_markdown(), nl=False)
        return
    if name is not None:
        table = tables.policy_table(name)
    else:
        table = tables.part_table() if parts else tables.policy_tables()
    console().print(table, highlight=False, markup=False)


@show_errors
def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{MODELS}; repeat to offer several.",
            show_default=DEFAULT_MODEL,
            callback=checked(file_of),
        ),
    ] = None,
    plugin: PluginOption = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is this computer only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 7860,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Serve the image chat as a web page. It shows both answers, and what was kept."""
    from mmkv.demo import server as page

    models = model or [DEFAULT_MODEL]
    page.run(models=models, host=host, port=port or None, device=device, dtype=dtype)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (policies, chat, demo, probe):
    app.command()(command)
app.command(context_settings=SETTINGS)(serve)
app.add_typer(evaluation)
