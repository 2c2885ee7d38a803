"""Rows side by side: their decode steps alternate, so that a machine that drifts drifts for all."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import psutil
import torch
from transformers import StaticCache
from transformers.utils.import_utils import is_flash_attn_2_available

import mmkv
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.eval.speed import models
from mmkv.eval.speed.rival import RemoteReply, Worker
from mmkv.eval.speed.rows import ATTENTION, Result, Row, Setting, make_rows
from mmkv.wrapping import comparing

AnyReply = models.Reply | RemoteReply
# Steps of a warm-up: enough for kernels to be compiled and for runs in graphs to begin.
_WARM_GPU, _WARM_CPU = 48, 3


@dataclass
class Bench:
    """One setting on one model."""

    setting: Setting
    model: Any  # not wrapped
    worker: Worker | None = None  # kvpress's process with the same model
    until: float = math.inf  # `time.monotonic` when it should be done; one round is always made
    tell: Callable[[str], None] = lambda text: None  # is given what is being done

    def __post_init__(self) -> None:
        self.order = random.Random(0)
        self.warm = _WARM_GPU if self.model.device.type == "cuda" else _WARM_CPU
        self.rows = make_rows(self.setting, kvpress=self.worker is not None)

    def run(self) -> Result:
        """Warm up each row, then let them take turns."""
        setting, notes, last = self.setting, list[str](), 0.0
        # Python's own collections then pass over what was there before.
        gc.collect()
        gc.freeze()
        for row in self.rows:
            self.tell(f"{setting.name}: warm-up, {row.label}")
            with _noting(row):
                reply = self._make(row)
                row.warm_s, row.peak_bytes = reply.start["warm_s"], reply.start["peak_bytes"]
                row.prefill_cache_bytes = reply.start["prefill_cache_bytes"]
                reply.close()
        held = sum(row.prefill_cache_bytes for row in self.rows)
        apart = self._free() < 1.5 * (held + max(row.peak_bytes or 0 for row in self.rows))
        if apart:
            notes.append("caches do not fit side by side: steps follow each prefill")
        for done in range(setting.rounds):
            start = time.monotonic()
            if done and start + last >= self.until:
                notes.append(f"{done} rounds instead of {setting.rounds}: no time")
                break
            self.tell(f"{setting.name}: round {done + 1}")
            rows = [row for row in self.rows if not row.note]
            self.order.shuffle(rows)
            for group in [[row] for row in rows] if apart else [rows]:
                self._take_turns(group)
            last = time.monotonic() - start
        gc.unfreeze()
        about = {
            "device": models.device_in_words(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: version(name) for name in ("mmkv", "torch", "transformers")},
            "kvpress": None if self.worker is None else self.worker.versions,
        }
        return Result(setting, self.rows, about, notes)

    def _take_turns(self, rows: Sequence[Row]) -> None:
        """Prompts of rows, then their steps in random order: each is one pair with the others'."""
        replies: list[tuple[Row, AnyReply]] = []
        for row in rows:
            with _noting(row):
                reply = self._make(row)
                row.prefill_s.append(reply.start["prefill_s"])
                replies.append((row, reply))
        for i in range(self.setting.new - 1):
            if i and time.monotonic() > self.until:
                break
            for row, reply in self.order.sample(replies, len(replies)):
                if not row.note:
                    with _noting(row):
                        row.step_s.append(reply.steps(1))
                        row.cache_bytes = reply.nbytes
        for _, reply in replies:
            reply.close()

    @comparing()
    def _make(self, row: Row) -> AnyReply:
        setting, cache = self.setting, None
        if self.worker is not None and row.kind == "kvpress":
            asked = {"press": row.press, "batch": setting.batch, "prompt": setting.prompt}
            return RemoteReply(self.worker, row.label, warm=self.warm, **asked)
        if row.policy == "flash" and not is_flash_attn_2_available():
            raise ValueError("flash-attn is not installed")
        model = models.twin(self.model)
        # `generate` knows how long a reply may become, too.
        most = setting.prompt + self.warm + setting.new
        if row.kind in ("policy", "bound"):
            attached = attachment_of(mmkv.wrap(model, row.policy, row.budget, **row.options))
            cache = CompressedCache(attached.parts.config, attached.plan, max_length=most)
        else:
            model.set_attn_implementation(ATTENTION.get(row.policy, row.policy))
        if row.policy == "static":
            cache = StaticCache(model.config, max_cache_len=most)
        ids = models.make_prompt(self.model, setting.batch, setting.prompt)
        return models.Reply(model, ids, self.warm, cache)

    def _free(self) -> int:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.model.device)[0]
        return psutil.virtual_memory().available


@contextmanager
def _noting(row: Row) -> Generator[None]:
    """What cannot be done becomes the note on a row, which then has no times."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        if "OutOfMemory" in text or "not enough memory" in text:
            row.note = "out of memory"
        elif isinstance(error, ValueError):
            row.note = " ".join(str(error).split())
        else:
            raise
        row.prefill_s, row.step_s = [], []
