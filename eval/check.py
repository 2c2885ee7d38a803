"""`mmkv.check`: which cache holds the fewest bytes of those whose predictions stay within a
tolerance on a user's own prompts. `mmkv check` is its command line (`mmkv.eval.cli`).

The model's greedy reply with the full cache is fed again with each smaller cache, as in every
suite with the metrics "divergence" and "next" (`mmkv.eval.measure`). A reply's first token does
not count: it is predicted while the prompt is read, before anything is evicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from numbers import Real
from types import SimpleNamespace
from typing import Any

from rich.console import Group
from rich.filesize import decimal
from rich.text import Text

from mmkv.budgets import named, number
from mmkv.forcing import checked_inputs
from mmkv.memory import BITS, Memory
from mmkv.terminal import Table, bar, plain

from .arguments import MEMORY
from .measure import Batch, Job, measure
from .prompts import Encoder, check_positions
from .runner import check_arguments, try_all
from .samples import Sample
from .store import FULL, Row, key_of
from .suites.prompts import NEW_TOKENS
from .variants import Variant

METRICS = ("divergence", "next")
WITHIN = 0.05
# Caches whose bytes differ by no more count as equal.
_ALIKE = 0.02


def check(
    model: Any,
    inputs: Iterable[Mapping[str, Any]],
    policies: str | Sequence[str] = "condense",
    budgets: float | str | Sequence[float | str] | None = None,
    *,
    memory: float | str | Sequence[float | str] | None = None,
    within: float = WITHIN,
    max_new_tokens: int = NEW_TOKENS,
    **options: Any,
) -> CheckReport:
    """Measure how far policies move a model's predictions on prompts, and what they save.

    Args:
        model: not wrapped; it is wrapped for parts of the call.
        inputs: for each prompt the inputs of `model(**x)`, one row each, such as a processor
            returns.
        policies: a name or several, each with options or without: "snapkv:heads=retrieval",
            "condense:kv_dtype=int8", "prefixkv:profile=FILE".
        budgets: one or several: fractions of the prompt, or tokens per layer and head.
        memory: in their place one or several shares of the full cache's bytes; by default 1/2 to
            1/32.
        within: the tolerance, nats a token.
        max_new_tokens: most tokens of a reply.
        options: for every policy that has them, such as `least=0`.

    Returns:
        A row for each policy and size, and for the full cache in 8 and in 4 bits; the row of the
        fewest bytes within the tolerance.

    Raises:
        ValueError: there are no prompts, one has a single token, several rows or more tokens than
            the model's positions, a tolerance or size is out of range, or `mmkv.wrap` refuses an
            option.
    """
    if memory is not None and budgets is not None:
        raise ValueError(f"memory={memory!r} stands in place of budgets={budgets!r}: give one")
    names = [policies] if isinstance(policies, str) else policies
    if budgets is None:
        sizes = [Memory.of(x) for x in _several(MEMORY if memory is None else memory)]
    else:
        sizes = [number(x) for x in _several(budgets)]
    variants = variants_of(names, sizes, within, max_new_tokens, options)
    prompts = [checked_inputs(x, i, "check") for i, x in enumerate(inputs)]
    check_lengths(model, [_length(x, i) for i, x in enumerate(prompts, 1)], max_new_tokens)
    pairs = [(variant, size) for variant in variants for size in variant.budgets(sizes)]
    try_all(model, pairs)
    samples = [
        Sample(id=str(i), prompt="", max_new_tokens=max_new_tokens) for i in range(len(prompts))
    ]
    job, rows = Job(model, _Given(model, prompts), samples, METRICS, {}), list[Row]()
    with bar(len(pairs) * len(samples)) as advance:
        for i in range(len(samples)):
            batch = Batch(job, [i])
            for variant, size in pairs:
                rows += (new := measure(variant, size, batch))
                if variant.label == FULL:
                    job.full[i] = new[0]
                advance(1, f"prompt {i + 1}")
    return summed_up(rows, pairs, within)


def _several(sizes: Any) -> Iterable[Any]:
    """Return sizes as an iterable; a single size may be a number or a text."""
    return [sizes] if isinstance(sizes, str | Real | Decimal) else sizes


class _Given(Encoder):
    """In place of an encoder: inputs that are encoded already, by the id of their sample."""

    def __init__(self, model: Any, inputs: Sequence[Mapping[str, Any]]) -> None:
        config, self.inputs = model.generation_config, inputs
        ends = config.eos_token_id
        end = ends[0] if isinstance(ends, list) else ends
        pad = next((x for x in (config.pad_token_id, end) if x is not None), 0)
        self.tokenizer = SimpleNamespace(pad_token_id=pad)

    def batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the inputs of one sample."""
        (sample,) = samples
        return dict(self.inputs[int(sample.id)])

    def answer(self, sample: Sample) -> list[int]:
        """Return no tokens: prompts have no reference answers."""
        return []


