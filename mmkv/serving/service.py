"""What is behind the routes of the server: one request from its body to its answer."""

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

from . import Busy, Closed, Event, Refused, api, pictures
from .answers import ChatAnswer, CompletionAnswer
from .errors import Limits, RequestError, read
from .metrics import Metrics

_log = logging.getLogger(__name__)


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
        self.room = limits.held_bytes  # that all requests together may still take
        self._decoders = asyncio.Semaphore(2)  # each may take its limit of pixels

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
        """The answer to a conversation, whole or as a stream."""
        return await self._counted(request, api.ChatRequest, ChatAnswer)

    async def complete(self, request: Request) -> Response:
        """The continuation of texts, whole or as a stream."""
        return await self._counted(request, api.CompletionRequest, CompletionAnswer)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """The tokens of a text or a conversation."""
        with ExitStack() as ending:
            asked = await self._read(request, api.TokenizeRequest, ending)
            given: dict[str, Any] = {"prompt": asked.prompt}
            if asked.messages is not None:
                shown = await self._pictures(asked.messages, ending)
                given["messages"] = api.messages(asked.messages, shown)
                given["template"] = asked.template
            tokens = await self._asked(self.engine.tokenize, **given)
        most = getattr(self.engine, "positions", None)
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens}

    async def _counted(self, request: Request, kind: Any, answering: Any) -> Response:
        try:
            return await self._answer(request, kind, answering)
        except ClientDisconnect:
            self.metrics.ended("gone")
            return Response(status_code=499)  # nginx's: nobody reads it
        except RequestError as error:
            self.metrics.ended(str(error.status))
            raise

    async def _answer(self, request: Request, kind: Any, answering: Any) -> Response:
        clock = self.metrics.clock()
        with ExitStack() as ending:
            held = ExitStack()  # what is no longer needed once the replies have ended
            ending.callback(held.close)
            asked = await self._read(request, kind, held)
            replies = await self._replies(request, asked, held, ending)
            watch = asyncio.create_task(_hang_up(request, replies))
            ending.callback(watch.cancel)
            answer = answering(asked, len(replies))
            events = self._events(replies, clock, held, ending)
            # An answer that fails before its first token is an error, not a stream.
            pieces = _pieces(answer, await anext(events), events)
            if asked.stream:
                sent = self._stream(asked, answer, pieces, replies)
                return _Stream(sent, ending.pop_all())
            every = [x async for x in pieces]
            self._note(replies)
            return JSONResponse(answer.whole(every, replies))
        raise AssertionError  # for pyright: an ExitStack might swallow exceptions

    def _take(self, size: int, ending: ExitStack) -> None:
        """A request takes some of the room for all, and gives it back at its end."""
        if size > self.room:
            raise RequestError("too many large requests at once: try again", status=429)

        def give_back() -> None:
            self.room += size

        self.room -= size
        ending.callback(give_back)

    async def _read(self, request: Request, kind: Any, ending: ExitStack) -> Any:
        """The body of a request of this kind, for our model."""
        # A browser sends this type to another origin only after asking.
        written = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if written != "application/json":
            raise RequestError("expected the header Content-Type: application/json", status=415)
        most, raw = self.limits.body_bytes, bytearray()
        large = RequestError(f"the body is larger than {most / 2**20:g} MiB", status=413)
        if int(request.headers.get("content-length", 0)) > most:
            raise large
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                async for piece in request.stream():
                    self._take(len(piece), ending)
                    raw += piece
                    if len(raw) > most:
                        raise large
        except TimeoutError:
            raise RequestError("the body did not come in time", status=408) from None
        asked = read(bytes(raw), kind, ignore_unknown=self._ignore_unknown)
        if asked.model is not None:
            await self.check_model(asked.model)
        return asked

    async def _pictures(self, messages: Any, ending: ExitStack) -> list[Any]:
        urls = api.picture_urls(messages)
        if len(urls) > self.limits.pictures:
            raise RequestError(
                f"{len(urls)} pictures: at most {self.limits.pictures}", param="messages"
            )
        found, left = list[Any](), self.limits.pixels
        for url in urls:
            async with self._decoders:
                picture = await asyncio.to_thread(
                    pictures.read_picture, url, self.limits, self._hosts, left
                )
            left -= picture.width * picture.height
            self._take(3 * picture.width * picture.height, ending)
            found.append(picture)
        return found

    async def _replies(
        self, request: Request, asked: Any, held: ExitStack, ending: ExitStack
    ) -> list[Any]:
        """The replies of the engine, one for each choice; they end with `ending`."""
        shown = await self._pictures(getattr(asked, "messages", ()), held)
        shared: dict[str, Any] = {"timeout": self._timeout, "owner": request.state.owner}
        shared |= asked.mmkv.model_dump()
        if (asked.n or 1) > 1:
            shared["repeated"] = True
        replies = list[Any]()
        for given in asked.replies(shown):
            replies.append(await self._asked(self.engine.submit, **given, **shared))
            ending.callback(replies[-1].cancel)
        return replies

    async def _asked(self, function: Any, **given: Any) -> Any:
        """What the engine says; what it refuses is an error of the client's."""
        try:
            # Tokenising and preparing pictures takes its time.
            return await asyncio.to_thread(function, **given)
        except Exception as error:
            raise _failure(error) from None

    async def _events(
        self, replies: list[Any], clock: Any, held: ExitStack, ending: ExitStack
    ) -> AsyncGenerator[tuple[int, Event | str]]:
        """The events of all replies as they come, and how each ended, unless one fails.

        They are taken whether anybody reads the answer or not, so that `held` is given back when
        the replies end.
        """
        found = asyncio.Queue[tuple[int, Event | str | Exception]]()

        async def take(i: int, reply: Any) -> None:
            try:
                async for event in reply:
                    found.put_nowait((i, event))
                found.put_nowait((i, self._reason(reply)))
            except Exception as error:
                found.put_nowait((i, error))

        async def take_all() -> None:
            with held:
                await asyncio.gather(*map(take, range(len(replies)), replies))

        ending.callback(asyncio.create_task(take_all()).cancel)
        running = len(replies)
        while running:
            i, event = await found.get()
            if isinstance(event, Exception):
                raise _failure(event) from None
            if isinstance(event, Event):
                clock()
            else:
                running -= 1
            yield i, event

    def _reason(self, reply: Any) -> str:
        """Why a reply ended as it should; an error where it did not."""
        if reply.finish_reason in ("stop", "length"):
            return reply.finish_reason
        if reply.finish_reason == "timeout":
            raise RequestError(f"took more than {self._timeout:g} s", status=504)
        if not reply.cancelled or self.closing:
            raise _closing()
        raise ClientDisconnect

    async def _stream(
        self, asked: Any, answer: Any, pieces: Any, replies: list[Any]
    ) -> AsyncGenerator[str]:
        """A stream as server-sent events; what goes wrong in it is its last."""
        counted = asked.stream_options is not None and asked.stream_options.include_usage
        more: dict[str, Any] = {"usage": None} if counted else {}

        def sent(piece: dict[str, Any]) -> str:
            return f"data: {json.dumps(piece)}\n\n"

        try:
            async for piece in pieces:
                yield sent({**answer.sent(piece), **more})
            self._note(replies)
            if counted:
                yield sent({**answer.sent(None), **answer.usage(replies)})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            self.metrics.ended(str(error.status))
            yield sent(error.body())
        except (ClientDisconnect, asyncio.CancelledError, GeneratorExit):
            self.metrics.ended("gone")
            raise

    def _note(self, replies: list[Any]) -> None:
        for reply in replies:
            self.metrics.ended(reply.finish_reason)
            self.metrics.kept(reply.usage.kept_tokens, reply.usage.prompt_tokens)


async def _pieces(answer: Any, given: Any, events: Any) -> AsyncGenerator[dict[str, Any]]:
    """What the given event and those to come, and the ends of replies, add to an answer."""
    while given is not None:
        i, event = given
        if isinstance(event, str):
            for piece in answer.end(i, event):
                yield piece
        elif (piece := answer.add(i, event)) is not None:
            yield piece
        given = await anext(events, None)


def _failure(error: Exception) -> Exception:
    """What a client is told of an error in the engine."""
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


async def _hang_up(request: Request, replies: list[Any]) -> None:
    """End replies when their client goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for reply in replies:
        reply.cancel()
