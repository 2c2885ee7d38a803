"""Models for an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def token_counter(name: str) -> Callable[[str], int]:
    """How many tokens a text has for a model, by its tokenizer alone.

    Raises:
        ValueError: no tokenizer can be loaded.
    """
    from mmkv.loading.models import load_tokenizer

    tokenizer = load_tokenizer(name)
    tokenizer.model_max_length = 10**9  # no warning: nothing is run on these texts
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_model(
    name: str = "builtin",
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
) -> tuple[Any, Any]:
    """A model in eval mode, and its processor (a tokenizer for a text model).

    Args:
        name, device, dtype: as for `mmkv.chat.load`.
        device_map: as transformers takes it; "auto" spreads a model over all GPUs.

    Raises:
        ValueError: a model that cannot be loaded, or an unknown device or dtype.
    """
    from mmkv import chat
    from mmkv.loading import models

    if device_map is None:
        loaded = chat.load(name, device, dtype)
        return loaded.model, loaded.processor
    if dtype not in chat.DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(chat.DTYPES)}")
    import torch

    chosen: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model, processor, _ = models.pretrained(name, dtype=chosen, device_map=device_map)
    return model, processor
