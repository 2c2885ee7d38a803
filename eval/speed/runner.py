"""Rows side by side: their decode steps alternate, so that a machine that drifts drifts for all."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import psutil
import torch
from transformers import StaticCache
from transformers.utils.import_utils import is_flash_attn_2_available

import mmkv
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.eval.speed import measure, models
from mmkv.eval.speed.measure import Reply
from mmkv.eval.speed.presets import Setting
from mmkv.eval.speed.report import Result, RowResult
from mmkv.eval.speed.rival import RemoteReply, Worker, WorkerError
from mmkv.eval.speed.rows import ATTENTION, Row, falling_profile, make_rows, parse, shuffled
from mmkv.wrapping import comparing

T = TypeVar("T")
Pair = tuple[Row, RowResult]
AnyReply = Reply | RemoteReply
# Steps of a warm-up: enough for kernels to be compiled and for runs in graphs to begin.
_WARM_GPU, _WARM_CPU = 48, 3
# Steps between two looks at the clock: a GPU must be kept busy over several.
_BLOCK_GPU, _BLOCK_CPU = 8, 1
# Prefills of each row, its warm-up's among them, for which the batch is reduced.
_LEAST_PREFILLS = 8
_GROWTH_BUDGET = 0.6
_LARGEST_BATCH = 512
_NO_MEMORY = "out of memory"


class Bench:
    """One setting on one model.

    Args:
        setting: what to measure.
        model: not wrapped; it is left so.
        device: in words, as the dtype.
        dtype: of the model.
        worker: kvpress's process with the same model, or None.
        until: seconds of `time.monotonic` at which it should be done; steps, prefills, and if need
            be the batch, are reduced.
        roofline: add the bound of a step's bytes on a GPU too.
        memory: bytes that count as free when the largest batch is sought; None asks the device.
        tell: called with what is being done.
    """

    def __init__(
        self,
        setting: Setting,
        model: Any,
        *,
        device: str,
        dtype: str,
        worker: Worker | None = None,
        until: float = math.inf,
        roofline: bool = False,
        memory: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.setting, self.model, self.worker = setting, model, worker
        self.until, self.memory, self.tell = until, memory, tell
        self.gpu = model.device.type == "cuda"
        self.rows = make_rows(setting, kvpress=worker is not None)
        self.warm = _WARM_GPU if self.gpu else _WARM_CPU
        self.order = random.Random(0)
        # The replies that wait for their next step; None where they do not fit side by side, as
        # those of the largest batch.
        self.held: dict[str, AnyReply] | None = {} if setting.batch else None
        self.result = Result(
            name=setting.name,
            model=setting.model,
            prompt=setting.prompt,
            new=setting.new,
            device=device,
            about=_about(dtype, self.gpu, worker),
            weight_bytes=models.weight_bytes(model),
            step_weight_bytes=models.step_bytes(model),
            layers=model.get_decoder().config.num_hidden_layers,
        )
        if roofline or not self.gpu:
            self.result.bandwidth = measure.bandwidth(model.device)

    def run(self) -> Result:
        """Warm up, count allocations, alternate decode steps, then prefills."""
        # Python's own collections then pass over what was there before.
        gc.collect()
        gc.freeze()
        try:
            self._run()
        finally:
            self._let_go()
            gc.unfreeze()
        return self.result

    def _run(self) -> None:
        setting, result = self.setting, self.result
        result.rows = [
            RowResult(r.label, r.kind, r.name, r.budget, dict(r.options), setting.batch)
            for r in self.rows
        ]
        pairs = list(zip(self.rows, result.rows, strict=True))
        self._fit_batch(pairs)
        for row, found in pairs:
            if not found.note:
                self._warm_up(row, found)
        pairs = [(row, found) for row, found in pairs if not found.note]
        self._count_bytes()
        if self.held is not None:
            self._alternate_steps(pairs, time.monotonic() + self._left() / 3)
            self._let_go()
        self._alternate_prefills(pairs)

    def _left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def _fit_batch(self, pairs: list[Pair]) -> None:
        """Reduce the batch where a CPU could not read all rows' prompts in time."""
        most, start = self.setting.batch, time.monotonic()
        if self.gpu or most < 2 or self.until == math.inf:
            return
        self.tell(f"{self.result.name}: time of one sequence")
        if self._guarded(pairs[0][1], lambda: self._open(pairs[0][0], 1, self.warm)) is None:
            return
        # Rows that score the prompt take longer than this first one.
        needed = 1.3 * _LEAST_PREFILLS * len(pairs) * (time.monotonic() - start)
        batch = max(1, min(most, int(self._left() / needed)))
        if batch < most:
            self.result.notes.append(f"batch {batch} instead of {most}: no time")
            for _, found in pairs:
                found.batch = batch

    def _warm_up(self, row: Row, found: RowResult) -> None:
        """Read a row's prompt, find its batch and its peaks, and hold its reply."""
        if why := self._why_not(row, found.batch):
            found.note = why
            return
        self.tell(f"{self.result.name}: warm-up, {row.label}")
        largest = found.batch == 0
        if largest:
            found.batch = self._largest_batch(row)
        reply = self._try(row, found, trace=True)
        if reply is None and self.held and found.note == _NO_MEMORY:
            self._apart()
            found.note = ""
            reply = self._try(row, found, trace=True)
        while reply is None and largest and found.batch > 1 and found.note == _NO_MEMORY:
            found.note, found.batch = "", int(found.batch * 0.9)
            reply = self._try(row, found, trace=True)
        if reply is None:
            return
        start = reply.start
        found.start_s, found.warm_s, found.warm_steps = start.prefill_s, start.warm_s, self.warm
        found.prefill_cache_bytes, found.cache_bytes = start.prefill_cache_bytes, reply.nbytes
        found.prefill_peak_bytes, found.peak_bytes = start.prefill_peak_bytes, start.peak_bytes
        if self.held is None:
            reply.close()
            return
        self.held[row.label] = reply
        peaks = [r.peak_bytes for r in self.result.rows if r.peak_bytes is not None]
        if self._free() < 1.5 * max(peaks, default=0):
            self._apart()

    def _apart(self) -> None:
        """Go on without holding replies: a row's steps then follow each of its prefills."""
        self._let_go()
        self.held = None
        self.result.notes.append("caches do not fit side by side: steps follow each prefill")

    def _let_go(self) -> None:
        for reply in (self.held or {}).values():
            reply.close()
        self.held = {} if self.held is not None else None

    def _count_bytes(self) -> None:
        setting, result = self.setting, self.result
        if setting.growth and not self.gpu:
            self._count()
        if setting.batch:
            ids = models.make_prompt(self.model, result.rows[0].batch, setting.prompt)
            peak = self._guarded(None, lambda: measure.plain_peak(self.model, ids))
            result.plain_peak_bytes = peak

    def _alternate_steps(self, pairs: list[Pair], until: float) -> None:
        """Blocks of decode steps of all rows, in random order: each is one pair with each other."""
        assert self.held is not None
        result, most = self.result, self.setting.new - 1
        block = min(_BLOCK_GPU if self.gpu else _BLOCK_CPU, most)
        while result.steps + block <= most:
            if result.steps and time.monotonic() > until:
                break
            self.tell(f"{result.name}: decode steps")
            for row, found in shuffled(pairs, self.order):
                if not found.note:
                    self._steps(self.held[row.label], found, block)
            result.steps += block

    def _alternate_prefills(self, pairs: list[Pair]) -> None:
        """Prompts of all rows in random order; without replies to hold, steps too."""
        rounds, last = 0, sum(found.start_s or 0.0 for _, found in pairs)
        while rounds < self.setting.rounds:
            if last > self._left() and (rounds or self.held is not None):
                break
            start = time.monotonic()
            for row, found in shuffled(pairs, self.order):
                self.tell(f"{self.result.name}: prefill {rounds + 1}, {row.label}")
                reply = None if found.note else self._try(row, found)
                if reply is None:
                    continue
                found.prefill_s.append(reply.start.prefill_s)
                if self.held is None:
                    self.result.steps = self.setting.new - 1
                    self._steps(reply, found, self.result.steps)
                reply.close()
            rounds, last = rounds + 1, time.monotonic() - start
        if rounds < self.setting.rounds:
            self.result.notes.append(f"{rounds} prefills instead of {self.setting.rounds}: no time")
        for _, found in () if rounds else pairs:
            found.prefill_s = [] if found.start_s is None or found.note else [found.start_s]

    def _steps(self, reply: AnyReply, found: RowResult, number: int) -> None:
        seconds = self._guarded(found, lambda: reply.steps(number))
        if seconds is not None:
            found.step_s.append(seconds / number)
            found.cache_bytes = reply.nbytes

    def _largest_batch(self, row: Row) -> int:
        def peak(batch: int) -> int | None:
            reply = self._guarded(None, lambda: self._open(row, batch, 1, trace=True))
            return None if reply is None else reply.start.peak_bytes

        most = _LARGEST_BATCH if self.memory is None else 4
        return largest_batch(peak(1), peak(2), self._free(), most)

    def _try(self, row: Row, found: RowResult, *, trace: bool = False) -> AnyReply | None:
        # A reply that only counts as a prefill needs no steps.
        warm = self.warm if trace or self.held is None else 0
        return self._guarded(found, lambda: self._open(row, found.batch, warm, trace=trace))

    def _open(self, row: Row, batch: int, warm: int, *, trace: bool = False) -> AnyReply:
        """A reply of a row."""
        if row.kind == "kvpress":
            assert self.worker is not None
            assert row.press is not None
            return self.worker.open(row.press, batch, self.setting.prompt, warm, trace=trace)
        ids, model = models.make_prompt(self.model, batch, self.setting.prompt), self._ready(row)
        cache = None
        # `generate` knows how long a reply may become, too.
        most = self.setting.prompt + self.warm + self.setting.new
        if row.name == "static":
            cache = StaticCache(model.config, max_cache_len=most)
        if row.kind == "policy":
            attached = attachment_of(model)
            cache = CompressedCache(attached.parts.config, attached.plan, max_length=most)
        return Reply(model, ids, warm, trace=trace, cache=cache)

    @comparing()
    def _ready(self, row: Row) -> Any:
        """A row's own model: wrapped, or with its attention implementation."""
        model = models.twin(self.model)
        if row.kind != "policy":
            attention = ATTENTION.get(row.name, row.name)
            if model.get_decoder().config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            return model
        options = dict(row.options)
        profile = options.pop("profile", None)
        if profile == "falling":
            profile = falling_profile(self.result.layers, row.budget)
        return mmkv.wrap(model, row.name, row.budget, profile=profile, **options)

    def _guarded(self, found: RowResult | None, work: Callable[[], T]) -> T | None:
        """What `work` gives; None and a note on the row where it does not fit or cannot be done."""
        try:
            return work()
        except (RuntimeError, ValueError) as error:
            short = isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
            if isinstance(error, WorkerError):
                short = error.memory
            if not short and (found is None or not isinstance(error, ValueError | WorkerError)):
                raise
            why = _NO_MEMORY if short else " ".join(str(error).split())
        if found is not None:
            found.note = why
            found.prefill_s, found.step_s = [], []
        if self.gpu:
            torch.cuda.empty_cache()
        return None

    def _free(self) -> int:
        if self.memory is not None:
            return self.memory
        if self.gpu:
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.model.device)[0]
        return psutil.virtual_memory().available

    def _why_not(self, row: Row, batch: int) -> str:
        """Why a row cannot be measured: no flash-attn, weights that do not fit; "" if it can."""
        if row.name == "flash" and not is_flash_attn_2_available():
            return "flash-attn is not installed"
        if row.name != "eager":
            return ""
        config = self.model.get_decoder().config
        cells = max(1, batch) * config.num_attention_heads * self.setting.prompt**2
        # Products, float32 weights and their cast live at once.
        needed = cells * (2 * self.model.dtype.itemsize + 4)
        if needed < 0.9 * self._free():
            return ""
        return f"does not fit: its weights take {needed / 1e9:.1f} GB"

    def _count(self) -> None:
        """How a decode step's tensors grow with the cache, on one sequence."""
        config = self.model.get_decoder().config
        for text in self.setting.growth:
            self.tell(f"{self.result.name}: counting the tensors of {text}'s decode step")
            name, options = parse(text)
            row = Row(text, "policy", name, _GROWTH_BUDGET, options)
            steps: list[measure.Step] = []
            for prompt in self.setting.growth_prompts:
                ids = models.make_prompt(self.model, 1, prompt)
                steps.append(measure.trace_step(self._ready(row), ids))
            growth = step_growth(steps[0], steps[1], config, self.model.dtype.itemsize)
            self.result.growth[text] = growth


