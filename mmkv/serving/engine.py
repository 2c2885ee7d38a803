"""The engine: prompts are read one after another, replies grow in one batch between the chunks.

One thread runs the model. Before each chunk of a prompt that is read, the running replies take a
step, so that none waits longer than one chunk takes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from mmkv import adapters, contexts, wrapping
from mmkv.attach.attachment import Attachment
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.chat import Loaded
from mmkv.contexts import Context
from mmkv.policy import Policy
from mmkv.registry import get_policy
from mmkv.serving import prompts
from mmkv.serving.memory import Bounds
from mmkv.serving.reply import Busy, Refused, Reply, Sampling
from mmkv.serving.request import Request
from mmkv.serving.rows import RowCaches
from mmkv.serving.text import TextStream


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now, and did so far.

    Attributes:
        running: requests whose replies grow.
        waiting: requests that were not begun.
        prefilling: requests whose prompts are being read: 0 or 1.
        cache_bytes: of keys and values, of all requests and shared prefixes.
        cache_memory: what was promised; None: nothing.
        reserved_bytes: what they may come to.
        tokens_generated: so far.
        prompt_tokens: read so far.
        requests_done: ended so far, for whatever reason.
        prefixes: that are held to be shared.
        prefix_hits: requests that found theirs read.
        step_seconds: of the last decode step.
        steps: decode steps so far.
    """

    running: int
    waiting: int
    prefilling: int
    cache_bytes: int
    cache_memory: int | None
    reserved_bytes: int
    tokens_generated: int
    prompt_tokens: int
    requests_done: int
    prefixes: int
    prefix_hits: int
    step_seconds: float
    steps: int


