"""Replay of decode steps as one CUDA graph, which saves the host's work on each step.

`generate` calls the `Runner` instead of the model for each step after the prefill. The first step
runs as usual, but reads its inputs from fixed tensors on the device; the second step is captured
and replayed, and so is each later one. The tensors that change from step to step are the inputs,
the position, and the row of the slot tables (`mmkv.decode.slots`), which the host computes some
steps ahead. A graph has a fixed number of slots: once all are in use, more are allocated and a new
graph is captured. A step that cannot be captured runs as usual, and the log says why.

`torch.cuda.graph` captures on whichever device is current; if CUDA refuses to end a capture, it
leaves its stream current and the allocator in the state of a running capture. So `capture` captures
on the model's device, and cleans up after a failure.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import GraphInputs, NotCapturableError, outside_inference_mode
from mmkv.calls import CACHE, cache_in, without

logger = logging.getLogger(__name__)

# A capture takes as long as some steps: it does not pay off for fewer new tokens than these.
LEAST_STEPS = 16

# New tokens that the first graph has slots for, and that every graph has at least.
AHEAD, LEAST_AHEAD = 256, 64

# A variable, so that tests without a GPU can replace it; untyped, as its private parts are.
cuda: Any = torch.cuda

# Captures share a stream, so only one runs at a time. With a stream each, every capture would cost
# a cuBLAS workspace, which is never freed.
_lock = threading.Lock()
_streams: dict[int, Any] = {}
# Failed graphs are kept alive, as torch's allocator of pinned memory still queries their captures.
_failed: list[Any] = []


def refusal(model: nn.Module, cache: Any, config: Any) -> str | None:
    """Return why `generate` with this config should not replay its steps; None if it should."""
    if not isinstance(cache, CompressedCache):
        return "the cache is not a CompressedCache"
    if not cache.plan.graph:
        return "graph=False"
    device: torch.device = next(model.parameters()).device
    if not _capturable(device):
        return f"there are no CUDA graphs on {device.type}"
    if config.disable_compile:
        return "disable_compile=True"
    if (config.num_beams or 1) > 1:
        return f"num_beams={config.num_beams}: beams move the cache's rows at each step"
    if len(set(getattr(model, "hf_device_map", {"": device}).values())) > 1:
        return "the model is split over several devices"
    if len(cache.compressed) < len(cache.layers):
        return "some layers have a sliding window or linear attention, and a cache of their own"
    if cache.plan.policy.decode.every and not cache.plan.keeps_all:
        return f"decode={cache.plan.policy.decode.name!r}: rounds of generated tokens are scored"
    if config.max_new_tokens is not None and config.max_new_tokens < LEAST_STEPS:
        return f"max_new_tokens={config.max_new_tokens} is below {LEAST_STEPS}"
    return None


def _capturable(device: torch.device) -> bool:
    return device.type == "cuda"


class Runner:
    """Runs the decode steps of one `generate` call, in place of `get_compiled_call`."""

    def __init__(self, model: nn.Module, compile_config: Any = None) -> None:
        self.model = model
        self.why_not: str | None = None
        self.graph_inputs: GraphInputs | None = None
        self.inputs: dict[str, Any] = {}
        self.ahead = AHEAD
        self.warm = False
        self.replay: Callable[[], None] | None = None
        self.out: Any = None

    def __call__(self, **inputs: Any) -> Any:
        """Run a decode step or a chunk of a prompt with the arguments of the model's `forward`."""
        cache: CompressedCache = cache_in(inputs)
        if (
            self.why_not is None
            and _decodes(cache, inputs)
            # After a row's first drop its slots follow another rule (H2O).
            and (self.graph_inputs is not None or not any(b.schedule.filling for b in cache.blocks))
        ):
            try:
                return self._on_device(cache, inputs)
            except RuntimeError as error:
                expected = isinstance(error, NotCapturableError)
                if self.replay is not None and not expected:
                    raise
                self._give_up(cache, str(error), logging.INFO if expected else logging.WARNING)
        return self.model(**inputs)

    def _on_device(self, cache: CompressedCache, inputs: dict[str, Any]) -> Any:
        if self.graph_inputs is None:
            position = cache.blocks[0].positions.new_zeros(())
            row, place = (position.new_zeros(1, dtype=torch.int64) for _ in range(2))
            self.graph_inputs = GraphInputs(row=row, position=position, place=place)
            cache.graph_inputs = self.graph_inputs
        if cache.graph_inputs is not self.graph_inputs:
            raise NotCapturableError("the cache was changed between two steps")
        self._take(inputs)
        if not all(b.fits for b in cache.blocks):
            self.warm, self.replay, self.out = False, None, None
            _reserve(cache, self.ahead)
            self.ahead *= 2
        self.graph_inputs.row.fill_(step_of(cache.blocks))  # fills do not wait for the device
        self.graph_inputs.position.fill_(seen := cache.get_seq_length())
        with outside_inference_mode():
            for layer in cache.compressed:
                layer.keeping().stored.make_room(seen)
        self.graph_inputs.place.fill_(cache.compressed[0].keeping().stored.place_of(seen))
        if not self.warm:
            with refusing_waits(), _undone(cache, always=False):
                out = self._step(cache)
            self.warm = True
            return out
        if self.replay is None:
            with _undone(cache, always=True):
                # The capture records the step without running it; the replay below runs it.
                self.replay, self.out = capture(
                    lambda: self._step(cache), self.graph_inputs.row.device
                )
        for layer in cache.compressed:
            layer.seen += 1
        for block in cache.blocks:
            block.schedule.advance()
        self.replay()
        outputs = tree_map_only(Tensor, torch.clone, without(self.out))
        return type(self.out)(**outputs, **{CACHE: cache})

    def _step(self, cache: CompressedCache) -> Any:
        cache.in_graph = True
        try:
            return self.model(**self.inputs)
        finally:
            cache.in_graph = False

    def _take(self, inputs: dict[str, Any]) -> None:
        """Copy the step's inputs to the tensors that the graph reads."""
        if not isinstance(inputs.get("position_ids"), Tensor):
            raise NotCapturableError("the call has no position_ids")
        # A step attends to all kept tokens, so its mask, whose shape would grow, is not needed.
        inputs = {**inputs, "attention_mask": None}
        if not self.inputs:
            self.inputs = tree_map_only(Tensor, torch.clone, inputs)
            return
        if inputs.keys() != self.inputs.keys():
            raise NotCapturableError(f"the arguments changed to {sorted(inputs)}")
        for name, new in inputs.items():
            old = self.inputs[name]
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
                old.copy_(new)
            elif isinstance(old, Tensor) or isinstance(new, Tensor) or old != new:
                raise NotCapturableError(f"the argument {name} changed")

    def _give_up(self, cache: CompressedCache, reason: str, level: int) -> None:
        self.why_not, self.replay, self.out, self.inputs = reason, None, None, {}
        cache.graph_inputs = None
        logger.log(level, "decoding without a CUDA graph: %s", reason)


