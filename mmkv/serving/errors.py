"""The errors that a server answers, and the reading of requests' bodies within bounds."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import from_json

_log = logging.getLogger(__name__)
_MAX_LINE, _MAX_MESSAGE = 200, 500
_PARTS = "text and image_url"
# Fields of OpenAI's clients that have no effect on the answer.
_NO_EFFECT = (
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store", "user"),
)
# Fields that are not supported, so only these values, which ask for nothing, are accepted.
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
    """An error that is answered in place of a completion."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = str(self)
        if len(message) > _MAX_MESSAGE:
            message = message[:_MAX_MESSAGE] + " ..."
        fields = {"message": message, "type": kinds.get(self.status, kind)}
        return {"error": {**fields, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one request, and of all requests at a time."""

    body_bytes: int = 32 * 2**20
    pictures: int = 16
    picture_bytes: int = 20 * 2**20  # of a file
    pixels: int = 40_000_000  # of all pictures of a request together
    held_bytes: int = 2**30  # of all requests and their decoded pictures together
    read_seconds: float = 30.0  # for headers, a body, or a picture from another server
    write_seconds: float = 30.0  # for a client to read what is sent
    connections: int = 2048  # that are open at a time


class Body(BaseModel):
    """A request's body, or an object in one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {k: x for k, x in fields.items() if k not in _NEUTRAL or x not in _NEUTRAL[k]}


Kind = TypeVar("Kind", bound=Body)


def read(raw: bytes, kind: type[Kind], *, ignore_unknown: bool = False) -> Kind:
    """Parse and check a JSON body; `ignore_unknown` drops unsupported fields and logs their names.

    Raises:
        RequestError: no JSON, a field of a wrong type or range, or one that is not supported.
    """
    try:
        data = from_json(raw)
    except ValueError as error:
        raise RequestError(f"the body is no JSON that can be read: {error}") from None
    if isinstance(data, dict):
        data = {name: x for name, x in data.items() if name not in _NO_EFFECT}
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    try:
        body = kind.model_validate(data, extra="ignore")
    except ValidationError as error:
        raise _request_error(error, data) from None
    unknown = [_place(x["loc"], data)[0] for x in problems if x["type"] == "extra_forbidden"]
    if not ignore_unknown:
        place = unknown[0]
        known = place.rpartition(".")[2] in _NEUTRAL
        if known or "." in place:
            message = f"{place} is not {'supported' if known else 'known here'}: leave it out"
        else:
            message = f"Unrecognized request argument supplied: {place}"
        raise RequestError(message, param=place)
    names = sorted({re.sub(r"\[\d+\]", "[]", x) for x in unknown})
    _log.warning("ignored in a request: %r", ", ".join(names)[:_MAX_LINE])
    return body


def _request_error(error: ValidationError, data: Any) -> RequestError:
    """Return an error about the most likely problem: the one that lies deepest in the body."""
    problems = error.errors(include_url=False)
    # Each kind of a union reports its own error; the kind that matched most lies deepest.
    first = max(problems, key=lambda x: (len(x["loc"]), not x["type"].endswith("_type")))
    kind, message, context = first["type"], first["msg"], first.get("ctx", {})
    place, value = _place(first["loc"], data)
    if kind == "missing":
        place = f"{place}.{first['loc'][-1]}".lstrip(".")
        message = f"{place} is missing"
    elif kind == "union_tag_invalid":
        tag = str(context.get("tag"))[:40]
        message = f"{place}: parts of type {tag!r} are not read here, only {_PARTS}"
    elif kind == "union_tag_not_found":
        message = f"{place}: a part needs a type: {_PARTS}"
    elif kind == "literal_error":
        message = f"{place}: {repr(value)[:60]} is not {context.get('expected')}"
    elif place.endswith(".content"):
        message = f"{place}: expected a text or a list of parts, not {repr(value)[:60]}"
    else:
        if kind == "model_type":
            message = "Expected an object"
        message = re.sub(r", not \d+$", "", message)  # pydantic's, the number of items
        message = f"{place or 'body'}: {message[0].lower()}{message[1:]}, not {repr(value)[:60]}"
    return RequestError(message, param=place or None)


def _place(loc: tuple[int | str, ...], value: Any) -> tuple[str, Any]:
    """Return where an error lies in a body, without kinds of unions, and the value there."""
    place = ""
    for parent, x in zip((None, *loc), loc, strict=False):
        if isinstance(parent, int) and x in ("text", "image_url"):
            continue  # the kind of a part, not one of its fields
        if isinstance(x, int) and isinstance(value, list) and x < len(value):
            place, value = f"{place}[{x}]", value[x]
        elif isinstance(value, dict) and x in value:
            place, value = f"{place}.{str(x)[:80]}".lstrip("."), value[x]
    return place, value
