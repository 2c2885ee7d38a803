"""From what a request brings to the model's inputs, and how the model reads them."""

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
from mmkv.cache.config import CacheConfig
from mmkv.calls import CACHE, cache_in
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
    """The inputs of a conversation; and, cut before its last text, what to read and what to ask.

    There is a cut where something stands before the last text of the last turn, which is the
    user's: other turns, a system text, or pictures; and no picture behind it.

    What the messages spell is text: a control token in them is encoded as its letters. Messages
    that the model cannot be given are refused.
    """
    parts = [part for x in messages if not isinstance(x["content"], str) for part in x["content"]]
    try:
        chat.check_pictures(loaded, [x["image"] for x in parts if x.get("type") == "image"])
    except ValueError as error:
        raise Refused(str(error)) from None
    if template:
        read = _variables(str(loaded.processor.chat_template))
        if unread := sorted({*template} - read - {"tools", "documents"}):
            # A processor would take it for an option of its own.
            name, has = unread[0], sorted(read - {"messages", "add_generation_prompt"})
            told = f"{name!r} is no variable of the chat template: {has}"
            raise Refused(f"chat_template_kwargs: {told}")
        if template.get("tools") and "tools" not in read:
            raise Refused("tools: the model's chat template has no place for them")
    given, marks = str([messages, template]), filter(str.strip, loaded.tokenizer.get_added_vocab())
    how = {"sanitize": any(mark in given for mark in marks)}
    try:
        whole = chat.encode_messages(loaded, messages, template, **how)
        empty = _without_question(messages) if split else None
        if empty is None:
            return whole, None, None
        other = chat.encode_messages(loaded, empty, template, **how)
        prefix, rest = chat.split_inputs(whole, other)
    except Exception as error:  # of templates and processors, which raise what they like
        raise Refused(f"messages that cannot be turned into a prompt: {error}") from error
    if rest["input_ids"].shape[1] == 0 or prefix["input_ids"].shape[1] == 0:
        return whole, None, None
    return whole, prefix, rest


def texts(messages: Sequence[Message] | None) -> str:
    """All texts of messages."""
    contents = [x["content"] for x in messages or ()]
    parts = [[{"text": x}] if isinstance(x, str) else x for x in contents]
    return "".join(part.get("text", "") for content in parts for part in content)


@cache
def _variables(template: str) -> set[str]:
    """What a chat template reads beside what it sets itself."""
    import jinja2
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    # Tags of transformers that are none of Jinja's.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    return jinja2.meta.find_undeclared_variables(environment.parse(plain))


def encode_prompt(loaded: chat.Loaded, prompt: str | Sequence[int]) -> dict[str, Any]:
    """The inputs of a prompt that is no conversation: its text, in which control tokens count."""
    tokenizer = loaded.tokenizer
    if isinstance(prompt, str):
        marks = chat.adds_special(tokenizer, prompt)
        ids = tokenizer(prompt, add_special_tokens=marks, return_tensors="pt")["input_ids"]
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
    """What tells prompts apart: a hash of all that they bring, pictures included, and of `how`."""
    found = {keystr(place): x for place, x in tree_flatten_with_path(dict(inputs))[0]}
    arrays = {name: x for name, x in found.items() if isinstance(x, Tensor | np.ndarray)}
    others = [(name, x) for name, x in sorted(found.items()) if name not in arrays]
    tensors = {name: torch.as_tensor(x) for name, x in arrays.items()}
    return of_tensors(tensors, f"{how} {others}")


def checked(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Inputs, where the model is; other than one row of them is refused."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or ids.shape[1] == 0:
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else None
        raise Refused(f"input_ids of shape {shape}: a request is one row, [1, N]")
    found = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()}
    found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
    return found


