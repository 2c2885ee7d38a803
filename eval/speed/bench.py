"""Timing of the unwrapped model, policies at budgets, and their nearest presses of kvpress.

`make_rows` lists the rows. `Bench` times them with alternating decode steps, so that drift of the
machine affects all alike. `Result` computes medians and paired ratios of the times.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch

import mmkv
from mmkv import calls
from mmkv.attach.attachment import attachment_of
from mmkv.budgets import named
from mmkv.cache.compressed import CompressedCache
from mmkv.eval.environment import describe_environment
from mmkv.eval.speed import models
from mmkv.eval.speed.kvpress_worker import Worker, nearest_press, press_label
from mmkv.eval.variants import parse_variants
from mmkv.memory import Memory
from mmkv.planning import comparing
from mmkv.terminal import Table, tell

# The row that ratios compare with, and a repetition of it, whose ratios should be 1.
UNWRAPPED, AGAIN = "not wrapped", "not wrapped, again"
# Keeps one token of the prompt, so that its steps cost nearly nothing for attention.
BOUND = "one token kept"
# Warm-up steps: enough to compile kernels and to start replaying graphs.
_WARM_GPU, _WARM_CPU = 48, 3


@dataclass(frozen=True)
class Setting:
    """One model, prompt and batch, with the policies and budgets compared on them."""

    model: str
    prompt: int  # tokens
    new: int  # tokens generated in each round
    batch: int  # sequences at once
    policies: tuple[str, ...]  # "name" or "name:option=value:option=value", as for `mmkv eval`
    budgets: tuple[float | int, ...] = (0.2,)
    rounds: int = 6


@dataclass
class Row:
    """One side of the comparison, and its measurements: seconds, and bytes."""

    label: str
    policy: str = ""  # its name; "": the model is not wrapped
    budget: float | int | None = None  # None: nothing is evicted
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    press: dict[str, Any] | None = None  # of kvpress, in the form of `nearest_press`
    prefill_s: list[float] = field(default_factory=list[float])  # to the first token
    step_s: list[float] = field(default_factory=list[float])  # of decode steps, alike for all rows
    cache_bytes: int = 0  # held at the end of a reply
    note: str = ""  # why nothing could be measured


def make_rows(setting: Setting, *, kvpress: bool) -> list[Row]:
    """Return a setting's rows. They include the wrapped full cache, whose gain or loss is not due
    to compression, and a cache of one token, whose steps bound what compression can gain.

    Raises:
        ValueError: an unknown policy or option, or a value out of range.
    """
    rows = [Row(UNWRAPPED), Row(AGAIN), Row(BOUND, "local", 1)]
    presses: dict[str, Row] = {}
    policies = setting.policies if "full" in setting.policies else ("full", *setting.policies)
    for variant in parse_variants(policies):
        text = variant.label
        if variant.hidden or variant.evict_chunks:
            raise ValueError(
                f"policy {text!r}: mmkv bench measures neither question=hidden nor evict_chunks: "
                "leave them out"
            )
        policy, options = variant.policy, variant.recorded
        if not policy.takes_budget:
            rows.append(Row(text, policy.name, options=options))
            continue
        for budget in setting.budgets:
            rows.append(Row(f"{text} {named(budget)}", policy.name, budget, options))
            shares_tokens = kvpress and not isinstance(budget, Memory)
            if shares_tokens and (press := nearest_press(policy, budget, setting.prompt)):
                label = f"kvpress {press_label(press)} {named(budget)}"
                presses[label] = Row(label, budget=budget, press=press)
    return [*rows, *presses.values()]


@dataclass
class Bench:
    """The measurement of one setting on one model."""

    setting: Setting
    model: Any  # not wrapped
    worker: Worker | None = None  # process of kvpress with the same model
    until: float = math.inf  # deadline by `time.monotonic`; one round is always made

    def __post_init__(self) -> None:
        self.rng, self.stopped = random.Random(0), False  # stopped by Ctrl-C
        self.warm = _WARM_GPU if self.model.device.type == "cuda" else _WARM_CPU
        self.rows = make_rows(self.setting, kvpress=self.worker is not None)

    def run(self) -> Result:
        """Warm up each row, then time all rows in rounds. Ctrl-C leaves the round out and stops."""
        setting, notes, last_round = self.setting, list[str](), 0.0
        # Garbage collections then skip all objects that exist already.
        gc.collect()
        gc.freeze()
        for row in self.rows:
            tell(f"warm-up, {row.label}")
            self._take_turns([row], 0)
            row.prefill_s.clear()
        one_by_one = self._free() < 2 * sum(row.cache_bytes for row in self.rows)
        if one_by_one:
            notes.append("caches do not fit side by side: steps follow each prefill")
        for rounds_done in range(setting.rounds):
            start = time.monotonic()
            if rounds_done and start + last_round >= self.until:
                notes.append(f"{rounds_done} rounds instead of {setting.rounds}: no time")
                break
            tell(f"round {rounds_done + 1}")
            rows = [row for row in self.rows if not row.note]
            self.rng.shuffle(rows)
            done = [(row, len(row.prefill_s), len(row.step_s)) for row in self.rows]
            try:
                for group in [[row] for row in rows] if one_by_one else [rows]:
                    self._take_turns(group, setting.new - 1)
            except KeyboardInterrupt:
                if not rounds_done:
                    raise
                for row, prompts, steps in done:
                    del row.prefill_s[prompts:], row.step_s[steps:]
                notes.append(f"{rounds_done} rounds instead of {setting.rounds}: stopped")
                self.stopped = True
                break
            last_round = time.monotonic() - start
        gc.unfreeze()
        environment = describe_environment(self.model.device) | {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "kvpress": None if self.worker is None else self.worker.versions,
        }
        return Result(setting, self.rows, environment, notes)

    def _take_turns(self, rows: Sequence[Row], steps: int) -> None:
        """Time each row's prompt, then steps of all rows in random order, so that steps pair up."""
        replies: list[tuple[Row, Any]] = []
        for row in rows:
            with _noting_failure(row):
                replies.append((row, reply := self._make(row)))
                seconds, row.cache_bytes = next(reply)
                row.prefill_s.append(seconds)
                for _ in range(self.warm):
                    _, row.cache_bytes = next(reply)
        for i in range(steps):
            # A row alone takes all of its steps, as many as the rows of the other turns.
            if i and len(rows) > 1 and time.monotonic() > self.until:
                break
            for row, reply in self.rng.sample(replies, len(replies)):
                if not row.note:
                    with _noting_failure(row):
                        seconds, row.cache_bytes = next(reply)
                        row.step_s.append(seconds)
        for _, reply in replies:
            reply.close()

    @comparing()
    def _make(self, row: Row) -> Generator[tuple[float, int]]:
        """Return a row's reply to random tokens, that has not read the prompt yet."""
        setting, cache = self.setting, None
        if self.worker is not None and row.press is not None:
            options = {"press": row.press, "batch": setting.batch, "prompt": setting.prompt}
            return self.worker.reply(row.label, **options)
        model = calls.twin(self.model)
        ids = models.make_prompt(model, setting.batch, setting.prompt)
        if row.policy:
            attached = attachment_of(mmkv.wrap(model, row.policy, row.budget, **row.options))
            # As `generate` does; the reply's last token is not read.
            max_length = setting.prompt + self.warm + setting.new - 1
            cache = CompressedCache(attached.parts.config, attached.plan, max_length=max_length)
        return models.reply(model, ids, cache)

    def _free(self) -> int:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(self.model.device)[0]
        return psutil.virtual_memory().available


