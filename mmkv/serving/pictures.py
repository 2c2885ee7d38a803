"""Pictures of a request: data URLs, and those of hosts that are allowed by name."""

from __future__ import annotations

import base64
import http.client
import time
import urllib.parse
from collections.abc import Collection
from contextlib import closing
from typing import Any

from mmkv.loading import untrusted
from mmkv.serving.errors import Limits, RequestError


def read_picture(url: str, limits: Limits, allow_hosts: Collection[str], pixels: int) -> Any:
    """The picture at a data URL, or at one of a host that is allowed: RGB, upright.

    Hosts are allowed by name, with ":port" where it is not the scheme's own.
    """
    inline = url[:5].lower() == "data:"
    raw = _inline(url, limits) if inline else _fetched(url, limits, allow_hosts)
    try:
        return untrusted.read_picture(
            raw, untrusted.upright, most_pixels=pixels, most_bytes=limits.picture_bytes
        )
    except untrusted.PictureError as error:
        raise _picture_error(str(error)) from None


def _picture_error(why: str) -> RequestError:
    return RequestError(f"cannot read a picture: {why}", param="messages", code="invalid_image")


def _inline(url: str, limits: Limits) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise _picture_error("expected data:image/...;base64,...")
    if len(data) > 4 * (limits.picture_bytes + 2) // 3 + 4:
        raise _picture_error(f"larger than {limits.picture_bytes / 2**20:g} MiB")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
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
        with closing(kind(where.netloc, timeout=limits.read_seconds)) as connection:
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
    except (OSError, ValueError, http.client.HTTPException):  # also a URL with control characters
        raise _picture_error("its server did not give it") from None
    return bytes(raw)
