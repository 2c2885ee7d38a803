"""Calls of tools, in the forms in which models write them into a reply's text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from mmkv.serving.reply import overlap

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# Marks that some models write before the JSON of a call.
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")


def call_schema(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of one call of any of these functions."""
    schemas = list[dict[str, Any]]()
    for i, function in enumerate(functions):
        arguments: dict[str, Any] = {**(function.get("parameters") or {"type": "object"})}
        arguments.pop("$schema", None)  # drafts up to 7 ignore an `$id` next to a reference
        arguments["$id"] = f"tool{i}"  # the arguments' references start at the arguments
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        schemas.append({**schema, "additionalProperties": False})
    return {"anyOf": schemas}


def as_object(function: Any) -> dict[str, Any]:
    """Return a call of an earlier answer as chat templates take it, its JSON arguments parsed."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = function.arguments
    return {"name": function.name, "arguments": arguments}


class ToolText:
    """A reply's text as it grows; what may be a call of these tools is held back until the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._text, self._n_given = set(names), "", 0

    def add(self, text: str) -> str:
        """Return the further text that is certainly not part of a call."""
        if not self._names:
            return text
        self._text += text
        start = self._text.lstrip()
        marks = (*_MARKS, "{", "[")
        if not start or any(start.startswith(x) or x.startswith(start) for x in marks):
            return ""
        end = self._text.find(_OPEN)
        if end < 0:
            end = len(self._text) - overlap(self._text, _OPEN)
        certain, self._n_given = self._text[self._n_given : end], max(end, self._n_given)
        return certain

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Return what was held back: the rest of the text, and the calls in OpenAI's form."""
        rest = self._text[self._n_given :]
        calls = self._calls(rest)
        if not calls:
            return rest, []
        return (rest.partition(_OPEN)[0].rstrip() if _OPEN in rest else ""), calls

    def _calls(self, text: str) -> list[dict[str, Any]]:
        if _OPEN in text:
            candidates = re.findall(f"{_OPEN}(.*?)(?:{_CLOSE}|$)", text, re.DOTALL)
        else:
            for mark in _MARKS:
                text = text.strip().removeprefix(mark)
            candidates = [text]
        calls = list[dict[str, Any]]()
        for candidate in candidates:
            try:
                parsed = json.loads(candidate)
            except (ValueError, RecursionError):
                return []
            for call in parsed if isinstance(parsed, list) else [parsed]:
                if not isinstance(call, dict) or call.get("name") not in self._names:
                    return []
                arguments = call.get("arguments", call.get("parameters", {}))
                as_json = arguments if isinstance(arguments, str) else json.dumps(arguments)
                function = {"name": call["name"], "arguments": as_json}
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append({"id": call_id, "type": "function", "function": function})
        return calls
