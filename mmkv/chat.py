"""One question to a model, with the full cache and with a compressed one.

What `mmkv chat` does, without its terminal: errors a user can make are `ValueError`s whose message
is one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mmkv.loading import models, quiet, untrusted
from mmkv.registry import option_types, policy_class

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from mmkv.policy import Policy
    from mmkv.report import CacheReport

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


@dataclass(frozen=True)
class Answer:
    """What came out.

    Attributes:
        text: the answer.
        tokens: how many tokens were generated.
        nbytes: bytes of the cache when it ended.
        report: the compressed cache when it ended; None with the full cache.
        kept: (layer, int64 [H, n]) for each compressed layer, as `cache.kept`, after the prompt.
    """

    text: str
    tokens: int
    nbytes: int
    report: CacheReport | None = None
    kept: list[tuple[int, Tensor]] = field(default_factory=list["tuple[int, Tensor]"])


def parse_options(policy: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Policy options from texts such as "window=16", as the policy's fields are typed.

    Raises:
        ValueError: an unknown policy, no "=", or a value of another type. An unknown option is
            left to `mmkv.get_policy`, which lists the candidates.
    """
    cls = policy_class(policy)
    typed = option_types(cls)
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
    """A fifth where no budget is given; None where the policy or the profile says how much.

    Raises:
        ValueError: the file holds no profile.
    """
    from mmkv.profiles import Profile

    sized = profile is not None and bool(Profile.load(profile).fractions)
    if budget is None and not sized and policy.retention is None:
        return DEFAULT_BUDGET
    return budget


def parse_value(name: str, text: str, hint: Any) -> Any:
    """The option `name`'s text as the type that a field's annotation names.

    Raises:
        ValueError: it is of another type; the message shows it.
    """
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
    """A picture as RGB, upright.

    Raises:
        ValueError: missing, too large or unreadable; the message names the file.
    """
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
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    chosen: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    where = models.find_device(device) if device_map is None else None
    more = {} if device_map is None else {"device_map": device_map}
    model, processor, reads_pictures = models.pretrained(name, dtype=chosen, **more)
    return Loaded(name, model if where is None else model.to(where), processor, reads_pictures)


