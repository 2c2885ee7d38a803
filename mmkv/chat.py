"""A model by its name, its inputs for a question with pictures, and options in words.

Errors a user can make are `ValueError`s whose message is one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image
from torch import Tensor

from mmkv.loading import models, untrusted
from mmkv.picture import check_size
from mmkv.policy import Policy
from mmkv.registry import option_types, policy_class

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Kept where nothing says how much.
DEFAULT_BUDGET = 0.2


@dataclass(frozen=True)
class Loaded:
    """A model and what turns text and pictures into its inputs (`reads_pictures`) or only text."""

    name: str
    model: Any
    processor: Any
    reads_pictures: bool

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer, or the processor where that is one."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def places_pictures(self) -> bool:
        """Whether its chat template gives pictures a place in a message."""
        return self.reads_pictures and self.processor.chat_template is not None


def parse_options(policy: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Policy options from texts such as "window=16", as the policy's fields are typed.

    An unknown option is left to `mmkv.get_policy`, which lists the candidates.
    """
    typed = option_types(policy_class(policy))
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise ValueError(f"option {pair!r}: expected name=value, such as window=16")
        options[name] = parse_value(name, text.strip(), typed.get(name, str))
    return options


def budget_or_default(
    budget: int | float | None, policy: Policy, profile: Path | None
) -> int | float | None:
    """A fifth where no budget is given; None where the policy or the profile says how much."""
    from mmkv.profiles import Profile

    sized = profile is not None and bool(Profile.load(profile).fractions)
    if budget is None and not sized and policy.retention is None:
        return DEFAULT_BUDGET
    return budget


def parse_value(name: str, text: str, hint: Any) -> Any:
    """The option `name`'s text as the type that a field's annotation names."""
    choices = flat(hint)
    if text in choices:
        return text
    if text.lower() == "none" and type(None) in choices:
        return None
    for kind, expected in ((bool, "true or false"), (int, "a whole number"), (float, "a number")):
        if kind in choices:
            try:
                return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
            except (ValueError, KeyError):
                raise ValueError(f"option {name}={text!r}: expected {expected}") from None
    return text


def flat(hint: Any) -> list[Any]:
    """The types and literal values of an annotation."""
    args = get_args(hint)
    return [x for arg in args for x in flat(arg)] if args else [hint]


def read_picture(path: str | Path) -> Image.Image:
    """A picture as RGB, upright; one that cannot be read is an error that names the file."""
    try:
        return untrusted.read_picture(path, untrusted.upright)
    except untrusted.PictureError as error:
        raise ValueError(f"cannot read picture {str(path)!r}: {error}") from error


def load(
    name: str = "builtin", device: str = "auto", dtype: str = "auto", device_map: str | None = None
) -> Loaded:
    """A model by its name: the built-in one, SmolLM2, or one that transformers loads.

    Args:
        name: "builtin", "smollm2", a folder, a .gguf file, or a hub's id.
        device: "auto" is the GPU where there is one.
        dtype: one of `DTYPES`; "auto" is what the model was saved in (float32 for the first two
            names and for GGUF files).
        device_map: in place of a device, as transformers takes it; "auto" spreads over all GPUs.

    Raises:
        ValueError: a model that cannot be loaded, or an unknown device or dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    chosen: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    if device_map is not None:
        return Loaded(name, *models.pretrained(name, dtype=chosen, device_map=device_map))
    where = models.find_device(device)
    model, *others = models.pretrained(name, dtype=chosen)
    return Loaded(name, model.to(where), *others)


def encode(loaded: Loaded, question: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """The model's inputs for one user message: the pictures, then the question."""
    content: Any = question
    if pictures or loaded.places_pictures:
        shown = [{"type": "image", "image": x} for x in pictures]
        content = [*shown, {"type": "text", "text": question}]
    return encode_messages(loaded, [{"role": "user", "content": content}])


