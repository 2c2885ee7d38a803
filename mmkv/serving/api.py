"""What a client of OpenAI's chat completions may ask for, and the shapes of answers and errors."""

from __future__ import annotations

import base64
import binascii
import http.client
import time
import urllib.parse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mmkv.loading import untrusted

if TYPE_CHECKING:
    from PIL import Image

_LONGEST_MESSAGE = 500
# Known to OpenAI's clients and without effect on what is answered.
_NO_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Not supported, so only a value that asks for nothing is taken.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


class RequestError(Exception):
    """What is answered in place of a completion."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = str(self)
        if len(message) > _LONGEST_MESSAGE:
            message = message[:_LONGEST_MESSAGE] + " ..."
        found = {"message": message, "type": kinds.get(self.status, kind)}
        return {"error": {**found, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one request, and of all that are held at once.

    Attributes:
        body_bytes: of a request.
        pictures: in a request.
        picture_bytes: of a picture's file.
        pixels: of all pictures of a request together.
        held_bytes: of all requests and their decoded pictures together.
        read_seconds: until a body, or a picture from another server, must be there.
    """

    body_bytes: int = 32 * 2**20
    pictures: int = 16
    picture_bytes: int = 20 * 2**20
    pixels: int = 40_000_000
    held_bytes: int = 2**30
    read_seconds: float = 30.0


class _Given(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TextPart(_Given):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImageURL(_Given):
    """Where a picture is; `detail` has no effect."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(_Given):
    """A picture in a message."""

    type: Literal["image_url"]
    image_url: ImageURL


class Message(_Given):
    """One turn. What an answer of OpenAI's holds beside its text is taken where it is empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class StreamOptions(_Given):
    """What a stream tells beside its text; padding against eavesdroppers is not done."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Compression(_Given):
    """Ours: how this request's cache is compressed."""

    policy: str | None = None
    budget: int | float | None = None


class ChatRequest(_Given):
    """The body of a request; unknown fields are judged by `parse`."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mmkv: Compression = Compression()

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def parse(raw: bytes) -> ChatRequest:
    """A request's body, checked.

    Raises:
        RequestError: no JSON, a field of another type or range, or one that is not supported.
    """
    try:
        found = ChatRequest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(x)[:40] for x in first["loc"])
        raise RequestError(f"{place or 'body'}: {first['msg']}", param=place or None) from None
    for name, value in (found.model_extra or {}).items():
        shown = name[:80]
        if name not in _NO_EFFECT and name not in _NEUTRAL:
            raise RequestError(f"Unrecognized request argument supplied: {shown}", param=shown)
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise RequestError(f"{name} is not supported: leave it out", param=name)
    if found.n not in (None, 1):
        raise RequestError("n: one answer a request; send it again for another", param="n")
    if "" in found.stops:
        raise RequestError("stop: an empty text would end every answer", param="stop")
    if found.stream_options and not found.stream:
        raise RequestError("stream_options: only with stream=true", param="stream_options")
    for i, message in enumerate(found.messages):
        pictures = [x for x in message.content if isinstance(x, ImagePart)]
        if pictures and message.role != "user":
            raise RequestError(
                f"messages.{i}: pictures can only be in messages of the user", param="messages"
            )
    return found


def picture_urls(request: ChatRequest) -> list[str]:
    """Where the pictures are, in the order of the messages."""
    parts = [part for message in request.messages for part in message.content]
    return [part.image_url.url for part in parts if isinstance(part, ImagePart)]


def messages(request: ChatRequest, pictures: Sequence[Image.Image]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them, with the pictures of `picture_urls` in place."""
    left, found = iter(pictures), list[dict[str, Any]]()
    for message in request.messages:
        role = "system" if message.role == "developer" else message.role
        content: Any = message.content
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image", "image": next(left)}
                for part in content
            ]
            if all(part["type"] == "text" for part in content):
                content = "\n".join(part["text"] for part in content)
        found.append({"role": role, "content": content})
    return found


def read_picture(url: str, limits: Limits, allow_hosts: Collection[str], pixels: int) -> Any:
    """The picture at a data URL, or at one of a host that is allowed by name: RGB, upright.

    Args:
        url: as the client gave it.
        limits: of a file's size, and of the time to fetch it.
        allow_hosts: hosts, with ":port" where it is not the scheme's own, that may be asked.
        pixels: how many it may have.

    Raises:
        RequestError: another URL, or no picture that may be read.
    """
    if url[:5].lower() == "data:":
        raw = _of_data_url(url, limits.picture_bytes)
    else:
        raw = _fetched(url, limits, allow_hosts)
    try:
        return untrusted.read_picture(
            raw, untrusted.upright, most_pixels=pixels, most_bytes=limits.picture_bytes
        )
    except untrusted.PictureError as error:
        raise _picture_error(str(error)) from None


def _picture_error(why: str) -> RequestError:
    return RequestError(f"cannot read a picture: {why}", param="messages", code="invalid_image")


def _of_data_url(url: str, most_bytes: int) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise _picture_error("expected data:image/...;base64,...")
    if len(data) > 4 * (most_bytes + 2) // 3 + 4:
        raise _picture_error(f"larger than {most_bytes / 2**20:g} MiB")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise _picture_error("no base64") from None


def _fetched(url: str, limits: Limits, allow_hosts: Collection[str]) -> bytes:
    """What an allowed host answers: no redirect is followed, no proxy asked."""
    try:
        where = urllib.parse.urlsplit(url)
    except ValueError:
        where = urllib.parse.urlsplit("")
    # The place as it stands: a name and password, or another port, make it another place.
    if where.scheme not in ("http", "https") or where.netloc.lower() not in allow_hosts:
        raise _picture_error("only data: URLs are read here, and hosts named by --allow-host")
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    end = time.monotonic() + limits.read_seconds
    raw = bytearray()
    try:
        connection = kind(where.netloc, timeout=limits.read_seconds)
        try:
            query = f"?{where.query}" if where.query else ""
            connection.request("GET", (where.path or "/") + query)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _picture_error(f"its server answered {answer.status}")
            while piece := answer.read1(2**16):
                raw += piece
                if len(raw) > limits.picture_bytes:
                    raise _picture_error(f"larger than {limits.picture_bytes / 2**20:g} MiB")
                if time.monotonic() > end:
                    raise TimeoutError
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):  # also a URL with control characters
        raise _picture_error("its server did not give it") from None
    return bytes(raw)


def answer(about: dict[str, Any], reply: Any, text: str) -> dict[str, Any]:
    """A whole completion; `about` is its id, time and model."""
    message = {"role": "assistant", "content": text, "refusal": None}
    end = {"logprobs": None, "finish_reason": reply.finish_reason}
    choices = [{"index": 0, "message": message, **end}]
    return {**about, "object": "chat.completion", "choices": choices, **usage(reply)}


def chunk(about: dict[str, Any], delta: Any, finish: str | None = None) -> dict[str, Any]:
    """A piece of a completion in a stream; without a delta the last, for `include_usage`."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    choices = [] if delta is None else [choice]
    return {**about, "object": "chat.completion.chunk", "choices": choices}


def usage(reply: Any) -> dict[str, Any]:
    """Tokens as OpenAI counts them, and what the cache held as `mmkv`."""
    used = reply.usage
    counts = {"prompt_tokens": used.prompt_tokens, "completion_tokens": used.completion_tokens}
    counts["total_tokens"] = used.prompt_tokens + used.completion_tokens
    held = {name: getattr(used, name) for name in ("kept_tokens", "cache_bytes", "shared")}
    return {"usage": counts, "mmkv": held}
