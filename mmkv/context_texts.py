"""Texts and chat messages as inputs of a context, which is read before its question is known.

The last message of a context is the user's, and a later text continues it. So the chat template is
applied to earlier and new messages together, its text is cut at marks, and only the new part is
tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Marks at which a template's text is cut: after earlier messages, and before later ones.
_START, _END = "<|mmkv start|>", "<|mmkv end|>"
_BETWEEN = "\n\n"  # between two texts of one message


@dataclass(frozen=True)
class ChatState:
    """State of a context's chat, which later texts and messages continue."""

    roles: tuple[str, ...] = ()  # of the messages, the last one the user's; () if no chat
    pictures: tuple[int, ...] = ()  # in each message: templates may count them
    # After a text: white space before the next one, tokenized together with it.
    lead: str = ""


def encode(
    inputs: Any, processor: Any, earlier: ChatState | None, *, ends: bool
) -> tuple[Mapping[str, Any], ChatState]:
    """Return the model's inputs of a prompt or question, and the state of the chat after them.

    Args:
        inputs: output of a processor, ids [N] or [B, N], a text or several, or chat messages.
        processor: encodes text and pictures, or a tokenizer, which encodes text; or None.
        earlier: state of the chat of the context that they continue; None: they begin one.
        ends: whether a reply follows.
    """
    if isinstance(inputs, Mapping):
        return inputs, earlier or ChatState()
    if isinstance(inputs, Tensor):
        if inputs.ndim not in (1, 2) or inputs.is_floating_point() or inputs.dtype == torch.bool:
            raise ValueError(f"ids of {inputs.dtype} {list(inputs.shape)}: expected ints, [B, N]")
        ids = inputs.long() if inputs.ndim == 2 else inputs.long()[None]
        return {"input_ids": ids}, earlier or ChatState()
    texts: list[Any] = [inputs] if isinstance(inputs, str) else []
    if isinstance(inputs, list | tuple):
        texts = list(inputs)
    if "" in texts:
        raise ValueError("an empty text: give the question, or the text to read")
    chat = bool(texts) and all(isinstance(x, Mapping) for x in texts)
    if not (chat or (texts and all(isinstance(x, str) for x in texts))):
        raise ValueError(
            "expected what a processor returns, a text or several, chat messages or a tensor of "
            f"ids, not {str(inputs)[:60]}"
        )
    if not callable(processor):
        name = "none" if processor is None else f"a {type(processor).__name__}"
        raise ValueError(
            f"a text needs the model's processor or tokenizer, got {name}: pass processor= here, "
            "or to mmkv.read or mmkv.load_context for all later calls"
        )
    encoder: Any = processor
    if chat:
        return _chat(texts, encoder, earlier, ends)
    if earlier.roles if earlier else encoder.chat_template is not None:
        encoded = [_chat([{"role": "user", "content": x}], encoder, earlier, ends) for x in texts]
        return left_padded([encoded_inputs for encoded_inputs, _ in encoded]), encoded[0][1]
    rows = [_tokens(encoder, text, begins=earlier is None) for text in texts]
    return left_padded(rows), ChatState()


def _chat(
    messages: Sequence[Mapping[str, Any]], processor: Any, earlier: ChatState | None, ends: bool
) -> tuple[Mapping[str, Any], ChatState]:
    """Return the inputs of chat messages, and the state of the chat; see `encode`."""
    if processor.chat_template is None:
        raise ValueError("the processor has no template for chat messages: give a text")
    if earlier is not None and not earlier.roles:
        raise ValueError(
            "chat messages cannot continue a context of ids or plain text: give a text"
        )
    text, pictures, chat = _rendered(processor, earlier, messages, ends=ends)
    if earlier is not None:
        text = _new_text(processor, earlier, messages, text, ends=ends)
    cut = text if ends else text.rstrip()
    inputs = _tokens(processor, cut, pictures, begins=earlier is None)
    return inputs, replace(chat, lead=text[len(cut) :] if chat.lead else "")


