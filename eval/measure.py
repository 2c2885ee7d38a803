"""One policy at one budget on one batch: perplexity, divergence, replies, and what was kept."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor

import mmkv
from mmkv.attach.attachment import attachment_of
from mmkv.calls import cache_in, unwrap_container
from mmkv.chat import on_device
from mmkv.forcing import (
    Read,
    Scored,
    changes_logits,
    ends_of,
    log_probabilities,
    score_answers,
    up_to_end,
)
from mmkv.loading import first_line
from mmkv.report import mean_known
from mmkv.rouge import rouge

from .prompts import Encoder, check_positions
from .replay import Capture, applies, asked, continued
from .samples import Sample
from .scoring import score
from .speed.models import now
from .store import FULL, Row
from .variants import Variant

COMPARED = {"divergence", "next"}  # metrics that compare next tokens with the full cache's


@dataclass
class Job:
    """The model, samples and metrics that all batches of a run share."""

    model: Any
    encoder: Encoder
    samples: Sequence[Sample]
    metrics: Sequence[str]
    about: dict[str, Any]  # fields that every row of the run has
    replays: bool = False  # whether one pass of a batch's prompts serves all policies
    full: dict[int, Row] = field(default_factory=dict[int, Row])  # the full cache's rows, by sample
    # Policy and budget, inputs, the context read last, and the seconds that reading it took.
    last_read: tuple[tuple[str, float | int], dict[str, Any], mmkv.Context, float] | None = None

    @cached_property
    def by_generate(self) -> bool:
        """Whether greedy replies need `generate`, as they are not those of the largest logits."""
        return changes_logits(self.model)

    def measures(self, *names: str) -> bool:
        """Return whether one of these metrics is measured."""
        return not set(names).isdisjoint(self.metrics)


class Batch:
    """Some samples of a job, with inputs and results that all policies share, computed once."""

    def __init__(self, job: Job, indices: Sequence[int]) -> None:
        self.job, self.indices = job, indices
        self.samples = [job.samples[i] for i in indices]
        # A captured pass of the prompts; under True, of their contexts without the questions.
        self.captures: dict[bool, Capture] = {}

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Return the prompts on the model's device."""
        return on_device(self.job.model, self.job.encoder.batch(self.samples))

    @cached_property
    def apart(self) -> list[dict[str, Any]]:
        """Return the contexts, and the questions that follow them, as two batches."""
        return [on_device(self.job.model, x) for x in self.job.encoder.apart(self.samples)]

    @cached_property
    def answers(self) -> list[list[int]]:
        """Return the token ids of the reference answers."""
        return [self.job.encoder.answer(sample) for sample in self.samples]

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each prompt."""
        return self.inputs["attention_mask"].sum(-1).tolist()

    def check_lengths(self) -> None:
        """Raise ValueError if a prompt is too long for the model with what is read after it."""
        measures, compares = self.job.measures, self.job.measures(*COMPARED)
        for sample, answer, n in zip(self.samples, self.answers, self.lengths, strict=True):
            along_text = compares and sample.is_continuation
            reads = measures("ppl") or along_text
            generates = measures("rouge", "score") or (compares and not along_text)
            n_new = max(len(answer) * reads, sample.max_new_tokens * generates)
            check_positions(self.job.model, f"sample {sample.id}", n, n_new)

    @property
    def replies(self) -> list[list[int]]:
        """Return token ids along which next tokens are compared: a text's continuation, or else
        the full cache's own reply; [] if there is none."""
        each = zip(self.indices, self.samples, self.answers, strict=True)
        full = self.job.full
        return [
            answer if s.is_continuation else full.get(i, {}).get("reply", [])
            for i, s, answer in each
        ]

    @cached_property
    def full(self) -> list[Tensor]:
        """Return the full cache's distributions along the replies, from the unwrapped model."""
        return log_probabilities(self.job.model, self.inputs, self.replies)

    def context(
        self, variant: Variant, budget: float | int, captured: Capture | None
    ) -> tuple[mmkv.Context, float]:
        """Return the compressed contexts of the prompts, and the seconds that reading them took.

        Equal ones are read only once.
        """
        job, key, inputs = self.job, (variant.label, budget), self.apart[0]
        if job.last_read is not None and job.last_read[0] == key:
            last = job.last_read[1]
            if last.keys() == inputs.keys() and all(last[x].equal(inputs[x]) for x in inputs):
                return job.last_read[2:]
        job.last_read = None  # frees its memory before another one is read
        start = now(job.model.device)
        if captured is None:
            context = mmkv.read(job.model, inputs, prefill_chunk_size=variant.evict_chunks)
        else:
            shape = inputs["input_ids"].shape
            by_token = {name: x for name, x in inputs.items() if x.shape == shape}
            context = mmkv.Context(job.model, captured.replayed(job.model), by_token)
        job.last_read = key, inputs, context, now(job.model.device) - start
        return job.last_read[2:]


