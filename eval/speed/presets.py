"""What `mmkv bench --preset` measures, and the figures it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from mmkv.eval.speed.report import Result, RowResult, ratio

_TOY_PROMPT, _TOY_NEW, _TOY_BATCH = 256, 5, 2


@dataclass(frozen=True, kw_only=True)
class Check:
    """A figure and its limit.

    Attributes:
        text: what the figure is.
        limit: what it is held to.
        figure: reads it from a result; None where its rows were not measured.
        at_least: whether the limit is the smallest allowed, not the largest.
        reach: the most that the figure could be on this machine, where that is known.
    """

    text: str
    limit: float
    figure: Callable[[Result], float | None]
    at_least: bool = True
    reach: Callable[[Result], float | None] | None = None

    def judge(self, result: Result) -> Verdict:
        """Pass, short, or not measured."""
        found = self.figure(result)
        passed = None
        if found is not None:
            passed = found >= self.limit if self.at_least else found <= self.limit
        reach = None if self.reach is None else self.reach(result)
        return Verdict(self.text, self.limit, self.at_least, found, passed, reach)


@dataclass(frozen=True)
class Verdict:
    """A check's outcome; `figure` and `passed` are None where its rows were not measured.

    `reach` is the most that the figure could be on this machine, None where that is not known.
    """

    text: str
    limit: float
    at_least: bool
    figure: float | None
    passed: bool | None
    reach: float | None = None

    def __str__(self) -> str:
        word = {True: "pass", False: "short", None: "not measured"}[self.passed]
        figure = "" if self.figure is None else f"{self.figure:.3g}"
        bound = "at least" if self.at_least else "at most"
        limit = f"{bound} {self.limit:g}"
        if self.reach is not None and self.at_least and self.reach < self.limit:
            limit += f"; at most {self.reach:.3g} can be reached here"
        return f"{word:<12} {figure:>8}  ({limit})  {self.text}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model, prompt and batch, and what is compared on them.

    Attributes:
        name: what it is called.
        model: as `--model` names it.
        prompt: tokens of the prompt.
        new: tokens generated.
        batch: sequences at once; 0 is the largest that fits, row by row.
        policies: "name" or "name:option=value:option=value"; the option profile is a file, or
            "falling" for a made-up one whose layers keep less and less.
        budgets: what each policy keeps.
        rounds: turns of each row.
        eager: measure the unwrapped model's eager attention too, where it fits.
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
    eager: bool = True
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


def tokens_over(label: str, base: str) -> Callable[[Result], float | None]:
    """A row's decoded tokens a second over another's."""

    def figure(result: Result) -> float | None:
        rows = result.row(label), result.row(base)
        if rows[0] is None or rows[1] is None:
            return None
        return ratio(rows[0].tokens_per_s, rows[1].tokens_per_s)

    return figure


def reach_over(base: str) -> Callable[[Result], float | None]:
    """The most tokens a second over a row's: those of a token that has no cache to read."""

    def figure(result: Result) -> float | None:
        row = result.row(base)
        if row is None or result.bare_step_s is None:
            return None
        return statistics.median(row.step_s) / result.bare_step_s

    return figure


def prefill_overhead(label: str) -> Callable[[Result], float | None]:
    """What a row's prefill takes beyond the unwrapped model's, as a share of that."""

    def figure(result: Result) -> float | None:
        row, base = result.row(label), result.base
        if row is None or base is None:
            return None
        return ratio(row.prefill_s, base.prefill_s) - 1

    return figure


def peak_layers(label: str) -> Callable[[Result], float | None]:
    """Memory while prefilling beyond the activations and the kept cache, in full layers."""

    def figure(result: Result) -> float | None:
        row, base = result.row(label), result.base
        if row is None or base is None or result.plain_peak_bytes is None:
            return None
        peak, kept, full = (
            row.prefill_peak_bytes,
            row.prefill_cache_bytes,
            base.prefill_cache_bytes,
        )
        if peak is None or kept is None or not full:
            return None
        return (peak - result.plain_peak_bytes - kept) / (full / result.layers)

    return figure


def bytes_over(label: str, budget: float) -> Callable[[Result], float | None]:
    """A row's cache bytes over `budget` of the unwrapped model's."""

    def figure(result: Result) -> float | None:
        row, base = result.row(label), result.base
        if row is None or base is None or row.cache_bytes is None or not base.cache_bytes:
            return None
        return row.cache_bytes / (budget * base.cache_bytes)

    return figure


def step_growth(policy: str) -> Callable[[Result], float | None]:
    """Bytes that a decode step allocates or copies more, for each slot a layer holds more."""

    def figure(result: Result) -> float | None:
        found = result.growth.get(policy)
        return None if found is None else found["nbytes"] / found["slots"]

    return figure


def _batch_over(label: str, base: str) -> Callable[[Result], float | None]:
    def figure(result: Result) -> float | None:
        rows = result.row(label), result.row(base)
        if rows[0] is None or rows[1] is None:
            return None
        return rows[0].batch / rows[1].batch

    return figure


def _at(budget: float, *policies: str) -> list[str]:
    return [f"{p} {budget:g}" for p in policies]


_UNWRAPPED = "unwrapped sdpa"
_SNAP, _ADA = "kvpress SnapKVPress 0.2", "kvpress AdaKVPress(SnapKVPress) 0.2"
_FALLING = "prefixkv:profile=falling"