def variants_of(
    policies: Sequence[str],
    sizes: Sequence[float | int],
    within: float,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> list[Variant]:
    """Return the caches to compare, the full one first and in 8 and in 4 bits last. Raises
    ValueError for a wrong argument."""
    if not 0 < within < math.inf:
        raise ValueError(f"within={within}: expected nats a token above 0, such as 0.05")
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: expected 2 or more; the first token is predicted "
            "before anything is evicted"
        )
    bits = [f"{FULL}:kv_dtype={dtype}" for dtype in BITS]
    texts = [*(x for x in policies if x not in bits), *bits]
    variants = check_arguments(texts, sizes, METRICS, options, exact=False)
    if all(x.policy.keeps_all for x in variants):
        raise ValueError(f"policies {list(policies)} keep everything: name one that does not")
    return variants


def check_lengths(model: Any, lengths: Sequence[int], max_new_tokens: int) -> None:
    """Refuse a prompt of one token, or one too long for the model with its reply."""
    if not lengths:
        raise ValueError("check: no prompts: give one or more")
    for i, n in enumerate(lengths, start=1):
        if n < 2:
            raise ValueError(
                f"prompt {i} has {n} token: there is nothing to compress; give a longer one"
            )
        check_positions(model, f"prompt {i}", n, max_new_tokens)


def _length(inputs: Mapping[str, Any], i: int) -> int:
    """Return the tokens of prompt i. Raises ValueError if it is several, or padded."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if len(ids) != 1 or (mask is not None and not bool(mask.all())):
        raise ValueError(
            f"check: prompt {i} has {len(ids)} rows or padding: give prompts one by one"
        )
    return ids.shape[1]


@dataclass(frozen=True)
class CheckRow:
    """One cache compared with the full one, over all prompts."""

    policy: str  # with its options: "condense", "full:kv_dtype=int8"
    budget: float | int  # requested; `Memory` where it is a share of bytes
    divergence: float  # of next-token distributions from the full cache's, in nats a token
    worst: float  # the largest divergence of one prompt
    worst_prompt: int  # that prompt's number, from 1
    same: float  # the share of tokens for which both caches have the same first choice
    kept: float  # the share of the prompts' pairs kept after the prefill, groups included
    nbytes: int  # bytes of the cache after the prefill, mean over prompts
    call: str  # what wraps a model with this cache
    tested: bool  # whether it held no more than was asked for
    kv_dtype: str | None = None  # the type of kept pairs; None: the model's

    @property
    def name(self) -> str:
        """The cache's name in tables."""
        return (
            self.policy if self.policy.startswith(FULL) else f"{self.policy} {named(self.budget)}"
        )

    @property
    def type(self) -> str:
        """The type of kept pairs in words."""
        return self.kv_dtype or "the model's type"