def measure(variant: Variant, budget: float | int, batch: Batch) -> list[Row]:
    """Measure one policy and budget on one batch. If that fails, each sample is tried alone, and
    the row of one that fails again holds the reason in `error`."""
    job = batch.job
    try:
        batch.check_lengths()
        if variant.label != FULL:  # these need the model before it is wrapped
            _ = job.by_generate
            if job.measures(*COMPARED):
                _ = batch.full
            if job.replays and variant.hidden not in batch.captures:
                inputs = batch.apart[0] if variant.hidden else batch.inputs
                batch.captures[variant.hidden] = Capture.of(job.model, inputs)
        with variant.wrapped(job.model, budget):
            return _measure(variant, budget, batch)
    except (ValueError, OutOfMemoryError) as error:
        if len(batch.indices) == 1:
            (row,) = _new_rows(variant, budget, batch)
            return [row | {"error": first_line(error)}]
    return [row for i in batch.indices for row in measure(variant, budget, Batch(job, [i]))]


def _measure(variant: Variant, budget: float | int, batch: Batch) -> list[Row]:
    start = time.perf_counter()
    job, model, context = batch.job, batch.job.model, None
    cache: Any = None
    held_bytes, read_s = 0, 0.0
    rows = _new_rows(variant, budget, batch)
    scores_answers, compares = job.measures("ppl"), job.measures(*COMPARED)
    generates, is_full = job.measures("rouge", "score"), variant.label == FULL
    if (scores_answers or compares) and variant.evict_chunks is not None and not variant.hidden:
        what = "perplexity" if scores_answers else "divergence"
        raise ValueError(
            f"{what} reads prompts at once, and evict_chunks in chunks: use --metrics rouge, "
            "or --question hidden"
        )
    replayed = not is_full and applies(attachment_of(model).plan)
    captured = batch.captures.get(variant.hidden) if replayed else None
    if variant.hidden:
        context, read_s = batch.context(variant, budget, captured)
        held_bytes = context.cache.nbytes

    def prompts_and_reader() -> tuple[dict[str, Any], Read | None]:
        """Return all tokens of the prompts, and the reader of those not in a cache yet."""
        if context is not None:
            return asked(context, batch.apart[1])
        return batch.inputs, None if captured is None else captured.reader(model)

    answers = batch.answers if scores_answers else None
    replies = batch.replies if compares and not is_full else None
    full = None if replies is None else batch.full
    # The answer of a continued text is its reply too: it is fed once for both metrics.
    for ids in [answers] if answers == replies else [answers, replies]:
        if ids is not None:
            prompts, read = prompts_and_reader()
            options: Any = {"full": full if ids == replies else None, "hidden": variant.hidden}
            scored = score_answers(model, prompts, ids, read=read, **options)
            cache, held_bytes = scored.cache, held_bytes or scored.held_bytes
            _add_scores(rows, batch, scored, ids is answers, ids == replies)
            del scored
    records_reply = is_full and compares
    if generates or records_reply:
        limits = [sample.max_new_tokens for sample in batch.samples]
        if captured is None or job.by_generate:
            pad, chunk = job.encoder.tokenizer.pad_token_id, variant.evict_chunks
            inputs = batch.inputs if context is None else context.arguments_for(batch.apart[1])
            chunk = chunk if context is None else None  # its context is read already
            tokens, cache, times, first_bytes = timed(model, inputs, limits, pad, chunk, read_s)
            times = times if captured is None else {}  # a replay takes less time than reading
        else:
            (prompts, read), times = prompts_and_reader(), dict[str, float]()
            assert read is not None
            ends = ends_of(model)
            tokens, cache, first_bytes = continued(model, prompts, read, limits, ends)
        each = zip(rows, batch.samples, batch.answers, tokens, strict=True)
        for row, sample, answer, ids in each:
            row["new_tokens"] = len(ids)
            if records_reply:
                n = max(0, len(answer if sample.is_continuation else ids) - 1)
                row |= {"reply": ids, "divergence_sum": 0.0, "next_sum": n, "next_tokens": n}
            if generates:
                reply = job.encoder.decode(ids)
                text = reply.strip()
                full_text = text if is_full else job.full.get(row["index"], {}).get("text")
                rouge_figures = _rouge(sample, text, full_text) if "rouge" in job.metrics else {}
                row |= {"text": text, "score": score(sample, reply), **rouge_figures, **times}
        held_bytes = held_bytes or first_bytes
    seconds = (time.perf_counter() - start) / len(rows)
    cache = cache if context is None else context.cache  # the one that was compressed
    return [
        row | facts | {"held_bytes": held_bytes // len(rows), "seconds": round(seconds, 4)}
        for row, facts in zip(rows, kept_by_row(cache), strict=True)
    ]


def _add_scores(
    rows: list[Row], batch: Batch, scored: Scored, with_ppl: bool, compares: bool
) -> None:
    """Add to the rows perplexity, or divergence from the full cache, or both."""
    for i, (row, sample) in enumerate(zip(rows, batch.samples, strict=True)):
        nll, n, nats = scored.nll[i], scored.tokens[i], scored.divergence[i]
        if with_ppl and not math.isfinite(nll):
            row["error"] = f"the answer's log-likelihood is {nll}"
        elif with_ppl:
            row |= {"nll": nll, "answer_tokens": n, "ppl": perplexity(nll, n)}
        if compares and not math.isfinite(nats):
            row["error"] = f"the divergence from the full cache is {nats}"
        elif compares:
            row |= {"divergence_sum": nats, "next_sum": scored.same[i]}
            row["next_tokens"] = scored.compared[i]
            row["divergences"] = [float(f"{x:.4g}") for x in scored.divergences[i]]
            # Equal next tokens give the same greedy reply.
            if not (sample.is_continuation or batch.job.by_generate):
                row["same"] = float(scored.same[i] == scored.compared[i])


def perplexity(nll: float, tokens: int) -> float | None:
    """Return `exp(nll / tokens)`; None without tokens, or if it overflows a float."""
    return math.exp(nll / tokens) if tokens and nll / tokens < 700 else None


def timed(
    model: Any,
    inputs: Mapping[str, Any],
    limits: Sequence[int],
    pad: int,
    chunk: int | None = None,
    read_s: float = 0.0,
) -> tuple[list[list[int]], Any, dict[str, float], int]:
    """Generate greedy replies, each up to an end token or its limit, and time them.

    A prompt is read `chunk` tokens at a time. `read_s` are the seconds in which the context before
    these tokens was read; both times include them. Return the token ids of each reply; the cache;
    "first_token_s" and "tokens_per_s"; and the cache's bytes after the prompt was read.
    """
    times, caches, prompt_bytes = list[float](), list[Any](), 0

    def put(value: Any) -> None:
        """Note when tokens arrive: first the prompt's, then the new ones."""
        nonlocal prompt_bytes
        times.append(time.perf_counter())
        prompt_bytes = caches[-1].nbytes if len(times) == 2 else prompt_bytes

    def watch(module: Any, args: Any, output: Any) -> None:
        caches[:] = [cache_in(output)]

    options: dict[str, Any] = {"max_new_tokens": max(limits), "do_sample": False, "num_beams": 1}
    options |= {"pad_token_id": pad, "return_dict_in_generate": True, "use_cache": True}
    options["streamer"] = SimpleNamespace(put=put, end=lambda: None)
    start = time.perf_counter() - read_s
    with torch.no_grad(), unwrap_container(model).register_forward_hook(watch):
        out = model.generate(**inputs, **options, prefill_chunk_size=chunk)
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    seconds, ends = time.perf_counter() - start, ends_of(model)
    replies = [up_to_end(ids, ends) for ids in new.tolist()]
    speed = round(sum(map(len, replies)) / seconds, 2)
    cut_replies = [ids[:limit] for ids, limit in zip(replies, limits, strict=True)]
    speeds = {"first_token_s": round(times[1] - start, 4), "tokens_per_s": speed}
    return cut_replies, caches[-1], speeds, prompt_bytes


def _rouge(sample: Sample, text: str, full: str | None) -> dict[str, float | None]:
    """Compare a reply with the full cache's, and with the reference answer."""
    identical = full == text
    return {
        "same": None if full is None else float(identical),
        # Two empty replies agree, where ROUGE would give 0.
        "rouge": 1.0 if identical else None if full is None else rouge(text, full),
        "rouge_reference": rouge(text, sample.answers[0]) if sample.answers else None,
    }


def kept_by_row(cache: Any) -> list[dict[str, Any]]:
    """Return the fields of each row about what its cache kept after the prefill.

    `cache_bytes` counts only kept pairs, so it does not depend on the other rows of a batch.
    """
    layers, report, rows = [x.keeping() for x in cache.compressed], cache.report(), []
    n, heads, seen = len(layers), layers[0].heads, cache.get_seq_length()
    other_bytes = sum(x.nbytes for x in report.layers if not x.compressed)
    full_pair = (report.full_nbytes - other_bytes) // (len(cache.lengths) * heads * n * seen)
    for row, length in enumerate(cache.lengths):
        kept, total = sum(x.sizes[row] for x in layers), length * n
        shares = [None if x.retained is None else float(x.retained[row]) for x in layers]
        sizes = {
            "cache_bytes": heads * kept * layers[0].stored.pair_bytes,
            "full_bytes": total * heads * full_pair,
        }
        sizes |= {"other_bytes": other_bytes // len(cache.lengths)}  # of layers not compressed
        facts = {"prompt_tokens": length, "kept_fraction": kept / total, **sizes}
        facts["kv_dtype"] = cache.plan.kv_dtype
        rows.append(facts | {"retained": 1.0 if kept == total else mean_known(shares)})
    return rows


def _new_rows(variant: Variant, budget: float | int, batch: Batch) -> list[Row]:
    return [
        {"policy": variant.label, "budget": budget, "index": index}
        | {"sample": s.id, "suite": s.suite, "task": s.task, "tags": list(s.tags)}
        | {"options": variant.recorded, **batch.job.about}
        for index, s in zip(batch.indices, batch.samples, strict=True)
    ]