def _ci_checks() -> tuple[Check, ...]:
    def faster(row: str, limit: float, what: str, base: str) -> Check:
        text = f"{row}: x tokens/s of {what}"
        return Check(text=text, limit=limit, figure=tokens_over(row, base), reach=reach_over(base))

    def most(text: str, limit: float, figure: Callable[[Result], float | None]) -> Check:
        return Check(text=text, limit=limit, figure=figure, at_least=False)

    checks: list[Check] = []
    for row in _at(0.2, "snapkv", "prefixkv"):
        checks += [
            faster(row, 1.2, "kvpress's SnapKV", _SNAP),
            faster(row, 15, "the unwrapped model", _UNWRAPPED),
        ]
    checks += [
        faster("adakv 0.2", 10, "kvpress's Ada", _ADA),
        faster("full", 2.5, "the unwrapped model", _UNWRAPPED),
    ]
    for limit, rows in (
        (0.05, _at(0.2, "snapkv", "adakv", "pyramidkv")),
        (0.45, _at(0.2, "h2o", "prefixkv")),
        (1.1, _at(0.2, "xkv")),
        (0.07, _at(0.2, "squeeze:base=local")),
    ):
        checks += [
            most(f"{row}: prefill time beyond the unwrapped model's", limit, prefill_overhead(row))
            for row in rows
        ]
    checks += [
        most(f"{row}: prefill's memory beyond activations and kept cache, layers", 1.2, figure)
        for row in _at(0.2, "snapkv", "pyramidkv", _FALLING, "xkv")
        for figure in (peak_layers(row),)
    ]
    # A mask of one byte for each slot of a single layer would be a growth of 1.
    checks += [
        most(f"{name}: bytes a step allocates or copies for a slot more", 0.99, step_growth(name))
        for name in ("full", "snapkv", "adakv", "prefixkv", "xkv", "h2o")
    ]
    return (
        *checks,
        most("adakv 0.2: x 0.2 of the full cache's bytes", 1.15, bytes_over("adakv 0.2", 0.2)),
        faster("adakv 0.2", 0.6, "snapkv", "snapkv 0.2"),
    )


_CI = Setting(
    name="ci",
    model="llama-120m-random",
    prompt=3072,
    new=33,
    batch=4,
    policies=(
        *("full", "snapkv", "adakv", "pyramidkv", "prefixkv", "h2o"),
        *("xkv", "local", "squeeze:base=local", _FALLING),
    ),
    budgets=(0.2,),
    eager=False,
    presses=("snapkv", "adakv"),
    growth=("full", "snapkv", "adakv", "prefixkv", "xkv", "h2o"),
    checks=_ci_checks(),
)


def _prefixkv(model: str, batch: int, prompt: int, new: int, least: tuple[float, float]) -> Setting:
    row = "prefixkv 0.2"
    return Setting(
        name=f"prefixkv {batch} x ({prompt} + {new})",
        model=model,
        prompt=prompt,
        new=new,
        batch=batch,
        policies=("full", "prefixkv"),
        budgets=(0.2, 0.4, 0.6, 0.8),
        eager=False,
        presses=(),
        checks=tuple(
            Check(text=f"{row}: x tokens/s of {what}", limit=limit, figure=tokens_over(row, base))
            for what, limit, base in (
                ("the unwrapped model", least[0], _UNWRAPPED),
                ("our own full cache", least[1], "full"),
            )
        ),
    )


def _squeeze(batch: int) -> Setting:
    return Setting(
        name=f"squeeze batch {batch}",
        model="mistral-7b-random",
        prompt=512,
        new=1024,
        batch=batch,
        policies=("full", "squeeze", "local"),
        budgets=(0.2,),
        eager=False,
        presses=(),
    )


_XKV = Setting(
    name="xkv",
    model="llama-8b-random",
    prompt=8192,
    new=128,
    batch=0,
    policies=("full", "xkv"),
    budgets=(0.2,),
    eager=False,
    presses=(),
    checks=(
        Check(
            text="xkv 0.2: x the largest batch of the unwrapped model",
            limit=1.0,
            figure=_batch_over("xkv 0.2", _UNWRAPPED),
        ),
    ),
)

PRESETS: dict[str, tuple[Setting, ...]] = {
    "ci": (_CI,),
    "prefixkv": (
        _prefixkv("llava-1.5-7b-random", 16, 1024, 512, (3.5, 1.45)),
        _prefixkv("llava-1.5-7b-random", 48, 624, 256, (4.0, 1.75)),
        _prefixkv("llava-1.5-13b-random", 8, 1024, 512, (2.5, 1.2)),
    ),
    "xkv": (_XKV,),
    "squeeze": tuple(_squeeze(batch) for batch in (1, 32, 64, 128, 224)),
}


def lines_below(result: Result) -> list[str]:
    """One line a policy: from how many decoded tokens on it is faster than the unwrapped model.

    And one for each row that has no numbers, why.
    """
    lines: list[str] = []
    for row in result.rows:
        found = result.summary(row)
        if row.note:
            lines.append(f"{row.label}: {row.note}")
        if "pays_from_steps" in found and row.kind == "policy":
            lines.append(_break_even_line(row, found["pays_from_steps"], result))
    return lines


def _break_even_line(row: RowResult, steps: float | None, result: Result) -> str:
    base = result.base
    assert base is not None
    cost = 1e3 * (statistics.median(row.prefill_s) - statistics.median(base.prefill_s))
    paid = "never pays" if steps is None else f"pays from {steps:g} decoded tokens on"
    return f"{row.label}: prefill {cost:+.1f} ms, {paid}"
