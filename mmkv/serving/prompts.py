"""Inputs of the model from messages and prompts, and a reader that runs the model on them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from transformers import LogitsProcessorList

from mmkv import chat
from mmkv.attach.attachment import Attachment
from mmkv.cache.compressed import CompressedCache
from mmkv.calls import CACHE, cache_in, has_pictures, reads_chunks
from mmkv.digest import of_tensors
from mmkv.serving import choose
from mmkv.serving.batch import Request
from mmkv.serving.reply import Logprob, Refused, TokenLogprobs

Message = Mapping[str, Any]


def encode(
    loaded: chat.Loaded,
    messages: Sequence[Message],
    template: Mapping[str, Any] | None = None,
    *,
    split: bool,
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
    """Return the inputs of a conversation; with `split` also its prefix and the rest, or None.

    The rest begins with the last text of the last turn, which must be the user's. There must be
    other turns, a system text, or pictures before that text, and no picture after it.

    Control tokens that a message spells are encoded as text. Messages that the model cannot take
    are refused.
    """
    parts = [part for x in messages if not isinstance(x["content"], str) for part in x["content"]]
    try:
        chat.check_pictures(loaded, [x["image"] for x in parts if x.get("type") == "image"])
    except ValueError as error:
        raise Refused(str(error)) from None
    if template:
        variables = _variables(str(loaded.processor.chat_template))
        if unknown := sorted({*template} - variables - {"tools", "documents"}):
            # A processor would take it as an option of its own.
            name, known = unknown[0], sorted(variables - {"messages", "add_generation_prompt"})
            message = f"{name!r} is no variable of the chat template: {known}"
            raise Refused(f"chat_template_kwargs: {message}")
        if template.get("tools") and "tools" not in variables:
            raise Refused("tools: the model's chat template has no place for them")
    text, marks = str([messages, template]), filter(str.strip, loaded.tokenizer.get_added_vocab())
    options = {"sanitize": any(mark in text for mark in marks)}
    try:
        whole = chat.encode_messages(loaded, messages, template, **options)
        empty = _without_question(messages) if split else None
        if empty is None:
            return whole, None, None
        without_question = chat.encode_messages(loaded, empty, template, **options)
        prefix, rest = chat.split_inputs(whole, without_question)
    except Exception as error:  # templates and processors may raise any error
        raise Refused(f"messages that cannot be turned into a prompt: {error}") from error
    if rest["input_ids"].shape[1] == 0 or prefix["input_ids"].shape[1] == 0:
        return whole, None, None
    return whole, prefix, rest


def texts(messages: Sequence[Message] | None) -> str:
    """Return all texts of messages, joined."""
    contents = [x["content"] for x in messages or ()]
    parts = [[{"text": x}] if isinstance(x, str) else x for x in contents]
    return "".join(part.get("text", "") for content in parts for part in content)


@cache
def _variables(template: str) -> set[str]:
    """Return the variables that a chat template reads and does not set itself."""
    import jinja2
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    # Tags that only transformers knows.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    return jinja2.meta.find_undeclared_variables(environment.parse(plain))


def encode_prompt(loaded: chat.Loaded, prompt: str | Sequence[int]) -> dict[str, Any]:
    """Return the inputs of a text or tokens without a template; control tokens count as such."""
    tokenizer = loaded.tokenizer
    if isinstance(prompt, str):
        special = chat.adds_special(tokenizer, prompt)
        ids = tokenizer(prompt, add_special_tokens=special, return_tensors="pt")["input_ids"]
    else:
        size = loaded.model.config.get_text_config().vocab_size
        if not all(type(token) is int and 0 <= token < size for token in prompt):
            raise Refused(f"a prompt of tokens: expected whole numbers from 0 to {size - 1}")
        ids = torch.tensor([prompt], dtype=torch.long)
    if ids.shape[1] == 0:
        raise Refused("the prompt is empty: give some text")
    inputs = {"input_ids": ids}
    if bool(chat.image_mask(loaded, inputs).any()):
        raise Refused("the prompt has tokens that stand for pictures: send those as messages")
    return inputs


def _without_question(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages with the last text empty; None if no prefix stands before it."""
    last = messages[-1]
    content = last["content"]
    if last["role"] != "user":
        return None
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": ""}] if len(messages) > 1 else None
    if not content or content[-1].get("type") != "text" or len(messages) + len(content) < 3:
        return None
    return [*messages[:-1], {**last, "content": [*content[:-1], {**content[-1], "text": ""}]}]


def digest(inputs: Mapping[str, Any], conditions: str) -> str:
    """Return a hash of all inputs, pictures included, and of `conditions`."""
    flat = {keystr(place): x for place, x in tree_flatten_with_path(dict(inputs))[0]}
    tensors = {k: torch.as_tensor(x) for k, x in flat.items() if isinstance(x, Tensor | np.ndarray)}
    others = [(name, x) for name, x in sorted(flat.items()) if name not in tensors]
    return of_tensors(tensors, f"{conditions} {others}")


