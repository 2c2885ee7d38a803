"""What `wrap` was asked for, checked, and how large it makes each layer.

Shape letters as in `mmkv.scores`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import sampling, token_masks
from mmkv.cache.sampling import SampledSizes
from mmkv.cache.token_masks import TokenMasks, total_kept
from mmkv.parts import SizeInputs
from mmkv.policy import Policy
from mmkv.sizes.layers import fit

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
    def waits_for_probe(self) -> bool:
        """Whether head sizes are to be found by the copy probe."""
        return self.policy.heads.name == "retrieval" and not self.keeps_everything

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
        """Whether a row's tokens over all layers, `total`, are those of `policy.least`.

        And not of the budget; None: the tokens that were asked for.
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


def sizes_of_rows(
    plan: CacheConfig,
    prompt: TokenMasks,
    n_layers: int,
    scores: Sequence[Tensor] = (),
    positions: Sequence[Tensor] = (),
    measured: Sequence[Tensor] = (),
) -> list[list[int]]:
    """How many tokens each of the compressed layers keeps of each row, [B][L].

    Args:
        plan: policy, budget and profile, whose kept fractions replace the policy's layer part.
        prompt: what is known of the tokens.
        n_layers: L.
        scores, positions: [B, 1 or H, U] of each layer, where they are known.
        measured: [B] of each layer, what the layer part `needs`.
    """
    policy, found, totals = plan.policy, [[n] * n_layers for n in prompt.lengths], dict[int, int]()
    for row, loses in enumerate(plan.evicting(prompt)):
        length, floor = prompt.lengths[row], prompt.floors[row]
        total = max(total_kept(policy, plan.budget, n_layers, length), n_layers * floor)
        if loses and total < n_layers * length:
            totals[row] = total
    lengths, floors = ([x[row] for row in totals] for x in (prompt.lengths, prompt.floors))
    fractions = [plan.fractions_of(length, n_layers) for length in lengths]
    wished = [[x * n for x in known or ()] for known, n in zip(fractions, lengths, strict=True)]
    if None in fractions:
        rows: Any = slice(None) if len(totals) == len(found) else list(totals)
        known = dict[str, Tensor]()
        if measured:
            each = [x.to(measured[0].device) for x in measured]
            known["measured"] = torch.stack(each, dim=1)[rows].cpu()
        if scores and policy.layers.needs == "scores":
            best, offered = competing(scores, positions, prompt)
            known |= {"scores": best[rows], "n_candidates": offered[rows]}
        spent = list(totals.values())
        given = SizeInputs(totals=spent, lengths=lengths, floors=floors, n_layers=n_layers, **known)
        wished = policy.layers(given)
        if policy.layers.retention is not None:
            totals = {
                b: max(n, int(sum(w))) for (b, n), w in zip(totals.items(), wished, strict=True)
            }
    for (row, total), sizes, floor in zip(totals.items(), wished, floors, strict=True):
        found[row] = fit(sizes, total, floor=floor, max_size=prompt.lengths[row])
    return found


def competing(
    scores: Sequence[Tensor], positions: Sequence[Tensor], prompt: TokenMasks
) -> tuple[Tensor, Tensor]:
    """The scores of each row's competing tokens, largest first, as the layer allocators want them.

    Heads that rank for themselves keep their own best, so a layer's n-th entry is the mean over
    heads of each head's n-th largest score: its prefix sums are what the layer then really retains.
    (The papers' R_l is defined on one ranking; with one ranking per layer this is the same.)

    Returns:
        importance: [B, L, U] of the widest layer, on the first layer's device; what a layer lost
            in earlier turns is 0.
        offered: int64 [B], the most that a layer has to offer of each row, 1 where it is nothing.
    """
    ranked, offered = [], []
    wide, device = max(s.shape[-1] for s in scores), scores[0].device
    for s, p in zip(scores, positions, strict=True):
        (always_kept,) = prompt.to(p.device).at(p, "always_kept")
        free = (p >= 0) & ~always_kept
        own = s.masked_fill(~free[:, : s.shape[1]], float("-inf"))
        own = own.sort(dim=-1, descending=True).values
        own = own.masked_fill(own == float("-inf"), 0.0).mean(dim=1)
        ranked.append(pad(own, (0, wide - own.shape[-1])).to(device))
        offered.append(free.sum(-1).amax(-1).to(device))
    return torch.stack(ranked, dim=1), torch.stack(offered).amax(0).clamp(min=1)
