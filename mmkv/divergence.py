"""Divergence of a compressed cache's predictions from the full cache's, on a user's own prompts.

The model's own greedy reply with the full cache is fed again to each cache. Kullback-Leibler
divergences of the next-token distributions are in nats a token, over all tokens of a reply but the
first, which is predicted while the prompt is read, before anything is evicted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.console import Group
from rich.filesize import decimal
from rich.text import Text

from mmkv import budgets as sizes
from mmkv.cache.codes import BITS
from mmkv.forcing import Scored, checked_inputs, log_probabilities, replies, score_answers
from mmkv.memory import Memory
from mmkv.policy import Policy
from mmkv.profiles import Profile
from mmkv.registry import get_policy
from mmkv.terminal import Table, bar, plain
from mmkv.wrapping import wrapped

Row = dict[str, Any]
FULL = "full"
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5)  # compared where none are given
# Caches whose bytes differ by no more count as equal: a floor sets their size, not the budget.
_ALIKE = 0.02


@dataclass(frozen=True)
class Setting:
    """A cache to compare with the full one; `label` is its row's `policy`."""

    policy: Policy
    budget: float | int
    kv_dtype: str | None = None
    profile: Profile | str | os.PathLike[str] | None = None

    @property
    def label(self) -> str:
        """The policy and the cache's data type, as evaluations name them."""
        return self.policy.name + (f":kv_dtype={self.kv_dtype}" if self.kv_dtype else "")

    def wrapped(self, model: Any) -> AbstractContextManager[Any]:
        """Return a context in which the model has this cache."""
        options: Any = {"profile": self.profile, "kv_dtype": self.kv_dtype}
        return wrapped(model, self.policy, self.budget, **options)


def check(
    model: Any,
    inputs: Iterable[Mapping[str, Any]],
    policy: str | Policy = "condense",
    budgets: Sequence[float | int | str] | None = None,
    *,
    memory: Sequence[float | str] | None = None,
    within: float = 0.05,
    max_new_tokens: int = 48,
    profile: Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
    **policy_options: Any,
) -> CheckReport:
    """Measure the divergence that a policy causes at each budget, and that of 8 and 4 bits.

    Args:
        model: not wrapped; it is wrapped for parts of the call.
        inputs: for each prompt the inputs of `model(**x)`, such as a processor returns; each row
            of a left-padded batch counts as a prompt.
        policy, profile, kv_dtype, policy_options: as for `mmkv.wrap`.
        budgets: fractions of the prompt, or tokens per layer and head; by default 0.05 to 0.5.
        memory: in their place, and in that of `kv_dtype`: shares of the full cache's bytes.
        within: the tolerance, nats a token.
        max_new_tokens: most tokens of a reply.

    Returns:
        A row for each budget, and the smallest budget within the tolerance.

    Raises:
        ValueError: there are no prompts, one has a single token or more than the model's positions,
            a tolerance or budget is out of range, or `mmkv.wrap` refuses an option.
    """
    if policy_options and not isinstance(policy, str):
        raise ValueError(f"options {sorted(policy_options)} beside a Policy: give them to it")
    if memory is not None and budgets is not None:
        raise ValueError(f"memory={memory!r} stands in place of budgets={budgets!r}: give one")
    shares: list[float | int] = [*map(Memory.of, memory or ())]
    kept = shares or [sizes.number(x) for x in (BUDGETS if budgets is None else budgets)]
    chosen = get_policy(policy, **policy_options) if isinstance(policy, str) else policy
    check_arguments(chosen, kept, within, max_new_tokens)
    samples = [checked_inputs(x, i, "check") for i, x in enumerate(inputs)]
    check_prompts(model, samples, max_new_tokens)
    settings = settings_of(model, chosen, kept, profile=profile, kv_dtype=kv_dtype)
    rows = chain.from_iterable(measured(model, samples, settings, max_new_tokens))
    return summed_up(rows, within)