class _Over(Exception):  # noqa: N818 - a signal, not an error
    """Ends the reading of a prompt whose request is over."""


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
        max_waiting: requests that may wait.
        max_prefixes: shared prefixes that are held, at the most; the least recently used one goes.

    Raises:
        ValueError: the model is not wrapped, or has layers with caches of their own.
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
        max_waiting: int = 1024,
        max_prefixes: int = 32,
    ) -> None:
        self.model = adapters.innermost(model)
        if not wrapping.is_wrapped(self.model):
            raise ValueError(
                f"this {type(self.model).__name__} is not wrapped: call mmkv.wrap(model, ...) first"
            )
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}: expected 1 or more")
        self._attachment: Attachment = vars(self.model)["_mmkv"]
        self._config = self._attachment.parts.config
        probe = CompressedCache(self._config, self._attachment.plan)
        if len(probe.compressed) != len(probe.layers):
            raise ValueError(
                f"{self._config.model_type} has layers with a sliding window or linear attention, "
                "whose caches are the model's own and cannot join a batch: use model.generate"
            )
        reads = hasattr(processor, "image_processor")
        self.processor = processor
        self._loaded = Loaded(type(self.model).__name__, self.model, processor, reads)
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self.cache_memory, self.max_batch = cache_memory, max_batch
        self.prefill_chunk, self.share_prefixes = prefill_chunk, share_prefixes
        self.max_waiting, self.max_prefixes = max_waiting, max_prefixes
        self._bounds = Bounds(self._attachment.parts, self.model.dtype.itemsize, prefill_chunk)
        self._plans: dict[Any, CacheConfig] = {}
        self._wake = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._reading: Request | None = None
        self._prefixes: OrderedDict[str, Context] = OrderedDict()
        self._closed = self._stepping = False
        self._tokens = self._read_tokens = self._done = self._hits = self._steps = 0
        self._step_seconds = 0.0
        options = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True, **options}
        self._hook = self.model.register_forward_pre_hook(self._before_chunk, prepend=True)
        self._thread = threading.Thread(target=self._loop, daemon=True, name="mmkv-engine")
        self._thread.start()

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]] | None = None,
        inputs: Mapping[str, Any] | None = None,
        *,
        prefix: Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        timeout: float | None = None,
        policy: str | Policy | None = None,
        budget: SupportsFloat | None = None,
    ) -> Reply:
        """Ask for a reply; it begins when its turn comes and memory is free.

        Args:
            messages: in the form of Hugging Face's chat templates; content is a text, or parts
                {"type": "text", "text": ...} and {"type": "image", "image": a picture}.
            inputs: of the model, one row, instead of messages; with `prefix` those behind it.
            prefix: inputs that others may share.
            sampling: how tokens are chosen; greedily if None.
            max_new_tokens: of the reply, at the most.
            timeout: seconds after which the reply ends, waiting included.
            policy: of this request; the model's own if None.
            budget: of this request; the model's own if both are None.

        Raises:
            Refused: it can never be served; the message has the numbers.
            Busy: too many requests wait.
            RuntimeError: the engine is closed.
        """
        if (messages is None) == (inputs is None):
            raise Refused("give either messages or inputs")
        if max_new_tokens < 1:
            raise Refused(f"max_new_tokens={max_new_tokens}: expected 1 or more")
        sampling = sampling or Sampling()
        if sampling.stop and self._tokenizer is None:
            raise Refused("stop texts need an engine with a processor")
        plan = self._plan(policy, budget)
        device = self.model.device
        if messages is not None:
            if self._tokenizer is None:
                raise Refused("messages need an engine with a processor: give inputs")
            if not messages:
                raise Refused("messages=[]: expected one at least")
            split = self.share_prefixes and not plan.policy.postpone
            given, prefix, rest = prompts.encode(self._loaded, messages, split=split)
            inputs = given if rest is None else rest
        assert inputs is not None
        inputs = prompts.checked(inputs, device)
        tokens = inputs["input_ids"].shape[1]
        if prefix is not None:
            if plan.policy.postpone:
                raise Refused(
                    f"postpone={plan.policy.postpone} waits for generated tokens, and a prefix is "
                    "read without any: give whole inputs"
                )
            prefix = prompts.checked(prefix, device)
            tokens += prefix["input_ids"].shape[1]
        whole = self._bounds.prompt(plan, tokens, max_new_tokens)
        self._check_size(tokens, max_new_tokens, whole)
        request = Request(
            Reply(self._notify),
            inputs,
            sampling,
            max_new_tokens,
            plan,
            tokens,
            whole,
            TextStream(self._tokenizer, sampling.stop),
            None if timeout is None else time.monotonic() + timeout,
        )
        if prefix is not None:
            request.prefix = dict(prefix)
            request.key = f"{id(plan)} {prompts.digest(prefix)}"
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            if len(self._waiting) >= self.max_waiting:
                raise Busy(f"{len(self._waiting)} requests wait already: try again later")
            self._waiting.append(request)
            self._wake.notify_all()
        return request.reply

    def stats(self) -> EngineStats:
        """What the engine does now, and did so far."""
        with self._wake:
            live, held = self._live(), list(self._prefixes.values())
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                prefilling=int(self._reading is not None),
                cache_bytes=self.cache_bytes(),
                cache_memory=self.cache_memory,
                reserved_bytes=sum(x.reserved for x in live) + sum(x.nbytes for x in held),
                tokens_generated=self._tokens,
                prompt_tokens=self._read_tokens,
                requests_done=self._done,
                prefixes=len(held),
                prefix_hits=self._hits,
                step_seconds=self._step_seconds,
                steps=self._steps,
            )

    def cache_bytes(self) -> int:
        """Bytes of keys and values of all requests and shared prefixes, now."""
        with self._wake:
            caches = [x.cache for x in self._live() if x.cache is not None]
            return sum(x.nbytes for x in [*caches, *self._prefixes.values()])

    def close(self) -> None:
        """End all requests ("cancelled") and the engine's thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _plan(self, policy: str | Policy | None, budget: SupportsFloat | None) -> CacheConfig:
        """The plan of a request's own policy and budget, or the wrap's.

        Raises:
            Refused: what `wrap` refuses, or what needs a hook that this wrap has not set.
        """
        wrap = self._attachment.plan
        if policy is None and budget is None:
            return wrap
        key = policy, budget
        if key not in self._plans:
            try:
                chosen = wrap.policy if policy is None else policy
                chosen = get_policy(chosen) if isinstance(chosen, str) else chosen
                plan, _ = wrapping.planned(
                    self.model,
                    self._attachment.parts,
                    chosen,
                    wrap.budget if budget is None else budget,
                    kv_dtype=wrap.kv_dtype,
                    evict_chunks=wrap.evict_chunks,
                )
            except ValueError as error:
                raise Refused(str(error)) from error
            needs = plan.policy.score.uses_rotary and not wrap.policy.score.uses_rotary
            compares = plan.needs_all_layers and plan.policy.layers.needs == "similarity"
            if compares:
                compares = not (wrap.needs_all_layers and wrap.policy.layers.needs == "similarity")
            if needs or compares:
                raise Refused(
                    f"policy={plan.policy.name!r} looks at what the engine's model does not show: "
                    f"wrap it with that policy in place of {wrap.policy.name!r}"
                )
            self._plans[key] = plan
        return self._plans[key]

    def _check_size(self, tokens: int, new: int, whole: int) -> None:
        most = getattr(self._config, "max_position_embeddings", None)
        if most is not None and tokens + new > most:
            raise Refused(
                f"a prompt of {tokens} tokens and max_new_tokens={new} are more than the "
                f"{most} positions of the model"
            )
        if self.cache_memory is not None and whole > self.cache_memory:
            raise Refused(
                f"a prompt of {tokens} tokens and max_new_tokens={new} may take {whole} bytes of "
                f"keys and values, and cache_memory is {self.cache_memory}"
            )

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _live(self) -> list[Request]:
        reading = [] if self._reading is None else [self._reading]
        return [*self._running, *reading]

    # All below runs on the engine's own thread.

    @torch.no_grad()
    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._waiting or self._running):
                    self._wake.wait()
            if self._closed:
                break
            self._sweep()
            request = self._admitted()
            if request is not None:
                self._start(request)
            elif self._running:
                self._step()
        self._hook.remove()
        with self._wake:
            left = [*self._waiting, *self._running]
            self._waiting.clear()
            self._prefixes.clear()
        for request in left:
            self._end(request, "cancelled")

    def _sweep(self) -> None:
        """End what was cancelled or took too long."""
        with self._wake:
            over = [x for x in [*self._waiting, *self._running] if x.over]
            for request in over:
                if request in self._waiting:
                    self._waiting.remove(request)
        for request in over:
            self._end(request, request.over or "cancelled")

    def _admitted(self) -> Request | None:
        """The request that has waited longest, if there is room for it now."""
        with self._wake:
            if not self._waiting or len(self._running) >= self.max_batch:
                return None
            request = self._waiting[0]
        context = self._prefixes.get(request.key)
        need = request.whole
        if context is not None:
            need = self._behind(request, context)
        if not self._has_room(need, spared=request.key):
            if self._running:
                return None
            # Alone, and still no room for a second copy of the prefix: it takes the first.
            self._prefixes.pop(request.key, None)
        with self._wake:
            self._waiting.remove(request)
            request.reserved, request.context = need, context
            request.shared = context is not None
            self._reading = request
        if context is not None:
            self._hits += 1
            if request.key in self._prefixes:
                self._prefixes.move_to_end(request.key)
        return request

    def _behind(self, request: Request, context: Context) -> int:
        asked = request.inputs["input_ids"].shape[1]
        return min(request.whole, self._bounds.behind(context.cache, asked, request.new))

    def _has_room(self, need: int, spared: str = "") -> bool:
        """Whether `need` bytes are free, once shared prefixes have gone that are in the way."""
        if self.cache_memory is None:
            return True
        taken = sum(x.reserved for x in self._live())
        held = {key: x.nbytes for key, x in self._prefixes.items()}
        free = self.cache_memory - taken - sum(held.values())
        going = list[str]()
        for key, nbytes in held.items():
            if free >= need:
                break
            if key != spared:
                going.append(key)
                free += nbytes
        if free < need:
            return False
        with self._wake:
            for key in going:
                del self._prefixes[key]
        return True

    def _start(self, request: Request) -> None:
        """Read a request's prompt; then it joins the batch."""
        try:
            given = self._given(request)
            cache = request.cache = given["past_key_values"]
            logits = self._read(request, given)
            self._read_tokens += request.tokens
            request.kept = _kept(cache)
            request.weigh()
            token = request.next_token(logits)
        except _Over:
            self._end(request, request.over or "cancelled")
        except Exception as error:
            self._end(request, "error", error)
        else:
            with self._wake:
                self._reading = None
                self._running.append(request)
            bound = self._bounds.reply(cache, request.new)
            if bound is not None:
                request.reserved = min(request.reserved, bound)
            self._give(request, token)

    def _given(self, request: Request) -> dict[str, Any]:
        """What the model is given of a request, with a cache that is its own."""
        if request.prefix is None:
            return {**request.inputs, "past_key_values": self._cache(request)}
        if request.context is None:
            cache = request.cache = self._cache(request)
            chunk = self._chunk(request.prefix)
            context = contexts.read_into(cache, self.model, request.prefix, chunk)
            request.context, request.cache = context, None
            need = self._behind(request, context)
            request.reserved = 0
            if self.share_prefixes and self._has_room(context.nbytes + need):
                request.reserved = need
                with self._wake:
                    self._prefixes[request.key] = context
                    while len(self._prefixes) > self.max_prefixes:
                        self._prefixes.popitem(last=False)
            else:
                request.reserved = request.whole
        context, own = request.context, self._prefixes.get(request.key) is not request.context
        request.context = None
        return context.behind(request.inputs, copied=not own)

    def _cache(self, request: Request) -> CompressedCache:
        cache = CompressedCache(self._config, request.plan)
        cache.own_plan = request.plan is not self._attachment.plan
        return cache

    def _chunk(self, inputs: Mapping[str, Any]) -> int | None:
        """Tokens to read at a time; None where the prompt must be read at once."""
        pictures = any(isinstance(x, Tensor) and x.is_floating_point() for x in inputs.values())
        encodes = getattr(self.model, "_supports_mm_encoder_outputs", None)
        if pictures and not (encodes is not None and encodes()):
            return None
        # Where tokens of a picture or of the whole prompt see later ones, no cut may part them.
        return None if "token_type_ids" in inputs else self.prefill_chunk

    def _read(self, request: Request, given: dict[str, Any]) -> Tensor:
        """Run a prompt through the model: logits [1, V] of the first token.

        `generate` prepares all that differs from model to model: masks, positions, pictures, and
        what tokens are chosen by.
        """
        found: list[Tensor] = []

        def read(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Tensor:
            out = model._prefill(input_ids, generation_config, model_kwargs)
            kwargs = model._update_model_kwargs_for_generation(out, model_kwargs)
            more = torch.cat([input_ids, input_ids[:, -1:]], dim=1)
            step = model.prepare_inputs_for_generation(more, next_sequence_length=1, **kwargs)
            at = input_ids.new_tensor([[input_ids.shape[1]]])
            request.position = step.get("position_ids", at)
            room = input_ids.new_zeros(1, request.new)
            request.ids = torch.cat([input_ids, room], dim=1)
            request.processors = logits_processor
            eos = getattr(generation_config, "_eos_token_tensor", None)
            request.eos = frozenset() if eos is None else frozenset(eos.flatten().tolist())
            found.append(out.logits[:, -1].to(copy=True, dtype=torch.float32))
            return input_ids

        sampling = request.sampling
        drawn: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
        if sampling.temperature > 0:
            drawn = {k: getattr(sampling, k) for k in drawn}
            request.generator = torch.Generator(self.model.device)
            if sampling.seed is None:
                request.generator.seed()
            else:
                request.generator.manual_seed(sampling.seed)
        self.model.generate(
            **given,
            **drawn,
            do_sample=sampling.temperature > 0,
            max_new_tokens=request.new,
            num_beams=1,
            num_return_sequences=1,
            prefill_chunk_size=self._chunk(given),
            disable_compile=True,
            custom_generate=read,
        )
        return found[0]

    def _before_chunk(self, module: Any, args: Any) -> None:
        """Before each chunk of a prompt: the running replies take a step."""
        reading = self._reading
        if reading is None or self._stepping or threading.current_thread() is not self._thread:
            return
        self._sweep()
        if self._closed or reading.over:
            raise _Over
        if self._running:
            self._step()

    def _step(self) -> None:
        """One token more of every running reply."""
        rows, began = list(self._running), time.perf_counter()
        self._stepping = True
        try:
            batch, logits = self._forward(rows)
            likeliest = logits.argmax(-1).tolist()
        except Exception as error:
            for request in rows:
                self._end(request, "error", error)
            return
        finally:
            self._stepping = False
        self._step_seconds = time.perf_counter() - began
        self._steps += 1
        for i, request in enumerate(rows):
            try:
                if (error := batch.errors[i]) is not None:
                    raise error
                token = likeliest[i] if request.plain else request.next_token(logits[i : i + 1])
            except Exception as error:
                self._end(request, "error", error)
            else:
                request.position = request.position + 1
                self._give(request, token)

    def _forward(self, rows: list[Request]) -> tuple[RowCaches, Tensor]:
        """The rows' caches, and their next tokens' logits float32 [B, V]."""
        batch = RowCaches([x.cache for x in rows if x.cache is not None])
        last = [[x.reply.tokens[-1]] for x in rows]
        out = self.model(
            input_ids=torch.tensor(last, device=self.model.device),
            position_ids=torch.cat([x.position for x in rows], dim=-2),
            past_key_values=batch,
            **self._options,
        )
        return batch, out.logits[:, -1].float()

    def _give(self, request: Request, token: int) -> None:
        reason = request.give(token)
        self._tokens += 1
        if reason is not None:
            self._end(request, reason)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """A request leaves, and what it held is freed."""
        request.weigh()
        usage = request.usage()
        with self._wake:
            if request in self._running:
                self._running.remove(request)
            if self._reading is request:
                self._reading = None
            self._done += 1
        request.cache, request.context, request.reserved = None, None, 0
        request.reply.error = error
        request.reply.put(None, reason, usage)


def _kept(cache: CompressedCache) -> int:
    """Tokens kept of a prompt, mean over layers and heads."""
    blocks = [block for layer in cache.compressed for block in layer.keeping().blocks]
    rows = [len(block.positions) for block in blocks]
    kept = [float(block.schedule.counts.mean()) for block in blocks]
    return round(sum(n * k for n, k in zip(rows, kept, strict=True)) / sum(rows))