class Reader:
    """Reads prompts with one wrapped model, so many tokens at a time."""

    def __init__(self, attachment: Attachment, chunk: int) -> None:
        self.model: Any = attachment.model
        self.attachment, self.size = attachment, chunk

    def cache(self, plan: CacheConfig) -> CompressedCache:
        """An empty cache of one request."""
        cache = CompressedCache(self.attachment.parts.config, plan)
        cache.own_plan = plan is not self.attachment.plan
        return cache

    def chunk(self, inputs: Mapping[str, Any]) -> int | None:
        """Tokens to read at a time; None where the prompt must be read at once."""
        encodes = getattr(self.model, "_supports_mm_encoder_outputs", None)
        if encodes is None:
            # Older releases cut neither what stands behind a cache nor positions of several axes.
            cache = cache_in(inputs)
            begun = cache is not None and cache.get_seq_length() > 0
            if begun or hasattr(self.model.config, "vision_config"):
                return None
        elif not encodes() and any(
            isinstance(x, Tensor) and x.is_floating_point() for x in inputs.values()
        ):
            return None
        # Where tokens of a picture or of the whole prompt see later ones, no cut may part them.
        both_ways = self.attachment.parts.both_ways or "token_type_ids" in inputs
        return None if both_ways else self.size

    def read(self, request: Request, given: dict[str, Any]) -> Tensor:
        """Run a prompt through the model: logits [1, V] of the first token.

        `generate` prepares all that differs from model to model: masks, positions, pictures, and
        what tokens are chosen by.
        """
        found: list[Tensor] = []

        def read(model: Any, input_ids: Tensor, logits_processor: Any, **more: Any) -> Tensor:
            config, _ = more.pop("generation_config"), more.pop("stopping_criteria")
            out = model._prefill(input_ids, config, more)
            kwargs = model._update_model_kwargs_for_generation(out, more)
            longer = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
            step = model.prepare_inputs_for_generation(longer, next_sequence_length=1, **kwargs)
            at = input_ids.new_tensor([[input_ids.shape[1]]])
            request.position = step.get("position_ids", at)
            room = input_ids.new_zeros(1, request.max_new_tokens)
            request.ids = torch.cat([input_ids, room], dim=1)
            request.processors = logits_processor
            eos = getattr(config, "_eos_token_tensor", None)
            request.eos = frozenset() if eos is None else frozenset(eos.flatten().tolist())
            found.append(out.logits[:, -1].to(copy=True, dtype=torch.float32))
            return input_ids

        sampling = request.sampling
        drawn: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
        if sampling.draws:
            drawn = {k: getattr(sampling, k) for k in drawn} | {"min_p": sampling.min_p or None}
            request.generator = torch.Generator(self.model.device)
            if sampling.seed is None:
                request.generator.seed()
            else:
                request.generator.manual_seed(sampling.seed)
        if sampling.repetition_penalty is not None:
            drawn["repetition_penalty"] = sampling.repetition_penalty
        with ExitStack() as ending:
            if sampling.echo and sampling.logprobs is not None:
                ending.callback(self._scores(request, given).remove)
                given = {**given, "logits_to_keep": 0}
            self.model.generate(
                **given,
                **drawn,
                logits_processor=LogitsProcessorList(request.extra_processors),
                do_sample=sampling.draws,
                max_new_tokens=max(1, request.max_new_tokens),  # none is chosen here
                use_cache=True,
                num_beams=1,
                num_return_sequences=1,
                prefill_chunk_size=self.chunk(given),
                disable_compile=True,
                custom_generate=read,
            )
        return found[0]

    def _scores(self, request: Request, given: dict[str, Any]) -> Any:
        """A hook that notes how likely the prompt's tokens are, chunk by chunk."""
        ids: list[int] = given["input_ids"][0].tolist()
        tokenizer, top = request.text.tokenizer, request.sampling.logprobs or 0
        first = "" if tokenizer is None else tokenizer.decode(ids[:1])
        found = [TokenLogprobs(Logprob(ids[0], first, None), ())]

        def note(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            if cache_in(kwargs) is given[CACHE]:  # not a step of others
                following = ids[len(found) :][: out.logits.shape[1]]
                logits = out.logits[0, : len(following)]
                found.extend(choose.logprobs(logits, following, top, tokenizer))
                request.echo = request.echo._replace(logprobs=tuple(found))

        return self.model.register_forward_hook(note, with_kwargs=True)


def kept(cache: CompressedCache) -> int:
    """Tokens kept of a prompt, mean over layers and heads."""
    blocks = [block for layer in cache.compressed for block in layer.keeping().blocks]
    rows = sum(len(x.positions) for x in blocks)
    return round(sum(len(x.positions) * float(x.schedule.counts.mean()) for x in blocks) / rows)
