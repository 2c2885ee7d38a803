"""Conversations that a server answers, mmkv's own or another one of OpenAI's chat completions.

It has one cache, compressed as the page's controls say, and tells its size; what it keeps of a
picture, and the answer of a full cache, it does not tell. What goes wrong is a `ValueError` of one
line.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
import urllib.parse
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx

from .session import LONGEST_SIDE
from .talk import Talk
from .values import Settings, Side, Turn
from .views import data_uri

if TYPE_CHECKING:
    from PIL import Image

_INTERVAL = 0.1  # seconds between two looks at an answer
_CONNECT = 10.0  # seconds until a server must have taken a connection


class Server:
    """Where a server is, and the key that it asks for.

    Raises:
        ValueError: no address such as http://127.0.0.1:8000.
    """

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        try:
            parts = urllib.parse.urlsplit(self.address)
            known = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            known = False
        if not known:
            raise ValueError(f"--server {address}: expected an address as http://127.0.0.1:8000")
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def models(self) -> list[str]:
        """The names of its models.

        Raises:
            ValueError: it is away, refuses, or is no such server.
        """
        try:
            found = httpx.get(f"{self.address}/v1/models", headers=self.headers, timeout=_CONNECT)
            if found.status_code != 200:
                raise self.refusal(found.status_code, found.text)
            names = [str(x["id"]) for x in found.json()["data"]]
        except httpx.HTTPError as error:
            raise self.away(error) from None
        except (KeyError, TypeError, json.JSONDecodeError):
            names = []
        if not names:
            raise ValueError(f"{self.address} names no model: is it `mmkv serve`?")
        return names

    def away(self, error: Exception) -> ValueError:
        """What to say where no answer, or half of one, came."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ValueError(f"no server answers at {self.address}: is `mmkv serve` running?")
        return ValueError(f"the server at {self.address} broke off ({type(error).__name__})")

    def refusal(self, status: int, body: str) -> ValueError:
        """What to say where it answered with an error."""
        try:
            said = json.loads(body)["error"]["message"]
        except (json.JSONDecodeError, KeyError, TypeError):
            said = f"HTTP {status}"
        if status == 401:
            said = f"{said}: give its key by --api-key or MMKV_API_KEY"
        return ValueError(f"the server refused: {said}")


class ServedModel:
    """A model of a server, which answers many conversations."""

    reads_pictures = True  # a model that does not is an error of the server's

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name

    def conversation(self) -> ServedTalk:
        """A new one."""
        return ServedTalk(self)


class ServedTalk(Talk):
    """One user's turns; the server is sent all of them with each question."""

    def __init__(self, engine: ServedModel) -> None:
        super().__init__()
        self.engine = engine
        self._messages: list[dict[str, Any]] = []

    def _forget(self) -> None:
        self._messages = []

    def _answered(
        self, question: str, picture: Image.Image | None, settings: Settings
    ) -> Generator[Turn]:
        policy, budget = settings.chosen()
        if settings.options or settings.kv_dtype is not None:
            raise ValueError("a server takes a policy and its budget alone, without other options")
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if picture is not None:
            url = {"url": data_uri(picture, side=LONGEST_SIDE)}
            content.insert(0, {"type": "image_url", "image_url": url})
        asked = {"role": "user", "content": content}
        compression = {"policy": policy.name}
        body = {
            "model": self.engine.name,
            "messages": [*self._messages, asked],
            "max_completion_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "mmkv": compression if budget is None else {**compression, "budget": budget},
        }
        turn = Turn(question, picture, settings.label, full=None)
        yield turn
        side, ended, notes = Side(), False, tuple[str, ...]()
        with closing(_Stream(self.engine.server, body)) as stream:
            for piece in stream.pieces():
                if piece is not None:
                    ended |= piece is _DONE
                    side = _grown(side, piece, stream.seconds)
                    notes += _counts(piece)
                    continue
                if self._stop:
                    break
                yield replace(turn, compressed=side)
        text = side.text.strip()
        if not ended:
            notes = ("Stopped before the end.",)
        self._messages += [asked, {"role": "assistant", "content": text}]
        side = replace(side, text=text, done=True)
        turn = replace(turn, compressed=side, notes=notes, done=True)
        self.turns.append(turn)
        yield turn


