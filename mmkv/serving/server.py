"""An HTTP server of OpenAI's chat completions around an engine, on loopback by default."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from . import Busy, Sampling, api
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
    max_new_tokens: int = 1024,
    timeout: float | None = 600.0,
    limits: Limits | None = None,
) -> FastAPI:
    """The routes of a server; it neither starts nor closes the engine.

    Args:
        engine: an `Engine`, or what has its `submit` and `stats`.
        name: the model's, as clients ask for it.
        api_key: what a client has to send; None lets everybody in who reaches the port.
        allow_hosts: as for `api.read_picture`.
        max_new_tokens: of an answer whose request does not say.
        timeout: seconds that a request may take.
        limits: bounds of what is read.
    """
    served = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    service = Service(engine, name, allow_hosts, max_new_tokens, timeout, limits or Limits())
    served.state.service = service

    def admit(request: Request) -> None:
        _admit(request, api_key)

    known = [Depends(admit)]

    @served.get("/health")
    async def health() -> Response:
        if service.closing:
            raise RequestError("the server is shutting down", status=503)
        return JSONResponse({"status": "ok"})

    @served.get("/metrics", dependencies=known)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @served.get("/v1/models", dependencies=known)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model]})

    @served.get("/v1/models/{model:path}", dependencies=known)
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(service.model)

    @served.post("/v1/chat/completions", dependencies=known)
    async def chat(request: Request) -> Response:
        return await service.chat(request)

    @served.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        headers = {"retry-after": "1"} if error.status in (429, 503) else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(error.body(), error.status, headers)

    @served.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        told = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, RequestError(told, status=error.status_code))

    @served.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return await refuse(
            request, RequestError("the server failed; its log says how", status=500)
        )

    assert all((health, metrics, models, model, chat, other, failed))  # FastAPI has them
    return served


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

    @contextmanager
    def share(self) -> Generator[Callable[[int], None]]:
        """What one request takes of it, given back at the end."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self.left:
                raise RequestError("too many large requests at once: try again", status=429)
            self.left -= size
            taken += size

        try:
            yield take
        finally:
            self.left += taken


class _Stream(StreamingResponse):
    """Server-sent events; what the request holds is given back however sending ends."""

    def __init__(self, content: AsyncIterator[str], ending: ExitStack) -> None:
        super().__init__(content, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
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
        max_new_tokens: int,
        timeout: float | None,
        limits: Limits,
    ) -> None:
        self.engine, self.limits, self.closing = engine, limits, False
        self.metrics = Metrics(engine)
        self.model = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "mmkv",
        }
        self._hosts = frozenset(x.lower() for x in allow_hosts)
        self._max_new_tokens, self._timeout = max_new_tokens, timeout
        self._room, self._decoders = _Room(limits.held_bytes), asyncio.Semaphore(_DECODERS)

    def check_model(self, name: str) -> None:
        """Refuse any model but ours.

        Raises:
            RequestError: 404.
        """
        if name != self.model["id"]:
            raise RequestError(
                f"The model {name[:80]!r} does not exist; this server has {self.model['id']!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def chat(self, request: Request) -> Response:
        """One completion, whole or as a stream.

        Raises:
            RequestError: in place of a completion.
        """
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
            take = ending.enter_context(self._room.share())
            asked = api.parse(await self._body(request, take))
            self.check_model(asked.model)
            reply = await self._submit(asked, take)
            ending.callback(reply.cancel)
            watch = asyncio.create_task(_hang_up(request, reply))
            ending.callback(watch.cancel)
            about = {
                "id": f"chatcmpl-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": self.model["id"],
            }
            texts = self._texts(reply, clock)
            # An answer that fails before its first token is an error, not a stream.
            first = await anext(texts, "")
            if asked.stream:
                sent = self._events(asked, about, first, texts, reply)
                return _Stream(sent, ending.pop_all())
            text = "".join([first, *[x async for x in texts]])
            self._note(reply)
            return JSONResponse(api.answer(about, text, reply.finish_reason, api.usage(reply)))
        raise AssertionError  # for pyright: an ExitStack might swallow exceptions

    async def _body(self, request: Request, take: Callable[[int], None]) -> bytes:
        # A browser sends this type to another origin only after asking, and gets no leave here.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError("expected the header Content-Type: application/json", status=415)
        most, raw = self.limits.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for piece in request.stream():
                    take(len(piece))
                    raw += piece
                    if len(raw) > most:
                        raise RequestError(
                            f"the body is larger than {most / 2**20:g} MiB", status=413
                        )
        except TimeoutError:
            raise RequestError("the body did not come in time", status=408) from None
        return bytes(raw)

    async def _submit(self, asked: ChatRequest, take: Callable[[int], None]) -> Any:
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
            take(3 * picture.width * picture.height)
            pictures.append(picture)
        sampling = Sampling(
            temperature=asked.temperature or 0.0,
            top_p=asked.top_p or 1.0,
            top_k=asked.top_k or 0,
            seed=asked.seed,
            stop=asked.stops,
        )
        longest = asked.max_completion_tokens or asked.max_tokens or self._max_new_tokens
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
            raise RequestError(str(error)) from None
        except Busy as error:
            raise RequestError(str(error), status=429) from None
        except RuntimeError:
            if not self.closing:
                raise
            raise RequestError("the server is shutting down", status=503) from None

    async def _texts(self, reply: Any, clock: Any) -> AsyncGenerator[str]:
        """The pieces of a reply's text.

        Raises:
            RequestError: it failed, was cut off by the server, or took too long.
            ClientDisconnect: nobody reads it any more.
        """
        try:
            async for event in reply:
                clock.token()
                yield event.text
        except ValueError as error:
            raise RequestError(str(error)) from None
        except Exception as error:
            _log.exception("a request failed", exc_info=error)
            raise RequestError("the engine failed; the server's log says how", status=500) from None
        if reply.finish_reason in ("stop", "length"):
            return
        if reply.finish_reason == "timeout":
            raise RequestError(f"took more than {self._timeout:g} s", status=504)
        if self.closing:
            raise RequestError("the server is shutting down", status=503)
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
                yield sent(api.usage_chunk(about, api.usage(reply)))
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


async def _hang_up(request: Request, reply: Any) -> None:
    """End a reply when its client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reply.cancel()
