"""An HTTP server of OpenAI's completions around an engine: its routes, and running it."""

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
    """The routes of a server around an engine, or what has its `submit`, `tokenize` and `stats`.

    It neither starts nor closes the engine. Clients ask for the model by its name, and send one of
    the keys; without any, everybody is let in who reaches the port, but only pages in browsers
    whose origin is allowed ("*": any). Prefixes are shared among the requests of one key, or of
    all. A request may take `timeout` seconds. See also `Limits` and `pictures.read_picture`.
    """
    handlers: Any = {RequestError: _refuse, HTTPException: _other, Exception: _failed}
    served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers)
    service = Service(engine, name, allow_hosts, ignore_unknown, timeout, limits or Limits())
    served.state.service = service
    if allow_origins:
        every: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
        served.add_middleware(CORSMiddleware, allow_origins=[*allow_origins], **every)

    def admit(request: Request) -> None:
        """Let a client in by its key; without keys, let programs in and pages of browsers not."""
        request.state.owner = None
        if not api_keys:
            # A page that is open in a browser on this computer could else use the server.
            origin = request.headers.get("origin")
            if origin is not None and not {origin, "*"} & {*allow_origins}:
                raise RequestError("pages of other origins are not served", status=403)
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")
        # Each is compared, so that the time tells nothing.
        same = [key.encode() for key in api_keys if hmac.compare_digest(sent, key.encode())]
        if kind.lower() != "bearer" or not same:
            raise RequestError("Incorrect API key provided", status=401, code="invalid_api_key")
        if share_prefixes == "key":
            # The engine is given a digest: what it may write into a log is no key.
            request.state.owner = hashlib.blake2b(same[0], digest_size=16).hexdigest()

    served.add_api_route("/health", service.health)
    known = APIRouter(dependencies=[Depends(admit)])
    known.add_api_route("/metrics", service.scrape)
    known.add_api_route("/v1/models", service.models)
    known.add_api_route("/v1/models/{model:path}", service.check_model)
    known.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    known.add_api_route("/v1/completions", service.complete, methods=["POST"])
    known.add_api_route("/tokenize", service.tokenize, methods=["POST"])
    served.include_router(known)
    return served


async def _refuse(request: Request, error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


async def _other(request: Request, error: HTTPException) -> Response:
    told = f"{request.method} {request.url.path}: {error.detail}"
    return await _refuse(request, RequestError(told, status=error.status_code))


async def _failed(request: Request, error: Exception) -> Response:
    return await _refuse(request, RequestError("the server failed; its log says how", status=500))


class _Connection(H11Protocol):
    """A connection that cannot be held open for nothing: uvicorn's, with bounds of number and time.

    Further ones than may be open are told to try again. Headers have to be there within
    `limits.read_seconds`, and what is sent has to be read by the client within
    `limits.write_seconds`, as far as it does not fit into the buffers on the way.
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
        """The time runs while no request of this connection is being answered."""
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._stop("reading")
        elif "reading" not in self._timers and not self.transport.is_closing():
            self._end_after("reading", self._limits.read_seconds)

    def _end_after(self, what: str, seconds: float) -> None:
        self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, what: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()


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


def config(served: FastAPI, **more: Any) -> uvicorn.Config:
    """How uvicorn serves an app."""
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
        **more,
    )


def run(
    served: FastAPI, listening: socket.socket, *, grace: float, ready: Callable[[], None]
) -> None:
    """Serve an `app` until SIGINT or SIGTERM, from the main thread; `ready` is called once it is.

    Answers may go on for `grace` seconds when it ends.
    """
    how = config(served, timeout_graceful_shutdown=int(grace) + 10)
    server = _Server(how, served.state.service, grace, ready)
    ends = (signal.SIGINT, signal.SIGTERM)
    # uvicorn raises the signals again that it ended by.
    before = {x: signal.signal(x, lambda number, frame: None) for x in ends}
    try:
        server.run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