@dataclass(frozen=True)
class CheckReport:
    """What caches cost and save on some prompts.

    Attributes:
        within: the tolerance, nats a token.
        prompts: number of prompts; `prompt_tokens`: tokens of the shortest and the longest.
        tokens: number of reply tokens, over which means are taken.
        full_nbytes: bytes of the full cache after the prefill, mean over prompts.
        rows: a row for each policy and size, then the full cache in 8 and in 4 bits.
        notes: remarks for the reader, such as replies that say nothing.
    """

    within: float
    prompts: int
    prompt_tokens: tuple[int, int]
    tokens: int
    full_nbytes: int
    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> CheckRow | None:
        """The row of the fewest bytes within the tolerance; of about equal ones the nearest to the
        full cache. None if there is none, or if no size of a policy was put to the test. Rows
        that were not put to the test do not count."""
        if self._too_short:
            return None
        found = [x for x in self.rows if x.tested and x.divergence <= self.within]
        least = min((x.nbytes for x in found), default=0)
        alike = [x for x in found if x.nbytes <= (1 + _ALIKE) * least]
        return min(alike, key=lambda x: x.divergence, default=None)

    @property
    def _too_short(self) -> bool:
        """Whether no size of a policy was put to the test."""
        return not any(x.tested for x in self.rows if not x.policy.startswith(FULL))

    @property
    def verdict(self) -> str:
        """A sentence with the recommended cache, or that there is none."""
        if self._too_short:
            return (
                f"too short to tell: of prompts of {self.prompt_tokens[1]:,} tokens or fewer, the "
                "tokens that are always kept exceed every size; give longer ones"
            )
        if (best := self.best) is None:
            nearest = min(self.rows, key=lambda x: x.divergence)
            return (
                f"nothing is within {self.within:g} nats a token: {nearest.name} is nearest, with "
                f"{nearest.divergence:.3g}; try more memory, another policy or a larger tolerance"
            )
        return (
            f"fewest bytes (within {_ALIKE:.0%}) at {self.within:g} nats a token or less: "
            f"{best.call} holds "
            f"{best.nbytes / self.full_nbytes:.0%} of the full cache's, in {best.type} "
            f"({best.divergence:.3g} nats, and {best.worst:.3g} on prompt {best.worst_prompt}, "
            "the worst)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        best = None if self.best is None else asdict(self.best)
        return asdict(self) | {"best": best, "verdict": self.verdict}

    def __str__(self) -> str:
        """Return the table that the terminal shows."""
        return plain(self)

    def __rich__(self) -> Group:
        """Return a table for the terminal, with the verdict and the notes."""
        least, most = self.prompt_tokens
        long = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        some = "1 prompt" if self.prompts == 1 else f"{self.prompts:,} prompts"
        title = f"{some} of {long} tokens, {self.tokens:,} tokens of replies"
        columns = ("nats a token", "worst prompt", "same token", "kept", "type", "bytes a prompt")
        rows = list[tuple[str, list[str]]]()
        for x in self.rows:
            numbers = [f"{x.divergence:.4f}", f"{x.worst:.4f}", f"{x.same:.1%}", f"{x.kept:.1%}"]
            size = f"{decimal(x.nbytes)} ({x.nbytes / self.full_nbytes:.0%})"
            rows.append((x.name, [*numbers, x.kv_dtype or "model's", size]))
        below = [Text(self.verdict, style="bold")]
        below += [Text(f"({x})", style="dim") for x in self.notes]
        return Group(Table("cache", columns, rows, title), *below)


def summed_up(
    rows: Sequence[Row], pairs: Sequence[tuple[Variant, float | int]], within: float
) -> CheckReport:
    """Return the report on rows of `measure`, of policies at their sizes, the full cache first.

    Raises:
        ValueError: a prompt could not be measured, or no reply has a second token.
    """
    if failed := [x for x in rows if "error" in x]:
        first = failed[0]
        raise ValueError(f"{first['policy']}, prompt {first['index'] + 1}: {first['error']}")
    full = [x for x in rows if x["policy"] == FULL]
    empty = {x["index"] for x in full if not x["next_tokens"]}
    if len(empty) == len(full):
        raise ValueError(
            "check: all replies end with their first token, which does not depend on the cache: "
            "give prompts with longer replies"
        )
    # Its own bytes, as `generate` reserves slots for a reply.
    full_nbytes = round(sum(x["full_bytes"] + x["other_bytes"] for x in full) / len(full))
    by_cache: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_cache.setdefault(key_of(row)[:2], []).append(row)
    caches = [
        _over_prompts(by_cache[variant.label, json.dumps(size)], variant, size, full_nbytes, empty)
        for variant, size in pairs
        if variant.label != FULL
    ]
    lengths, notes = [x["prompt_tokens"] for x in full], list[str]()
    if untested := [x.name for x in caches if not x.tested]:
        notes.append(
            f"{', '.join(untested)}: too short to tell. The tokens that are always kept, such as "
            "least= tokens a head, take more than this size; give longer prompts, or least=0 "
            "(--option least=0)"
        )
    if empty:
        notes.append(f"{len(empty)} replies end with their first token and say nothing of a cache")
    tokens = sum(x["next_tokens"] for x in full)
    between = min(lengths), max(lengths)
    return CheckReport(within, len(full), between, tokens, full_nbytes, tuple(caches), tuple(notes))


def _over_prompts(
    rows: Sequence[Row], variant: Variant, size: float | int, full_nbytes: int, empty: set[int]
) -> CheckRow:
    """Return the figures of a cache over all prompts; `empty` ones have no reply to compare."""
    compared = [x for x in rows if x["index"] not in empty]
    nats = {x["index"]: x["divergence_sum"] / x["next_tokens"] for x in compared}
    tokens, lengths = (sum(x[name] for x in rows) for name in ("next_tokens", "prompt_tokens"))
    worst = max(nats, key=lambda i: nats[i])
    kept = sum(x["kept_fraction"] * x["prompt_tokens"] for x in rows) / lengths
    nbytes = round(sum(x["held_bytes"] for x in rows) / len(rows))
    share = nbytes / full_nbytes if isinstance(size, Memory) else kept
    return CheckRow(
        policy=variant.label,
        budget=size,
        divergence=sum(x["divergence_sum"] for x in rows) / tokens,
        worst=nats[worst],
        worst_prompt=worst + 1,
        same=sum(x["next_sum"] for x in rows) / tokens,
        kept=kept,
        nbytes=nbytes,
        call=variant.call(size),
        tested=not isinstance(size, float) or share <= 1.1 * size + 0.01,
        kv_dtype=rows[0]["kv_dtype"],
    )
