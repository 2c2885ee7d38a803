"""Connections that cannot be held open for nothing: uvicorn's, with bounds of number and time."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mmkv.serving.errors import Limits

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def bounded(limits: Limits) -> Any:
    """What uvicorn's `http` takes.

    `limits.connections` are open at a time; further ones are told to try again. Headers have to be
    there within `limits.read_seconds`, and what is sent has to be read by the client within
    `limits.write_seconds`, as far as it does not fit into the buffers on the way.
    """
    return partial(_Connection, limits)


class _Connection(H11Protocol):
    def __init__(self, limits: Limits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        late = self._limits.write_seconds
        self._writing = self.loop.call_later(late, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _stopped(self._writing)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._reading, self._writing = _stopped(self._reading), _stopped(self._writing)

    def _look(self) -> None:
        """The time runs while no request of this connection is being answered."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._reading = _stopped(self._reading)
        elif self._reading is None and not self.transport.is_closing():
            late = self._limits.read_seconds
            self._reading = self.loop.call_later(late, self.transport.abort)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
