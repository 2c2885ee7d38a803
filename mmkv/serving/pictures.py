"""The pictures of a request, read from data URLs and from hosts that are allowed by name."""

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
    """Return the picture of a data URL, or of a URL of an allowed host: RGB, upright.

    A host's name has ":port" if that is not the default port of the scheme.
    """
    inline = url[:5].lower() == "data:"
    raw = _inline(url, limits) if inline else _fetched(url, limits, allow_hosts)
    try:
        return untrusted.read_picture(
            raw, untrusted.upright, most_pixels=pixels, most_bytes=limits.picture_bytes
        )
    except untrusted.PictureError as error:
        raise _picture_error(str(error)) from None


def _picture_error(reason: str) -> RequestError:
    return RequestError(f"cannot read a picture: {reason}", param="messages", code="invalid_image")


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
    """Return the body from an allowed host; no redirect is followed and no proxy used."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.urlsplit("")
    # All of `netloc` is compared: a user's name or another port make it another host.
    if parts.scheme not in ("http", "https") or parts.netloc.lower() not in allow_hosts:
        raise _picture_error("only data: URLs are read here, and hosts named by --allow-host")
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    deadline = time.monotonic() + limits.read_seconds
    raw = bytearray()
    try:
        with closing(connect(parts.netloc, timeout=limits.read_seconds)) as connection:
            query = f"?{parts.query}" if parts.query else ""
            connection.request("GET", (parts.path or "/") + query)
            response = connection.getresponse()
            if response.status != 200:
                raise _picture_error(f"its server answered {response.status}")
            while chunk := response.read1(2**16):
                raw += chunk
                if len(raw) > limits.picture_bytes:
                    raise _picture_error(f"larger than {limits.picture_bytes / 2**20:g} MiB")
                if time.monotonic() > deadline:
                    raise TimeoutError
    except (OSError, ValueError, http.client.HTTPException):  # also a URL with control characters
        raise _picture_error("its server did not give it") from None
    return bytes(raw)
