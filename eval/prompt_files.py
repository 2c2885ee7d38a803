"""A user's own prompts, and English ones that every machine has, for `check` and `calibrate`.

A `.txt` file has one prompt a line; in one with lines of three dashes alone, prompts are what
stands between these. A `.jsonl` file has an object a line: {"prompt": text}, which is the user's
message, or {"messages": [{"role": ..., "content": text}, ...]}, as chat templates take them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv import chat

from .prompts import Encoder, longest
from .samples import DataError, Sample
from .suites import files

Prompt = list[dict[str, Any]]
_BETWEEN = re.compile(r"^[ \t]*---[ \t]*$", re.MULTILINE)
_SUMMARY = "Summarize the text above in three sentences."
# Topics of the documentation that Python itself holds (PSF licence), and what is asked about each.
_SHIPPED = {
    "objects": _SUMMARY,
    "with": 'When is the "__exit__()" method called? Answer in two sentences.',
    "import": _SUMMARY,
    "naming": "Which exception is raised when a name is not found? Answer in one sentence.",
    "types": "Name the types that the text above describes.",
    "debugger": "How do you break into the debugger at a certain line? Answer in one sentence.",
}
_MOST_LETTERS = 3600  # of a document


def read(path: Path) -> list[Prompt]:
    """The prompts of a file, as conversations.

    Raises:
        DataError: no such file, of another kind, without prompts, or with one that is none.
    """
    if path.suffix == ".jsonl":
        return [_conversation(entry) for entry in files.read_lines(path)]
    if path.suffix != ".txt":
        raise DataError(f"{path}: expected a .txt file, a prompt a line, or .jsonl")
    text = files.read_text(path)
    blocks = _BETWEEN.split(text)
    if len(blocks) == 1:
        blocks = text.splitlines()
    found = [_said(block.strip()) for block in blocks if block.strip()]
    if not found:
        raise DataError(f"{path}: has no prompts: write one a line")
    return found


def shipped() -> list[Prompt]:
    """Requests about documents that Python itself holds.

    Raises:
        DataError: this Python comes without them.
    """
    topics = files.documentation()
    return [
        _said(f"{_beginning(topics[name].strip())}\n\n{asked}") for name, asked in _SHIPPED.items()
    ]


def inputs(
    loaded: chat.Loaded, prompts: Sequence[Prompt] | None, limit: int | None, *, drawn: bool = False
) -> list[dict[str, Any]]:
    """What the model takes for each prompt, as its chat template writes it.

    Args:
        loaded: the model.
        prompts: None: of the shipped ones, or, with `drawn`, about drawn pictures.
        limit: how many at most.

    Raises:
        ValueError: the template refuses one; says which.
    """
    from jinja2 import TemplateError

    from .suites.registry import load_suite

    if prompts is None and drawn:
        return of_samples(loaded, load_suite("description", limit=limit or len(_SHIPPED)))
    found = list[dict[str, Any]]()
    for i, prompt in enumerate((shipped() if prompts is None else prompts)[:limit], start=1):
        if loaded.reads_pictures and loaded.processor.chat_template is not None:
            prompt = [x | {"content": [{"type": "text", "text": x["content"]}]} for x in prompt]
        try:
            found.append(chat.encode_messages(loaded, prompt))
        except (ValueError, TemplateError) as error:
            raise ValueError(f"prompt {i}: {error}") from None
    return found


def of_samples(loaded: chat.Loaded, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What the model takes for each sample of a suite."""
    encoder = Encoder(loaded.processor, longest(loaded.model))
    return [encoder.inputs(loaded.model, [sample]) for sample in samples]


def _said(text: str) -> Prompt:
    return [{"role": "user", "content": text}]


def _conversation(entry: files.Entry) -> Prompt:
    """A line's messages, of text alone."""
    if "messages" not in entry.fields:
        return _said(entry.text("prompt"))
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages:
        raise entry.error("messages", "expected a list of messages")
    for message in messages:
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise entry.error(
                "messages",
                'expected {"role": a text, "content": a text} each; leave pictures out',
            )
    return messages


def _beginning(text: str) -> str:
    """Whole paragraphs."""
    return text if len(text) <= _MOST_LETTERS else text[:_MOST_LETTERS].rpartition("\n\n")[0]