def encode(loaded: Loaded, question: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """The model's inputs for one user message: the pictures, then the question.

    Raises:
        ValueError: pictures for a model that reads none, or no chat template to place them.
    """
    check_pictures(loaded, pictures)
    content: Any = question
    if loaded.reads_pictures and loaded.processor.chat_template is not None:
        content = [{"type": "image", "image": x} for x in pictures]
        content.append({"type": "text", "text": question})
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

    Raises:
        ValueError: no chat template, and more than one message; or a picture of extreme shape.
    """
    from mmkv.picture import check_size

    shown: Any = [x["content"] for x in messages if isinstance(x.get("content"), list)]
    for part in (part for parts in shown for part in parts if part.get("type") == "image"):
        check_size(part["image"], getattr(loaded.processor, "image_processor", None))
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
        marks = adds_special(processor, text)
        inputs = processor(text, add_special_tokens=marks, return_tensors="pt")
    else:
        how |= {"tokenize": True, "return_dict": True, "return_tensors": "pt", **marked}
        inputs = processor.apply_chat_template(messages, **how)
    return on_device(loaded.model, inputs)


def split_prompt(
    loaded: Loaded, question: str, pictures: Sequence[Image.Image]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of `encode` cut before the question: what to read, and what to ask.

    The first has all pictures; it is what the prompt has in common with one of no question.

    Raises:
        ValueError: as `encode`.
    """
    return split_inputs(encode(loaded, question, pictures), encode(loaded, "", pictures))


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
    """Refuse pictures that a model cannot be shown.

    Raises:
        ValueError: it reads none, or has no chat template to place them.
    """
    if pictures and not loaded.reads_pictures:
        raise ValueError(f"model {loaded.name!r} reads text only: leave the pictures out")
    if pictures and loaded.processor.chat_template is None:
        raise ValueError(f"model {loaded.name!r} has no chat template: no place for pictures")


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


def ask(
    loaded: Loaded,
    inputs: dict[str, Any],
    policy: Policy | None = None,
    budget: float | int | None = None,
    *,
    profile: str | Path | None = None,
    kv_dtype: str | None = None,
    max_new_tokens: int = 80,
    temperature: float = 0.0,
    seed: int = 0,
) -> Answer:
    """Generate one answer, with the full cache (`policy` None) or a compressed one.

    Args:
        loaded: a model that is not wrapped; it is left so.
        inputs: from `encode`.
        policy: as for `mmkv.wrap`; so are `budget`, `profile` and `kv_dtype`.
        max_new_tokens: when to stop at the latest.
        temperature: 0 takes the likeliest token; above, tokens are drawn.
        seed: what the draws start from.

    Raises:
        ValueError: what `mmkv.wrap` refuses.
    """
    from mmkv.cache_name import cache_in
    from mmkv.wrapping import wrapped

    model, kept = loaded.model, list[tuple[int, "Tensor"]]()

    def remember(module: Any, args: Any, output: Any) -> None:
        if not kept:
            kept.extend(_kept(cache_in(output)))

    how = {**inputs, **generation(max_new_tokens, temperature, seed)}
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if policy is not None:
            wrap: Any = {"profile": profile, "kv_dtype": kv_dtype}
            stack.enter_context(wrapped(model, policy, budget, **wrap))
            stack.callback(model.register_forward_hook(remember).remove)
        out = model.generate(**how, return_dict_in_generate=True)
    new = out.sequences[0, inputs["input_ids"].shape[1] :]
    cache = cache_in(out)
    return Answer(
        text=loaded.processor.decode(new, skip_special_tokens=True).strip(),
        tokens=len(new),
        nbytes=cache_nbytes(cache),
        report=None if policy is None else cache.report(),
        kept=kept,
    )


def generation(max_new_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """What `generate` takes for these; draws start from `seed` now."""
    import torch

    torch.manual_seed(seed)
    drawn = {"temperature": temperature} if temperature else {"temperature": None, "top_p": None}
    return {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, **drawn}


def _kept(cache: Any) -> list[tuple[int, Tensor]]:
    from mmkv.cache.layer import CompressedLayer

    layers = enumerate(cache.layers)
    return [(i, cache.shares(i)[0].cpu()) for i, x in layers if isinstance(x, CompressedLayer)]


def cache_nbytes(cache: Any) -> int:
    """Bytes that a cache holds for keys and values, of a wrapped model or not."""
    from mmkv.cache.layer import nbytes

    return sum(map(nbytes, cache.layers))


def image_mask(loaded: Loaded, inputs: dict[str, Any]) -> Tensor:
    """Bool [N], True where the prompt holds a token of a picture or a video."""
    import torch

    from mmkv import adapters

    ids: Tensor = inputs["input_ids"][0].cpu()
    tokens = adapters.find(loaded.model).image_token_ids
    return torch.isin(ids, torch.tensor(tokens, dtype=ids.dtype))


def draw(
    loaded: Loaded,
    inputs: dict[str, Any],
    answer: Answer,
    pictures: Sequence[Image.Image],
    paths: Sequence[Path],
    title: str,
) -> None:
    """Write one figure a picture: its patches that the cache kept after the prompt, by layer.

    Raises:
        ValueError: the model's patch grid is not known.
        OSError: a file cannot be written.
    """
    from mmkv import picture as show

    pixels: Tensor = inputs["pixel_values"].float().cpu()
    if pixels.ndim != 4 or len(pixels) != len(pictures):
        raise ValueError(
            f"the patch grid is not known: pixel_values of shape {tuple(pixels.shape)} for "
            f"{len(pictures)} picture(s)"
        )
    image = image_mask(loaded, inputs)
    shares = [(i, show.kept_patches(kept, image, len(pictures))) for i, kept in answer.kept]
    for p, (original, path) in enumerate(zip(pictures, paths, strict=True)):
        seen = show.as_seen(original, pixels[p].numpy(), loaded.processor.image_processor)
        show.save(path, seen, [(i, x[p]) for i, x in shares], title)
