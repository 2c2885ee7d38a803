"""Fields of a request that are not known here, or not supported: refused, or done without."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from mmkv.serving.errors import RequestError

_log = logging.getLogger(__name__)
_LONGEST_LINE = 200
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
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}


def drop_unknown(found: BaseModel, *, ignore: bool) -> None:
    """Remove what a body has beside the fields of its models.

    Args:
        found: the body.
        ignore: tell the log of them, in one line.

    Raises:
        RequestError: there is such a field, it asks for something, and it is not to be ignored.
    """
    ignored = set[str]()
    for place, extra in _extras(found):
        for name, value in extra.items():
            shown, known = f"{place}{name[:80]}", name in _NEUTRAL
            if (name in _NO_EFFECT and not place) or (known and value in (None, *_NEUTRAL[name])):
                continue
            told = "not supported" if known else "not known here"
            if ignore:
                ignored.add(re.sub(r"\[\d+\]", "[]", shown))
            elif known or place:
                raise RequestError(f"{shown} is {told}: leave it out", param=shown)
            else:
                raise RequestError(f"Unrecognized request argument supplied: {shown}", param=shown)
        extra.clear()
    if ignored:
        _log.warning("ignored in a request: %r", ", ".join(sorted(ignored))[:_LONGEST_LINE])


def _extras(given: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """What models have beside their fields, by their place."""
    if isinstance(given, BaseModel):
        yield place, given.model_extra or {}
        for name in type(given).model_fields:
            yield from _extras(getattr(given, name), f"{place}{name}.")
    elif isinstance(given, list) and given and isinstance(given[0], BaseModel):
        for i, x in enumerate(given):
            yield from _extras(x, f"{place.rstrip('.')}[{i}].")
