"""What is answered in place of a completion; bodies of requests read within bounds and checked."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

_log = logging.getLogger(__name__)
_LONGEST_LINE, _LONGEST_MESSAGE = 200, 500
_PARTS = "text and image_url"
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
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "suffix": (None, ""),
    "verbosity": (None,),
    "web_search_options": (None,),
}


class RequestError(Exception):
    """What is answered in place of a completion."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
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
    """Bounds of one request, and of all that are held at once."""

    body_bytes: int = 32 * 2**20
    pictures: int = 16
    picture_bytes: int = 20 * 2**20  # of a file
    pixels: int = 40_000_000  # of all pictures of a request together
    held_bytes: int = 2**30  # of all requests and their decoded pictures together
    read_seconds: float = 30.0  # for headers, a body, or a picture from another server
    write_seconds: float = 30.0  # for a client to read what is sent
    connections: int = 2048  # that are open at a time


class Body(BaseModel):
    """A body, or an object in one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: x for k, x in given.items() if k not in _NEUTRAL or x not in _NEUTRAL[k]}


Kind = TypeVar("Kind", bound=Body)


def read(raw: bytes, kind: type[Kind], *, ignore_unknown: bool = False) -> Kind:
    """A body in JSON, checked; or without what is not supported, whose names the log has.

    Raises:
        RequestError: no JSON, a field of another type or range, or one that is not supported.
    """
    try:
        given = from_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is no JSON that can be read: {error}") from None
    if isinstance(given, dict):
        given = {name: x for name, x in given.items() if name not in _NO_EFFECT}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        every = error.errors(include_url=False)
    try:
        found = kind.model_validate(given, extra="ignore")
    except ValidationError as error:
        raise _wrong(error, given) from None
    unknown = [_place(x["loc"], given)[0] for x in every if x["type"] == "extra_forbidden"]
    if not ignore_unknown:
        place = unknown[0]
        known = place.rpartition(".")[2] in _NEUTRAL
        if known or "." in place:
            told = f"{place} is not {'supported' if known else 'known here'}: leave it out"
        else:
            told = f"Unrecognized request argument supplied: {place}"
        raise RequestError(told, param=place)
    names = sorted({re.sub(r"\[\d+\]", "[]", x) for x in unknown})
    _log.warning("ignored in a request: %r", ", ".join(names)[:_LONGEST_LINE])
    return found


def _wrong(error: ValidationError, given: Any) -> RequestError:
    """One sentence about what is most likely meant: the error that lies deepest in a body."""
    every = error.errors(include_url=False)
    # Of a union, each kind tells its own; that one lies deepest which was begun.
    first = max(every, key=lambda x: (len(x["loc"]), not x["type"].endswith("_type")))
    kind, told, context = first["type"], first["msg"], first.get("ctx", {})
    place, at = _place(first["loc"], given)
    if kind == "missing":
        place = f"{place}.{first['loc'][-1]}".lstrip(".")
        told = f"{place} is missing"
    elif kind == "union_tag_invalid":
        tag = str(context.get("tag"))[:40]
        told = f"{place}: parts of type {tag!r} are not read here, only {_PARTS}"
    elif kind == "union_tag_not_found":
        told = f"{place}: a part needs a type: {_PARTS}"
    elif kind == "literal_error":
        told = f"{place}: {repr(at)[:60]} is not {context.get('expected')}"
    elif place.endswith(".content"):
        told = f"{place}: expected a text or a list of parts, not {repr(at)[:60]}"
    else:
        told = f"{place or 'body'}: {told[0].lower()}{told[1:]}"
    return RequestError(told, param=place or None)


def _place(loc: tuple[int | str, ...], at: Any) -> tuple[str, Any]:
    """Where an error lies in a body, and what stands there; kinds of unions are left out."""
    place = ""
    for before, x in zip((None, *loc), loc, strict=False):
        if isinstance(before, int) and x in ("text", "image_url"):
            continue  # which kind of part it is, no field of it
        if isinstance(x, int) and isinstance(at, list) and x < len(at):
            place, at = f"{place}[{x}]", at[x]
        elif isinstance(at, dict) and x in at:
            place, at = f"{place}.{str(x)[:80]}".lstrip("."), at[x]
    return place, at
