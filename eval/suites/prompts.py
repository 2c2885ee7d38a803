"""A user's own prompts; caches are compared along the full cache's replies to them.

Data is a file. Each line of a `.txt` file is a prompt, or each part between lines of three dashes.
Each line of a `.jsonl` file is {"prompt": text} or {"messages": [{"role": ..., "content": text},
...]}. "documentation" stands for questions about the documentation in Python (PSF licence).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mmkv.eval.samples import DataError, Request, Sample, Suite
from mmkv.eval.suites import files

DOCUMENTATION = "documentation"
NEW_TOKENS = 48
_SUMMARIZE = "Summarize the text above in three sentences."
# Topics of the documentation, and a request about each.
_SHIPPED = {
    "objects": _SUMMARIZE,
    "with": 'When is the "__exit__()" method called? Answer in two sentences.',
    "import": _SUMMARIZE,
    "naming": "Which exception is raised when a name is not found? Answer in one sentence.",
    "types": "Name the types that the text above describes.",
    "debugger": "How do you break into the debugger at a certain line? Answer in one sentence.",
}
_MOST_CHARACTERS = 3600  # of a shipped document


def load(request: Request) -> Iterator[Sample]:
    """Yield the prompts, numbered from 1; the last message of each is the user's."""
    shipped = files.stands_for(request.data, DOCUMENTATION)
    conversations = _shipped() if shipped else _read(request.data)
    for i, (*turns, (_, prompt)) in enumerate(conversations, start=1):
        yield Sample(id=f"{i}", turns=tuple(turns), prompt=prompt, max_new_tokens=NEW_TOKENS)


def _shipped() -> Iterator[list[tuple[str, str]]]:
    """Yield requests about the documentation that Python includes. Raises DataError."""
    topics = files.documentation()
    for name, question in _SHIPPED.items():
        text = topics[name].strip()
        if len(text) > _MOST_CHARACTERS:  # cut between two paragraphs
            text = text[:_MOST_CHARACTERS].rpartition("\n\n")[0]
        yield [("user", f"{text}\n\n{question}")]


def _read(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield the conversations of a file as roles and texts. Raises DataError."""
    if path.suffix == ".jsonl":
        yield from map(_conversation, files.read_lines(path))
        return
    if path.suffix != ".txt" and path.exists():
        raise DataError(f"{path}: expected a .txt file, a prompt a line, or .jsonl")
    text = files.read_text(path)
    blocks = re.split(r"(?m)^[ \t]*---[ \t]*$", text)
    if len(blocks) == 1:
        blocks = text.split("\n")  # not at form feeds and other separators
    prompts = [block.strip() for block in blocks if block.strip()]
    if not prompts:
        raise DataError(f"{path}: has no prompts: write one a line")
    for prompt in prompts:
        yield [("user", prompt)]


def _conversation(entry: files.Entry) -> list[tuple[str, str]]:
    """Return a line's messages as roles and texts."""
    if "messages" not in entry.fields:
        return [("user", entry.text("prompt"))]
    messages = entry.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise entry.error("messages", "expected a list of messages")
    turns: list[tuple[str, str]] = []
    for message in messages:
        turn = message if isinstance(message, dict) else {}
        if not all(isinstance(turn.get(name), str) for name in ("role", "content")):
            problem = 'expected {"role": a text, "content": a text} each; leave pictures out'
            raise entry.error("messages", problem)
        role, content = (entry.checked("messages", turn[x]) for x in ("role", "content"))
        turns.append((role, content))
    if turns[-1][0] != "user":
        raise entry.error("messages", f"the last one is the {turns[-1][0]}'s, expected the user's")
    if not turns[-1][1].strip():
        raise entry.error("messages", "the last one is empty")
    return turns


SUITE = Suite(load, words=(DOCUMENTATION,))
