"""One timed run, and what it allocates.

Imports nothing of mmkv: kvpress's environment, in which mmkv is not installed, loads this file too.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
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


@dataclass(frozen=True)
class Run:
    """One run of `generate`: seconds, and bytes.

    Attributes:
        prefill_s: to the logits of the first new token.
        decode_s: from there to the last token.
        steps: decode steps in it.
        prefill_cache_bytes: held by the cache after the prompt.
        cache_bytes: held at the end.
        prefill_peak_bytes: most allocated until the first token, beyond what was before the run
            (so without the weights); None where it was not measured.
        peak_bytes: the same over the whole run.
    """

    prefill_s: float
    decode_s: float
    steps: int
    prefill_cache_bytes: int
    cache_bytes: int
    prefill_peak_bytes: int | None = None
    peak_bytes: int | None = None


@contextmanager
def attention(model: Any, name: str) -> Generator[None]:
    """The model with another attention implementation."""
    before = model.get_decoder().config._attn_implementation
    if before == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def run_once(model: Any, ids: Tensor, new: int, *, trace: bool = False) -> Run:
    """Generate `new` tokens greedily and time the prefill and the rest.

    The device is synchronised before, after the first forward and at the end, nowhere else.

    Args:
        model: wrapped or not.
        ids: int64 [B, N], without padding.
        new: tokens to generate, at least 2; none stops early.
        trace: on the CPU, take the peaks from the allocator's events; such a run is slower. On a
            GPU the allocator counts them always.
    """
    gpu, before = ids.device.type == "cuda", 0
    seen: dict[str, Any] = {}
    gc.collect()
    if gpu:
        torch.cuda.reset_peak_memory_stats(ids.device)
        before = torch.cuda.memory_allocated(ids.device)

    def first(module: Any, args: Any, output: Any) -> None:
        handle.remove()
        _wait(ids.device)
        seen["at"] = time.perf_counter()
        seen["bytes"] = cache_nbytes(output.past_key_values)
        if gpu:
            seen["peak"] = torch.cuda.max_memory_allocated(ids.device) - before
        if profile is not None:
            with torch.profiler.record_function(_FIRST):
                pass

    handle = model.register_forward_hook(first)
    with ExitStack() as stack:
        stack.callback(handle.remove)
        profile = stack.enter_context(_profile()) if trace and not gpu else None
        _wait(ids.device)
        start = time.perf_counter()
        out = _generate(model, ids, new)
        _wait(ids.device)
        end = time.perf_counter()
    made = out.sequences.shape[1] - ids.shape[1]
    if made != new:
        raise RuntimeError(f"the model generated {made} tokens instead of {new}")
    early, late = seen.get("peak"), None
    if gpu:
        late = torch.cuda.max_memory_allocated(ids.device) - before
    elif profile is not None:
        early, late = _peaks(profile)
    return Run(
        prefill_s=seen["at"] - start,
        decode_s=end - seen["at"],
        steps=new - 1,
        prefill_cache_bytes=seen["bytes"],
        cache_bytes=cache_nbytes(out.past_key_values),
        prefill_peak_bytes=early,
        peak_bytes=late,
    )


def _generate(model: Any, ids: Tensor, new: int) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        pad_token_id=0,
    )


def bare_step(model: Any, ids: Tensor, *, times: int = 10) -> float:
    """Median seconds of the model on one token without any cache: no decode step can be faster."""

    def step() -> None:
        model(ids[:, :1], use_cache=False)

    with torch.inference_mode():
        found = [_seconds(step, ids.device) for _ in range(times + 1)]
    return statistics.median(found[1:])


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes, the best of several; measured once."""
    size = 1 << (31 if device.type == "cuda" else 27)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / min([_seconds(copy, device) for _ in range(9)][1:])


def _seconds(work: Callable[[], None], device: torch.device) -> float:
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
    """Count the tensors of the model's forward in decode step number `at`."""
    counter, forwards = _Tensors(), 0

    def enter(module: Any, args: Any) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == at + 1:
            counter.__enter__()

    def leave(module: Any, args: Any, output: Any) -> None:
        if forwards == at + 1:
            counter.__exit__(None, None, None)

    hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    try:
        out = _generate(model, ids, at + 2)
    finally:
        for hook in hooks:
            hook.remove()
    held = cache_nbytes(out.past_key_values)
    return Step(sum(counter.sizes), counter.ops, held)
