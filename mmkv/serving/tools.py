"""Calls of tools: the forms in which models write them, found in a reply's text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from mmkv.serving.reply import overlap

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# What some models write before the JSON of a call.
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")


def call_schema(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of one call of any of these functions."""
    every, shared = list[dict[str, Any]](), dict[str, Any]()
    for function in functions:
        arguments: dict[str, Any] = {**(function.get("parameters") or {"type": "object"})}
        shared |= arguments.pop("$defs", {})  # they are referred to from the root
        given = {"name": {"const": function["name"]}, "arguments": arguments}
        shape = {"type": "object", "properties": given, "required": [*given]}
        every.append({**shape, "additionalProperties": False})
    return {"anyOf": every, **({"$defs": shared} if shared else {})}


def as_object(function: Any) -> dict[str, Any]:
    """A call that is sent back, as chat templates take it: arguments that are JSON as an object."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = function.arguments
    return {"name": function.name, "arguments": arguments}


class ToolText:
    """A reply's text as it comes: what may be a call of these tools is held back until the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._text, self._given = set(names), "", 0

    def add(self, text: str) -> str:
        """The text that is certain to be no call."""
        if not self._names:
            return text
        self._text += text
        begun = self._text.lstrip()
        marks = (*_MARKS, "{", "[")
        if not begun or any(begun.startswith(x) or x.startswith(begun) for x in marks):
            return ""
        end = self._text.find(_OPEN)
        if end < 0:
            end = len(self._text) - overlap(self._text, _OPEN)
        found, self._given = self._text[self._given : end], max(end, self._given)
        return found

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What was held back: the rest of the text, and the calls as an answer has them."""
        rest = self._text[self._given :]
        calls = self._calls(rest)
        if not calls:
            return rest, []
        return (rest.partition(_OPEN)[0].rstrip() if _OPEN in rest else ""), calls

    def _calls(self, text: str) -> list[dict[str, Any]]:
        if _OPEN in text:
            found = re.findall(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", text, re.DOTALL)
        else:
            for mark in _MARKS:
                text = text.strip().removeprefix(mark)
            found = [text]
        calls = list[dict[str, Any]]()
        for one in found:
            try:
                given = json.loads(one)
            except (ValueError, RecursionError):
                return []
            for call in given if isinstance(given, list) else [given]:
                if not isinstance(call, dict) or call.get("name") not in self._names:
                    return []
                arguments = call.get("arguments", call.get("parameters", {}))
                written = arguments if isinstance(arguments, str) else json.dumps(arguments)
                called = {"name": call["name"], "arguments": written}
                name = f"call_{uuid.uuid4().hex[:24]}"
                calls.append({"id": name, "type": "function", "function": called})
        return calls
