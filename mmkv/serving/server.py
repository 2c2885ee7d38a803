"""An HTTP server of OpenAI's chat completions around an engine: its routes, and running it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import ExitStack
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from . import Busy, Closed, Refused, Sampling, api
from .api import ChatRequest, Limits, RequestError
from .metrics import Metrics

_log = logging.getLogger(__name__)
# Pictures that are decoded at a time: each may take its limit of pixels.
_DECODERS = 2
_GONE = 499  # nginx's: the client has closed the connection, so nobody reads this


def app(
    engine: Any,
    *,
    name: str,
    api_key: str | None = None,
    allow_hosts: Collection[str] = (),
    timeout: float | None = 600.0,
    limits: Limits | None = None,
) -> FastAPI:
    """The routes of a server; it neither starts nor closes the engine.

    Args:
        engine: an `Engine`, or what has its `submit` and `stats`.
        name: the model's, as clients ask for it.
        api_key: what a client has to send; None lets everybody in who reaches the port.
        allow_hosts: as for `api.read_picture`.
        timeout: seconds that a request may take.
        limits: bounds of what is read.
    """
    handlers: Any = {RequestError: _refuse, HTTPException: _other, Exception: _failed}
    served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers)
    service = Service(engine, name, allow_hosts, timeout, limits or Limits())
    served.state.service = service

    def admit(request: Request) -> None:
        _admit(request, api_key)

    served.add_api_route("/health", service.health)
    known = APIRouter(dependencies=[Depends(admit)])
    known.add_api_route("/metrics", service.scrape)
    known.add_api_route("/v1/models", service.models)
    known.add_api_route("/v1/models/{model:path}", service.check_model)
    known.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
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


def _admit(request: Request, api_key: str | None) -> None:
    """Let a client in by its key; without keys, let programs in and pages of browsers not.

    A page that is open in a browser on this computer could else use the server.
    """
    if api_key is None:
        if "origin" in request.headers:
            raise RequestError("pages of other origins are not served", status=403)
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("latin-1"), api_key.encode())
    if kind.lower() != "bearer" or not same:
        raise RequestError("Incorrect API key provided", status=401, code="invalid_api_key")


class _Room:
    """Bytes that all requests hold together."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int, ending: ExitStack) -> None:
        """A request takes some of it, and gives that back at its end."""
        if size > self.left:
            raise RequestError("too many large requests at once: try again", status=429)
        self.left -= size
        ending.callback(self._give, size)

    def _give(self, size: int) -> None:
        self.left += size


class _Stream(StreamingResponse):
    """Server-sent events; what the request holds is given back however sending ends."""

    def __init__(self, content: AsyncIterator[str], ending: ExitStack) -> None:
        super().__init__(content, 200, {"cache-control": "no-cache"}, "text/event-stream")
        self._ending = ending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._ending:
            await super().__call__(scope, receive, send)