def pays(model: nn.Module, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """Replace `_valid_auto_compile_criteria`: return whether to replay steps, and log why not."""
    why_not = refusal(model, model_kwargs.get(CACHE), generation_config)
    if why_not is not None:
        logger.info("decoding without a CUDA graph: %s", why_not)
    return why_not is None


def _decodes(cache: CompressedCache, inputs: dict[str, Any]) -> bool:
    """Return whether this pass reads one generated token, and neither a prompt nor, with longrope,
    the prompt again."""
    tokens = inputs.get("input_ids")
    tokens = inputs["inputs_embeds"] if tokens is None else tokens
    decodes = not cache.expects_prompt and tokens.shape[1] == 1
    return decodes and not cache.crosses(1)


def step_of(blocks: Iterable[Any]) -> int:
    """Return the next step's row in the schedules' tables, which is the same for all blocks."""
    rows: set[int] = set()
    for block in blocks:
        if not block.schedule.needs_decode_attention:  # otherwise there is no table
            block.schedule.prepare()
            rows.add(block.schedule.at)
    if len(rows) > 1:
        raise ValueError(f"the layers are not at the same step, but at {sorted(rows)}")
    return max(rows, default=0)


def _reserve(cache: CompressedCache, n_ahead: int) -> None:
    """Allocate slots for up to `n_ahead` tokens, but no more than a full cache would have.

    The bound is a mean over rows. Policies that drop a token a step need few slots.
    """
    blocks, seen = cache.blocks, cache.get_seq_length()
    if not cache.plan.keeps_all:
        rows = sum(len(b.positions) for b in blocks)
        used = sum(len(b.positions) * b.schedule.used for b in blocks)
        n_dropped = seen - used // rows
        n_ahead = max(LEAST_AHEAD, min(n_ahead, n_dropped))
    if cache.max_length:
        n_ahead = min(n_ahead, cache.max_length - seen)
    for block in blocks:
        block.freeze(max(1, n_ahead))
    for layer in cache.compressed:
        layer.keeping().fit()


@contextmanager
def _undone(cache: CompressedCache, *, always: bool) -> Generator[None]:
    """Restore the cache's state after an error or, after a capture, `always`."""
    tokens_seen = [(layer, layer.seen) for layer in cache.compressed]
    schedules = [(b, copy.copy(b.schedule)) for b in cache.blocks]
    saved = [(x, x.clone()) for b in cache.blocks for x in b.accumulators]
    try:
        yield
    except BaseException:
        always = True
        for x, old in saved:
            x.copy_(old)
        raise
    finally:
        for layer, seen in tokens_seen if always else ():
            layer.seen = seen
        for block, schedule in schedules if always else ():
            block.schedule = schedule
        cache.in_pass = False


def capture(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Return a function that replays `step` on `device`, and the output, which it overwrites.

    Raises:
        RuntimeError: the step cannot be captured, or ran on another device.
    """
    with _lock, cuda.device(device):
        marker = torch.zeros((), device=device)
        graph = cuda.CUDAGraph()
        # A capture cannot use memory that the allocator has in reserve.
        cuda.synchronize()
        cuda.empty_cache()
        with cuda.stream(_stream()), _into(graph):
            marker.add_(1)
            out = step()
        if marker.item():  # the step ran at once
            raise RuntimeError(f"the capture on {device} recorded nothing")

    def replay(marker: Tensor = marker) -> None:  # keeps `marker`, which the graph writes to
        graph.replay()

    return replay, out


@contextmanager
def refusing_waits() -> Generator[None]:
    """Make the host's waits for the device an error, as they cannot be captured.

    The setting is the whole process's, so it is not changed while other threads run.
    """
    if threading.active_count() > 1:
        yield
        return
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)


@contextmanager
def _into(graph: Any) -> Generator[None]:
    """Capture the work on the current stream, and end the capture after an error too."""
    device, pool = cuda.current_device(), cuda.graph_pool_handle()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the step's own error says more
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        # torch tells its allocator of the end only if CUDA ends the capture without an error. If
        # it has told it, these calls raise.
        with suppress(RuntimeError):
            cuda.memory._cuda_endAllocateToPool(device, pool)
            cuda.memory._cuda_releasePool(device, pool)
            _failed.append(graph)
        raise


def _stream() -> Any:
    """Return the current device's stream for captures."""
    index = cuda.current_device()
    if index not in _streams:
        _streams[index] = cuda.Stream()
    return _streams[index]
