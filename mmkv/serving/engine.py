"""The engine: what it is asked is checked here; one thread (`Worker`) runs the model."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, SupportsFloat

from transformers import LogitsProcessor

from mmkv import chat, wrapping
from mmkv.attach import copy_probe
from mmkv.attach.attachment import attachment_of
from mmkv.budgets import number
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.calls import unwrap_container
from mmkv.digest import adapters
from mmkv.policy import Policy
from mmkv.registry import get_policy, load_plugin
from mmkv.serving import choose, prompts
from mmkv.serving.batch import Request
from mmkv.serving.memory import Bounds
from mmkv.serving.reply import Event, Refused, Reply, Sampling, TextStream
from mmkv.serving.worker import Limits, Worker

# The largest number that an option of a request's policy may be: no prompt has more tokens.
_MOST_OPTION = 2**17


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now (requests and bytes; `None` is no limit), and did so far (counts)."""

    running: int
    waiting: int
    prefilling: int
    cache_bytes: int
    cache_memory: int | None
    reserved_bytes: int  # what `cache_bytes` may come to
    prefixes: int  # held to be shared
    tokens_generated: int
    prompt_tokens: int
    requests_done: int  # for whatever reason
    prefix_hits: int  # requests that found theirs read


class Engine:
    """Serves many requests with one wrapped model.

    A reply equals what `model.generate` gives for its prompt alone, greedily and, with a seed,
    after `torch.manual_seed(seed)`; with `prefill_chunk_size=prefill_chunk` where the model was
    wrapped with evict_chunks=True. With a shared prefix it equals
    `mmkv.read(model, prefix).ask(rest)`: what stands behind the prefix is then kept whole.

    Args:
        model: a wrapped model; it must stay wrapped as it is.
        processor: turns messages into inputs and tokens into text; None: requests bring inputs,
            and replies have no text.
        cache_memory: bytes of keys and values that are never exceeded; None: no limit. Requests
            wait until what they take at the most is free.
        max_batch: replies that grow at a time, at the most.
        prefill_chunk: tokens of a prompt that are read between two steps of the running replies.
        share_prefixes: read once what requests begin with: of messages, all before the last text of
            the user's last turn, if that is more than the template; of inputs, their `prefix`.
        max_new_tokens: of a reply whose request does not say: so many, or what room is left.
        max_waiting: requests that may wait.
        max_prefixes: shared prefixes that are held, at the most; the least recently used one that
            no request waits for goes first.

    Raises:
        ValueError: the model is not wrapped, has layers with caches of their own, or is spread
            over processes.
    """

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        cache_memory: int | None = None,
        max_batch: int = 32,
        prefill_chunk: int = 512,
        share_prefixes: bool = True,
        max_new_tokens: int = 1024,
        max_waiting: int = 1024,
        max_prefixes: int = 32,
    ) -> None:
        self.model = unwrap_container(model)
        self._attachment = attachment_of(self.model)
        parts, config = self._attachment.parts, self._attachment.parts.config
        names = ("max_batch", "prefill_chunk", "max_new_tokens")
        for name, value in zip(names, (max_batch, prefill_chunk, max_new_tokens), strict=True):
            if value < 1:
                raise ValueError(f"{name}={value}: expected 1 or more")
        if (ranks := parts.ranks) > 1:
            raise ValueError(
                f"this model's heads are spread over {ranks} processes (tensor parallelism), and "
                "engines that take requests by themselves would not stay in step: load it in one "
                "process, with device_map='auto', or call model.generate in all of them"
            )
        probe = CompressedCache(config, self._attachment.plan)
        if len(probe.compressed) != len(probe.layers):
            raise ValueError(
                f"{config.model_type} has layers with a sliding window or linear attention, "
                "whose caches are the model's own and cannot join a batch: use model.generate"
            )
        reads = hasattr(processor, "image_processor")
        self.processor = processor
        self._loaded = chat.Loaded(type(self.model).__name__, self.model, processor, reads)
        self._tokenizer = self._loaded.tokenizer
        self.cache_memory, self.share_prefixes = cache_memory, share_prefixes
        self.max_new_tokens = max_new_tokens
        # Tokens of a prompt and its reply that the model has positions for; None: any number.
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self._bounds = Bounds(parts, self.model.dtype.itemsize, prefill_chunk)
        # 1 (a token) and 1.0 (all of them) are equal, and not the same budget.
        self._planned = lru_cache(maxsize=64, typed=True)(self._make_plan)
        self._grammars = choose.Grammars(self.model, self._tokenizer)
        limits = Limits(cache_memory, max_batch, share_prefixes, max_waiting, max_prefixes)
        self._worker = Worker(self._attachment, limits, self._bounds)

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]] | None = None,
        inputs: Mapping[str, Any] | None = None,
        *,
        prompt: str | Sequence[int] | None = None,
        prefix: Mapping[str, Any] | None = None,
        template: Mapping[str, Any] | None = None,
        repeated: bool = False,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        timeout: float | None = None,
        policy: str | Policy | None = None,
        budget: SupportsFloat | None = None,
        options: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> Reply:
        """Ask for a reply; it begins when its turn comes and memory is free.

        Args:
            messages: in the form of Hugging Face's chat templates; content is a text, or parts
                {"type": "text", "text": ...} and {"type": "image", "image": a picture}.
            inputs: of the model, one row, instead of messages; with `prefix` those behind it.
            prompt: a text, or its tokens, instead of messages: no template is written around it.
            prefix: inputs that others may share.
            template: what the chat template is given beside the messages, such as tools.
            repeated: whether the same is asked again at once, for another reply: it is read once,
                its last token apart, which is kept whole.
            sampling: how tokens are chosen; greedily if None.
            max_new_tokens: of the reply, at the most; None: the engine's `max_new_tokens`, or what
                the model's positions and the memory leave, if that is less; 0 with `echo` alone.
            timeout: seconds after which the reply ends, waiting included.
            policy: of this request; the model's own if None.
            budget: of this request; the model's own if both are None.
            options: of the policy that is named here.
            owner: whose it is, such as a client's key: prefixes are shared within one owner (None
                is one too), so that times tell none what another has sent.

        Raises:
            Refused: it can never be served; the message has the numbers.
            Busy: too many requests wait.
            Closed: the engine is.
        """
        if sum(x is not None for x in (messages, inputs, prompt)) != 1:
            raise Refused("give either messages, inputs or a prompt")
        sampling = sampling or Sampling()
        least = 0 if sampling.echo else 1
        if max_new_tokens is not None and max_new_tokens < least:
            raise Refused(f"max_new_tokens={max_new_tokens}: expected {least} or more")
        if sampling.stop and self._tokenizer is None:
            raise Refused("stop texts need an engine with a processor")
        plan = self._plan(policy, budget, options).started()
        split = self.share_prefixes and not plan.policy.postpone and not sampling.echo
        if inputs is None:
            whole, prefix, rest = self.encode(messages, prompt, template, split=split)
            if repeated and split:  # replies share all but the last token
                length = whole["input_ids"].shape[1]
                prefix, rest = chat.cut(whole, length - 1) if length > 1 else (None, None)
            inputs = whole if rest is None else rest
        inputs = prompts.checked(inputs, self.model.device)
        tokens = inputs["input_ids"].shape[1]
        behind, key = 0, ""  # tokens of a question behind a prefix, and what tells that apart
        if prefix is not None:
            if plan.policy.postpone:
                raise Refused(
                    f"postpone={plan.policy.postpone} waits for generated tokens, and a prefix is "
                    "read without any: give whole inputs"
                )
            prefix = prompts.checked(prefix, self.model.device)
            behind, tokens = tokens, tokens + prefix["input_ids"].shape[1]
            how = owner, adapters(self.model), plan, plan.task, plan.learned
            key = prompts.digest(prefix, repr(how))
        new, most = self._size(plan, tokens, behind, max_new_tokens)
        request = Request(
            reply=Reply(self._worker.notify),
            inputs=inputs,
            prefix=prefix,
            key=key,
            sampling=sampling,
            custom=self._custom(sampling, tokens),
            new=new,
            plan=plan,
            tokens=tokens,
            whole=most,
            text=TextStream(self._tokenizer, sampling.stop),
            deadline=None if timeout is None else time.monotonic() + timeout,
        )
        if sampling.echo and prefix is None and self._tokenizer is not None:
            text = self._tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
            request.echo = Event(-1, text)
        self._worker.add(request)
        return request.reply

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | Sequence[int] | None = None,
        template: Mapping[str, Any] | None = None,
        *,
        split: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]:
        """The model's inputs for messages or a prompt, see `prompts.encode`; or it is `Refused`."""
        if self._tokenizer is None:
            raise Refused("messages and texts need an engine with a processor: give inputs")
        text = prompts.texts(messages) if prompt is None else prompt
        if isinstance(text, str) and self.positions is not None:
            # Encoding the longest takes a minute. A token may stand for any number of blanks.
            least = sum(map(len, text.split())) // self._longest
            if least > self.positions:
                raise _overlong(f"a prompt of {least} or more tokens and a reply", self.positions)
        if prompt is not None:
            return prompts.encode_prompt(self._loaded, prompt), None, None
        if not messages:
            raise Refused("messages=[]: expected one at least")
        return prompts.encode(self._loaded, messages, template, split=split)

    def tokenize(self, **given: Any) -> list[int]:
        """The tokens of messages or a prompt; takes what `encode` takes."""
        return self.encode(**given)[0]["input_ids"][0].tolist()

    def _custom(self, sampling: Sampling, tokens: int) -> list[LogitsProcessor]:
        """What tokens are chosen by behind a prompt, beside what `generate` has."""
        found = list[LogitsProcessor]()
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias:
            size = self.model.config.get_text_config().vocab_size
            if wrong := [x for x in sampling.logit_bias if not 0 <= x < size]:
                raise Refused(f"logit_bias of token {wrong[0]}: the model has {size} tokens")
            found.append(choose.Penalties(sampling, tokens))
        if sampling.grammar is not None:
            if self._tokenizer is None:
                raise Refused("formats of replies need an engine with a processor")
            found.append(self._grammars.processor(sampling.grammar, tokens))
        return found

    def stats(self) -> EngineStats:
        """What the engine does now, and did so far."""
        return EngineStats(**self._worker.stats())

    def close(self) -> None:
        """End all requests ("cancelled") and the engine's thread."""
        self._worker.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _plan(
        self,
        policy: str | Policy | None,
        budget: SupportsFloat | None,
        options: Mapping[str, Any] | None,
    ) -> CacheConfig:
        """The plan of a request's own policy and budget, or the wrap's; it may be refused."""
        if options and not isinstance(policy, str):
            raise Refused(f"options={dict(options)}: give the name of the policy that they are of")
        for name, value in (options or {}).items():
            if isinstance(value, int | float) and abs(value) > _MOST_OPTION:
                raise Refused(f"{name}={str(value)[:20]}: at most {_MOST_OPTION} in a request")
        try:
            if policy is not None and not isinstance(policy, Policy):
                policy = get_policy(policy, **(options or {}))
            return self._planned(policy, None if budget is None else number(budget))
        except ValueError as error:
            raise Refused(str(error)) from error

    def _make_plan(self, policy: Policy | None, budget: float | int | None) -> CacheConfig:
        wrap = self._attachment.plan
        if policy is None and budget is None:
            return wrap
        plan, _ = wrapping.planned(
            self.model,
            self._attachment.parts,
            wrap.policy if policy is None else policy,
            wrap.budget if budget is None else budget,
            kv_dtype=wrap.kv_dtype,
            evict_chunks=wrap.evict_chunks,
        )
        plan = copy_probe.settled(self._attachment, plan)

        def compares(plan: CacheConfig) -> bool:
            return plan.needs_all_layers and plan.policy.layers.needs == "similarity"

        needs = plan.policy.score.uses_rotary and not wrap.policy.score.uses_rotary
        if needs or (compares(plan) and not compares(wrap)):
            raise Refused(
                f"policy={plan.policy.name!r} looks at what the engine's model does not show: "
                f"wrap it with that policy in place of {wrap.policy.name!r}"
            )
        return plan

    def _size(
        self, plan: CacheConfig, tokens: int, behind: int, asked: int | None
    ) -> tuple[int, int]:
        """How long a reply may get, as asked for or as there is room, and bytes with the prompt."""

        def need(new: int) -> int:
            return self._bounds.prompt(plan, tokens, new, behind)

        most, memory = self.positions, self.cache_memory
        told, new = f"a prompt of {tokens} tokens and a reply", asked
        if new is not None:
            told += f" of {new}"
        else:
            new = self.max_new_tokens if most is None else min(self.max_new_tokens, most - tokens)
            if memory is not None:
                new = bisect_right(range(1, new + 1), memory, key=need)
            new = max(1, new)
        if most is not None and tokens + new > most:
            raise _overlong(told, most)
        if memory is not None and need(new) > memory:
            told += f" may take {need(new)} bytes of keys and values"
            raise Refused(f"{told}, and cache_memory is {memory}")
        return new, need(new)

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))


def make_engine(
    model: str = "builtin",
    device: str = "auto",
    dtype: str = "auto",
    *,
    policy: str = "condense",
    budget: float | int | None = None,
    options: Mapping[str, Any] | None = None,
    profile: str | None = None,
    kv_dtype: str | None = None,
    plugins: Sequence[str] = (),
    **engine: Any,
) -> Engine:
    """Load a model (see `mmkv.chat.load`), wrap it (`mmkv.wrap`), and start its engine.

    Before that, `plugins` are loaded (`mmkv.registry.load_plugin`). All of these may raise errors.
    """
    for file in plugins:
        load_plugin(file)
    loaded = chat.load(model, device, dtype)
    more: dict[str, Any] = {"profile": profile, "kv_dtype": kv_dtype, **(options or {})}
    wrapping.wrap(loaded.model, policy, budget, **more)
    return Engine(loaded.model, loaded.processor, **engine)


def _overlong(told: str, most: int) -> Refused:
    return Refused(
        f"{told} are more than the {most} positions of the model", code="context_length_exceeded"
    )
