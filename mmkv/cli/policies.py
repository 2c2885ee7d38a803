"""`mmkv policies`: the tables of policies and parts."""

from __future__ import annotations

from typing import Annotated

import typer

from mmkv.options import PluginOption
from mmkv.terminal import console, told


@told
def policies(
    parts: Annotated[
        bool, typer.Option("--parts", help="List the parts of policies instead.")
    ] = False,
    markdown: Annotated[bool, typer.Option(help="Print a Markdown table.")] = False,
    plugin: PluginOption = None,
) -> None:
    """List the policies: their parts, papers, options and defaults."""
    from mmkv import tables

    if markdown:
        typer.echo(tables.part_markdown() if parts else tables.policy_markdown(), nl=False)
        return
    table = tables.part_table() if parts else tables.policy_tables()
    console().print(table, highlight=False, markup=False)