def checked(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return inputs on the model's device, with a mask; refuse more or less than one row."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or ids.shape[1] == 0:
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
        raise Refused(f"input_ids of shape {shape}: a request is one row, [1, N]")
    moved = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    moved.setdefault("attention_mask", torch.ones_like(moved["input_ids"]))
    return moved


def chunk_size(attachment: Attachment, inputs: Mapping[str, Any], size: int) -> int | None:
    """Return the tokens to read at a time, `size`; None: the prompt must be read at once."""
    model: Any = attachment.model
    # Older releases do not cut positions of several axes (Qwen-VL) rightly either.
    if not reads_chunks(cache_in(inputs), hasattr(model.config, "vision_config")):
        return None
    if has_pictures(inputs) and not model._supports_mm_encoder_outputs():
        return None
    # Tokens of a picture or prompt that attend to later ones must be in the same chunk.
    return None if attachment.parts.both_ways or "token_type_ids" in inputs else size


def read(model: Any, request: Request, inputs: dict[str, Any], size: int | None) -> Tensor:
    """Read a prompt, `size` tokens at a time; return the logits [1, V] of the reply's first token.

    `generate` prepares what differs between models: masks, positions, pictures, and logits
    processors.
    """

    def prefill(model: Any, input_ids: Tensor, logits_processor: Any, **kwargs: Any) -> Tensor:
        config, _ = kwargs.pop("generation_config"), kwargs.pop("stopping_criteria")
        out = model._prefill(input_ids, config, kwargs)
        kwargs = model._update_model_kwargs_for_generation(out, kwargs)
        next_ids = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
        step = model.prepare_inputs_for_generation(next_ids, next_sequence_length=1, **kwargs)
        position = input_ids.new_tensor([[input_ids.shape[1]]])
        request.position = step.get("position_ids", position)
        request.ids = torch.nn.functional.pad(input_ids, (0, request.max_new_tokens))
        request.processors = logits_processor
        eos = getattr(config, "_eos_token_tensor", None)
        request.eos = frozenset() if eos is None else frozenset(eos.flatten().tolist())
        return out.logits[:, -1].to(copy=True, dtype=torch.float32)

    sampling = request.sampling
    options: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
    if sampling.draws:
        options = {k: getattr(sampling, k) for k in options} | {"min_p": sampling.min_p or None}
        request.generator = torch.Generator(model.device)
        if sampling.seed is None:
            request.generator.seed()
        else:
            request.generator.manual_seed(sampling.seed)
    if sampling.repetition_penalty is not None:
        options["repetition_penalty"] = sampling.repetition_penalty
    with ExitStack() as ending:
        if sampling.echo and sampling.logprobs is not None:
            ending.callback(_note_logprobs(model, request, inputs).remove)
            inputs = {**inputs, "logits_to_keep": 0}
        return model.generate(
            **inputs,
            **options,
            logits_processor=LogitsProcessorList(request.extra_processors),
            do_sample=sampling.draws,
            max_new_tokens=max(1, request.max_new_tokens),  # `prefill` chooses none
            use_cache=True,
            num_beams=1,
            num_return_sequences=1,
            prefill_chunk_size=size,
            disable_compile=True,
            custom_generate=prefill,
        )
    raise AssertionError  # for pyright: an ExitStack might swallow exceptions


def _note_logprobs(model: Any, request: Request, inputs: dict[str, Any]) -> Any:
    """Add a hook that notes the log probabilities of the prompt's tokens, chunk by chunk."""
    ids: list[int] = inputs["input_ids"][0].tolist()
    tokenizer, top = request.text.tokenizer, request.sampling.logprobs or 0
    first = "" if tokenizer is None else tokenizer.decode(ids[:1])
    entries = [TokenLogprobs(Logprob(ids[0], first, None), ())]

    def note(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if cache_in(kwargs) is inputs[CACHE]:  # the prompt's own pass, not a decode step
            next_tokens = ids[len(entries) :][: out.logits.shape[1]]
            logits = out.logits[0, : len(next_tokens)]
            entries.extend(choose.logprobs(logits, next_tokens, top, tokenizer))
            request.echo = request.echo._replace(logprobs=tuple(entries))

    return model.register_forward_hook(note, with_kwargs=True)


def kept(cache: CompressedCache) -> int:
    """Return the tokens kept of a prompt, mean over layers and heads."""
    rows = sum(len(x.positions) for x in cache.blocks)
    sizes = (len(x.positions) * float(x.schedule.counts.mean()) for x in cache.blocks)
    return round(sum(sizes) / rows)
