"""Runs policies x budgets over a suite's samples; finished rows are written to disk at once.

The unit of work is a batch at one policy and budget. Batches do not depend on the number of
processes, and all policies run on a group of batches before the next. A group has all questions
about its contexts, so that a context whose question is hidden is read once.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState

from mmkv import registry
from mmkv.budgets import named, number
from mmkv.chat import max_positions
from mmkv.memory import Memory
from mmkv.terminal import bar, say

from .environment import describe_environment, file_digests
from .measure import COMPARED, Batch, Job, measure
from .prompts import Encoder
from .samples import Sample
from .store import (
    FULL,
    Row,
    Store,
    check_metrics,
    digest,
    key_of,
)
from .variants import Variant, parse_variants


def find_processes(device: str | None = None) -> PartialState:
    """Return this process's place among those that the launcher started."""
    # accelerate joins processes without an accelerator only if it is told that they use the CPU.
    cpu = device == "cpu" or not torch.accelerator.is_available()
    # The first process to end waits for the slowest, possibly for days.
    return PartialState(cpu=cpu, timeout=timedelta(days=7))


def run(
    model: Any,
    processor: Any,
    samples: Sequence[Sample],
    *,
    policies: Sequence[str],
    budgets: Sequence[float | int] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    metrics: Sequence[str] = ("ppl", "rouge"),
    out: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    batch_size: int = 8,
    model_name: str | None = None,
    data: str = "",
    limit: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    replay: bool = False,
    exact: bool = True,
) -> list[Row]:
    """Measure policies at budgets, or go on with a run that was stopped.

    Args:
        model: not wrapped; it is wrapped for each policy and budget, and left unwrapped.
        processor: a transformers processor, or a tokenizer for a text model.
        samples: of one suite; `model_name`, `data` and `limit` are only recorded.
        policies, options: see `parse_variants`. "full" is added if the metrics compare with it.
        budgets: fractions of the prompt, or numbers of tokens; or all of them `Memory`.
        metrics: of `store.METRICS`: perplexity of the answer; divergence of the next-token
            distributions from the full cache's, and the share of the same next tokens, along a
            text's continuation or the full cache's reply; ROUGE-L against that reply; the sample's
            metric.
        out: the run's folder; see `mmkv.eval.store`.
        batch_size: samples at once. With several processes, at most samples / processes.
        max_length: tokens to which long prompts may be cut; by default the model's length.
        seed: of torch, for plugin policies that use random numbers; none of ours does.
        replay: see `mmkv.eval.replay`; rows then have no times, and batches are small.
        exact: whether budgets are measured exactly (least=0), or as `mmkv.wrap` would keep them.

    Returns:
        All rows, in order of policy, budget and sample; with several processes, the first
        returns all rows, the others their own.

    Raises:
        ValueError: bad arguments, a policy that this model cannot have, or a folder with a run of
            other settings, or to which another process writes.
    """
    variants = check_arguments(policies, budgets, metrics, options, exact=exact)
    budgets = [number(budget) for budget in budgets]
    if not samples:
        raise ValueError("samples: there are none; give one or more")
    suite = samples[0].suite
    if "score" in metrics and all(s.metric is None for s in samples):
        raise ValueError(f"metric 'score': suite {suite!r} has none; use other metrics")
    if "ppl" in metrics and not any(s.answers for s in samples):
        raise ValueError(
            f"metric 'ppl': the samples of suite {suite!r} have no answers to score: use other "
            "metrics, such as divergence,next,rouge"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected at least 1")
    processes = find_processes()
    max_length = max_positions(model) if max_length is None else max_length
    variants_at = [(variant, budget) for variant in variants for budget in variant.budgets(budgets)]
    try_all(model, variants_at)
    profiles = [path for v, budget in variants_at if (path := v.profile_at(budget)) is not None]
    settings = {
        "model": model_name or model.config.name_or_path or type(model).__name__,
        "suite": suite,
        "data": data,
        "files": file_digests(model, profiles),
        "policies": {v.label: v.recorded for v in variants},
        "budgets": budgets,
        "metrics": list(metrics),
        "options": dict(options or {}),
        "limit": limit,
        "n": len(samples),
        "data_digest": digest([s.facts for s in samples]),
        "batch_size": batch_size,
        "max_length": max_length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "seed": seed,
        "notes": list(dict.fromkeys(x.note for x in samples if x.note)),
        **({"replay": True} if replay else {}),
        **({"memory": True} if isinstance(budgets[0], Memory) else {}),
    }
    environment = describe_environment(model.device)
    store = Store(out, None if processes.num_processes == 1 else processes.process_index)
    order = [v.label for v in variants], [1.0, *(b for b in budgets if named(b) != "1.0")]
    row_fields = {x: settings[x] for x in ("model", "n")} | {"run": digest([settings, environment])}
    job = Job(model, Encoder(processor, max_length), samples, tuple(metrics), row_fields, replay)
    groups = batches_of(samples, batch_size)
    if processes.is_main_process and len(groups) < processes.num_processes:
        print(
            f"{processes.num_processes} processes share {len(groups)} batches: some have nothing "
            f"to do; use --batch-size {max(1, len(samples) // processes.num_processes)} or less"
        )
    own_groups = groups[processes.process_index :: processes.num_processes]
    if replay:  # the capture of one batch is large
        own_groups = [[batch] for group in own_groups for batch in group]
    total = len(variants_at) * sum(len(batch) for group in own_groups for batch in group)
    with store.lock() if processes.is_main_process else nullcontext():
        store.claim(settings, environment, main=processes.is_main_process)
        if processes.is_main_process:
            store.merge(*order)
        processes.wait_for_everyone()
        rows = {key_of(row): row for row in store.rows()}
        torch.manual_seed(seed)
        with bar(total, shown=processes.is_main_process) as advance:
            for (variant, budget), batch in _in_order(job, own_groups, variants_at):
                keys = {i: (variant.label, json.dumps(budget), i) for i in batch.indices}
                missing = [i for i, key in keys.items() if key not in rows]
                if missing:
                    measured = measure(variant, budget, batch)
                    new_rows = [r for r in measured if r["index"] in missing]
                    store.append(new_rows)
                    rows |= {key_of(r): r for r in new_rows}
                if variant.label == FULL:
                    job.full |= {i: rows[key] for i, key in keys.items()}
                finished = 0 if missing else len(keys)
                advance(len(keys), f"{variant.label} {named(budget)}", finished)
        processes.wait_for_everyone()
        merged = store.merge(*order) if processes.is_main_process else list(rows.values())
        processes.wait_for_everyone()
    return merged


def _in_order(
    job: Job,
    groups: Iterable[Sequence[tuple[int, ...]]],
    variants_at: Sequence[tuple[Variant, float | int]],
) -> Iterator[tuple[tuple[Variant, float | int], Batch]]:
    """Yield what to measure: each policy and budget on each batch, one group after the other."""
    for group in groups:
        yield from itertools.product(variants_at, [Batch(job, indices) for indices in group])


def batches_of(samples: Sequence[Sample], size: int) -> list[list[tuple[int, ...]]]:
    """Return groups of batches of up to `size` sample indices; a group's batches share contexts.

    With one question on each context, each group is one batch, in the order of the samples.
    """
    contexts: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        contexts.setdefault(sample.context, []).append(i)
    by_count: dict[int, list[list[int]]] = {}
    for indices in contexts.values():
        by_count.setdefault(len(indices), []).append(indices)
    return [
        list(zip(*same_count[start : start + size], strict=True))
        for same_count in by_count.values()
        for start in range(0, len(same_count), size)
    ]


def check_arguments(
    policies: Sequence[str],
    budgets: Sequence[float | int],
    metrics: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    exact: bool = True,
) -> list[Variant]:
    """Return the policies, the full cache first. Raises ValueError for bad arguments."""
    check_metrics(metrics)
    if not budgets or not policies:
        what = "budgets" if policies else "policies"
        example = "[0.2]" if policies else "['condense']"
        raise ValueError(f"{what}: there are none; give one or more, such as {what}={example}")
    variants = parse_variants(policies, options, exact=exact)
    full = [v for v in variants if v.label == FULL]
    if not full and {"rouge", *COMPARED} & {*metrics}:
        full = parse_variants([FULL])
    return [*full, *(v for v in variants if v.label != FULL)]


def fitting(model: Any, budgets: Sequence[float | int]) -> list[str]:
    """Return the registered policies that this model can have at all of these budgets."""
    names: list[str] = []
    for name in registry.list_policies():
        try:
            (variant,) = parse_variants([name])
            try_all(model, [(variant, budget) for budget in variant.budgets(budgets)])
            names.append(name)
        except ValueError as error:
            say(str(error))
    return names


def try_all(model: Any, variants_at: Iterable[tuple[Variant, float | int]]) -> None:
    """Wrap the model once for each policy and budget, so that a bad one fails at the start."""
    for variant, budget in variants_at:
        try:
            with variant.wrapped(model, budget):
                pass
        except ValueError as error:
            raise ValueError(f"policy {variant.label} at {budget}: {error}") from None
