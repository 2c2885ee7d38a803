"""The settings of a wrap, checked, and what they keep of a prompt's rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from mmkv.cache import sampling, token_masks
from mmkv.cache.sampling import SampledSizes
from mmkv.cache.token_masks import TokenMasks, total_kept
from mmkv.policy import Policy

logger = logging.getLogger(__name__)

# The largest number of rows that one log line describes; it counts the others.
_MOST_NAMED = 3


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a wrap: policy, budget, profile and options. They depend on no model."""

    policy: Policy
    budget: float | int | None
    fractions: tuple[float, ...] | None = None
    # Frequencies of the decoder's rotary embedding [D / 2], for policy.reposition.
    inv_freq: Tensor | None = field(default=None, repr=False, compare=False)
    # The type of kept pairs: "int8", "int4", or None for the model's own type.
    kv_dtype: str | None = None
    # Evict after every chunk of a prompt that is read in chunks, not only after the last.
    evict_chunks: bool = False
    # The layer sizes learned so far (`Layers.learns`), shared by all caches of a wrap.
    sampling: SampledSizes | None = field(default=None, repr=False, compare=False)
    # Of one cache: its task, and the layers' shares of a budget, if learned before it began.
    task: str = field(default="", repr=False, compare=False)
    learned: tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    # Replay decode steps as a CUDA graph, if that is possible and pays off.
    graph: bool = field(default=True, compare=False)
    # The kinds of warnings logged for this wrap, so that each is logged once.
    logged: set[str] = field(default_factory=set[str], repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheConfig:
        """Return the same plan: copies of a cache share it, as it never changes."""
        return self

    def describe(self) -> str:
        """Return the policy and budget in words."""
        options = "" if self.kv_dtype is None else f", kv_dtype={self.kv_dtype!r}"
        options += ", evict_chunks=True" if self.evict_chunks else ""
        return f"policy={self.policy.name!r}, budget={self.budget}{options}"

    @cached_property
    def waits_for_probe(self) -> bool:
        """Whether head sizes still depend on a run of the copy probe."""
        return self.policy.heads.name == "retrieval" and not self.keeps_everything

    @cached_property
    def keeps_everything(self) -> bool:
        """Whether no token is ever evicted."""
        return token_masks.keeps_everything(self.policy, self.budget)

    @cached_property
    def kept_whole(self) -> int:
        """The largest number of tokens up to which a row loses none."""
        return token_masks.kept_whole(self.policy, self.budget)

    def evicting(self, prompt: TokenMasks) -> list[bool]:
        """Return for each row whether it is long enough to lose a token."""
        if self.keeps_everything:
            return [False] * len(prompt.lengths)
        rows = zip(prompt.lengths, prompt.floors, strict=True)
        return [n > max(self.kept_whole, floor) for n, floor in rows]

    def started(self) -> CacheConfig:
        """Return the plan for a new cache, with its task and the sizes learned for that task."""
        if self.sampling is None:
            return self
        task = self.task or sampling.current_task.get()
        return replace(self, task=task, learned=self.sampling.shares(task))

    def learn(self, sizes: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Add the sizes [B][L] of a first prompt's rows that lose tokens to the sample.

        Equal rows count once, as they are beams of one request.
        """
        if self.sampling is None or self.learned is not None:
            return
        for row, length in dict.fromkeys(zip(map(tuple, sizes), lengths, strict=True)):
            if any(n < length for n in row):
                self.sampling.add(self.task, row)

    def fractions_of(self, length: int, n_layers: int) -> tuple[float, ...] | None:
        """Return the share of a row's tokens that each layer keeps; None if scores decide it."""
        if self.learned is not None and self.budget is not None:
            per_token = total_kept(self.policy, self.budget, n_layers, length) / length
            return tuple(share * per_token for share in self.learned)
        if self.fractions is None or not isinstance(self.budget, float):
            return self.fractions
        factor = max(1.0, self.policy.least / (self.budget * length))
        return tuple(share * factor for share in self.fractions)

    @property
    def needs_all_layers(self) -> bool:
        """Whether sizes depend on the scores of every layer."""
        needs = self.policy.heads.is_global or self.policy.score.repeats
        sized = self.fractions is not None or self.learned is not None
        needs |= bool(self.policy.layers.needs) and not sized
        return needs and not self.keeps_everything

    def mean_sizes(self, prompt: TokenMasks, n_layers: int) -> list[float] | None:
        """Return the tokens a head keeps of each row, mean over layers; None without a budget."""
        if self.budget is None:
            return None
        kept = partial(total_kept, self.policy, self.budget, n_layers)
        rows = zip(prompt.lengths, prompt.floors, strict=True)
        return [max(kept(n) / n_layers, floor) for n, floor in rows]

    def raised(self, length: int, n_layers: int, total: int | None = None) -> bool:
        """Return whether `policy.least`, not the budget, decides a row's size.

        `total` is the number of tokens kept over all layers; None: as many as planned.
        """
        least = n_layers * min(self.policy.least, length)
        if self.keeps_everything or isinstance(self.budget, int):
            return False
        share = round((self.budget or 0.0) * n_layers * length)
        return share < least and total in (None, least)

    def shortfalls(self, prompt: TokenMasks, n_layers: int) -> list[str]:
        """Return a note on each row of which the budget keeps no more than the required tokens."""
        policy, budget, notes = self.policy, self.budget, list[str]()
        if budget is None or self.keeps_everything:
            return notes
        required = [f"window {policy.window_size}"] if policy.window_size else []
        required += [f"sinks {policy.sinks}"] if policy.sinks else []
        required += ["protected text"] if policy.protect is not None else []
        n_required = map(sum, zip(prompt.n_pinned, prompt.windows, strict=True))
        if any(map(int.__gt__, prompt.floors, n_required)):  # a round of generated tokens
            required.append(f"latest {policy.decode.latest}")
        rows = zip(prompt.lengths, prompt.windows, prompt.floors, strict=True)
        for row, (length, window, floor) in enumerate(rows):
            total = total_kept(policy, budget, n_layers, length)
            budget_left = total - n_layers * floor  # for tokens that compete
            fits = window == policy.window_size and budget_left >= 0
            if fits and (budget_left >= n_layers or floor in (0, length)):
                continue
            budget_text = f"budget {budget} gives"
            if self.raised(length, n_layers):
                budget_text = f"budget {budget} with least={policy.least} gives"
            text = (
                f"row {row}: {budget_text} {total / n_layers:.3g} of {length} tokens a "
                f"layer, {'all' if fits else 'too few'} for {', '.join(required)}"
            )
            if window != policy.window_size:
                text += f"; its last {window} observe instead"
            if budget_left < 0:
                text += f"; {floor} are kept"
            notes.append(text)
        return notes

    def log_shortfalls(self, prompt: TokenMasks, n_layers: int) -> None:
        """Log the first notes of `shortfalls` in one line, once a wrap."""
        notes = [] if "shortfalls" in self.logged else self.shortfalls(prompt, n_layers)
        if notes:
            self.logged.add("shortfalls")
            rest = f"; and {len(notes) - _MOST_NAMED} rows more" if len(notes) > _MOST_NAMED else ""
            logger.warning("%s%s", "; ".join(notes[:_MOST_NAMED]), rest)
