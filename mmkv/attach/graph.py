"""Decode steps replayed as one CUDA graph: what a step costs the host is paid once.

`generate` calls the `Runner` in place of the model for each step after the prefill. The first step
reads everything that changes from step to step on the device; the second is captured, and then
replayed, as is each one after it. What changes from step to step: the inputs, the position, and the
row of the slot tables (`mmkv.parts.slots`), which are worked out on the host some steps ahead.
A graph knows the slots it was captured with: once they are taken there are more, and it begins
anew. Whatever cannot be captured runs as always, and the log says why.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmkv.attach.capturing import capture, refusing_waits
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import GraphInputs, NotCapturableError
from mmkv.cache.layer import CompressedLayer
from mmkv.calls import CACHE, cache_in, without

logger = logging.getLogger(__name__)

# A capture costs about as much as some steps; a shorter run does not get it back.
LEAST_STEPS = 16

# Tokens that the first graph has slots for, and any: fewer would be captured too often.
AHEAD, LEAST_AHEAD = 256, 64


def refusal(model: nn.Module, cache: Any, config: Any) -> str | None:
    """Why `generate` with this config should not replay its steps; None where it should."""
    if not isinstance(cache, CompressedCache):
        return "the cache is none of ours"
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
    if not all(isinstance(x, CompressedLayer) for x in cache.layers):
        return "some layers have a sliding window or linear attention, and a cache of their own"
    if cache.plan.policy.decode.every and not cache.plan.keeps_everything:
        return f"decode={cache.plan.policy.decode.name!r}: rounds of generated tokens are scored"
    if config.max_new_tokens is not None and config.max_new_tokens < LEAST_STEPS:
        return f"max_new_tokens={config.max_new_tokens} is below {LEAST_STEPS}"
    return None


def _capturable(device: torch.device) -> bool:
    return device.type == "cuda"


class Runner:
    """One `generate`'s decode steps, in place of `get_compiled_call`."""

    def __init__(self, model: nn.Module, compile_config: Any = None) -> None:
        self.model = model
        self.why_not: str | None = None
        self.clock: GraphInputs | None = None
        self.inputs: dict[str, Any] = {}
        self.ahead = AHEAD
        self.warm = False
        self.replay: Callable[[], None] | None = None
        self.out: Any = None

    def __call__(self, **inputs: Any) -> Any:
        """A decode step or a prompt's chunk, with the arguments that `generate` gives the model."""
        cache: CompressedCache = cache_in(inputs)
        if (
            self.why_not is None
            and _decodes(cache, inputs)
            # From a row's first drop on its slots follow otherwise (H2O).
            and (self.clock is not None or not any(b.schedule.filling for b in cache.blocks))
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
        if self.clock is None:
            self.clock = cache.clock = GraphInputs.at(cache.blocks[0].positions.device)
        if cache.clock is not self.clock:
            raise NotCapturableError("the cache was changed between two steps")
        self._take(inputs)
        if not all(b.fits for b in cache.blocks):
            self.warm, self.replay, self.out = False, None, None
            _reserve(cache, self.ahead)
            self.ahead *= 2
        self.clock.set(step_of(cache.blocks), cache.get_seq_length())
        if not self.warm:
            with refusing_waits(), _undone(cache, always=False):
                out = self._step(cache)
            self.warm = True
            return out
        if self.replay is None:
            with _undone(cache, always=True):
                # Seen while recording, but not done: the replay below is this step.
                self.replay, self.out = capture(lambda: self._step(cache), self.clock.row.device)
        for layer in cache.compressed:
            layer.seen += 1
        for block in cache.blocks:
            block.schedule.advance()
        self.replay()
        found = tree_map_only(Tensor, torch.clone, without(self.out))
        return type(self.out)(**found, **{CACHE: cache})

    def _step(self, cache: CompressedCache) -> Any:
        cache.on_clock = True
        try:
            return self.model(**self.inputs)
        finally:
            cache.on_clock = False

    def _take(self, inputs: dict[str, Any]) -> None:
        """Put the step's inputs where the graph reads them."""
        if not isinstance(inputs.get("position_ids"), Tensor):
            raise NotCapturableError("the model is not told the positions")
        # A step sees all that is held: its mask says nothing, and would grow.
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
        cache.clock = None
        logger.log(level, "decoding without a CUDA graph: %s", reason)


def pays(model: nn.Module, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """In place of `_valid_auto_compile_criteria`: whether to replay steps; the log says why not."""
    why_not = refusal(model, model_kwargs.get(CACHE), generation_config)
    if why_not is not None:
        logger.info("decoding without a CUDA graph: %s", why_not)
    return why_not is None


def _decodes(cache: CompressedCache, inputs: dict[str, Any]) -> bool:
    """Whether this is one token behind a prompt that has been evicted, and no part of a prompt."""
    tokens = inputs.get("input_ids")
    tokens = inputs["inputs_embeds"] if tokens is None else tokens
    return not (cache.expects_prompt or cache.postpones) and tokens.shape[1] == 1


def step_of(blocks: Iterable[Any]) -> int:
    """The row of the schedules' tables that is the next step's, that of all blocks."""
    rows: set[int] = set()
    for block in blocks:
        block.schedule.prepare()
        if not block.schedule.needs_decode_attention:  # one that does has no table
            rows.add(block.schedule.at)
    if len(rows) > 1:
        raise ValueError(f"the layers are not at the same step, but at {sorted(rows)}")
    return max(rows, default=0)


def _reserve(cache: CompressedCache, ahead: int) -> None:
    """Set slots aside for up to `ahead` tokens, but not so many that the full cache is smaller.

    Of the mean row: those who keep all need slots too. Policies that drop a token a step need few.
    """
    blocks, seen = cache.blocks, cache.get_seq_length()
    if not cache.plan.keeps_everything:
        used, rows = (sum(x) for x in zip(*(b.taken for b in blocks), strict=True))
        dropped = seen - used // rows
        ahead = max(LEAST_AHEAD, min(ahead, dropped))
    if cache.max_length:
        ahead = min(ahead, cache.max_length - seen)
    for block in blocks:
        block.freeze(max(1, ahead))


@contextmanager
def _undone(cache: CompressedCache, *, always: bool) -> Generator[None]:
    """Leave the cache as it was, after an error or `always`: a capture only looks at a step."""
    host = [(layer, layer.seen) for layer in cache.compressed]
    schedules = [(b, copy.copy(b.schedule)) for b in cache.blocks]
    saved = [(x, x.clone()) for b in cache.blocks for x in b.mutable]
    try:
        yield
    except BaseException:
        always = True
        for x, old in saved:
            x.copy_(old)
        raise
    finally:
        for layer, seen in host if always else ():
            layer.seen = seen
        for block, schedule in schedules if always else ():
            block.schedule = schedule
