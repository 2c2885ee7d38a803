"""Load a model by its name, and encode questions with pictures.

Errors of a user are `ValueError`s whose message is one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmkv import adapters
from mmkv.context_texts import adds_special
from mmkv.loading import models
from mmkv.loading.names import DEFAULT_MODEL, DTYPES
from mmkv.picture import check_size


@dataclass(frozen=True)
class Loaded:
    """A model and its processor, or its tokenizer if it reads no pictures."""

    name: str
    model: Any
    processor: Any

    @property
    def reads_pictures(self) -> bool:
        """Whether the model reads pictures, by its processor."""
        return hasattr(self.processor, "image_processor")

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer, or the processor if it is a tokenizer."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def places_pictures(self) -> bool:
        """Whether the chat template has a place for pictures in a message."""
        return self.reads_pictures and self.processor.chat_template is not None

    def message(
        self, text: str, pictures: Sequence[Image.Image] = (), *, role: str = "user"
    ) -> dict[str, Any]:
        """Return a chat message of pictures, then a text, with the content that its model takes."""
        content: Any = text
        if pictures or self.places_pictures:
            content = [*({"type": "image", "image": x} for x in pictures)]
            content.append({"type": "text", "text": text})
        return {"role": role, "content": content}


def load(
    name: str = DEFAULT_MODEL,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
) -> Loaded:
    """Load a model by its name: a built-in one, or one that transformers loads.

    Args:
        name: "smollm2-vision", "smollm2", a folder, a .gguf file, or a hub's id.
        device: "auto" is the GPU where there is one.
        dtype: one of `DTYPES`; "auto" is that of the saved weights (float32 for the
            built-in models and for GGUF files).
        device_map: of transformers, in place of a device; "auto" spreads over all GPUs.

    Raises:
        ValueError: the model cannot be loaded, or device or dtype is unknown.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    torch_dtype: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    if device_map is not None:
        return Loaded(name, *models.pretrained(name, dtype=torch_dtype, device_map=device_map))
    target = models.find_device(device)
    model, processor = models.pretrained(name, dtype=torch_dtype)
    return Loaded(name, model.to(target), processor)


def encode(loaded: Loaded, question: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """Return the model's inputs for one user message: the pictures, then the question."""
    return encode_messages(loaded, [loaded.message(question, pictures)])


def encode_messages(loaded: Loaded, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the model's inputs for a conversation, by its chat template.

    Args:
        loaded: the model and its processor.
        messages: {"role": ..., "content": a text, or parts {"type": "text", "text": ...} and
            {"type": "image", "image": a picture}}.
    """
    contents: Any = [x["content"] for x in messages if isinstance(x.get("content"), list)]
    pictures = [x["image"] for parts in contents for x in parts if x.get("type") == "image"]
    check_pictures(loaded, pictures)
    processor: Any = loaded.processor
    if processor.chat_template is None:
        if len(messages) > 1 or not isinstance(messages[0]["content"], str):
            raise ValueError(f"model {loaded.name!r} has no chat template: give it one text")
        inputs = processor(text=messages[0]["content"], return_tensors="pt")
    elif not loaded.reads_pictures:
        # Here special tokens are added only if the template has not; a processor always adds them.
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = processor(
            text, add_special_tokens=adds_special(processor, text), return_tensors="pt"
        )
    else:
        inputs = processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    return on_device(loaded.model, inputs)


def split_inputs(
    whole: Mapping[str, Any], empty: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut a prompt where it begins to differ from the same one without a question.

    Returns:
        The tokens before, with all pictures, and the inputs of the others.
    """
    ids, bare = whole["input_ids"][0].tolist(), empty["input_ids"][0].tolist()
    n = next((i for i, (a, b) in enumerate(zip(ids, bare, strict=False)) if a != b), len(bare))
    shape = whole["input_ids"].shape
    tokenwise = [k for k, x in whole.items() if getattr(x, "shape", None) == shape]
    first = {k: x[:, :n] if k in tokenwise else x for k, x in whole.items()}
    return first, {k: whole[k][:, n:] for k in tokenwise}


def check_pictures(loaded: Loaded, pictures: Sequence[Image.Image]) -> None:
    """Refuse pictures that the model cannot read, or that are of extreme shape."""
    if pictures and not loaded.reads_pictures:
        raise ValueError(f"model {loaded.name!r} reads text only: leave the pictures out")
    if pictures and loaded.processor.chat_template is None:
        raise ValueError(f"model {loaded.name!r} has no chat template: no place for pictures")
    for picture in pictures:
        check_size(picture, getattr(loaded.processor, "image_processor", None))


def on_device(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move inputs to the model's device, pictures to its dtype."""
    device, dtype = model.device, model.dtype
    return {
        k: x.to(device, dtype) if x.is_floating_point() else x.to(device) for k, x in inputs.items()
    }


def max_positions(model: Any) -> int | None:
    """Return how many positions the model's text config allows; None if it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def image_mask(loaded: Loaded, inputs: dict[str, Any]) -> Tensor:
    """Return bool [N], True for tokens of pictures and videos in the prompt."""
    ids: Tensor = inputs["input_ids"][0].cpu()
    return adapters.find(loaded.model).is_image(ids)
