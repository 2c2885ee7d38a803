"""A conversation as a model's inputs: the first turn by `mmkv.chat`, later ones appended.

Earlier turns stay the very tokens that the cache has seen; only what the chat template puts
between an answer and the next one is encoded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv import chat

if TYPE_CHECKING:
    from PIL import Image

_ANSWER = "qzanswerqz"  # stands for the answer in the template; no text of ours


@dataclass(frozen=True)
class Tokens:
    """A conversation so far: ids int64 [1, N], and what belongs to its pictures.

    Attributes:
        ids: tokens.
        aligned: other inputs of shape [1, N], such as token types.
        pictures: inputs that count pictures along their first dimension, such as pixel_values.
    """

    ids: Tensor
    aligned: dict[str, Tensor]
    pictures: dict[str, Tensor]

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> Tokens:
        """Split what a processor returns."""
        ids: Tensor = inputs["input_ids"]
        rest = {k: x for k, x in inputs.items() if k not in ("input_ids", "attention_mask")}
        aligned = {k: x for k, x in rest.items() if x.shape == ids.shape}
        return cls(ids, aligned, {k: x for k, x in rest.items() if k not in aligned})

    def extended(self, new: Tokens) -> Tokens:
        """These tokens, then new ones with their pictures."""
        names = {*self.aligned, *new.aligned}
        return Tokens(
            torch.cat([self.ids, new.ids], dim=1),
            {k: torch.cat([_or_zeros(x, k) for x in (self, new)], dim=1) for k in names},
            {
                k: torch.cat([x.pictures[k] for x in (self, new) if k in x.pictures])
                for k in {*self.pictures, *new.pictures}
            },
        )

    def inputs(self, pictures: dict[str, Tensor]) -> dict[str, Tensor]:
        """For `model.generate`, with the pictures that its cache has not seen."""
        mask = torch.ones_like(self.ids)
        return {"input_ids": self.ids, "attention_mask": mask, **self.aligned, **pictures}


def _or_zeros(tokens: Tokens, name: str) -> Tensor:
    found = tokens.aligned.get(name)
    return torch.zeros_like(tokens.ids) if found is None else found


def next_turn(
    loaded: chat.Loaded,
    before: Tokens,
    earlier: Sequence[int],
    question: str,
    pictures: Sequence[Image.Image],
) -> Tokens:
    """The tokens between an answer and the next one.

    Args:
        loaded: the model.
        before: the conversation up to the last answer's last token.
        earlier: how many pictures each earlier turn had.
        question: of the new turn.
        pictures: of the new turn.

    Raises:
        ValueError: pictures for a model that reads none, or no chat template to place them.
    """
    chat.check_pictures(loaded, pictures)
    processor = loaded.processor
    tokenizer = getattr(processor, "tokenizer", processor)
    if processor.chat_template is None:
        text = f"\n{question}\n"
    else:
        text = _between(loaded, earlier, question, len(pictures))
    end: str | None = tokenizer.eos_token
    if end and text.startswith(end) and int(before.ids[0, -1]) == tokenizer.eos_token_id:
        text = text.removeprefix(end)
    more: dict[str, Any] = {"images": list(pictures)} if pictures else {}
    inputs = processor(text=text, return_tensors="pt", add_special_tokens=False, **more)
    return Tokens.of(chat.on_device(loaded.model, inputs))


def _between(loaded: chat.Loaded, earlier: Sequence[int], question: str, pictures: int) -> str:
    """What the template writes after the last answer, up to where the next one begins."""
    messages: list[dict[str, Any]] = []
    for count in earlier:
        messages += [
            {"role": "user", "content": _content(loaded, "?", count)},
            {"role": "assistant", "content": _content(loaded, _ANSWER, 0)},
        ]
    messages.append({"role": "user", "content": _content(loaded, question, pictures)})
    whole: str = loaded.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    after = whole.split(_ANSWER, len(earlier))
    if len(after) != len(earlier) + 1:
        raise ValueError(f"the chat template of model {loaded.name!r} leaves earlier answers out")
    return after[-1]


def _content(loaded: chat.Loaded, text: str, pictures: int) -> Any:
    if not loaded.reads_pictures:
        return text
    return [*[{"type": "image"}] * pictures, {"type": "text", "text": text}]
