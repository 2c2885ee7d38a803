"""Models for an evaluation: the built-in one, or what transformers loads."""

from __future__ import annotations

from typing import Any


def load_model(
    name: str = "builtin",
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
) -> tuple[Any, Any]:
    """A model in eval mode, and its processor (a tokenizer for a text model).

    Args:
        name: "builtin", a folder, or a hub's id.
        device: "auto" is the GPU where there is one.
        dtype: "auto" is what the model was saved in.
        device_map: as transformers takes it; "auto" spreads a model over all GPUs.

    Raises:
        ValueError: a model that cannot be loaded, or an unknown device or dtype.
    """
    from mmkv import chat

    if device_map is None:
        loaded = chat.load(name, device, dtype)
        return loaded.model, loaded.processor
    if dtype not in chat.DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(chat.DTYPES)}")
    import torch
    import transformers as hf
    from transformers.models.auto import modeling_auto

    from mmkv.builtin import WEIGHTS

    path = str(WEIGHTS) if name == "builtin" else name
    try:
        kind = hf.AutoConfig.from_pretrained(path).model_type
        sees = kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        reader: Any = hf.AutoProcessor if sees else hf.AutoTokenizer
        maker: Any = hf.AutoModelForImageTextToText if sees else hf.AutoModelForCausalLM
        chosen: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = maker.from_pretrained(path, dtype=chosen, device_map=device_map)
        return model.eval(), reader.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"cannot load model {name!r}: {error}") from error
