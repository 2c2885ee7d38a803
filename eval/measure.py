"""One policy at one budget on one batch: perplexity, divergence, replies, and what was kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mmkv
from mmkv.attach.attachment import attachment_of
from mmkv.chat import on_device
from mmkv.report import mean_known

from .perplexity import Scored, log_probabilities, perplexity, score_answers, score_behind
from .prompts import Encoder
from .replay import Capture, applies, behind, continued
from .replies import ends_of, timed
from .scoring import rouge_l, score
from .store import Row
from .variants import FULL, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.forcing import Read

    from .samples import Sample

COMPARED = {"divergence", "next"}  # metrics of next tokens beside the full cache's
# Encoded batches kept in memory between policies; more are encoded again.
_REMEMBERED = 8
# Bytes of the full cache's distributions kept between policies; a batch's own may take more.
_DISTRIBUTIONS = 2 * 2**30


@dataclass
class Job:
    """What all batches of a run share."""

    model: Any
    encoder: Encoder
    samples: Sequence[Sample]
    metrics: tuple[str, ...]
    about: dict[str, Any]
    references: dict[int, str] = field(default_factory=dict)
    replies: dict[int, list[int]] = field(default_factory=dict)  # the full cache's, as tokens
    # Whether one pass of a batch's prompts serves all policies, see `replay`.
    replays: bool = False
    _encoded: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)
    _apart: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _answers: dict[int, list[int]] = field(default_factory=dict)
    _full: dict[int, Tensor] = field(default_factory=dict)
    _captured: dict[bool, tuple[tuple[int, ...], Capture]] = field(default_factory=dict)
    # The context that was read last, and of what.
    _read: tuple[tuple[str, float | int], dict[str, Any], mmkv.Context] | None = None

    @property
    def generates(self) -> bool:
        """Whether a metric needs the model's own reply."""
        return bool({"rouge", "score"} & set(self.metrics))

    @property
    def compares(self) -> bool:
        """Whether a metric compares next tokens with the full cache's."""
        return bool(COMPARED & set(self.metrics))

    def inputs(self, batch: tuple[int, ...]) -> dict[str, Any]:
        """The batch's prompts on the model's device."""
        found = self._encoded.get(batch)
        if found is None:
            found = self.encoder.batch([self.samples[i] for i in batch])
            if len(self._encoded) < _REMEMBERED:
                self._encoded[batch] = found
        return on_device(self.model, found)

    def apart(self, batch: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The batch's prompts before their questions, and the questions."""
        if batch not in self._apart:
            found = self.encoder.apart([self.samples[i] for i in batch])
            if len(self._apart) >= _REMEMBERED:
                return found
            self._apart[batch] = found
        return self._apart[batch]

    def context(
        self,
        variant: Variant,
        budget: float | int,
        given: dict[str, Any],
        captured: Capture | None = None,
    ) -> mmkv.Context:
        """The contexts of a batch, compressed; the same again are not read again."""
        if self._read is not None:
            how, before, context = self._read
            if how == (variant.label, budget) and _equal(before, given):
                return context
        self.forget()  # before memory is asked for another
        if captured is not None:
            shape = given["input_ids"].shape
            seen = {name: x for name, x in given.items() if x.shape == shape}
            context = mmkv.Context(self.model, captured.cache(self.model), seen)
        else:
            context = mmkv.read(self.model, given, prefill_chunk_size=variant.evict_chunks)
        self._read = (variant.label, budget), given, context
        return context

    def forget(self) -> None:
        """Let go of the context that was read last."""
        self._read = None

    def answer(self, index: int) -> list[int]:
        """Token ids of a sample's reference answer."""
        if index not in self._answers:
            self._answers[index] = self.encoder.answer(self.samples[index])
        return self._answers[index]

    def reply(self, index: int) -> list[int]:
        """Token ids along which next tokens are compared: how a text goes on, or else the full
        cache's own reply; [] where that is not known."""
        own = not self.samples[index].goes_on
        return self.replies.get(index, []) if own else self.answer(index)

    def capture(self, variant: Variant, batch: tuple[int, ...]) -> None:
        """Take in one pass of the batch's prompts, or what precedes their questions.

        The model is not wrapped yet; what was taken in of the batch before is let go.
        """
        known = self._captured.get(variant.hidden)
        if not self.replays or variant.label == FULL or (known and known[0] == batch):
            return
        self._captured.pop(variant.hidden, None)
        inputs = on_device(
            self.model, self.apart(batch)[0] if variant.hidden else self.inputs(batch)
        )
        self._captured[variant.hidden] = batch, Capture.of(self.model, inputs)

    def captured(self, variant: Variant, batch: tuple[int, ...]) -> Capture | None:
        """What `capture` took in, where it serves the variant that the model is wrapped with."""
        known = self._captured.get(variant.hidden)
        if known is None or known[0] != batch or not applies(attachment_of(self.model).plan):
            return None
        return known[1]

    def full(self, batch: tuple[int, ...]) -> list[Tensor]:
        """The full cache's distributions along the batch's replies, by the model unwrapped.

        Kept between policies as long as memory allows.
        """
        if not self._full.keys() >= set(batch):
            known = log_probabilities(self.model, self.inputs(batch), list(map(self.reply, batch)))
            self._full |= dict(zip(batch, known, strict=True))
        for index in [i for i in self._full if i not in batch]:
            if sum(x.nbytes for x in self._full.values()) > _DISTRIBUTIONS:
                del self._full[index]
        return [self._full[i] for i in batch]


def measure(job: Job, variant: Variant, budget: float | int, batch: tuple[int, ...]) -> list[Row]:
    """One policy and budget on one batch.

    Where the core refuses the batch, its halves are tried, down to the one sample whose budget
    cannot be honoured: that row holds the reason in `error`.
    """
    from torch import OutOfMemoryError

    try:
        if job.compares and variant.label != FULL:
            job.full(batch)  # by the model as it is, before it is wrapped
        job.capture(variant, batch)
        with variant.wrapped(job.model, budget):
            return _measure(job, variant, budget, batch)
    except (ValueError, OutOfMemoryError) as error:
        if len(batch) == 1:
            row = _new_row(job, variant, budget, batch[0])
            return [row | {"error": str(error).splitlines()[0]}]
    half = len(batch) // 2
    return [r for part in (batch[:half], batch[half:]) for r in measure(job, variant, budget, part)]


def _measure(job: Job, variant: Variant, budget: float | int, batch: tuple[int, ...]) -> list[Row]:
    start = time.perf_counter()
    inputs, context = job.inputs(batch), None
    cache: Any = None
    held = 0
    rows = [_new_row(job, variant, budget, i) for i in batch]
    perplexed, reference = "ppl" in job.metrics, variant.label == FULL
    if (perplexed or job.compares) and variant.evict_chunks is not None and not variant.hidden:
        what = "perplexity" if perplexed else "divergence"
        raise ValueError(
            f"{what} reads prompts at once, and evict_chunks in chunks: use --metrics rouge, "
            "or --question hidden"
        )
    captured = job.captured(variant, batch)
    if variant.hidden:
        given, inputs = (on_device(job.model, x) for x in job.apart(batch))
        context = job.context(variant, budget, given, captured)
        held = context.cache.nbytes
    else:
        job.forget()

    def known() -> tuple[dict[str, Any], Read | None]:
        """All tokens of the prompts, and what reads them from what was taken in."""
        if context is not None and captured is not None:
            return behind(context, inputs)
        return inputs, None if captured is None else captured.read(job.model)

    def force(replies: list[list[int]], full: list[Tensor] | None) -> Scored:
        whole, read = known()
        if context is not None and read is None:
            return score_behind(context, inputs, replies, full)
        hidden = context is not None
        return score_answers(job.model, whole, replies, full=full, read=read, hidden=hidden)

    answers = [job.answer(i) for i in batch] if perplexed else None
    replies = [job.reply(i) for i in batch] if job.compares and not reference else None
    full = None if replies is None else job.full(batch)
    if answers is not None:
        scored = force(answers, full if answers == replies else None)
        cache, held = scored.cache, held or scored.held_bytes
        _add_perplexity(rows, scored)
        if answers == replies:
            _add_comparison(rows, scored)
        del scored
    if replies is not None and answers != replies:
        scored = force(replies, full)
        cache, held = scored.cache, held or scored.held_bytes
        _add_comparison(rows, scored)
        del scored
    itself = reference and job.compares
    if job.generates or itself:
        limits = [job.samples[i].max_new_tokens for i in batch]
        if captured is None:
            pad = job.encoder.tokenizer.pad_token_id
            how: dict[str, Any] = {"chunk": variant.evict_chunks, "context": context}
            found, cache, times, first_bytes = timed(job.model, inputs, limits, pad, **how)
        else:
            (whole, read), times, first_bytes = known(), dict[str, float](), 0
            assert read is not None
            found, cache = continued(job.model, whole, read, limits, ends_of(job.model))
        for row, ids in zip(rows, found, strict=True):
            index, row["new_tokens"] = row["index"], len(ids)
            if itself:
                along = job.answer(index) if job.samples[index].goes_on else ids
                n = max(0, len(along) - 1)
                row |= {"reply": ids, "divergence_sum": 0.0, "next_sum": n, "next_tokens": n}
            if job.generates:
                text = job.encoder.decode(ids).strip()
                row |= {"text": text, **_text_figures(job, variant, index, text), **times}
        held = held or first_bytes
    seconds = (time.perf_counter() - start) / len(batch)
    cache = cache if context is None else context.cache  # what was compressed
    return [
        row | facts | {"held_bytes": held // len(batch), "seconds": round(seconds, 4)}
        for row, facts in zip(rows, kept_by_row(cache), strict=True)
    ]


def _add_perplexity(rows: list[Row], scored: Scored) -> None:
    for row, nll, n in zip(rows, scored.nll, scored.tokens, strict=True):
        if not math.isfinite(nll):
            row["error"] = f"the answer's log-likelihood is {nll}"
            continue
        ppl = perplexity([nll], [n])
        row |= {"nll": nll, "answer_tokens": n, "ppl": ppl if ppl != math.inf else None}


def _add_comparison(rows: list[Row], scored: Scored) -> None:
    for row, nats, same, n in zip(
        rows, scored.divergence, scored.same, scored.compared, strict=True
    ):
        if not math.isfinite(nats):
            row["error"] = f"the divergence from the full cache is {nats}"
            continue
        row |= {"divergence_sum": nats, "next_sum": same, "next_tokens": n}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a model reads the same."""
    from torch import equal

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


def _text_figures(job: Job, variant: Variant, index: int, text: str) -> dict[str, float | None]:
    sample = job.samples[index]
    figures: dict[str, float | None] = {"score": score(sample, text)}
    if "rouge" in job.metrics:
        # The full cache against itself, then everything else against what it said.
        full = text if variant.label == FULL else job.references.get(index)
        # Two empty replies agree, where ROUGE would give 0.
        same = full == text
        figures["same"] = None if full is None else float(same)
        figures["rouge"] = 1.0 if same else None if full is None else rouge_l(text, (full,))
        figures["rouge_reference"] = rouge_l(text, sample.answers[:1]) if sample.answers else None
    return figures


def kept_by_row(cache: Any) -> list[dict[str, Any]]:
    """What each row kept of its prompt, right after the prefill.

    `cache_bytes` counts the kept pairs alone, so it does not depend on a row's batch; what the
    storages hold beside them is in `held_bytes`.
    """
    layers, lengths = [x.keeping() for x in cache.compressed], cache.lengths
    report = cache.report()
    plain = sum(x.nbytes for x in report.layers if not x.compressed)
    seen = cache.get_seq_length()
    pair = (report.full_nbytes - plain) // (len(lengths) * layers[0].heads * len(layers) * seen)
    block = layers[0].blocks[0]
    held = block.nbytes // block.slots  # of one pair, fewer in 8 or 4 bits
    found = []
    for row, length in enumerate(lengths):
        kept = sum(x.sizes[row] for x in layers)
        retained = mean_known(
            None if x.retained is None else float(x.retained[row]) for x in layers
        )
        whole = kept == length * len(layers)
        found.append(
            {
                "prompt_tokens": length,
                "kept_fraction": kept / (length * len(layers)),
                "cache_bytes": kept * layers[0].heads * held,
                "full_bytes": length * len(layers) * layers[0].heads * pair,
                "retained": 1.0 if whole else retained,
            }
        )
    return found


def head(variant: Variant, budget: float | int, index: int) -> Row:
    """What identifies a row."""
    return {"policy": variant.label, "budget": budget, "index": index}


def _new_row(job: Job, variant: Variant, budget: float | int, index: int) -> Row:
    sample = job.samples[index]
    return {
        **head(variant, budget, index),
        "sample": sample.id,
        "suite": sample.suite,
        "task": sample.task,
        "tags": list(sample.tags),
        "options": variant.recorded,
        **job.about,
    }
