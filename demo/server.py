"""Start the image chat: on loopback, with uploads in a folder that goes when it ends."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmkv import chat
from mmkv.terminal import bind

if TYPE_CHECKING:
    from .session import Engines

# Nothing but this server is asked for anything; no other page can hold this one in a frame.
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        b"style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; form-action 'self'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class SafeHeaders:
    """ASGI middleware that adds `_HEADERS` to every answer."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""

        async def add(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self.app(scope, receive, add)


def _served(address: str, key: str | None) -> Engines:
    """The models of a server.

    Raises:
        ValueError: it is away or refuses, or httpx is missing.
    """
    try:
        from .remote import ServedModel, Server
    except ModuleNotFoundError as error:
        raise ValueError(f"the demo needs {error.name}: pip install 'mmkv[demo]'") from None
    from .session import Engines

    there = Server(address, key)
    return Engines(there.models(), lambda name: ServedModel(there, name), server=there.address)


@contextmanager
def serving(
    models: Sequence[str] = ("builtin",),
    *,
    host: str = "127.0.0.1",
    port: int | None = 7860,
    device: str = "auto",
    dtype: str = "auto",
    server: str | None = None,
    api_key: str | None = None,
) -> Generator[str]:
    """Serve the page for the length of a `with` block; gives its address.

    Args:
        models: as for `mmkv.chat.load`; the first is loaded before anything is served.
        host: where to listen; the default is reached from this computer only.
        port: None takes a free one.
        device: as for `mmkv.chat.load`, as the dtype.
        dtype: of the models.
        server: the address of a server that answers with its own models, in place of all these.
        api_key: what it asks for.

    Raises:
        ValueError: the port is taken, Gradio is missing, a model cannot be loaded, or the server
            is away or refuses.
        OSError: the port was taken while the model was loaded.
    """
    bind(host, port or 0).close()  # refused before a model is loaded
    answering = None if server is None else _served(server, api_key)
    with tempfile.TemporaryDirectory(prefix="mmkv-demo-", ignore_cleanup_errors=True) as folder:
        # Gradio reads these while it is imported.
        os.environ.update(GRADIO_TEMP_DIR=folder, GRADIO_ANALYTICS_ENABLED="False")
        try:
            from . import page
        except ModuleNotFoundError as error:
            raise ValueError(f"the demo needs {error.name}: pip install 'mmkv[demo]'") from None
        from starlette.middleware import Middleware

        from .session import MOST_BYTES, Engines

        if answering is None:
            from .backend import Engine

            engines = Engines(models, lambda name: Engine(chat.load(name, device, dtype)))
        else:
            engines = answering
        engines.get(engines.names[0])
        blocks = page.build(engines)
        try:
            _, address, _ = blocks.launch(
                server_name=host,
                server_port=port,
                share=False,
                inbrowser=False,
                prevent_thread_lock=True,
                quiet=True,
                footer_links=[],
                max_file_size=MOST_BYTES,
                ssr_mode=False,
                enable_monitoring=False,
                pwa=False,
                theme=page.theme(),
                css=page.CSS,
                app_kwargs={
                    "middleware": [Middleware(SafeHeaders)],
                    "docs_url": None,
                    "openapi_url": None,
                },
            )
            yield address
        finally:
            blocks.close(verbose=False)


def run(**options: Any) -> None:
    """Serve until Ctrl-C or a termination signal; takes what `serving` takes."""
    ended = threading.Event()

    def end(number: int, frame: Any) -> None:
        ended.set()

    before = signal.signal(signal.SIGTERM, end)
    try:
        with serving(**options) as address:
            print(f"The image chat is at {address} (Ctrl-C ends it)", flush=True)
            while not ended.wait(1):
                pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
