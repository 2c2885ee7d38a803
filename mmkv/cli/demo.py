"""`mmkv demo`: the image chat in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from mmkv.options import MODELS, DeviceOption, DtypeOption, PluginOption
from mmkv.terminal import told


@told
def demo(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{MODELS}; repeat to offer several.",
            show_default="builtin",
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

    models = model or ["builtin"]
    page.run(models=models, host=host, port=port or None, device=device, dtype=dtype)
