"""What `wrap` was asked for, checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from mmkv.cache import sampling, token_masks
from mmkv.cache.sampling import SampledSizes
from mmkv.cache.token_masks import TokenMasks
from mmkv.policy import Policy

logger = logging.getLogger(__name__)

# Rows of a batch that one log line names; it counts the others.
_MOST_NAMED = 3


@dataclass(frozen=True)
class CacheConfig:
    """How a cache is made smaller: what `wrap` was asked for. It knows no model."""

    policy: Policy
    budget: float | int | None
    fractions: tuple[float, ...] | None = None
    # Frequencies of the decoder's rotary embedding [D / 2], for policy.reposition.
    inv_freq: Tensor | None = field(default=None, repr=False, compare=False)
    # What kept pairs are held as: "int8", "int4", or None for the model's own type.
    kv_dtype: str | None = None
    # Evict after every chunk of a prompt that comes in chunks, not at its end.
    evict_chunks: bool = False
    # What is learned of layer sizes (`Layers.learns`), shared by all caches of a wrap.
    sampling: SampledSizes | None = field(default=None, repr=False, compare=False)
    # Of one cache: its task, and the layers' shares of a budget that were learned before it began.
    task: str = field(default="", repr=False, compare=False)
    learned: tuple[float, ...] | None = field(default=None, repr=False, compare=False)
    # Replay decode steps as a CUDA graph, where that is possible and pays.
    graph: bool = field(default=True, compare=False)
    # Names what was said of this wrap already: a log has it once, not with every prompt.
    said: set[str] = field(default_factory=set[str], repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheConfig:
        """Copies of a cache share their plan: it never changes."""
        return self

    def describe(self) -> str:
        """The policy and budget in words."""
        more = "" if self.kv_dtype is None else f", kv_dtype={self.kv_dtype!r}"
        more += ", evict_chunks=True" if self.evict_chunks else ""
        return f"policy={self.policy.name!r}, budget={self.budget}{more}"

    @cached_property
    def keeps_everything(self) -> bool:
        """Whether nothing is ever evicted."""
        return token_masks.keeps_everything(self.policy, self.budget)

    @cached_property
    def kept_whole(self) -> int:
        """Up to how many tokens a row loses none."""
        return token_masks.kept_whole(self.policy, self.budget)

    def evicts(self, prompt: TokenMasks) -> bool:
        """Whether any row is long enough to lose a token."""
        return any(self.evicting(prompt))

    def evicting(self, prompt: TokenMasks) -> list[bool]:
        """Which rows are long enough to lose a token."""
        if self.keeps_everything:
            return [False] * len(prompt.lengths)
        rows = zip(prompt.lengths, prompt.floors, strict=True)
        return [n > max(self.kept_whole, floor) for n, floor in rows]

    def started(self) -> CacheConfig:
        """The plan of a cache that begins now."""
        if self.sampling is None:
            return self
        task = self.task or sampling.current_task()
        return replace(self, task=task, learned=self.sampling.shares(task))

    def learn(self, sizes: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Take in the sizes [B][L] of a first prompt's rows of these lengths that lose tokens.

        Beams of one request are rows alike, which count once.
        """
        if self.sampling is None or self.learned is not None:
            return
        for row, length in dict.fromkeys(zip(map(tuple, sizes), lengths, strict=True)):
            if any(n < length for n in row):
                self.sampling.add(self.task, row)

    def fractions_of(self, length: int, n_layers: int) -> tuple[float, ...] | None:
        """The share of a row's tokens that each layer keeps, as far as that is known before."""
        if self.learned is not None and self.budget is not None:
            total = token_masks.total_kept(self.policy, self.budget, n_layers, length)
            per_token = total / length
            return tuple(share * per_token for share in self.learned)
        if self.fractions is None or not isinstance(self.budget, float):
            return self.fractions
        raised = max(1.0, self.policy.least / (self.budget * length))
        return tuple(share * raised for share in self.fractions)

    @property
    def whole(self) -> CacheConfig:
        """What holds a prompt whole until it is evicted."""
        return replace(self, budget=1.0, kv_dtype=None)

    @property
    def needs_all_layers(self) -> bool:
        """Whether sizes depend on the scores of every layer."""
        needs = self.policy.heads.is_global or self.policy.score.repeats
        sized = self.fractions is not None or self.learned is not None
        needs |= bool(self.policy.layers.needs) and not sized
        return needs and not self.keeps_everything

    def mean_sizes(self, prompt: TokenMasks, n_layers: int) -> list[float] | None:
        """Tokens that a head keeps of each row, mean over layers; None where no budget says so."""
        if self.budget is None:
            return None
        kept = partial(token_masks.total_kept, self.policy, self.budget, n_layers)
        rows = zip(prompt.lengths, prompt.floors, strict=True)
        return [max(kept(n) / n_layers, floor) for n, floor in rows]

    def raised(self, length: int, n_layers: int, total: int | None = None) -> bool:
        """Whether a row's tokens over all layers are those of `policy.least`, not of the budget.

        Args:
            length: of the row.
            n_layers: L, the compressed layers.
            total: what it keeps of them; None: what was asked for.
        """
        least = n_layers * min(self.policy.least, length)
        if self.keeps_everything or isinstance(self.budget, int):
            return False
        share = round((self.budget or 0.0) * n_layers * length)
        return share < least and total in (None, least)

    def shortfalls(self, prompt: TokenMasks, n_layers: int) -> list[str]:
        """Which rows are too short for the budget to hold more than what must be kept."""
        policy, budget, found = self.policy, self.budget, list[str]()
        if budget is None or self.keeps_everything:
            return found
        always = [f"window {policy.window_size}"] if policy.window_size else []
        always += [f"sinks {policy.sinks}"] if policy.sinks else []
        always += ["protected text"] if policy.protect is not None else []
        named = map(sum, zip(prompt.n_pinned, prompt.windows, strict=True))
        if any(map(int.__gt__, prompt.floors, named)):  # a round of generated tokens
            always.append(f"latest {policy.decode.latest}")
        rows = zip(prompt.lengths, prompt.windows, prompt.floors, strict=True)
        for row, (length, window, floor) in enumerate(rows):
            total = token_masks.total_kept(policy, budget, n_layers, length)
            free = total - n_layers * floor  # left for tokens that need not be kept
            holds = window == policy.window_size and free >= 0
            if holds and (free >= n_layers or floor in (0, length)):
                continue
            given = f"budget {budget} gives"
            if self.raised(length, n_layers):
                given = f"budget {budget} with least={policy.least} gives"
            text = (
                f"row {row}: {given} {total / n_layers:.3g} of {length} tokens a "
                f"layer, {'all' if holds else 'too few'} for {', '.join(always)}"
            )
            if window != policy.window_size:
                text += f"; its last {window} observe instead"
            if free < 0:
                text += f"; {floor} are kept"
            found.append(text)
        return found

    def log_shortfalls(self, prompt: TokenMasks, n_layers: int) -> None:
        """Say in one line of the log, once a wrap, what `shortfalls` finds first."""
        found = [] if "shortfalls" in self.said else self.shortfalls(prompt, n_layers)
        if found:
            self.said.add("shortfalls")
            more = f"; and {len(found) - _MOST_NAMED} rows more" if len(found) > _MOST_NAMED else ""
            logger.warning("%s%s", "; ".join(found[:_MOST_NAMED]), more)

    @property
    def runs_mini_prefill(self) -> bool:
        """Whether a first pass that stores nothing learns the layers' sizes."""
        return self.needs_all_layers and self.policy.layers.mini_prefill
