"""What is answered in place of a completion, and the bounds of what is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

_LONGEST_MESSAGE = 500
_PARTS = "text and image_url"


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
        read_seconds: until headers, a body, or a picture from another server must be there.
        write_seconds: until a client must have read what is sent.
        connections: that are open at a time.
    """

    body_bytes: int = 32 * 2**20
    pictures: int = 16
    picture_bytes: int = 20 * 2**20
    pixels: int = 40_000_000
    held_bytes: int = 2**30
    read_seconds: float = 30.0
    write_seconds: float = 30.0
    connections: int = 2048


def wrong_body(error: ValidationError, raw: bytes) -> RequestError:
    """One sentence about what is most likely meant: the error that lies deepest in a body."""
    every = error.errors(include_url=False)
    # Of a union, each kind tells its own; that one lies deepest which was begun.
    first = max(every, key=lambda x: (len(x["loc"]), not x["type"].endswith("_type")))
    kind, told = first["type"], first["msg"]
    if kind == "json_invalid":
        return RequestError(f"the body is no JSON that can be read: {told}")
    place, at = "", from_json(raw, allow_partial=True)
    for i, x in enumerate(first["loc"], start=1):
        missing = kind == "missing" and i == len(first["loc"])
        if isinstance(x, int) and isinstance(at, list) and x < len(at):
            place, at = f"{place}[{x}]", at[x]
        elif isinstance(x, str) and isinstance(at, dict) and (x in at or missing):
            place, at = f"{place}.{x[:80]}".lstrip("."), at.get(x)
    shown = repr(at)[:60]
    if kind == "missing":
        told = f"{place} is missing"
    elif kind == "union_tag_invalid":
        tag = str(first.get("ctx", {}).get("tag"))[:40]
        told = f"{place}: parts of type {tag!r} are not read here, only {_PARTS}"
    elif kind == "union_tag_not_found":
        told = f"{place}: a part needs a type: {_PARTS}"
    elif kind == "literal_error":
        told = f"{place}: {shown} is not {first.get('ctx', {}).get('expected')}"
    elif place.endswith(".content"):
        told = f"{place}: expected a text or a list of parts, not {shown}"
    else:
        told = f"{place or 'body'}: {told[0].lower()}{told[1:]}"
    return RequestError(told, param=place or None)