def step_growth(
    short: measure.Step, long: measure.Step, config: Any, itemsize: int
) -> dict[str, float]:
    """What a decode step has more with the longer cache.

    "nbytes" it allocates and writes; token "slots" (of one key-value head each) that a layer
    holds, mean over layers; tensor operations, "ops".
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = (long.cache_bytes - short.cache_bytes) / (
        2 * head_dim * itemsize * config.num_hidden_layers
    )
    return {
        "nbytes": float(long.nbytes - short.nbytes),
        "slots": slots,
        "ops": float(long.ops - short.ops),
    }


def largest_batch(one: int | None, two: int | None, free: int, most: int) -> int:
    """About the largest batch that fits, at most `most`.

    Args:
        one: bytes at the peak of one sequence; None if it does not fit.
        two: of two.
        free: bytes there are.
        most: the largest to try.
    """
    if one is None or two is None:
        return 1
    fits = 1 + int(max(0.0, 0.95 * free - one) // max(1, two - one))
    return max(1, min(fits, most))


def _about(dtype: str, gpu: bool, worker: Worker | None) -> dict[str, Any]:
    import transformers

    import mmkv

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "versions": {
            "mmkv": mmkv.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
        },
        "kvpress": None if worker is None else worker.versions,
        "peak": "CUDA allocator, above the weights"
        if gpu
        else "CPU allocator's events in the warm-up, above the weights",
    }
