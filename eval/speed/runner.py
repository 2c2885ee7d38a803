"""Rows in turns: A B A B, so that a machine that drifts drifts for all."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import psutil
import torch

from mmkv.eval.speed import measure, models
from mmkv.eval.speed.measure import Run
from mmkv.eval.speed.presets import Setting
from mmkv.eval.speed.report import Result, RowResult
from mmkv.eval.speed.rival import Worker, WorkerError
from mmkv.eval.speed.rows import Row, falling_profile, interleave, make_rows, parse

T = TypeVar("T")
# Tokens of a warm-up: enough for kernels to be compiled and for runs in graphs to begin.
_WARM_GPU, _WARM_CPU = 48, 4
_FEWEST_NEW = 32
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
        until: seconds of `time.monotonic` at which it should be done; rounds, and if need be
            generated tokens, are reduced.
        roofline: add the bytes-bound ideal.
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
        self.new = setting.new
        self.rows = make_rows(setting, kvpress=worker is not None)
        self.result = Result(
            name=setting.name,
            model=setting.model,
            prompt=setting.prompt,
            new=setting.new,
            rounds=0,
            device=device,
            about=_about(dtype, self.gpu, worker),
            weight_bytes=models.weight_bytes(model),
            step_weight_bytes=models.step_bytes(model),
            layers=model.get_decoder().config.num_hidden_layers,
        )
        if roofline:
            self.result.bandwidth = measure.copy_bandwidth(model.device)

    def run(self) -> Result:
        """Warm up, take turns, count allocations."""
        # Python's own collections then pass over what was there before.
        gc.collect()
        gc.freeze()
        try:
            return self._run()
        finally:
            gc.unfreeze()

    def _run(self) -> Result:
        batch, result = self.setting.batch, self.result
        result.rows = [
            RowResult(r.label, r.kind, r.name, r.budget, dict(r.options), batch, self.new)
            for r in self.rows
        ]
        pairs = list(zip(self.rows, result.rows, strict=True))
        costs = [self._warm_up(row, found) for row, found in pairs]
        # A first run may have compiled kernels: no row takes much longer than the unwrapped one.
        seconds = sum(min(c, 1.5 * costs[0]) if costs[0] else c for c in costs)
        pairs = [(row, found) for row, found in pairs if not found.note]
        self._fit_tokens(pairs, seconds)
        last = 0.0
        for turn in range(self.setting.rounds):
            start = time.monotonic()
            if turn and start + last > self.until:
                result.notes.append(f"{turn} rounds instead of {self.setting.rounds}: out of time")
                break
            for _, (row, found) in interleave(pairs, 1):
                self.tell(f"{result.name}: round {turn + 1}, {row.label}")
                self._turn(row, found)
            result.rounds, last = turn + 1, time.monotonic() - start
        for row in result.rows:
            row.new = self.new
            if result.bandwidth is not None and row.cache_bytes is not None:
                row.ideal_step_s = (result.step_weight_bytes + row.cache_bytes) / result.bandwidth
        result.new = self.new
        if self.setting.growth and not self.gpu:
            self._count()
        if batch:
            ids = models.make_prompt(self.model, batch, self.setting.prompt)
            with measure.attention(self.model, "sdpa"):
                peak = self._guarded(None, lambda: measure.plain_peak(self.model, ids))
                bare = self._guarded(None, lambda: measure.bare_step(self.model, ids))
            result.plain_peak_bytes, result.bare_step_s = peak, bare
        return result

    def _warm_up(self, row: Row, found: RowResult) -> float:
        """Find the batch, measure the peaks; the seconds that a full turn will about take."""
        if row.name == "eager" and (why := self._too_large(found.batch)):
            found.note = why
            return 0.0
        self.tell(f"{self.result.name}: warm-up, {row.label}")
        largest = found.batch == 0
        if largest:
            found.batch = self._largest_batch(row)
        new = min(self.new, _WARM_GPU if self.gpu else _WARM_CPU)
        run = self._try(row, found, new, trace=True)
        while run is None and largest and found.batch > 1 and found.note == _NO_MEMORY:
            found.note, found.batch = "", int(found.batch * 0.9)
            run = self._try(row, found, new, trace=True)
        if run is None:
            return 0.0
        found.prefill_peak_bytes, found.peak_bytes = run.prefill_peak_bytes, run.peak_bytes
        return run.prefill_s + run.decode_s / run.steps * (self.new - 1)

    def _largest_batch(self, row: Row) -> int:
        def peak(batch: int) -> int | None:
            run = self._guarded(None, lambda: self._once(row, batch, 2, trace=True))
            return None if run is None else run.peak_bytes

        most = _LARGEST_BATCH if self.memory is None else 4
        return largest_batch(peak(1), peak(2), self._free(), most)

    def _turn(self, row: Row, found: RowResult) -> None:
        run = self._try(row, found, self.new)
        if run is None:
            return
        found.prefill_s.append(run.prefill_s)
        found.step_s.append(run.decode_s / run.steps)
        found.prefill_cache_bytes, found.cache_bytes = run.prefill_cache_bytes, run.cache_bytes
        if run.peak_bytes is not None and run.prefill_peak_bytes is not None:
            found.prefill_peak_bytes, found.peak_bytes = run.prefill_peak_bytes, run.peak_bytes

    def _try(self, row: Row, found: RowResult, new: int, *, trace: bool = False) -> Run | None:
        return self._guarded(found, lambda: self._once(row, found.batch, new, trace=trace))

    def _once(self, row: Row, batch: int, new: int, *, trace: bool = False) -> Run:
        if row.kind == "kvpress":
            assert self.worker is not None
            assert row.press is not None
            return self.worker.run(row.press, batch, self.setting.prompt, new, trace=trace)
        ids = models.make_prompt(self.model, batch, self.setting.prompt)
        with self._ready(row):
            return measure.run_once(self.model, ids, new, trace=trace)

    @contextmanager
    def _ready(self, row: Row) -> Generator[None]:
        """The model as a row has it."""
        from mmkv.wrapping import wrapped

        if row.kind == "unwrapped":
            with measure.attention(self.model, row.name):
                yield
            return
        options = dict(row.options)
        profile = options.pop("profile", None)
        if profile == "falling":
            profile = falling_profile(self.result.layers, row.budget)
        with wrapped(self.model, row.name, row.budget, profile=profile, **options):
            yield

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

    def _fit_tokens(self, pairs: list[tuple[Row, RowResult]], seconds: float) -> None:
        """Generate fewer tokens where not even one round fits into the time."""
        left = self.until - time.monotonic()
        if not pairs or seconds <= left or self.new <= _FEWEST_NEW:
            return
        self.new = max(_FEWEST_NEW, int(self.new * max(0.0, left) / seconds))
        self.result.notes.append(f"{self.new} new tokens instead of {self.setting.new}: no time")

    def _free(self) -> int:
        if self.memory is not None:
            return self.memory
        if self.gpu:
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.model.device)[0]
        return psutil.virtual_memory().available

    def _too_large(self, batch: int) -> str:
        """Why eager attention's weights do not fit; "" if they do."""
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
                with self._ready(row):
                    steps.append(measure.trace_step(self.model, ids))
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
