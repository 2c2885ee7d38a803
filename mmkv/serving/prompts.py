"""From what a request brings to the model's inputs, and the part of them that others may share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmkv import chat
from mmkv.serving.reply import Refused

Message = Mapping[str, Any]


def encode(
    loaded: chat.Loaded, messages: Sequence[Message], *, split: bool
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
    """The inputs of a conversation; and, cut before its last text, what to read and what to ask.

    There is a cut where something stands before the last text of the last turn, which is the
    user's: other turns, a system text, or pictures; and no picture behind it.

    Raises:
        Refused: messages that the model cannot be given.
    """
    try:
        whole = chat.encode_messages(loaded, messages)
        empty = _without_question(messages) if split else None
        if empty is None:
            return whole, None, None
        prefix, rest = chat.split_inputs(whole, chat.encode_messages(loaded, empty))
    except Exception as error:  # of templates and processors, which raise what they like
        raise Refused(f"messages that cannot be turned into a prompt: {error}") from error
    if rest["input_ids"].shape[1] == 0 or prefix["input_ids"].shape[1] == 0:
        return whole, None, None
    return whole, prefix, rest


def _without_question(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with the last text empty; None where nothing is to be shared before it."""
    last = messages[-1]
    content = last["content"]
    if last["role"] != "user":
        return None
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": ""}] if len(messages) > 1 else None
    if not content or content[-1].get("type") != "text" or len(messages) + len(content) < 3:
        return None
    return [*messages[:-1], {**last, "content": [*content[:-1], {**content[-1], "text": ""}]}]


def digest(inputs: Mapping[str, Any], how: str) -> str:
    """What tells prompts apart: a hash of all their tensors, pictures included, and of `how`."""
    found = hashlib.blake2b(how.encode(), digest_size=16)
    for name, x in sorted(inputs.items()):
        if isinstance(x, Tensor):
            found.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
            flat = x.detach().cpu().contiguous().flatten()
            found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def checked(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Inputs of one row, where the model is.

    Raises:
        Refused: no input_ids, or other than one row of them.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or ids.shape[1] == 0:
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
        raise Refused(f"input_ids of shape {shape}: a request is one row, [1, N]")
    found = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
    return found
