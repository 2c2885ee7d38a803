"""One policy at one budget on one batch: perplexity, divergence, replies, and what was kept."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mmkv
from mmkv.attach.attachment import attachment_of
from mmkv.calls import cache_in
from mmkv.chat import on_device
from mmkv.forcing import Scored, ends_of, log_probabilities, score_answers, up_to_end
from mmkv.report import mean_known

from .prompts import Encoder
from .replay import Capture, applies, behind, continued
from .scoring import rouge, score
from .store import Row
from .variants import FULL, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.forcing import Read

    from .samples import Sample

COMPARED = {"divergence", "next"}  # metrics of next tokens beside the full cache's


@dataclass
class Job:
    """What all batches of a run share."""

    model: Any
    encoder: Encoder
    samples: Sequence[Sample]
    metrics: Sequence[str]
    about: dict[str, Any]
    replays: bool = False  # whether one pass of a batch's prompts serves all policies
    full: dict[int, Row] = field(default_factory=dict[int, Row])  # the full cache's rows, by sample
    # The context that was read last, and of what.
    read: tuple[tuple[str, float | int], dict[str, Any], mmkv.Context] | None = None

    def measures(self, *names: str) -> bool:
        """Whether a metric is among these."""
        return not set(names).isdisjoint(self.metrics)


class Batch:
    """Samples of a job by number, and what all policies share of them, made when it is needed."""

    def __init__(self, job: Job, indices: Sequence[int]) -> None:
        self.job, self.indices = job, indices
        self.samples = [job.samples[i] for i in indices]
        # What one pass brought of the prompts; under True, of what precedes their questions.
        self.captures: dict[bool, Capture] = {}

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The prompts on the model's device."""
        return on_device(self.job.model, self.job.encoder.batch(self.samples))

    @cached_property
    def apart(self) -> list[dict[str, Any]]:
        """The prompts before their questions, and the questions."""
        return [on_device(self.job.model, x) for x in self.job.encoder.apart(self.samples)]

    @cached_property
    def answers(self) -> list[list[int]]:
        """Token ids of the reference answers."""
        return [self.job.encoder.answer(sample) for sample in self.samples]

    @property
    def replies(self) -> list[list[int]]:
        """Token ids along which next tokens are compared: how a text goes on, or else the full
        cache's own reply; [] where that is not known."""
        each = zip(self.indices, self.samples, self.answers, strict=True)
        full = self.job.full
        return [answer if s.goes_on else full.get(i, {}).get("reply", []) for i, s, answer in each]

    @cached_property
    def full(self) -> list[Tensor]:
        """The full cache's distributions along the replies, by the model unwrapped."""
        return log_probabilities(self.job.model, self.inputs, self.replies)[0]

    def context(
        self, variant: Variant, budget: float | int, captured: Capture | None
    ) -> mmkv.Context:
        """The prompts before their questions, compressed; the same again are not read again."""
        job, how, given = self.job, (variant.label, budget), self.apart[0]
        if job.read is not None and job.read[0] == how:
            before = job.read[1]
            if before.keys() == given.keys() and all(before[x].equal(given[x]) for x in given):
                return job.read[2]
        job.read = None  # before memory is asked for another
        if captured is None:
            context = mmkv.read(job.model, given, prefill_chunk_size=variant.evict_chunks)
        else:
            shape = given["input_ids"].shape
            seen = {name: x for name, x in given.items() if x.shape == shape}
            context = mmkv.Context(job.model, captured.cache(job.model), seen)
        job.read = how, given, context
        return context


def measure(variant: Variant, budget: float | int, batch: Batch) -> list[Row]:
    """One policy and budget on one batch; where the core refuses it, its samples are tried alone,
    and the row of one whose budget cannot be honoured holds the reason in `error`."""
    from torch import OutOfMemoryError

    job = batch.job
    try:
        if variant.label != FULL:  # by the model as it is, before it is wrapped
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
            return [row | {"error": str(error).splitlines()[0]}]
    alone = [Batch(job, [i]) for i in batch.indices]
    return [row for one in alone for row in measure(variant, budget, one)]