def measured(
    model: Any,
    samples: Sequence[Mapping[str, Any]],
    settings: Sequence[Setting],
    max_new_tokens: int,
    done: Container[tuple[str, str, int]] = (),
) -> Iterator[list[Row]]:
    """Yield the rows of all samples, one cache and sample at a time, with a progress bar.

    Rows in `done`, given as policy, budget and number of the row, are left out.
    """
    first_row = 0
    with bar(len(samples) * len(settings)) as advance:
        for i, inputs in enumerate(samples, start=1):
            remaining = [x for x in settings if (x.label, repr(x.budget), first_row) not in done]
            name = f"prompt {i} of {len(samples)}"
            advance(len(settings) - len(remaining), name)
            if remaining:
                answers = replies(model, inputs, max_new_tokens)
                full, full_nbytes = log_probabilities(model, inputs, answers)
                for setting in remaining:
                    with setting.wrapped(model):
                        scored = score_answers(model, inputs, answers, full=full)
                    yield _rows(setting, scored, _lengths(inputs), full_nbytes, first_row)
                    advance(1, name)
            first_row += len(inputs["input_ids"])


def _rows(
    setting: Setting, scored: Scored, lengths: list[int], full_nbytes: int, first_row: int
) -> list[Row]:
    """Return a row for each prompt of a batch, whose full cache has `full_nbytes` bytes."""
    if not all(map(math.isfinite, scored.divergence)):
        raise ValueError(
            f"{setting.label} {sizes.named(setting.budget)}: the model's next-token "
            "probabilities are not finite: use another dtype, such as bfloat16 or float32"
        )
    kept = kept_shares(scored.cache)
    return [
        {
            "policy": setting.label,
            "budget": setting.budget,
            **({"memory": True} if isinstance(setting.budget, Memory) else {}),
            "index": first_row + i,
            "prompt_tokens": lengths[i],
            "tokens": n,
            "divergence": scored.divergence[i] / n if n else None,
            "same": scored.same[i] / n if n else None,
            "kept": kept[i],
            "nbytes": scored.held_bytes // len(kept),
            "full_nbytes": full_nbytes // len(kept),
        }
        for i, n in enumerate(scored.compared)
    ]


def check_arguments(
    policy: Policy, budgets: Sequence[float | int], within: float, max_new_tokens: int
) -> None:
    """Check the arguments that need no model."""
    if not 0 < within < math.inf:
        raise ValueError(f"within={within}: expected nats a token above 0, such as 0.05")
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: expected 2 or more; the first token is predicted "
            "before anything is evicted"
        )
    if not budgets:
        raise ValueError("check: no budgets: give some, such as 0.1 and 0.2")
    if policy.keeps_all:
        raise ValueError(f"policy {policy.name!r} keeps everything: there is nothing to check")
    for budget in budgets:
        sizes.checked(policy, budget)
    if policy.layers.learns:
        raise ValueError(
            "check measures each prompt alone, and allocation='sampled' learns from one for the "
            "next: use allocation='mini-prefill'"
        )


