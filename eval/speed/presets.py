"""What `mmkv bench --preset` measures, and the figures it is held to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from mmkv.eval.speed.report import Estimate, Result, RowResult, ratio

# The row that ratios compare with, and the same once more: a bench must not tell them apart.
UNWRAPPED, AGAIN = "unwrapped sdpa", "unwrapped sdpa again"
_TOY_PROMPT, _TOY_NEW, _TOY_BATCH = 256, 5, 2

# Figures are None where what they need was not measured; plain numbers were counted, not timed.
Figure = Callable[[Result], Estimate | float | None]
Comparison = Callable[[RowResult, RowResult, Result], Estimate | float | None]
Bound = Literal["at least", "at most", "within"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A figure (`text` says of what) and the limit that it is held to.

    "within" a limit of 0.05: neither 5 % more than 1, nor 1 is 5 % more than it.
    """

    text: str
    limit: float
    figure: Figure
    bound: Bound = "at least"

    def judge(self, result: Result) -> Verdict:
        """By the figure's interval, which must lie whole on one side of the limit."""
        found = self.figure(result)
        if isinstance(found, float | int):
            found = Estimate.exact(found)
        outcome = "not measured" if found is None else self._outcome(found)
        return Verdict(self.text, self.limit, self.bound, found, outcome)

    def _outcome(self, found: Estimate) -> str:
        if found.low is None or found.high is None:
            return "cannot tell"
        low, high = 0.0, math.inf
        if self.bound == "within":
            low, high = 1 / (1 + self.limit), 1 + self.limit
        elif self.bound == "at most":
            high = self.limit
        else:
            low = self.limit
        if low <= found.low and found.high <= high:
            return "pass"
        return "short" if found.high <= low or found.low >= high else "cannot tell"


