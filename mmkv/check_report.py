"""What `mmkv.check` found: a row a cache, and the smallest budget within the tolerance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mmkv import budgets
from mmkv.terminal import Table

if TYPE_CHECKING:
    from rich.console import Group

Row = dict[str, Any]
FULL = "full"
# Caches whose bytes differ by no more are as large: a floor, and not their budget, sizes them.
_ALIKE = 0.02


@dataclass(frozen=True)
class CheckRow:
    """One cache beside the full one, over all prompts.

    Attributes:
        policy: its name, and what its pairs are held as: "condense", "full:kv_dtype=int8".
        budget: what was asked for.
        divergence: of the next-token distributions from the full cache's, nats a token.
        worst: the largest of one prompt; `worst_prompt` is that prompt's number.
        same: the share of tokens for which both caches have the same first choice.
        kept: the share of the prompts' pairs that is held once they are read, groups included.
        nbytes: bytes of the storages then, mean of a prompt.
    """

    policy: str
    budget: float | int
    divergence: float
    worst: float
    worst_prompt: int
    same: float
    kept: float
    nbytes: int

    @property
    def name(self) -> str:
        """As a table shows it."""
        name, _, dtype = self.policy.partition(":kv_dtype=")
        first = "full cache" if name == FULL else f"{name} {budgets.named(self.budget)}"
        return f"{first} in {dtype}" if dtype else first


@dataclass(frozen=True)
class CheckReport:
    """What a policy costs on some prompts.

    Attributes:
        policy: as in its rows.
        within: the tolerance, nats a token.
        prompts: how many, and `prompt_tokens` how long the shortest and the longest are.
        tokens: of replies, over which means are taken.
        full_nbytes: bytes of the full cache once a prompt is read, mean of a prompt.
        rows: the policy at each budget, then the full cache in 8 and in 4 bits.
        notes: what a reader should know.
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
        """The smallest budget, by bytes, whose divergence is within the tolerance; None: none is.

        Of budgets that hold as much, since a floor sizes them, it is the largest.
        """
        return None if self._smallest is None else self._smallest.budget

    @property
    def _smallest(self) -> CheckRow | None:
        # Of budgets that hold as much the smaller ones were not put to the test.
        good = [x for x in self.rows if x.policy == self.policy and x.divergence <= self.within]
        least = min((x.nbytes for x in good), default=0)
        alike = [x for x in good if x.nbytes <= (1 + _ALIKE) * least]
        return max(alike, key=lambda x: (x.kept, x.budget), default=None)

    @property
    def verdict(self) -> str:
        """The smallest budget in a sentence, or that there is none."""
        found = self._smallest
        if found is None:
            own = [x for x in self.rows if x.policy == self.policy]
            best = min(own, key=lambda x: x.divergence)
            return (
                f"no budget is within {self.within:g} nats a token: {best.name} is nearest, with "
                f"{best.divergence:.3g}; try larger budgets, another policy or options, or a "
                "larger tolerance"
            )
        return (
            f"the smallest budget within {self.within:g} nats a token: "
            f"{budgets.named(found.budget)} ({found.divergence:.3g}, and {found.worst:.3g} on "
            f"prompt {found.worst_prompt + 1}, the worst), in "
            f"{found.nbytes / self.full_nbytes:.0%} of the full cache's bytes"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self) | {"smallest": self.smallest, "verdict": self.verdict}

    def __rich__(self) -> Group:
        """A table for the terminal, the verdict and the notes."""
        from rich.console import Group
        from rich.filesize import decimal
        from rich.text import Text

        least, most = self.prompt_tokens
        long = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        some = "1 prompt" if self.prompts == 1 else f"{self.prompts:,} prompts"
        title = f"{some} of {long} tokens, {self.tokens:,} tokens of replies"
        columns = ("nats a token", "worst prompt", "same token", "kept", "bytes a prompt")
        full = CheckRow(FULL, 1.0, 0.0, 0.0, 0, 1.0, 1.0, self.full_nbytes)
        rows = list[tuple[str, list[str]]]()
        for x in (full, *self.rows):
            size = f"{decimal(x.nbytes)} ({x.nbytes / self.full_nbytes:.0%})"
            numbers = f"{x.divergence:.4f}", f"{x.worst:.4f}", f"{x.same:.1%}", f"{x.kept:.1%}"
            rows.append((x.name, [*numbers, size]))
        notes = [Text(f"({x})", style="dim") for x in self.notes]
        verdict = Text(self.verdict, style="bold")
        return Group(Table("cache", columns, rows, title), verdict, *notes)


def summed_up(rows: Iterable[Row], within: float, notes: Sequence[str] = ()) -> CheckReport:
    """The report on rows of `mmkv.divergence.measured`, those of the policy first."""
    by_cache: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_cache.setdefault((row["policy"], budgets.named(row["budget"])), []).append(row)
    found = [_over_prompts(each) for each in by_cache.values()]
    notes = list(notes)
    untested = [x for x in found if isinstance(x.budget, float) and x.kept > 1.1 * x.budget + 0.01]
    if untested:
        notes.append(
            f"{', '.join(x.name for x in untested)} kept more than the budget says: what always "
            "stays of these prompts, such as least= tokens a head, is more; longer prompts put it "
            "to the test"
        )
    each = next(iter(by_cache.values()))
    if silent := sum(not x["tokens"] for x in each):
        notes.append(f"{silent} replies end with their first token and say nothing of a cache")
    lengths = [x["prompt_tokens"] for x in each]
    return CheckReport(
        policy=found[0].policy,
        within=within,
        prompts=len(each),
        prompt_tokens=(min(lengths), max(lengths)),
        tokens=sum(x["tokens"] for x in each),
        full_nbytes=round(sum(x["full_nbytes"] for x in each) / len(each)),
        rows=tuple(found),
        notes=tuple(notes),
    )


def _over_prompts(rows: Sequence[Row]) -> CheckRow:
    told = [x for x in rows if x["tokens"]]
    if not told:
        raise ValueError(
            "check: all replies end with their first token, which no cache has a say in: give "
            "prompts with longer replies"
        )
    worst = max(told, key=lambda x: x["divergence"])
    return CheckRow(
        policy=worst["policy"],
        budget=worst["budget"],
        divergence=_mean(told, "divergence", "tokens"),
        worst=worst["divergence"],
        worst_prompt=worst["index"],
        same=_mean(told, "same", "tokens"),
        kept=_mean(rows, "kept", "prompt_tokens"),
        nbytes=round(sum(x["nbytes"] for x in rows) / len(rows)),
    )


def _mean(rows: Sequence[Row], name: str, weight: str) -> float:
    return sum(x[name] * x[weight] for x in rows) / sum(x[weight] for x in rows)
