"""`mmkv demo`: the image chat in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from mmkv.options import MODELS, DeviceOption, DtypeOption
from mmkv.terminal import told


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