@dataclass(frozen=True)
class Verdict:
    """A check's outcome: pass, short, cannot tell, or not measured (`figure` is None)."""

    text: str
    limit: float
    bound: Bound
    figure: Estimate | None
    outcome: str

    def __str__(self) -> str:
        figure = "" if self.figure is None else str(self.figure)
        return f"{self.outcome:<12} {figure:>20}  ({self.bound} {self.limit:g})  {self.text}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model, prompt and batch, and what is compared on them.

    Attributes:
        model: as `--model` names it.
        prompt: tokens of the prompt.
        new: tokens generated; as many steps at most are timed.
        batch: sequences at once; 0 is the largest that fits, row by row.
        policies: "name" or "name:option=value:option=value"; the option profile is a file, or
            "falling" for a made-up one whose layers keep less and less.
        rounds: prefills of each row.
        unwrapped: what else the unwrapped model is measured with: "eager" attention, where it
            fits, "static" cache, which transformers compiles on a GPU, or "flash" attention.
        presses: the policies whose nearest press is measured; None for all that have one.
        growth: the policies whose decode step is counted at two prompt lengths.
        growth_prompts: these lengths.
        checks: what the result is held to.
    """

    name: str = "bench"
    model: str
    prompt: int
    new: int
    batch: int
    policies: tuple[str, ...]
    budgets: tuple[float | int, ...]
    rounds: int = 5
    unwrapped: tuple[str, ...] = ("eager",)
    presses: tuple[str, ...] | None = None
    growth: tuple[str, ...] = ()
    growth_prompts: tuple[int, int] = (512, 1024)
    checks: tuple[Check, ...] = ()

    def toy(self) -> Setting:
        """The same with a prompt and a batch small enough for a test."""
        return replace(
            self,
            prompt=min(self.prompt, _TOY_PROMPT),
            new=min(self.new, _TOY_NEW),
            batch=min(self.batch, _TOY_BATCH),
            growth_prompts=(96, 192),
        )


def compared(label: str, base: str, figure: Comparison) -> Figure:
    """A figure of two rows, where both were measured."""

    def found(result: Result) -> Estimate | float | None:
        row, other = result.row(label), result.row(base)
        return None if row is None or other is None else figure(row, other, result)

    return found


def tokens_over(label: str, base: str) -> Figure:
    """A row's decoded tokens a second over another's."""

    def figure(row: RowResult, other: RowResult, result: Result) -> Estimate:
        return ratio(row.tokens_per_s, other.tokens_per_s)

    return compared(label, base, figure)


def prefill_over(row: RowResult, base: RowResult, result: Result) -> Estimate:
    """A row's prefill time over the unwrapped model's."""
    return ratio(row.prefill_s, base.prefill_s)


def peak_layers(row: RowResult, base: RowResult, result: Result) -> float | None:
    """Memory while prefilling beyond the activations and the kept cache, in full layers."""
    peak, kept, full = row.prefill_peak_bytes, row.prefill_cache_bytes, base.prefill_cache_bytes
    if peak is None or kept is None or not full or result.plain_peak_bytes is None:
        return None
    return (peak - result.plain_peak_bytes - kept) / (full / result.layers)


def bytes_over_a_fifth(row: RowResult, base: RowResult, result: Result) -> float | None:
    """A row's cache bytes over 0.2 of the unwrapped model's."""
    if row.cache_bytes is None or not base.cache_bytes:
        return None
    return row.cache_bytes / (0.2 * base.cache_bytes)


def batch_over(row: RowResult, base: RowResult, result: Result) -> float:
    """A row's batch over another's."""
    return row.batch / base.batch


def step_growth(policy: str) -> Figure:
    """Bytes that a decode step allocates or copies more, for each slot a layer holds more."""

    def figure(result: Result) -> float | None:
        found = result.growth.get(policy)
        return None if found is None else found["nbytes"] / found["slots"]

    return figure


def _faster(row: str, limit: float, what: str, base: str) -> Check:
    text = f"{row}: x tokens/s of {what}"
    return Check(text=text, limit=limit, figure=tokens_over(row, base))


def _at_most(row: str, limit: float, what: str, figure: Comparison) -> Check:
    found = compared(row, UNWRAPPED, figure)
    return Check(text=f"{row}: {what}", limit=limit, figure=found, bound="at most")


def _same(figure: Figure, what: str) -> Check:
    text = f"the unwrapped model again: x {what}, no difference"
    return Check(text=text, limit=0.05, figure=figure, bound="within")


def _steady(policy: str) -> Check:
    # A mask of one byte for each slot of a single layer would be a growth of 1.
    text = f"{policy}: bytes a step allocates or copies for a slot more"
    return Check(text=text, limit=0.99, figure=step_growth(policy), bound="at most")


# What every setting is held to: the bench can tell 5 % apart, and finds none where there is none.
SAME = (
    _same(tokens_over(AGAIN, UNWRAPPED), "tokens/s"),
    _same(compared(AGAIN, UNWRAPPED, prefill_over), "prefill time"),
)
_SNAP, _ADA = "kvpress SnapKVPress 0.2", "kvpress AdaKVPress(SnapKVPress) 0.2"
_FALLING = "prefixkv:profile=falling"
_GROWTH = ("full", "snapkv", "adakv", "prefixkv", "xkv", "h2o")
_PREFILL = "x prefill time of the unwrapped model"
_PEAK = "prefill's memory beyond activations and kept cache, layers"
_CI_CHECKS = (
    _faster("snapkv 0.2", 1.15, "kvpress's SnapKV", _SNAP),
    _faster("snapkv 0.2", 15, "the unwrapped model", UNWRAPPED),
    _faster("prefixkv 0.2", 1.15, "kvpress's SnapKV", _SNAP),
    _faster("prefixkv 0.2", 15, "the unwrapped model", UNWRAPPED),
    _faster("adakv 0.2", 10, "kvpress's Ada", _ADA),
    _faster("full", 2.5, "the unwrapped model", UNWRAPPED),
    _at_most("condense 0.2", 1.1, _PREFILL, prefill_over),
    _at_most("snapkv 0.2", 1.05, _PREFILL, prefill_over),
    _at_most("adakv 0.2", 1.05, _PREFILL, prefill_over),
    _at_most("h2o 0.2", 1.15, _PREFILL, prefill_over),
    _at_most("prefixkv 0.2", 1.15, _PREFILL, prefill_over),
    _at_most("xkv 0.2", 2.1, _PREFILL, prefill_over),
    _at_most("squeeze:base=local 0.2", 1.07, _PREFILL, prefill_over),
    _at_most("snapkv 0.2", 1.2, _PEAK, peak_layers),
    _at_most(f"{_FALLING} 0.2", 1.2, _PEAK, peak_layers),
    _at_most("xkv 0.2", 1.2, _PEAK, peak_layers),
    *map(_steady, _GROWTH),
    _at_most("adakv 0.2", 1.15, "x 0.2 of the full cache's bytes", bytes_over_a_fifth),
    _faster("adakv 0.2", 0.8, "snapkv", "snapkv 0.2"),
    _faster("condense 0.2", 0.95, "snapkv", "snapkv 0.2"),
)
_XKV_CHECK = Check(
    text="xkv 0.2: x the largest batch of the unwrapped model",
    limit=1.0,
    figure=compared("xkv 0.2", UNWRAPPED, batch_over),
)
_preset = partial(Setting, budgets=(0.2,), unwrapped=(), presses=())
_on_gpu = partial(_preset, unwrapped=("static", "flash"))


def _prefixkv(model: str, batch: int, prompt: int, new: int, least: tuple[float, float]) -> Setting:
    return _on_gpu(
        name=f"prefixkv {batch} x ({prompt} + {new})",
        model=model,
        prompt=prompt,
        new=new,
        batch=batch,
        policies=("full", "prefixkv", "prefixkv:graph=false", "condense"),
        budgets=(0.2, 0.4, 0.6, 0.8),
        checks=(
            _faster("prefixkv 0.2", least[0], "the unwrapped model", UNWRAPPED),
            _faster("prefixkv 0.2", least[1], "our own full cache", "full"),
        ),
    )


def _squeeze(batch: int) -> Setting:
    return _on_gpu(
        name=f"squeeze batch {batch}",
        model="mistral-7b-random",
        prompt=512,
        new=1024,
        batch=batch,
        policies=("full", "squeeze", "local"),
    )


_CI = _preset(
    name="ci",
    model="llama-120m-random",
    prompt=2048,
    new=65,
    batch=4,
    rounds=20,
    policies=(
        *("full", "condense", "snapkv", "adakv", "prefixkv", "h2o"),
        *("xkv", "squeeze:base=local", _FALLING),
    ),
    presses=("snapkv", "adakv"),
    growth=_GROWTH,
    checks=_CI_CHECKS,
)
_XKV = _on_gpu(
    name="xkv",
    model="llama-8b-random",
    prompt=8192,
    new=128,
    batch=0,
    policies=("full", "xkv"),
    checks=(_XKV_CHECK,),
)
PRESETS: dict[str, tuple[Setting, ...]] = {
    "ci": (_CI,),
    "prefixkv": (
        _prefixkv("llava-1.5-7b-random", 16, 1024, 512, (3.5, 1.45)),
        _prefixkv("llava-1.5-7b-random", 48, 624, 256, (4.0, 1.75)),
        _prefixkv("llava-1.5-13b-random", 8, 1024, 512, (2.5, 1.2)),
    ),
    "xkv": (_XKV,),
    "squeeze": tuple(map(_squeeze, (1, 32, 64, 128, 224))),
}
