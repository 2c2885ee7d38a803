"""The engine: it checks requests; one thread (`Worker`) runs the model."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from typing import Any, SupportsFloat

from transformers import LogitsProcessor

from mmkv import chat, wrapping
from mmkv.adapters import short_positions
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
from mmkv.serving.worker import EngineStats, Limits, Worker

# Upper bound for options of a request's policy: no prompt has more tokens.
_MAX_OPTION = 2**17


class Engine(AbstractContextManager["Engine"]):
    """An engine that serves many requests with one wrapped model.

    A reply equals what `model.generate` gives for its prompt alone, greedily and, with a seed,
    after `torch.manual_seed(seed)`; with `prefill_chunk_size=prefill_chunk` where the model was
    wrapped with evict_chunks=True. With a shared prefix it equals
    `mmkv.read(model, prefix).ask(rest)`: all tokens after the prefix are then kept.

    Args:
        model: a wrapped model; it must stay wrapped as it is.
        processor: turns messages into inputs and tokens into text; None: requests bring inputs,
            and replies have no text.
        cache_memory: bytes of keys and values that are never exceeded; None: no limit. Requests
            wait until the most bytes that they may take are free.
        max_batch: most replies that grow at a time.
        prefill_chunk: tokens of a prompt that are read between two steps of the running replies.
        share_prefixes: read common beginnings once: of messages, all before the last text of the
            user's last turn, if that is more than the template; of inputs, their `prefix`.
        max_new_tokens: of a reply whose request sets no limit, or fewer where room is short.
        max_waiting: most requests that wait.
        max_prefixes: most shared prefixes that are stored; the least recently used one that no
            request waits for is dropped first.

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
        self.processor = processor
        self._loaded = chat.Loaded(type(self.model).__name__, self.model, processor)
        self._tokenizer = self._loaded.tokenizer
        self.cache_memory, self.share_prefixes = cache_memory, share_prefixes
        self.max_new_tokens = max_new_tokens
        # Longest prompt and reply together, in tokens; None: no limit. With longrope a batch takes
        # one set of frequencies, those of its longest row.
        positions = getattr(config, "max_position_embeddings", None)
        self.positions: int | None = short_positions(config) or positions
        self._bounds = Bounds(parts, self.model.dtype.itemsize, prefill_chunk)
        # Typed, since the budgets 1 (one token) and 1.0 (all tokens) compare equal.
        self._cached_plan = lru_cache(maxsize=64, typed=True)(self._make_plan)
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
        budget: SupportsFloat | str | None = None,
        options: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> Reply:
        """Request a reply, which begins when its turn comes and memory is free.

        Args:
            messages: in the form of Hugging Face's chat templates; content is a text, or parts
                {"type": "text", "text": ...} and {"type": "image", "image": a picture}.
            inputs: of the model, one row, instead of messages; with `prefix` those after it.
            prompt: a text, or its tokens, instead of messages: no template is applied.
            prefix: inputs that other requests may share.
            template: variables of the chat template besides the messages, such as tools.
            repeated: whether the same prompt is sent again at once for another reply: all but its
                last token is read once, and that token is kept by each reply.
            sampling: how tokens are chosen; greedily if None.
            max_new_tokens: longest reply; None: the engine's `max_new_tokens`, or fewer where the
                model's positions or the memory leave fewer; 0 only with `echo`.
            timeout: seconds after which the reply ends, waiting included.
            policy: of this request; the model's own if None.
            budget: of this request; the model's own if both are None.
            options: of the policy that is named here.
            owner: a client's key, for example: only requests of one owner (None is one too) share
                prefixes, so that response times reveal nothing of other clients' prompts.

        Raises:
            Refused: the request can never be served; the message has the numbers.
            Busy: too many requests wait.
            Closed: the engine was closed.
        """
        if sum(x is not None for x in (messages, inputs, prompt)) != 1:
            raise Refused("give either messages, inputs or a prompt")
        sampling = sampling or Sampling()
        min_new = 0 if sampling.echo else 1
        if max_new_tokens is not None and max_new_tokens < min_new:
            raise Refused(f"max_new_tokens={max_new_tokens}: expected {min_new} or more")
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
        n_behind, key = 0, ""  # tokens after the prefix, and the prefix's key
        if prefix is not None:
            if plan.policy.postpone:
                raise Refused(
                    f"postpone={plan.policy.postpone} waits for generated tokens, and a prefix is "
                    "read without any: give whole inputs"
                )
            prefix = prompts.checked(prefix, self.model.device)
            n_behind, tokens = tokens, tokens + prefix["input_ids"].shape[1]
            conditions = owner, adapters(self.model), plan, plan.task, plan.learned
            key = prompts.digest(prefix, repr(conditions))
        new, max_bytes = self._size(plan, tokens, n_behind, max_new_tokens)
        request = Request(
            reply=Reply(self._worker.notify),
            inputs=inputs,
            prefix=prefix,
            key=key,
            sampling=sampling,
            extra_processors=self._extra_processors(sampling, tokens),
            max_new_tokens=new,
            plan=plan,
            tokens=tokens,
            max_bytes=max_bytes,
            text=TextStream(self._tokenizer, sampling.stop),
            deadline=time.monotonic() + (float("inf") if timeout is None else timeout),
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
        """Return the model's inputs for messages or a prompt, as `prompts.encode` does."""
        if self._tokenizer is None:
            raise Refused("messages and texts need an engine with a processor: give inputs")
        text = prompts.texts(messages) if prompt is None else prompt
        if isinstance(text, str) and self.positions is not None:
            # Encoding very long texts takes a minute. Blanks do not count: a token may have many.
            n_min = sum(map(len, text.split())) // self._longest_token
            if n_min > self.positions:
                raise _too_long(f"a prompt of {n_min} or more tokens and a reply", self.positions)
        if prompt is not None:
            return prompts.encode_prompt(self._loaded, prompt), None, None
        if not messages:
            raise Refused("messages=[]: expected one at least")
        return prompts.encode(self._loaded, messages, template, split=split)

    def tokenize(self, **arguments: Any) -> list[int]:
        """Return the tokens of messages or a prompt; takes the arguments of `encode`."""
        return self.encode(**arguments)[0]["input_ids"][0].tolist()

    def _extra_processors(self, sampling: Sampling, n_prompt: int) -> list[LogitsProcessor]:
        """Return logits processors besides those of `generate`, after `n_prompt` prompt tokens."""
        processors = list[LogitsProcessor]()
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias:
            size = self.model.config.get_text_config().vocab_size
            if unknown := [x for x in sampling.logit_bias if not 0 <= x < size]:
                raise Refused(f"logit_bias of token {unknown[0]}: the model has {size} tokens")
            processors.append(choose.Penalties(sampling, n_prompt))
        if sampling.grammar is not None:
            if self._tokenizer is None:
                raise Refused("formats of replies need an engine with a processor")
            processors.append(self._grammars.processor(sampling.grammar, n_prompt))
        return processors

    def stats(self) -> EngineStats:
        """Return what the engine holds now, and its counts so far."""
        return self._worker.stats()

    def close(self) -> None:
        """End all requests ("cancelled") and the engine's thread."""
        self._worker.close()

    def __exit__(self, *args: object) -> None:
        self.close()

    def _plan(
        self,
        policy: str | Policy | None,
        budget: SupportsFloat | str | None,
        options: Mapping[str, Any] | None,
    ) -> CacheConfig:
        """Return the plan of a request's own policy and budget, or the model's; or refuse it."""
        if options and not isinstance(policy, str):
            raise Refused(f"options={dict(options)}: give the name of the policy that they are of")
        for name, value in (options or {}).items():
            if isinstance(value, int | float) and abs(value) > _MAX_OPTION:
                raise Refused(f"{name}={str(value)[:20]}: at most {_MAX_OPTION} in a request")
        try:
            if policy is not None and not isinstance(policy, Policy):
                policy = get_policy(policy, **(options or {}))
            return self._cached_plan(policy, None if budget is None else number(budget))
        except ValueError as error:
            raise Refused(str(error)) from error

    def _make_plan(self, policy: Policy | None, budget: float | int | None) -> CacheConfig:
        default = self._attachment.plan
        if policy is None and budget is None:
            return default
        plan, _ = wrapping.planned(
            self.model,
            self._attachment.parts,
            default.policy if policy is None else policy,
            default.budget if budget is None else budget,
            kv_dtype=default.kv_dtype,
            evict_chunks=default.evict_chunks,
        )
        plan = copy_probe.settled(self._attachment, plan)

        def uses_similarity(plan: CacheConfig) -> bool:
            return plan.needs_all_layers and plan.policy.layers.needs == "similarity"

        needs_rotary = plan.policy.score.uses_rotary and not default.policy.score.uses_rotary
        if needs_rotary or (uses_similarity(plan) and not uses_similarity(default)):
            raise Refused(
                f"policy={plan.policy.name!r} looks at what the engine's model does not show: "
                f"wrap it with that policy in place of {default.policy.name!r}"
            )
        return plan

    def _size(
        self, plan: CacheConfig, tokens: int, n_behind: int, requested: int | None
    ) -> tuple[int, int]:
        """Return the longest reply, as requested or as room is left, and the bytes it may take."""

        def bytes_of(new: int) -> int:
            return self._bounds.prompt(plan, tokens, new, n_behind)

        limit, memory = self.positions, self.cache_memory
        message, new = f"a prompt of {tokens} tokens and a reply", requested
        if new is not None:
            message += f" of {new}"
        else:
            new = self.max_new_tokens if limit is None else min(self.max_new_tokens, limit - tokens)
            if memory is not None:
                new = bisect_right(range(1, new + 1), memory, key=bytes_of)
            new = max(1, new)
        if limit is not None and tokens + new > limit:
            raise _too_long(message, limit)
        if memory is not None and bytes_of(new) > memory:
            message += f" may take {bytes_of(new)} bytes of keys and values"
            raise Refused(f"{message}, and cache_memory is {memory}")
        return new, bytes_of(new)

    @cached_property
    def _longest_token(self) -> int:
        """The characters of the longest token."""
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
    **engine_options: Any,
) -> Engine:
    """Load a model (see `mmkv.chat.load`), wrap it (`mmkv.wrap`), and start its engine.

    Before that, load the `plugins` (`mmkv.registry.load_plugin`). Each step may raise errors.
    """
    for file in plugins:
        load_plugin(file)
    loaded = chat.load(model, device, dtype)
    wrap_options: dict[str, Any] = {"profile": profile, "kv_dtype": kv_dtype, **(options or {})}
    wrapping.wrap(loaded.model, policy, budget, **wrap_options)
    return Engine(loaded.model, loaded.processor, **engine_options)


def _too_long(text: str, limit: int) -> Refused:
    return Refused(
        f"{text} are more than the {limit} positions of the model", code="context_length_exceeded"
    )