_DONE: dict[str, Any] = {}  # the piece behind the last


def _grown(side: Side, piece: dict[str, Any], seconds: float) -> Side:
    """An answer with one more piece of it, after so many seconds; its counts come last."""
    try:
        text = "".join(x["delta"].get("content") or "" for x in piece.get("choices", ()))
        usage, held = piece.get("usage"), piece.get("mmkv")
        if text:
            side = replace(side, text=side.text + text, tokens=side.tokens + 1, last=seconds)
            side = replace(side, first=seconds if side.first is None else side.first)
        if usage:
            side = replace(side, tokens=usage["completion_tokens"])
        if usage and held:
            share = held["kept_tokens"] / max(usage["prompt_tokens"], 1)
            side = replace(side, kept=float(share), nbytes=int(held["cache_bytes"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("the server answered what is no chat completion") from None
    if side.first is not None and side.tokens > 1 and side.last > side.first:
        side = replace(side, rate=(side.tokens - 1) / (side.last - side.first))
    return side


def _counts(piece: dict[str, Any]) -> tuple[str, ...]:
    """What the last piece says of the prompt."""
    usage, held = piece.get("usage"), piece.get("mmkv")
    if not usage or not held:
        return ()
    of = f"{held['kept_tokens']:,} of the prompt's {usage['prompt_tokens']:,} tokens"
    shared = " Its beginning had been read before." if held.get("shared") else ""
    return (f"The cache kept {of}.{shared}",)


class _Stream:
    """An answer of a server, read in a thread of its own, so that waiting for it can end."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.server, self.body = server, body
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._found: queue.SimpleQueue[tuple[float, dict[str, Any] | Exception]] = (
            queue.SimpleQueue()
        )
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._read())
        self._thread = threading.Thread(target=self._run, daemon=True, name="mmkv-demo-stream")
        self._thread.start()

    def pieces(self) -> Generator[dict[str, Any] | None]:
        """The pieces as they come, `_DONE` last; None where none came for a while.

        Raises:
            ValueError: what went wrong.
        """
        looked = time.perf_counter()
        while True:
            try:
                came, piece = self._found.get(timeout=_INTERVAL)
            except queue.Empty:
                yield None
                continue
            if isinstance(piece, Exception):
                raise piece
            self.seconds = came - self._began
            yield piece
            if piece is _DONE:
                return
            if time.perf_counter() - looked > _INTERVAL:
                looked = time.perf_counter()
                yield None

    def close(self) -> None:
        """End the request, if it still runs."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        last: dict[str, Any] | Exception = _DONE
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except httpx.HTTPError as error:
            last = self.server.away(error)
        except Exception as error:
            last = error
        self._put(last)

    def _put(self, piece: dict[str, Any] | Exception) -> None:
        self._found.put((time.perf_counter(), piece))

    async def _read(self) -> None:
        # A server may let a request wait for as long as it likes: the user can end it.
        timeout = httpx.Timeout(None, connect=_CONNECT)
        url, headers = f"{self.server.address}/v1/chat/completions", self.server.headers
        async with (
            httpx.AsyncClient(timeout=timeout, headers=headers) as client,
            client.stream("POST", url, json=self.body) as answer,
        ):
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise self.server.refusal(answer.status_code, text)
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if not line.startswith("data:"):
                    continue
                try:
                    piece = json.loads(data)
                except json.JSONDecodeError:
                    piece = None
                if not isinstance(piece, dict):
                    raise ValueError("the server answered what is no chat completion")
                if "error" in piece:
                    raise self.server.refusal(500, data)
                self._put(piece)
        raise ValueError("the server ended the answer before its end")