@contextmanager
def _noting_failure(row: Row) -> Generator[None]:
    """Catch a failure, write it into the row's note, and drop the row's times."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # A CPU without memory raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
            row.note = "out of memory"
        elif isinstance(error, ValueError):
            row.note = " ".join(str(error).split())
        else:
            raise
        row.prefill_s, row.step_s = [], []


class Ratio(NamedTuple):
    """The median of paired ratios to a base, and the ends of its 95 % confidence interval."""

    median: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float], base: Sequence[float]) -> Ratio:
        """Return the ratio of values to a base, pair by pair, which cancels drift of the machine.

        The interval is between two of the n ratios, and includes the true median with at least
        95 % for any distribution. Fewer than six ratios have none.
        """
        ratios = sorted(a / b for a, b in zip(values, base, strict=True))
        n = len(ratios)
        cumulated = itertools.accumulate(math.comb(n, i) for i in range(n + 1))
        k = next(i for i, count in enumerate(cumulated) if 40 * count >= 2**n)
        return cls(median(ratios), *((ratios[k - 1], ratios[n - k]) if k else (None, None)))

    def __str__(self) -> str:
        """Return the ratio as tables show it."""
        between = "" if self.low is None else f" ({self.low:.3g}-{self.high:.3g})"
        return f"{self.median:.3g}{between}"


@dataclass
class Result:
    """The rows, facts about model and machine, and notes on the measurement."""

    setting: Setting
    rows: list[Row]
    about: dict[str, Any]
    notes: list[str]

    def cells(self, row: Row) -> dict[str, str]:
        """Return a row's medians and ratios by column; {} if it was not measured."""
        if not row.step_s:
            return {}
        base = next((x for x in self.rows if x.label == UNWRAPPED and x.step_s), row)
        step = median(row.step_s)
        cells = {
            "prefill ms": f"{1e3 * median(row.prefill_s):,.0f}",
            "ms/token": f"{1e3 * step:.2f}",
            "tokens/s": f"{self.setting.batch / step:.1f}",
            "cache MB": f"{row.cache_bytes / 1e6:,.1f}",
        }
        if base is row:
            return cells
        return cells | {
            "x prefill": str(Ratio.of(row.prefill_s, base.prefill_s)),
            "x tokens/s": str(Ratio.of(base.step_s, row.step_s)),
            "x cache": f"{row.cache_bytes / base.cache_bytes:.2f}",
        }

    @property
    def table(self) -> Table:
        """The figures of all rows, with notes on the measurement."""
        cells = {row.label: self.cells(row) for row in self.rows}
        columns = list(dict.fromkeys(name for row_cells in cells.values() for name in row_cells))
        rows = [(label, [x.get(name, "") for name in columns]) for label, x in cells.items()]
        x = self.setting
        title = f"{x.model}, {x.batch} x ({x.prompt:,} + {x.new:,}) tokens"
        rounds = max(len(row.prefill_s) for row in self.rows)
        steps = max(len(row.step_s) for row in self.rows)
        texts = [
            "{device}, {threads} threads, {dtype}".format(**self.about),
            f"each row {rounds} times its prompt and {steps} decode steps, in random order",
            "medians; ratios to the unwrapped model, pair by pair, with 95 % intervals",
            *self.notes,
        ]
        failed = [f"{row.label}: {row.note}" for row in self.rows if row.note]
        return Table("", columns, rows, title, ["; ".join(texts), *failed])

    def save(self, path: Path) -> None:
        """Write all times as JSON, and the table beside it as Markdown."""
        data = {"format": "mmkv-bench", "version": 5, **asdict(self.setting), "about": self.about}
        data |= {"notes": self.notes}
        data["rows"] = [asdict(row) | {"cells": self.cells(row)} for row in self.rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(self.table.markdown, encoding="utf-8")