class Service:
    """What is behind the routes; takes what `app` takes. `closing` refuses new requests."""

    def __init__(
        self,
        engine: Any,
        name: str,
        allow_hosts: Collection[str],
        timeout: float | None,
        limits: Limits,
    ) -> None:
        self.engine, self.limits, self.closing = engine, limits, False
        self.metrics = Metrics(engine)
        created = int(time.time())
        self.model = {"id": name, "object": "model", "created": created, "owned_by": "mmkv"}
        self._hosts = frozenset(x.lower() for x in allow_hosts)
        self._timeout = timeout
        self._room, self._decoders = _Room(limits.held_bytes), asyncio.Semaphore(_DECODERS)

    async def health(self) -> dict[str, str]:
        """Whether new requests are taken."""
        if self.closing:
            raise _closing()
        return {"status": "ok"}

    async def scrape(self) -> Response:
        """What Prometheus reads."""
        return Response(self.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """All models: ours."""
        return {"object": "list", "data": [self.model]}

    async def check_model(self, model: str) -> dict[str, Any]:
        """Our model; any other is refused (404)."""
        if model != self.model["id"]:
            raise RequestError(
                f"The model {model[:80]!r} does not exist; this server has {self.model['id']!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.model

    async def chat(self, request: Request) -> Response:
        """One completion, whole or as a stream."""
        try:
            return await self._chat(request)
        except ClientDisconnect:
            self.metrics.ended("gone")
            return Response(status_code=_GONE)
        except RequestError as error:
            self.metrics.ended(str(error.status))
            raise

    async def _chat(self, request: Request) -> Response:
        clock = self.metrics.clock()
        with ExitStack() as ending:
            asked = api.parse(await self._body(request, ending))
            await self.check_model(asked.model)
            reply = await self._submit(asked, ending)
            ending.callback(reply.cancel)
            watch = asyncio.create_task(_hang_up(request, reply))
            ending.callback(watch.cancel)
            about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
            about["model"] = asked.model
            texts = self._texts(reply, clock)
            # An answer that fails before its first token is an error, not a stream.
            first = await anext(texts, "")
            if asked.stream:
                sent = self._events(asked, about, first, texts, reply)
                return _Stream(sent, ending.pop_all())
            text = "".join([first, *[x async for x in texts]])
            self._note(reply)
            return JSONResponse(api.answer(about, reply, text))
        raise AssertionError  # for pyright: an ExitStack might swallow exceptions

    async def _body(self, request: Request, ending: ExitStack) -> bytes:
        # A browser sends this type to another origin only after asking, and gets no leave here.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError("expected the header Content-Type: application/json", status=415)
        most, raw = self.limits.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for piece in request.stream():
                    self._room.take(len(piece), ending)
                    raw += piece
                    if len(raw) > most:
                        raise RequestError(
                            f"the body is larger than {most / 2**20:g} MiB", status=413
                        )
        except TimeoutError:
            raise RequestError("the body did not come in time", status=408) from None
        return bytes(raw)

    async def _submit(self, asked: ChatRequest, ending: ExitStack) -> Any:
        urls = api.picture_urls(asked)
        if len(urls) > self.limits.pictures:
            raise RequestError(
                f"{len(urls)} pictures: at most {self.limits.pictures}", param="messages"
            )
        pictures, left = list[Any](), self.limits.pixels
        for url in urls:
            async with self._decoders:
                picture = await asyncio.to_thread(
                    api.read_picture, url, self.limits, self._hosts, left
                )
            left -= picture.width * picture.height
            self._room.take(3 * picture.width * picture.height, ending)
            pictures.append(picture)
        sampling = Sampling(
            temperature=asked.temperature or 0.0,
            top_p=asked.top_p or 1.0,
            top_k=asked.top_k or 0,
            seed=asked.seed,
            stop=asked.stops,
        )
        longest = asked.max_completion_tokens or asked.max_tokens
        try:
            # Tokenising and preparing pictures takes its time.
            return await asyncio.to_thread(
                self.engine.submit,
                api.messages(asked, pictures),
                sampling=sampling,
                max_new_tokens=longest,
                timeout=self._timeout,
                policy=asked.mmkv.policy,
                budget=asked.mmkv.budget,
            )
        except ValueError as error:
            raise _refused(error) from None
        except Busy as error:
            raise RequestError(str(error), status=429) from None
        except Closed:
            raise _closing() from None

    async def _texts(self, reply: Any, clock: Any) -> AsyncGenerator[str]:
        """The pieces of a reply's text; ClientDisconnect where nobody reads them any more."""
        try:
            async for event in reply:
                clock()
                yield event.text
        except RequestError:
            raise
        except ValueError as error:
            raise _refused(error) from None
        except Exception as error:
            _log.exception("a request failed", exc_info=error)
            raise RequestError("the engine failed; the server's log says how", status=500) from None
        if reply.finish_reason in ("stop", "length"):
            return
        if reply.finish_reason == "timeout":
            raise RequestError(f"took more than {self._timeout:g} s", status=504)
        if not reply.cancelled or self.closing:
            raise _closing()
        raise ClientDisconnect

    async def _events(
        self,
        asked: ChatRequest,
        about: dict[str, Any],
        first: str,
        texts: AsyncGenerator[str],
        reply: Any,
    ) -> AsyncGenerator[str]:
        """A stream as server-sent events; what goes wrong in it is its last."""
        counted = asked.stream_options is not None and asked.stream_options.include_usage
        more: dict[str, Any] = {"usage": None} if counted else {}

        def sent(piece: dict[str, Any]) -> str:
            return f"data: {json.dumps(piece)}\n\n"

        try:
            yield sent({**api.chunk(about, {"role": "assistant", "content": first}), **more})
            async for text in texts:
                if text:
                    yield sent({**api.chunk(about, {"content": text}), **more})
            self._note(reply)
            yield sent({**api.chunk(about, {}, reply.finish_reason), **more})
            if counted:
                yield sent({**api.chunk(about, None), **api.usage(reply)})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            self.metrics.ended(str(error.status))
            yield sent(error.body())
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            self.metrics.ended("gone")
            raise

    def _note(self, reply: Any) -> None:
        self.metrics.ended(reply.finish_reason)
        self.metrics.kept(reply.usage.kept_tokens, reply.usage.prompt_tokens)


def _refused(error: ValueError) -> RequestError:
    code = error.code if isinstance(error, Refused) else None
    return RequestError(str(error), code=code)


def _closing() -> RequestError:
    return RequestError("the server is shutting down", status=503)


async def _hang_up(request: Request, reply: Any) -> None:
    """End a reply when its client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reply.cancel()


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
        # uvicorn's own configuration would close every handler of the process.
        log_config=None,
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
