"""An HTTP server with OpenAI's completions around an engine: its routes, and running it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import signal
import socket
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import Limits, RequestError
from .service import Service

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def app(
    engine: Any,
    *,
    name: str,
    api_keys: Collection[str] = (),
    share_prefixes: Literal["key", "all"] = "key",
    allow_hosts: Collection[str] = (),
    allow_origins: Collection[str] = (),
    ignore_unknown: bool = False,
    timeout: float | None = 600.0,
    limits: Limits | None = None,
) -> FastAPI:
    """Return the routes of a server around an engine, or an object with its methods.

    It neither starts nor closes the engine. Clients send the model's name and one of the keys.
    Without keys, all that reach the port may send requests, but web pages only if their origin is
    allowed ("*": any). Prefixes are shared among the requests of one key, or of all. A request may
    take `timeout` seconds. See also `Limits` and `pictures.read_picture`.
    """
    handlers: Any = {RequestError: _refuse, HTTPException: _http_error, Exception: _failed}
    served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers)
    service = Service(engine, name, allow_hosts, ignore_unknown, timeout, limits or Limits())
    served.state.service = service
    if allow_origins:
        cors: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
        served.add_middleware(CORSMiddleware, allow_origins=[*allow_origins], **cors)

    def admit(request: Request) -> None:
        """Check a client's key; without keys, refuse web pages only."""
        request.state.owner = None
        if not api_keys:
            # Otherwise any page in a browser on this computer could use the server.
            origin = request.headers.get("origin")
            if origin is not None and not {origin, "*"} & {*allow_origins}:
                raise RequestError("pages of other origins are not served", status=403)
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1")
        # All are compared, so that the time reveals nothing.
        same = [key.encode() for key in api_keys if hmac.compare_digest(sent, key.encode())]
        if kind.lower() != "bearer" or not same:
            raise RequestError("Incorrect API key provided", status=401, code="invalid_api_key")
        if share_prefixes == "key":
            # A digest, so that the engine cannot write the key into a log.
            request.state.owner = hashlib.blake2b(same[0], digest_size=16).hexdigest()

    served.add_api_route("/health", service.health)
    protected = APIRouter(dependencies=[Depends(admit)])
    protected.add_api_route("/metrics", service.scrape)
    protected.add_api_route("/v1/models", service.models)
    protected.add_api_route("/v1/models/{model:path}", service.check_model)
    protected.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    protected.add_api_route("/v1/completions", service.complete, methods=["POST"])
    protected.add_api_route("/tokenize", service.tokenize, methods=["POST"])
    served.include_router(protected)
    return served


async def _refuse(request: Request, error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refuse(request, RequestError(message, status=error.status_code))


async def _failed(request: Request, error: Exception) -> Response:
    return await _refuse(request, RequestError("the server failed; its log says how", status=500))


class _Connection(H11Protocol):
    """A connection of uvicorn, bounded in number and in the time that it may be idle.

    Beyond `limits.connections`, it is answered with 503. Headers must arrive within `read_seconds`,
    and what does not fit into buffers must be read by the client within `write_seconds`.
    """

    def __init__(self, limits: Limits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._timers = dict[str, asyncio.TimerHandle]()

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
        self._end_after("writing", self._limits.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("writing")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop("reading")
        self._stop("writing")

    def _look(self) -> None:
        """Run the timer of reading while no request of this connection is being answered."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._stop("reading")
        elif "reading" not in self._timers and not self.transport.is_closing():
            self._end_after("reading", self._limits.read_seconds)

    def _end_after(self, timer: str, seconds: float) -> None:
        self._timers[timer] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()


class _Server(uvicorn.Server):
    """A server that reports when it listens, and lets answers finish for a while at its end."""

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
        await asyncio.to_thread(self._service.engine.close)  # cancels the running replies


def config(served: FastAPI, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for an app."""
    return uvicorn.Config(
        served,
        http=partial(_Connection, served.state.service.limits),  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="off",
        access_log=False,
        # uvicorn's own configuration would close every handler of the process.
        log_config=None,
        log_level="warning",
        server_header=False,
        **options,
    )


def run(
    served: FastAPI, listening: socket.socket, *, grace: float, ready: Callable[[], None]
) -> None:
    """Serve an `app` until SIGINT or SIGTERM, from the main thread; call `ready` when it listens.

    Running answers may continue for `grace` seconds after the signal.
    """
    options = config(served, timeout_graceful_shutdown=int(grace) + 10)
    server = _Server(options, served.state.service, grace, ready)
    signals = (signal.SIGINT, signal.SIGTERM)
    # uvicorn raises the signal that ended it once more.
    handlers = {x: signal.signal(x, lambda number, frame: None) for x in signals}
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