def _measure(variant: Variant, budget: float | int, batch: Batch) -> list[Row]:
    start = time.perf_counter()
    job, model, context = batch.job, batch.job.model, None
    cache: Any = None
    held = 0
    rows = _new_rows(variant, budget, batch)
    perplexed, compares = job.measures("ppl"), job.measures(*COMPARED)
    generates, reference = job.measures("rouge", "score"), variant.label == FULL
    if (perplexed or compares) and variant.evict_chunks is not None and not variant.hidden:
        what = "perplexity" if perplexed else "divergence"
        raise ValueError(
            f"{what} reads prompts at once, and evict_chunks in chunks: use --metrics rouge, "
            "or --question hidden"
        )
    replayed = not reference and applies(attachment_of(model).plan)
    captured = batch.captures.get(variant.hidden) if replayed else None
    if variant.hidden:
        context = batch.context(variant, budget, captured)
        held = context.cache.nbytes

    def known() -> tuple[dict[str, Any], Read | None]:
        """All tokens of the prompts, and what reads those that are not read already."""
        if context is not None:
            return behind(context, batch.apart[1])
        return batch.inputs, None if captured is None else captured.read(model)

    answers = batch.answers if perplexed else None
    replies = batch.replies if compares and not reference else None
    full = None if replies is None else batch.full
    # A text that goes on is fed once for both.
    for ids in [answers] if answers == replies else [answers, replies]:
        if ids is not None:
            whole, read = known()
            how: Any = {"full": full if ids == replies else None, "hidden": variant.hidden}
            scored = score_answers(model, whole, ids, read=read, **how)
            cache, held = scored.cache, held or scored.held_bytes
            _add_scores(rows, batch.samples, scored, ids is answers, ids == replies)
            del scored
    itself = reference and compares
    if generates or itself:
        limits = [sample.max_new_tokens for sample in batch.samples]
        if captured is None:
            pad, chunk = job.encoder.tokenizer.pad_token_id, variant.evict_chunks
            given = batch.inputs if context is None else context.behind(batch.apart[1])
            chunk = chunk if context is None else None  # it is read already
            found, cache, times, first_bytes = timed(model, given, limits, pad, chunk)
        else:
            (whole, read), times, first_bytes = known(), dict[str, float](), 0
            assert read is not None
            found, cache = continued(model, whole, read, limits, ends_of(model))
        for row, sample, answer, ids in zip(rows, batch.samples, batch.answers, found, strict=True):
            row["new_tokens"] = len(ids)
            if itself:
                n = max(0, len(answer if sample.goes_on else ids) - 1)
                row |= {"reply": ids, "divergence_sum": 0.0, "next_sum": n, "next_tokens": n}
            if generates:
                text = job.encoder.decode(ids).strip()
                full_text = text if reference else job.full.get(row["index"], {}).get("text")
                rouged = _rouge(sample, text, full_text) if "rouge" in job.metrics else {}
                row |= {"text": text, "score": score(sample, text), **rouged, **times}
        held = held or first_bytes
    seconds = (time.perf_counter() - start) / len(rows)
    cache = cache if context is None else context.cache  # what was compressed
    return [
        row | facts | {"held_bytes": held // len(rows), "seconds": round(seconds, 4)}
        for row, facts in zip(rows, kept_by_row(cache), strict=True)
    ]


def _add_scores(
    rows: list[Row], samples: Sequence[Sample], scored: Scored, perplexed: bool, compared: bool
) -> None:
    """Perplexity along what was fed, or how near the full cache's predictions are, or both."""
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        nll, n, nats = scored.nll[i], scored.tokens[i], scored.divergence[i]
        if perplexed and not math.isfinite(nll):
            row["error"] = f"the answer's log-likelihood is {nll}"
        elif perplexed:
            row |= {"nll": nll, "answer_tokens": n, "ppl": perplexity(nll, n)}
        if compared and not math.isfinite(nats):
            row["error"] = f"the divergence from the full cache is {nats}"
        elif compared:
            row |= {"divergence_sum": nats, "next_sum": scored.same[i]}
            row["next_tokens"] = scored.compared[i]
            if not sample.goes_on:  # greedy replies are then the full cache's own
                row["same"] = float(scored.same[i] == scored.compared[i])


def perplexity(nll: float, tokens: int) -> float | None:
    """`exp` of the mean over tokens; None without any, or where that is no float."""
    return math.exp(nll / tokens) if tokens and nll / tokens < 700 else None


def timed(
    model: Any, inputs: Mapping[str, Any], limits: Sequence[int], pad: int, chunk: int | None = None
) -> tuple[list[list[int]], Any, dict[str, float], int]:
    """Greedy replies by `generate`, each up to an end and its limit, and how fast they came.

    A prompt is read `chunk` tokens at a time. Returns tokens of each reply; the cache;
    "first_token_s" and "tokens_per_s"; and the cache's bytes once the prompt was read.
    """
    import torch

    times, caches, held = list[float](), list[Any](), 0

    def put(value: Any) -> None:
        """Note when tokens come: first the prompt, then the first new ones."""
        nonlocal held
        times.append(time.perf_counter())
        held = caches[-1].nbytes if len(times) == 2 else held

    def watch(module: Any, args: Any, output: Any) -> None:
        caches[:] = [cache_in(output)]

    how: dict[str, Any] = {"max_new_tokens": max(limits), "do_sample": False, "num_beams": 1}
    how |= {"pad_token_id": pad, "return_dict_in_generate": True, "use_cache": True}
    how["streamer"] = SimpleNamespace(put=put, end=lambda: None)
    start = time.perf_counter()
    with torch.no_grad(), model.register_forward_hook(watch):
        out = model.generate(**inputs, **how, prefill_chunk_size=chunk)
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    seconds, ends = time.perf_counter() - start, ends_of(model)
    replies = [up_to_end(ids, ends) for ids in new.tolist()]
    speed = round(sum(map(len, replies)) / seconds, 2)
    found = [ids[:limit] for ids, limit in zip(replies, limits, strict=True)]
    first = {"first_token_s": round(times[1] - start, 4), "tokens_per_s": speed}
    return found, caches[-1], first, held


def _rouge(sample: Sample, text: str, full: str | None) -> dict[str, float | None]:
    """A reply beside the full cache's, and beside the reference answer."""
    same = full == text
    return {
        "same": None if full is None else float(same),
        # Two empty replies agree, where ROUGE would give 0.
        "rouge": 1.0 if same else None if full is None else rouge(text, full),
        "rouge_reference": rouge(text, sample.answers[0]) if sample.answers else None,
    }


def kept_by_row(cache: Any) -> list[dict[str, Any]]:
    """What each row kept of its prompt, right after the prefill.

    `cache_bytes` counts the kept pairs alone, so it does not depend on a row's batch.
    """
    layers, report, found = [x.keeping() for x in cache.compressed], cache.report(), []
    n, heads, seen = len(layers), layers[0].heads, cache.get_seq_length()
    plain = sum(x.nbytes for x in report.layers if not x.compressed)
    pair = (report.full_nbytes - plain) // (len(cache.lengths) * heads * n * seen)
    block = layers[0].blocks[0]
    held = block.nbytes // block.slots  # of one pair, fewer in 8 or 4 bits
    for row, length in enumerate(cache.lengths):
        kept, whole = sum(x.sizes[row] for x in layers), length * n
        shares = [None if x.retained is None else float(x.retained[row]) for x in layers]
        sizes = {"cache_bytes": kept * heads * held, "full_bytes": whole * heads * pair}
        facts = {"prompt_tokens": length, "kept_fraction": kept / whole, **sizes}
        found.append(facts | {"retained": 1.0 if kept == whole else mean_known(shares)})
    return found


def _new_rows(variant: Variant, budget: float | int, batch: Batch) -> list[Row]:
    return [
        {"policy": variant.label, "budget": budget, "index": index}
        | {"sample": s.id, "suite": s.suite, "task": s.task, "tags": list(s.tags)}
        | {"options": variant.recorded, **batch.job.about}
        for index, s in zip(batch.indices, batch.samples, strict=True)
    ]
