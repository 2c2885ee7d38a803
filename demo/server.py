"""Start the image chat, on loopback by default; uploads are deleted when it ends."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mmkv import chat
from mmkv.loading.names import DEFAULT_MODEL
from mmkv.terminal import bind

# The page loads nothing from other servers, and no other page can embed it.
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        b"style-src 'self' 'unsafe-inline'; worker-src 'self' blob:; frame-ancestors 'none'; "
        b"form-action 'self'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


def _with_headers(app: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an ASGI app to add `_HEADERS` to every response."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        async def add(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await app(scope, receive, add)

    return handle


@contextmanager
def serving(
    models: Sequence[str] = (DEFAULT_MODEL,),
    *,
    host: str = "127.0.0.1",
    port: int | None = 7860,
    device: str = "auto",
    dtype: str = "auto",
) -> Generator[str]:
    """Serve the page within a `with` block; yields its address.

    Args:
        models: as for `mmkv.chat.load`; the first is loaded before anything is served.
        host: where to listen; the default is reached from this computer only.
        port: None takes a free one.
        device: as for `mmkv.chat.load`.
        dtype: as for `mmkv.chat.load`.

    Raises:
        ValueError: the port is taken, or a model cannot be loaded.
        OSError: the port was taken while the model was loaded.
    """
    bind(host, port or 0).close()  # refused before a model is loaded
    with tempfile.TemporaryDirectory(prefix="mmkv-demo-", ignore_cleanup_errors=True) as folder:
        # Gradio reads these while it is imported.
        os.environ.update(GRADIO_TEMP_DIR=folder, GRADIO_ANALYTICS_ENABLED="False")
        from . import conversation, page

        loaded = conversation.Models(models, lambda name: chat.load(name, device, dtype))
        loaded.get(loaded.names[0])
        blocks = page.build(loaded)
        from starlette.middleware import Middleware  # which Gradio brings

        try:
            _, address, _ = blocks.launch(
                server_name=host,
                server_port=port,
                share=False,
                prevent_thread_lock=True,
                quiet=True,
                max_file_size=conversation.MOST_BYTES,
                ssr_mode=False,
                enable_monitoring=False,
                theme=page.THEME,
                css=page.CSS,
                app_kwargs={
                    "middleware": [Middleware(_with_headers)],
                    "docs_url": None,
                    "openapi_url": None,
                },
            )
            yield address
        finally:
            blocks.close(verbose=False)


def run(**options: Any) -> None:
    """Serve until Ctrl-C or a termination signal; `options` are those of `serving`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), serving(**options) as address:
        print(f"The image chat is at {address} (Ctrl-C ends it)", flush=True)
        threading.Event().wait()
