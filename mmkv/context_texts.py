"""Texts and chat messages as inputs of a context, which is read before its question is known.

The last message that is read is the user's, and stays open: a text that follows belongs to it. So
what is read, and what follows it, are written by the chat template in one piece and cut apart, and
each is turned into tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import pad

# Where a template's text is cut: behind what was read before, and before what may follow.
_START, _END = "<|mmkv start|>", "<|mmkv end|>"
_BETWEEN = "\n\n"  # two texts of a message


@dataclass(frozen=True)
class Opened:
    """How a context goes on."""

    roles: tuple[
        str, ...
    ] = ()  # of its messages, the last the user's and open; () if it is no chat
    pictures: tuple[int, ...] = ()  # how many each of them has, which templates may count
    lead: str = ""  # white space before what follows, which tokens hold with its beginning


def encode(
    given: Any, processor: Any, before: Opened | None, *, ends: bool
) -> tuple[Mapping[str, Any], Opened]:
    """A model's inputs from what a user gives, and how the context goes on behind them.

    Args:
        given: what a processor returns, ids [N] or [B, N], a text or several, or chat messages.
        processor: turns text and pictures into inputs, as a tokenizer does text; or None.
        before: how the context that they stand behind goes on; None: they begin one.
        ends: whether a reply follows.
    """
    if isinstance(given, Mapping):
        return given, before or Opened()
    if isinstance(given, Tensor):
        if given.ndim not in (1, 2) or given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(f"ids of {given.dtype} {list(given.shape)}: expected ints, [B, N]")
        return {"input_ids": given.long().view(-1, given.shape[-1])}, before or Opened()
    texts: list[Any] = [given] if isinstance(given, str) else []
    if isinstance(given, list | tuple):
        texts = list(given)
    if "" in texts:
        raise ValueError("an empty text: say what is asked, or read")
    chat = bool(texts) and all(isinstance(x, Mapping) for x in texts)
    if not (chat or (texts and all(isinstance(x, str) for x in texts))):
        raise ValueError(
            "expected what a processor returns, a text or several, chat messages or a tensor of "
            f"ids, not {str(given)[:60]}"
        )
    if not callable(processor):
        name = "none" if processor is None else f"a {type(processor).__name__}"
        raise ValueError(
            f"a text needs the model's processor or tokenizer, and there is {name}: pass it as "
            "processor=, to mmkv.read or mmkv.load_context for all that follows"
        )
    known: Any = processor
    if chat:
        return _chat(texts, known, before, ends)
    if before.roles if before else known.chat_template is not None:
        found = [_chat([{"role": "user", "content": x}], known, before, ends) for x in texts]
        return _padded([inputs for inputs, _ in found]), found[0][1]
    return _padded([_tokens(known, text, begins=before is None) for text in texts]), Opened()


def _chat(
    given: Sequence[Mapping[str, Any]], processor: Any, before: Opened | None, ends: bool
) -> tuple[Mapping[str, Any], Opened]:
    """`encode` of chat messages."""
    if processor.chat_template is None:
        raise ValueError("chat messages, and the processor has no chat template: give a text")
    if before is not None and not before.roles:
        raise ValueError("chat messages behind a context that was read from ids: give a text")
    text, pictures, opened = _written(processor, before, given, ends=ends)
    if before is not None:
        text = text.partition(_START)[2]
    if not ends:
        text = text.rpartition(_END)[0]
    cut = text if ends else text.rstrip()
    content = given[0]["content"] or [{}]
    goes_on = isinstance(content, str) or "text" in content[0]
    lead = before.lead if before else ""
    if given[0]["role"] != "user":  # the text's own blanks stay, a template's behind a picture not
        lead = lead.removesuffix(_BETWEEN) if lead.endswith(_BETWEEN) else ""
    elif not goes_on:
        lead = ""
    inputs = _tokens(processor, lead + cut, pictures, begins=before is None)
    return inputs, replace(opened, lead=text[len(cut) :])


def _written(
    processor: Any, before: Opened | None, new: Sequence[Mapping[str, Any]], *, ends: bool
) -> tuple[str, list[Any], Opened]:
    """What the template makes of new messages behind others, of which no content is known.

    That is the text with its marks, the new pictures, and how all messages go on.
    """
    known = zip(before.roles, before.pictures, strict=True) if before else ()
    whole: list[tuple[str, list[Any]]] = [(role, [{"type": "image"}] * n) for role, n in known]
    if whole:
        whole[-1][1].append(_text(_START))
    for i, message in enumerate(new):
        role, content = message.get("role"), message.get("content")
        parts = [_text(content)] if isinstance(content, str) else content
        if not isinstance(role, str) or not isinstance(parts, list | tuple):
            raise ValueError(f"message {str(message)[:60]}: expected a role and a content")
        for part in parts:
            kind = str(part.get("type")) if isinstance(part, Mapping) else ""
            expected = {"text": str, "image": Image}.get(kind)
            if expected is None or not isinstance(part.get(kind), expected):
                raise ValueError(
                    f"message part {str(part)[:60]}: expected {{'type': 'text', 'text': ...}} or "
                    "{'type': 'image', 'image': a picture of PIL}"
                )
        if i == 0 and role == "user" and whole:
            whole[-1][1].extend(parts)
        else:
            whole.append((role, list(parts)))
    if not ends:
        if whole[-1][0] != "user":
            whole.append(("user", []))
        parts = whole[-1][1]
        said = parts and parts[-1]["type"] == "text" and parts[-1]["text"] not in ("", _START)
        parts.append(_text((_BETWEEN if said else "") + _END))
    pictures = [x["image"] for _, parts in whole for x in parts if "image" in x]
    counts = [sum(x["type"] == "image" for x in parts) for _, parts in whole]
    messages = [{"role": role, "content": _content(processor, parts)} for role, parts in whole]
    try:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # of templates, which raise what they like
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    for mark in (*([_START] if before else []), *([] if ends else [_END])):
        if mark not in text:
            raise ValueError("the chat template leaves out a text: give tokens in its place")
    return text, pictures, Opened(tuple(role for role, _ in whole), tuple(counts))


def _content(processor: Any, parts: list[Any]) -> Any:
    """A message's content as a template wants it, texts side by side joined."""
    joined: list[Any] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = _text(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    if hasattr(processor, "image_processor"):
        return joined
    if any(part["type"] == "image" for part in joined):
        raise ValueError("a picture, and the tokenizer reads text only: leave it out")
    return "".join(part["text"] for part in joined)


def _tokens(
    processor: Any, text: str, pictures: Sequence[Any] = (), *, begins: bool = True
) -> Mapping[str, Any]:
    bos = getattr(processor, "tokenizer", processor).bos_token
    special = begins and (bos is None or not text.startswith(bos))  # a template has written its own
    how: dict[str, Any] = {"add_special_tokens": special, "return_tensors": "pt"}
    if pictures:
        how["images"] = list(pictures)
    return processor(text=text, **how)


def _padded(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Rows of text as one batch, padded on the left."""
    if len(rows) == 1:
        return rows[0]
    most = max(row["input_ids"].shape[1] for row in rows)
    return {
        name: torch.cat([pad(x[name], (most - x[name].shape[1], 0)) for x in rows])
        for name in rows[0]
    }


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