def _new_text(
    processor: Any,
    earlier: ChatState,
    messages: Sequence[Mapping[str, Any]],
    marked: str,
    *,
    ends: bool,
) -> str:
    """Return the template's text of the new messages, with the blanks before it.

    `marked` is the text of the whole chat with a mark before the new messages. After an earlier
    text, the new one follows the mark. After a picture, or at the start of a message, a template
    may write other blanks before the mark than before a picture. There the whole chat is rendered
    without a mark, and the text of the earlier messages is removed from its start.
    """
    if not earlier.lead:
        whole = _rendered(processor, earlier, messages, ends=ends, starts=False)[0]
        before = _rendered(processor, earlier, (), ends=False, starts=False)[0].rstrip()
        if whole.startswith(before):
            return whole.removeprefix(before)
    content = messages[0]["content"] or [{}]
    continues = isinstance(content, str) or "text" in content[0]
    lead = earlier.lead
    if messages[0]["role"] != "user" or not continues:  # the text's own blanks stay
        lead = lead.removesuffix(_BETWEEN)
    return lead + marked.partition(_START)[2]


def _rendered(
    processor: Any,
    earlier: ChatState | None,
    new: Sequence[Mapping[str, Any]],
    *,
    ends: bool,
    starts: bool = True,
) -> tuple[str, list[Any], ChatState]:
    """Return the template's text, the new pictures, and the state of the whole chat.

    Earlier messages are rendered without their content, which is not stored; with `starts` a mark
    stands after them. Unless it `ends`, the text is cut where the user's last message may go on.
    """
    roles = zip(earlier.roles, earlier.pictures, strict=True) if earlier else ()
    turns: list[tuple[str, list[Any]]] = [(role, [{"type": "image"}] * n) for role, n in roles]
    if turns and starts:
        turns[-1][1].append(_text(_START))
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
        if i == 0 and role == "user" and turns:
            turns[-1][1].extend(parts)
        else:
            turns.append((role, list(parts)))
    between = ""
    if not ends:
        if turns[-1][0] != "user":
            turns.append(("user", []))
        parts = turns[-1][1]
        if parts and parts[-1]["type"] == "text" and parts[-1]["text"] not in ("", _START):
            between = _BETWEEN
        parts.append(_text(between + _END))
    pictures = [x["image"] for _, parts in turns for x in parts if "image" in x]
    counts = [sum(x["type"] == "image" for x in parts) for _, parts in turns]
    messages = [{"role": role, "content": _content(processor, parts)} for role, parts in turns]
    try:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of any type
        raise ValueError(f"the chat template refuses the messages: {error}") from None
    for mark in (*([_START] if earlier and starts else []), *([] if ends else [_END])):
        if mark not in text:
            raise ValueError("the chat template leaves out a text: give ids instead")
    if not ends:
        text = text.rpartition(_END)[0]
    return text, pictures, ChatState(tuple(role for role, _ in turns), tuple(counts), between)


def _content(processor: Any, parts: list[Any]) -> Any:
    """Return a message's content as a template takes it, adjacent texts joined."""
    joined: list[Any] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = _text(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    if hasattr(processor, "image_processor"):
        return joined
    if any(part["type"] == "image" for part in joined):
        raise ValueError("the tokenizer reads text only: leave the picture out")
    return "".join(part["text"] for part in joined)


def _tokens(
    processor: Any, text: str, pictures: Sequence[Any] = (), *, begins: bool = True
) -> Mapping[str, Any]:
    special = begins and adds_special(getattr(processor, "tokenizer", processor), text)
    options: dict[str, Any] = {"add_special_tokens": special, "return_tensors": "pt"}
    if pictures:
        options["images"] = list(pictures)
    return processor(text=text, **options)


def adds_special(tokenizer: Any, text: str) -> bool:
    """Return whether the tokenizer adds special tokens: not if the template wrote them."""
    bos = tokenizer.bos_token
    return bos is None or not text.startswith(bos)


def left_padded(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> Mapping[str, Any]:
    """Return one batch of rows of one sequence each, [1, n]; masks are 0 at the padding."""
    if len(rows) == 1:
        return rows[0]
    fill = dict.fromkeys(rows[0], 0) | {"input_ids": pad_id}
    return {
        name: pad_sequence([row[name][0] for row in rows], True, fill[name], padding_side="left")
        for name in rows[0]
    }


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