def check_prompts(model: Any, samples: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
    """Refuse a prompt of one token, or one too long for the model with its reply."""
    if not samples:
        raise ValueError("check: no prompts: give one or more")
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    lengths = [n for sample in samples for n in _lengths(sample)]
    for i, n in enumerate(lengths, start=1):
        if n < 2:
            raise ValueError(
                f"prompt {i} has {n} token: there is nothing to compress; give a longer one"
            )
        if max_positions is not None and n + max_new_tokens > max_positions:
            raise ValueError(
                f"prompt {i} has {n:,} tokens, and with {max_new_tokens} of a reply more than the "
                f"model's {max_positions:,} positions: shorten it"
            )


def settings_of(
    model: Any,
    policy: Policy,
    budgets: Sequence[float | int],
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
) -> list[Setting]:
    """Return the caches to compare, after wrapping with each, those of the full cache last."""
    settings = [Setting(policy, budget, kv_dtype, profile) for budget in budgets]
    settings += [Setting(get_policy(FULL), 1.0, dtype) for dtype in BITS]
    for setting in settings:
        with setting.wrapped(model):
            pass
    return settings


def kept_shares(cache: Any) -> list[float]:
    """Return the share of each row's prompt pairs that a compressed cache keeps."""
    by_row = zip(*(x.keeping().sizes for x in cache.compressed), strict=True)
    pairs = zip(by_row, cache.lengths, strict=True)
    return [sum(kept) / (n * len(kept)) for kept, n in pairs]


def _lengths(inputs: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of each row, without padding."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    return [ids.shape[1]] * len(ids) if mask is None else mask.sum(-1).tolist()


@dataclass(frozen=True)
class CheckRow:
    """One cache compared with the full one, over all prompts."""

    policy: str  # and the data type of its pairs: "condense", "full:kv_dtype=int8"
    budget: float | int  # the budget requested
    divergence: float  # of next-token distributions from the full cache's, in nats a token
    worst: float  # the largest divergence of one prompt
    worst_prompt: int  # that prompt's number
    same: float  # the share of tokens for which both caches have the same first choice
    kept: float  # the share of the prompts' pairs kept after the prefill, groups included
    nbytes: int  # bytes of the cache after the prefill, mean over prompts

    @property
    def name(self) -> str:
        """The cache's name in tables."""
        name, _, dtype = self.policy.partition(":kv_dtype=")
        first = "full cache" if name == FULL else f"{name} {sizes.named(self.budget)}"
        return f"{first} in {dtype}" if dtype else first


@dataclass(frozen=True)
class CheckReport:
    """The divergence that a policy causes on some prompts.

    Attributes:
        policy: as in its rows.
        within: the tolerance, nats a token.
        prompts: number of prompts; `prompt_tokens`: tokens of the shortest and the longest.
        tokens: number of reply tokens, over which means are taken.
        full_nbytes: bytes of the full cache after the prefill, mean over prompts.
        rows: the policy at each budget, then the full cache in 8 and in 4 bits.
        notes: remarks for the reader, such as budgets that were not reached.
    """

    policy: str
    within: float
    prompts: int
    prompt_tokens: tuple[int, int]
    tokens: int
    full_nbytes: int
    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def smallest(self) -> float | int | None:
        """The smallest budget, by bytes, whose divergence is within the tolerance, or None.

        Of budgets with equal bytes, whose size a floor sets, it is the largest.
        """
        return None if self._smallest is None else self._smallest.budget

    @property
    def _smallest(self) -> CheckRow | None:
        # Of budgets with equal bytes the smaller ones were not really tested.
        passing = [x for x in self.rows if x.policy == self.policy and x.divergence <= self.within]
        min_nbytes = min((x.nbytes for x in passing), default=0)
        equal_size = [x for x in passing if x.nbytes <= (1 + _ALIKE) * min_nbytes]
        return max(equal_size, key=lambda x: (x.kept, x.budget), default=None)

    @property
    def verdict(self) -> str:
        """A sentence with the smallest budget, or that there is none."""
        row = self._smallest
        if row is None:
            of_policy = (x for x in self.rows if x.policy == self.policy)
            best = min(of_policy, key=lambda x: x.divergence)
            return (
                f"no budget is within {self.within:g} nats a token: {best.name} is nearest, with "
                f"{best.divergence:.3g}; try larger budgets, another policy or options, or a "
                "larger tolerance"
            )
        return (
            f"the smallest budget within {self.within:g} nats a token: "
            f"{sizes.named(row.budget)} ({row.divergence:.3g}, and {row.worst:.3g} on "
            f"prompt {row.worst_prompt + 1}, the worst), in "
            f"{row.nbytes / self.full_nbytes:.0%} of the full cache's bytes"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"smallest": self.smallest, "verdict": self.verdict}

    def __str__(self) -> str:
        """Return the table that the terminal shows."""
        return plain(self)

    def __rich__(self) -> Group:
        """Return a table for the terminal, with the verdict and the notes."""
        least, most = self.prompt_tokens
        long = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        some = "1 prompt" if self.prompts == 1 else f"{self.prompts:,} prompts"
        title = f"{some} of {long} tokens, {self.tokens:,} tokens of replies"
        columns = ("nats a token", "worst prompt", "same token", "kept", "bytes a prompt")
        full = CheckRow(FULL, 1.0, 0.0, 0.0, 0, 1.0, 1.0, self.full_nbytes)
        rows = list[tuple[str, list[str]]]()
        for x in (full, *self.rows):
            numbers = [f"{x.divergence:.4f}", f"{x.worst:.4f}", f"{x.same:.1%}", f"{x.kept:.1%}"]
            size = f"{decimal(x.nbytes)} ({x.nbytes / self.full_nbytes:.0%})"
            rows.append((x.name, [*numbers, size]))
        below = [Text(self.verdict, style="bold")]
        below += [Text(f"({x})", style="dim") for x in self.notes]
        return Group(Table("cache", columns, rows, title), *below)


def summed_up(rows: Iterable[Row], within: float) -> CheckReport:
    """Return the report on rows of `measured`, in which the policy's come first."""
    by_cache: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        budget = Memory(row["budget"]) if row.get("memory") else row["budget"]
        key = str(row["policy"]), sizes.named(budget)
        by_cache.setdefault(key, []).append({**row, "budget": budget})
    caches, notes = [_over_prompts(x) for x in by_cache.values()], list[str]()
    first_cache = next(iter(by_cache.values()))
    full_nbytes = round(sum(x["full_nbytes"] for x in first_cache) / len(first_cache))

    def exceeds(x: CheckRow) -> bool:
        share = x.nbytes / full_nbytes if isinstance(x.budget, Memory) else x.kept
        return isinstance(x.budget, float) and share > 1.1 * x.budget + 0.01

    untested = [x for x in caches if exceeds(x)]
    if untested:
        notes.append(
            f"{', '.join(x.name for x in untested)} kept more than the budget says: what always "
            "stays of these prompts, such as least= tokens a head, is more; longer prompts put it "
            "to the test"
        )
    if empty := sum(not x["tokens"] for x in first_cache):
        notes.append(f"{empty} replies end with their first token and say nothing of a cache")
    lengths = [x["prompt_tokens"] for x in first_cache]
    return CheckReport(
        policy=caches[0].policy,
        within=within,
        prompts=len(first_cache),
        prompt_tokens=(min(lengths), max(lengths)),
        tokens=sum(x["tokens"] for x in first_cache),
        full_nbytes=full_nbytes,
        rows=tuple(caches),
        notes=tuple(notes),
    )


def _over_prompts(rows: Sequence[Row]) -> CheckRow:
    compared = [x for x in rows if x["tokens"]]
    if not compared:
        raise ValueError(
            "check: all replies end with their first token, which no cache has a say in: give "
            "prompts with longer replies"
        )
    worst = max(compared, key=lambda x: x["divergence"])
    return CheckRow(
        policy=worst["policy"],
        budget=worst["budget"],
        divergence=_mean(compared, "divergence", "tokens"),
        worst=worst["divergence"],
        worst_prompt=worst["index"],
        same=_mean(compared, "same", "tokens"),
        kept=_mean(rows, "kept", "prompt_tokens"),
        nbytes=round(sum(x["nbytes"] for x in rows) / len(rows)),
    )


def _mean(rows: Sequence[Row], name: str, weight: str) -> float:
    return sum(x[name] * x[weight] for x in rows) / sum(x[weight] for x in rows)
