"""A prompt and decode steps behind it: how long they take, and what they allocate.

Imports nothing of mmkv: kvpress's environment, in which mmkv is not installed, loads this file too.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The profiler's own messages are no part of a measurement.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
_FIRST = "mmkv bench: first token"
# New tokens that a reply is announced to have: a graph pays for any such.
_LONG = 1024


@dataclass(frozen=True)
class Start:
    """A prompt, and the first steps behind it, which warm up: seconds, and bytes.

    Attributes:
        prefill_s: to the first new token.
        warm_s: of the warm-up's steps, a GPU's capture among them.
        prefill_cache_bytes: held by the cache after the prompt.
        prefill_peak_bytes: most allocated until the first token, beyond what was before (so without
            the weights); None where it was not measured.
        peak_bytes: the same up to the end of the warm-up.
    """

    prefill_s: float
    warm_s: float
    prefill_cache_bytes: int
    prefill_peak_bytes: int | None = None
    peak_bytes: int | None = None


class Reply:
    """A batch in the middle of its greedy reply: the prompt is read, and steps can be asked for.

    The device is synchronised around what is timed, nowhere else.

    Args:
        model: wrapped or not.
        ids: int64 [B, N], without padding.
        warm: steps to take at once, which count as warm-up.
        trace: on the CPU, take the peaks from the allocator's events, which costs time. On a GPU
            the allocator counts them always.
        cache: empty, to be filled; None: the model's own.
    """

    def __init__(
        self, model: Any, ids: Tensor, warm: int = 0, *, trace: bool = False, cache: Any = None
    ) -> None:
        self.device, self.seen = ids.device, ids.shape[1]
        self._call: Any = model
        self._token, self.cache = ids, cache
        gpu, before, early, late = ids.device.type == "cuda", 0, None, None
        gc.collect()
        if gpu:
            torch.cuda.reset_peak_memory_stats(ids.device)
            before = torch.cuda.memory_allocated(ids.device)
        with _profile() if trace and not gpu else nullcontext() as profile:
            prefill = _seconds(self._read, ids.device)
            held = self.nbytes
            if gpu:
                early = torch.cuda.max_memory_allocated(ids.device) - before
            with torch.profiler.record_function(_FIRST):
                pass
            self._call = _stepper(model, self.cache)
            taken = self.steps(warm)
        if gpu:
            late = torch.cuda.max_memory_allocated(ids.device) - before
        if profile is not None:
            early, late = _peaks(profile)
        self.start = Start(prefill, taken, held, early, late)

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds."""
        return cache_nbytes(self.cache)

    def steps(self, number: int) -> float:
        """Seconds of so many more decode steps."""
        return _seconds(lambda: [self._step() for _ in range(number)], self.device)

    def close(self) -> None:
        """Let go of the cache."""
        self.cache = self._call = None

    @torch.no_grad()
    def _read(self) -> None:
        ids = self._token
        out = self._call(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache, self._token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def _step(self) -> None:
        # Without padding a step's mask says nothing; looking at it would make a GPU wait.
        out = self._call(
            input_ids=self._token,
            position_ids=torch.full_like(self._token, self.seen),
            attention_mask=None,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        self.seen += 1
        self._token = out.logits[:, -1:].argmax(-1)


def _stepper(model: Any, cache: Any) -> Any:
    """What `generate` would call for each step: the model, or what replays it."""
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = _LONG
    if model._valid_auto_compile_criteria({"past_key_values": cache}, config):
        return model.get_compiled_call(config.compile_config)
    return model


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy moves, or a sum reads: the best of several of each."""
    size = 1 << (31 if device.type == "cuda" else 27)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copies = [_seconds(lambda: target.copy_(source), device) for _ in range(9)]
    sums = [_seconds(source.sum, device) for _ in range(9)]
    return size * max(2 / min(copies), 1 / min(sums))


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def plain_peak(model: Any, ids: Tensor) -> int:
    """Most bytes that a forward pass without any cache allocates: the activations."""
    gpu, before = ids.device.type == "cuda", 0
    if gpu:
        torch.cuda.reset_peak_memory_stats(ids.device)
        before = torch.cuda.memory_allocated(ids.device)
    with nullcontext() if gpu else _profile() as profile, torch.inference_mode():
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
    return torch.cuda.max_memory_allocated(ids.device) - before if gpu else _peaks(profile)[1]


def cache_nbytes(cache: Any) -> int:
    """Bytes of the storages a cache really holds for keys and values."""
    counted = getattr(cache, "nbytes", None)
    if isinstance(counted, int):
        return counted
    held: dict[int, int] = {}
    for layer in cache.layers:
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(x, Tensor) and x.numel():
                storage = x.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _profile() -> Any:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )


def _peaks(profile: Any) -> tuple[int, int]:
    """Most bytes allocated at once, until the first token and overall."""
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    return peaks((e.name(), e.nbytes()) for e in events)


def peaks(events: Iterable[tuple[str, int]]) -> tuple[int, int]:
    """Running maxima of allocations: until the mark of the first token, and overall.

    Args:
        events: (name, bytes) in order; "[memory]" allocates, or frees by negative bytes.
    """
    now = most = 0
    early: int | None = None
    for name, size in events:
        if name == "[memory]":
            now += size
            most = max(most, now)
        elif name == _FIRST:
            early = most
    return most if early is None else early, most


@dataclass(frozen=True)
class Step:
    """The tensors of one decode step.

    Attributes:
        nbytes: bytes of those it allocates, and of those it copies into others.
        ops: how many tensor operations it has.
        cache_bytes: bytes the cache holds at the end of the run.
    """

    nbytes: int
    ops: int
    cache_bytes: int


_COPIES = ("copy", "put", "cat", "scatter", "fill", "clone")


class _Tensors(TorchDispatchMode):
    """Counts what operations allocate or copy; views, and sums in place, cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        out = func(*args, **kwargs)
        self.ops += 1
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.sizes.append(x.untyped_storage().nbytes())
        if func._schema.is_mutable and any(x in func._schema.name for x in _COPIES):
            # Of an indexed write only the values are written, not the whole tensor.
            name = func._schema.name
            written = args[2] if "index_put" in name else (args[0] if args else kwargs["out"])
            if isinstance(written, Tensor):
                self.sizes.append(written.numel() * written.element_size())
        return out


def trace_step(model: Any, ids: Tensor, *, at: int = 3) -> Step:
    """Count the tensors of decode step number `at`."""
    reply, counter = Reply(model, ids, at - 1), _Tensors()
    with counter:
        reply.steps(1)
    return Step(sum(counter.sizes), counter.ops, reply.nbytes)
