"""The functions behind the server's routes: a request from its body to its answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import ExitStack
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from . import Busy, Closed, Refused, api, pictures
from .answers import ChatAnswer, CompletionAnswer, Piece
from .errors import Limits, RequestError, read
from .metrics import Metrics

_log = logging.getLogger(__name__)


class _Stream(StreamingResponse):
    """Server-sent events; a request's resources are freed however sending ends."""

    def __init__(self, content: AsyncIterator[str], ending: ExitStack) -> None:
        super().__init__(content, 200, {"cache-control": "no-cache"}, "text/event-stream")
        self._ending = ending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._ending:
            await super().__call__(scope, receive, send)


class Service:
    """The functions behind the routes; arguments as for `app`. `closing` refuses new requests."""

    def __init__(
        self,
        engine: Any,
        name: str,
        allow_hosts: Collection[str],
        ignore_unknown: bool,
        timeout: float | None,
        limits: Limits,
    ) -> None:
        self.engine, self.limits, self.closing = engine, limits, False
        self.metrics = Metrics(engine)
        created = int(time.time())
        self.model = {"id": name, "object": "model", "created": created, "owned_by": "mmkv"}
        self._hosts = frozenset(x.lower() for x in allow_hosts)
        self._ignore_unknown, self._timeout = ignore_unknown, timeout
        self.room = limits.held_bytes  # bytes that further bodies and pictures may take
        self._decoders = asyncio.Semaphore(2)  # bounds memory: each decodes up to `limits.pixels`

    async def health(self) -> dict[str, str]:
        """Return whether new requests are accepted."""
        if self.closing:
            raise _closing()
        return {"status": "ok"}

    async def scrape(self) -> Response:
        """Return the metrics for Prometheus."""
        return Response(self.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """Return the list of models: the only one."""
        return {"object": "list", "data": [self.model]}

    async def check_model(self, model: str) -> dict[str, Any]:
        """Return the served model; refuse any other (404)."""
        if model != self.model["id"]:
            raise RequestError(
                f"The model {model[:80]!r} does not exist; this server has {self.model['id']!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.model

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, whole or as a stream."""
        return await self._answer(request, api.ChatRequest, ChatAnswer)

    async def complete(self, request: Request) -> Response:
        """Continue texts, whole or as a stream."""
        return await self._answer(request, api.CompletionRequest, CompletionAnswer)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Return the tokens of a text or a conversation."""
        with ExitStack() as ending:
            body = await self._read(request, api.TokenizeRequest, ending)
            arguments: dict[str, Any] = {"prompt": body.prompt}
            if body.messages is not None:
                images = await self._pictures(body.messages, ending)
                arguments["messages"] = api.messages(body.messages, images)
                arguments["template"] = body.template
            tokens = await self._call(self.engine.tokenize, **arguments)
        positions = getattr(self.engine, "positions", None)
        return {"count": len(tokens), "max_model_len": positions, "tokens": tokens}

    async def _answer(self, request: Request, kind: Any, answer_type: Any) -> Response:
        clock = self.metrics.clock()
        try:
            with ExitStack() as ending:
                input_memory = ExitStack()  # of body and pictures, freed when the replies end
                ending.callback(input_memory.close)
                body = await self._read(request, kind, input_memory)
                replies = await self._replies(request, body, input_memory, ending)
                watcher = asyncio.create_task(_cancel_on_disconnect(request, replies))
                ending.callback(watcher.cancel)
                answer = answer_type(body, len(replies))
                later = self._pieces(answer, replies, clock, input_memory, ending)
                # An answer that fails before its first token is an error, not a stream.
                pieces = await anext(later)
                if body.stream:
                    stream = self._stream(body, answer, pieces, later, replies)
                    return _Stream(stream, ending.pop_all())
                pieces += [piece async for more in later for piece in more]
                self._note(replies)
                return JSONResponse(answer.whole(pieces, replies))
        except ClientDisconnect:
            self.metrics.ended("gone")
            return Response(status_code=499)  # as nginx has it; no client reads it
        except RequestError as error:
            self.metrics.ended(str(error.status))
            raise
        raise AssertionError  # for pyright: an ExitStack might swallow exceptions

    def _reserve(self, size: int, ending: ExitStack) -> None:
        """Reserve bytes of the room for all requests until `ending`."""
        if size > self.room:
            raise RequestError("too many large requests at once: try again", status=429)

        def give_back() -> None:
            self.room += size

        self.room -= size
        ending.callback(give_back)

    async def _read(self, request: Request, kind: Any, ending: ExitStack) -> Any:
        """Return the checked body of a request, for the served model."""
        # A browser sends this type to another origin only if a preflight request allows it.
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise RequestError("expected the header Content-Type: application/json", status=415)
        max_bytes, raw = self.limits.body_bytes, bytearray()
        too_large = RequestError(f"the body is larger than {max_bytes / 2**20:g} MiB", status=413)
        if int(request.headers.get("content-length", 0)) > max_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for piece in request.stream():
                    self._reserve(len(piece), ending)
                    raw += piece
                    if len(raw) > max_bytes:
                        raise too_large
        except TimeoutError:
            raise RequestError("the body did not come in time", status=408) from None
        body = read(bytes(raw), kind, ignore_unknown=self._ignore_unknown)
        if body.model is not None:
            await self.check_model(body.model)
        return body

    async def _pictures(self, messages: Any, ending: ExitStack) -> list[Any]:
        urls = api.picture_urls(messages)
        if len(urls) > self.limits.pictures:
            raise RequestError(
                f"{len(urls)} pictures: at most {self.limits.pictures}", param="messages"
            )
        images, pixels_left = list[Any](), self.limits.pixels
        for url in urls:
            async with self._decoders:
                image = await asyncio.to_thread(
                    pictures.read_picture, url, self.limits, self._hosts, pixels_left
                )
            pixels_left -= image.width * image.height
            self._reserve(3 * image.width * image.height, ending)
            images.append(image)
        return images

    async def _replies(
        self, request: Request, body: Any, input_memory: ExitStack, ending: ExitStack
    ) -> list[Any]:
        """Request a reply for each choice from the engine; `ending` cancels them."""
        images = await self._pictures(getattr(body, "messages", ()), input_memory)
        shared = {"timeout": self._timeout, "owner": request.state.owner, **body.mmkv.model_dump()}
        shared["repeated"] = (body.n or 1) > 1
        replies = list[Any]()
        for arguments in body.replies(images):
            replies.append(await self._call(self.engine.submit, **arguments, **shared))
            ending.callback(replies[-1].cancel)
        return replies

    async def _call(self, function: Any, **arguments: Any) -> Any:
        """Call a function of the engine in a thread; turn its errors into those for clients."""
        try:
            # Tokenising and preparing pictures takes time.
            return await asyncio.to_thread(function, **arguments)
        except Exception as error:
            raise _failure(error) from None

    async def _pieces(
        self,
        answer: ChatAnswer,
        replies: list[Any],
        clock: Any,
        input_memory: ExitStack,
        ending: ExitStack,
    ) -> AsyncGenerator[list[Piece]]:
        """Yield the pieces of an answer at each event of its replies, unless one fails.

        Replies are read whether the client reads the answer or not, so that `input_memory` is freed
        when they end.
        """
        queue = asyncio.Queue[list[Piece] | Exception | None]()

        async def read_reply(i: int, reply: Any) -> None:
            try:
                async for event in reply:
                    clock()
                    queue.put_nowait(answer.add(i, event))
                queue.put_nowait(answer.end(i, self._reason(reply)))
            except Exception as error:
                queue.put_nowait(error)

        async def read_all() -> None:
            with input_memory:
                await asyncio.gather(*map(read_reply, range(len(replies)), replies))
            queue.put_nowait(None)

        ending.callback(asyncio.create_task(read_all()).cancel)
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise _failure(item) from None
            yield item

    def _reason(self, reply: Any) -> str:
        """Return why a reply ended; raise an error if it was cut off."""
        if reply.finish_reason in ("stop", "length"):
            return reply.finish_reason
        if reply.finish_reason == "timeout":
            raise RequestError(f"took more than {self._timeout:g} s", status=504)
        if not reply.cancelled or self.closing:
            raise _closing()
        raise ClientDisconnect

    async def _stream(
        self, body: Any, answer: Any, pieces: Any, later: Any, replies: list[Any]
    ) -> AsyncGenerator[str]:
        """Yield a stream's server-sent events; an error is the last one."""
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        usage: dict[str, Any] = {"usage": None} if with_usage else {}

        def as_event(piece: Piece) -> str:
            return f"data: {json.dumps(piece)}\n\n"

        try:
            while pieces is not None:
                for piece in pieces:
                    yield as_event({**answer.sent(piece), **usage})
                pieces = await anext(later, None)
            self._note(replies)
            if with_usage:
                yield as_event({**answer.sent(None), **answer.usage(replies)})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            self.metrics.ended(str(error.status))
            yield as_event(error.body())
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            self.metrics.ended("gone")
            raise

    def _note(self, replies: list[Any]) -> None:
        for reply in replies:
            self.metrics.ended(reply.finish_reason)
            self.metrics.kept(reply.usage.kept_tokens, reply.usage.prompt_tokens)


def _failure(error: Exception) -> Exception:
    """Return the error that a client gets for an error in the engine."""
    if isinstance(error, RequestError | ClientDisconnect):
        return error
    if isinstance(error, ValueError):
        return RequestError(str(error), code=error.code if isinstance(error, Refused) else None)
    if isinstance(error, Busy):
        return RequestError(str(error), status=429)
    if isinstance(error, Closed):
        return _closing()
    _log.error("a request failed", exc_info=error)
    return RequestError("the engine failed; the server's log says how", status=500)


def _closing() -> RequestError:
    return RequestError("the server is shutting down", status=503)


async def _cancel_on_disconnect(request: Request, replies: list[Any]) -> None:
    """Cancel replies when their client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for reply in replies:
        reply.cancel()
