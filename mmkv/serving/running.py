"""Listens at an address, and runs a server there until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from .server import Service


class _Server(uvicorn.Server):
    """Says when it listens; ends by letting answers finish for a while."""

    def __init__(
        self, config: uvicorn.Config, service: Service, grace: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._grace, self._ready = service, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.closing = True
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(self._service.engine.close)  # what runs is cancelled by that


def run(
    served: FastAPI,
    listening: socket.socket,
    *,
    grace: float = 30.0,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; from the main thread only.

    Args:
        served: from `app`.
        listening: from `bind`.
        grace: seconds that answers may go on when it ends.
        ready: called once it listens.
    """
    config = uvicorn.Config(
        served,
        # The one that bounds a request's headers.
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(grace) + 10,
    )
    server = _Server(config, served.state.service, grace, ready)
    ends = (signal.SIGINT, signal.SIGTERM)
    # uvicorn raises the signals again that it ended by.
    before = {x: signal.signal(x, lambda number, frame: None) for x in ends}
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