def encode_messages(
    loaded: Loaded,
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any] | None = None,
    *,
    sanitize: bool = False,
) -> dict[str, Any]:
    """The model's inputs for a conversation, as its chat template writes it.

    Args:
        loaded: the model and its processor.
        messages: {"role": ..., "content": a text, or parts {"type": "text", "text": ...} and
            {"type": "image", "image": a picture}}.
        template: what the template is given beside the messages, such as tools.
        sanitize: encode control tokens that the messages spell as the text that they are.
    """
    shown: Any = [x["content"] for x in messages if isinstance(x.get("content"), list)]
    pictures = [x["image"] for parts in shown for x in parts if x.get("type") == "image"]
    check_pictures(loaded, pictures)
    processor: Any = loaded.processor
    how: Any = {"add_generation_prompt": True, **(template or {}), "tokenize": False}
    marked: Any = {"sanitize_control_tokens": True} if sanitize else {}
    if not {*marked} <= {*inspect.signature(processor.apply_chat_template).parameters}:
        raise ValueError("the text spells a control token: leave it out, or update transformers")
    if processor.chat_template is None:
        if len(messages) > 1 or not isinstance(messages[0]["content"], str):
            raise ValueError(f"model {loaded.name!r} has no chat template: give it one text")
        whole: Any = {"split_special_tokens": True} if sanitize else {}
        inputs = processor(text=messages[0]["content"], return_tensors="pt", **whole)
    elif not loaded.reads_pictures and not sanitize:
        # A tokenizer adds no marks of its own to what a template wrote, a processor does.
        text = processor.apply_chat_template(messages, **how)
        inputs = processor(
            text, add_special_tokens=adds_special(processor, text), return_tensors="pt"
        )
    else:
        how |= {"tokenize": True, "return_dict": True, "return_tensors": "pt", **marked}
        inputs = processor.apply_chat_template(messages, **how)
    return on_device(loaded.model, inputs)


def split_inputs(
    whole: Mapping[str, Any], empty: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt cut where it goes apart from one of no question; the first part has all pictures."""
    ids, other = whole["input_ids"][0].tolist(), empty["input_ids"][0].tolist()
    n = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(other))
    return cut(whole, n)


def cut(inputs: Mapping[str, Any], n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt's first `n` tokens, with all its pictures, and what goes token by token behind."""
    shape = inputs["input_ids"].shape
    by_token = [k for k, x in inputs.items() if getattr(x, "shape", None) == shape]
    read = {k: x[:, :n] if k in by_token else x for k, x in inputs.items()}
    return read, {k: inputs[k][:, n:] for k in by_token}


def check_pictures(loaded: Loaded, pictures: Sequence[Image.Image]) -> None:
    """Refuse pictures that a model cannot be shown, or that are of extreme shape."""
    if pictures and not loaded.reads_pictures:
        raise ValueError(f"model {loaded.name!r} reads text only: leave the pictures out")
    if pictures and loaded.processor.chat_template is None:
        raise ValueError(f"model {loaded.name!r} has no chat template: no place for pictures")
    for picture in pictures:
        check_size(picture, getattr(loaded.processor, "image_processor", None))


def on_device(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs where the model is, pictures in its dtype."""
    device, dtype = model.device, model.dtype
    return {
        k: x.to(device, dtype) if x.is_floating_point() else x.to(device) for k, x in inputs.items()
    }


def adds_special(tokenizer: Any, text: str) -> bool:
    """Whether the tokenizer shall add its own marks: not where a template has done so."""
    bos = tokenizer.bos_token
    return bos is None or not text.startswith(bos)


def image_mask(loaded: Loaded, inputs: dict[str, Any]) -> Tensor:
    """Bool [N], True where the prompt holds a token of a picture or a video."""
    from mmkv import adapters

    ids: Tensor = inputs["input_ids"][0].cpu()
    tokens = adapters.find(loaded.model).image_token_ids
    return torch.isin(ids, torch.tensor(tokens, dtype=ids.dtype))
