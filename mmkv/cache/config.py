"""The settings of a wrapped model, and the masks of the tokens that they pin.

Budgets are per row: a row of a left-padded batch is sized by its own length, so it keeps the same
tokens in a batch as alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import sampling
from mmkv.cache.sampling import SampledSizes
from mmkv.memory import Allotment
from mmkv.parts import SizeInputs
from mmkv.policy import Policy
from mmkv.sizes.profiled import HeadTable, RetrievalHeads, free_share

logger = logging.getLogger(__name__)

# The largest number of rows that one log line describes; it counts the others.
_MOST_NAMED = 3


@dataclass(frozen=True)
class CacheConfig:
    """The settings of a wrapped model: policy, budget, profile and options.

    `mmkv.planning` checks them.
    """

    policy: Policy
    budget: float | int | None
    fractions: tuple[float, ...] | None = None
    # The type of kept pairs: "int8", "int4", or None for the model's own type.
    kv_dtype: str | None = None
    # Evict after every chunk of a prompt that is read in chunks, not only after the last.
    evict_chunks: bool = False
    # Sizes of heads that were measured, in place of the policy's; None: the policy sizes them.
    table: HeadTable | None = None
    # How a share of the full cache's bytes sets budget and type; None: these were given.
    allotment: Allotment | None = None
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
        retention = self.policy.layers.retention
        size = f"budget={self.budget}" if retention is None else f"retention={retention}"
        size += "" if self.kv_dtype is None else f", kv_dtype={self.kv_dtype!r}"
        if self.allotment is not None:
            size = f"memory={float(self.allotment.memory):.3g}"
        size += ", evict_chunks=True" if self.evict_chunks else ""
        return f"policy={self.policy.name!r}, {size}"

    @property
    def size(self) -> str:
        """The budget in words: "budget 0.2", "memory 6.25%", or "retention 0.97"."""
        if self.allotment is not None:
            return f"memory {self.allotment.memory}"
        retention = self.policy.layers.retention
        return f"budget {self.budget}" if self.budget else f"retention {retention}"

    @property
    def waits_for_probe(self) -> bool:
        """Whether head sizes wait for a run of the copy probe (`mmkv.attach.copy_probe`)."""
        measured = self.table is not None or not isinstance(self.policy.heads, RetrievalHeads)
        return not (measured or self.keeps_all)

    @property
    def equal_heads(self) -> bool:
        """Whether all heads of a layer keep the same number of tokens."""
        return self.table is None and not self.policy.heads.scope

    def layer_sizes(self, rows: SizeInputs) -> Sequence[Sequence[float]]:
        """Return how many tokens each layer keeps, [B][L], see `mmkv.parts.Layers`."""
        if self.table is not None and self.table.sizes_layers:
            return self.table.layer_sizes(rows)
        layers = self.policy.layers
        sizes, wanted = layers(rows), (len(rows.lengths), rows.n_layers)
        if (shape := np.shape(sizes)) != wanted:
            raise ValueError(
                f"{type(layers).__name__} returned shape {shape}: expected [B][L] = {wanted}"
            )
        return sizes

    @cached_property
    def keeps_all(self) -> bool:
        """Whether no token is ever evicted. budget=1.0 is the full cache, in decoding too."""
        return self.policy.keeps_all or (isinstance(self.budget, float) and self.budget >= 1.0)

    @cached_property
    def kept_whole(self) -> int:
        """The length up to which a row loses no token: `policy.least`, or a budget in tokens."""
        return self.budget if isinstance(self.budget, int) else self.policy.least

    def total_kept(self, n_layers: int, length: int, pinned: int = 0) -> int:
        """Return how many tokens all layers keep together, in tokens per head.

        A budget given as a share is a share of the row's `length`. Each layer keeps at least
        `kept_whole` tokens, or one, as a mean, and its `pinned` ones. `retention` does not count
        here.
        """
        least = max(min(max(1, self.kept_whole), length), pinned)
        return max(self._share(n_layers, length), n_layers * least)

    def share_kept(self, n_layers: int, length: int, pinned: int) -> float:
        """Return the mean share of a row's tokens, without pinned ones, that a head keeps.

        Without a budget, as with `retention`, that is not known before layers are sized: 1.
        """
        if self.budget is None:
            return 1.0
        return free_share(self.total_kept(n_layers, length, pinned), n_layers, length, pinned)

    def _share(self, n_layers: int, length: int) -> int:
        """Return a budget that is a fraction over all layers, in tokens per head, else 0."""
        if self.allotment is not None:
            return int(self.allotment.budget(length) * n_layers * length) if length else 0
        return round(self.budget * n_layers * length) if isinstance(self.budget, float) else 0

    def evicting(self, masks: TokenMasks) -> list[bool]:
        """Return for each row whether it may lose a token in this pass."""
        rows = zip(self.long_enough(masks), masks.ends_in_padding, strict=True)
        return [is_long and not in_padding for is_long, in_padding in rows]

    def long_enough(self, masks: TokenMasks) -> list[bool]:
        """Return for each row whether it is long enough to lose a token."""
        if self.keeps_all:
            return [False] * len(masks.lengths)
        rows = zip(masks.lengths, masks.n_pinned, strict=True)
        return [n > max(self.kept_whole, n_pinned) for n, n_pinned in rows]

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
            per_token = self.total_kept(n_layers, length) / length
            return tuple(share * per_token for share in self.learned)
        if self.fractions is None or not isinstance(self.budget, float):
            return self.fractions
        factor = max(1.0, self.policy.least / (self.budget * length))
        return tuple(share * factor for share in self.fractions)

    @property
    def needs_all_layers(self) -> bool:
        """Whether sizes depend on the scores of every layer."""
        needs = self.policy.heads.scope == "model" or self.policy.score.repeats
        sized = self.fractions is not None or self.learned is not None
        needs |= bool(self.policy.layers.needs) and not sized
        return needs and not self.keeps_all

    def mean_sizes(self, masks: TokenMasks, n_layers: int) -> list[float] | None:
        """Return the tokens a head keeps of each row, mean over layers; None without a budget."""
        if self.budget is None:
            return None
        rows = zip(masks.lengths, masks.n_pinned, strict=True)
        return [self.total_kept(n_layers, *of_row) / n_layers for of_row in rows]

    def raised(self, length: int, n_layers: int, total: int | None = None) -> bool:
        """Return whether `policy.least`, not the budget, decides a row's size.

        `total` is the number of tokens kept over all layers; None: as many as planned.
        """
        least = n_layers * min(self.policy.least, length)
        if self.keeps_all or isinstance(self.budget, int):
            return False
        return self._share(n_layers, length) < least and total in (None, least)

    def shortfalls(self, masks: TokenMasks, n_layers: int) -> list[str]:
        """Return a note on each row of which the budget keeps no more than the pinned tokens."""
        policy, budget, notes = self.policy, self.budget, list[str]()
        if budget is None or self.keeps_all:
            return notes
        pinned = [f"window {policy.window_size}"] if policy.window_size else []
        pinned += [f"sinks {policy.sinks}"] if policy.sinks else []
        pinned += ["protected text"] if policy.protect is not None else []
        n_marked = map(sum, zip(masks.n_protected, masks.windows, strict=True))
        if any(map(int.__gt__, masks.n_pinned, n_marked)):  # a round of generated tokens
            pinned.append(f"latest {policy.decode.latest}")
        rows = zip(masks.lengths, masks.windows, masks.n_pinned, strict=True)
        for row, (length, window, n_pinned) in enumerate(rows):
            total = self.total_kept(n_layers, length)
            budget_left = total - n_layers * n_pinned  # for tokens that compete
            fits = window == policy.window_size and budget_left >= 0
            if fits and (budget_left >= n_layers or n_pinned in (0, length)):
                continue
            budget_text = f"{self.size} gives"
            if self.raised(length, n_layers):
                budget_text = f"{self.size} with least={policy.least} gives"
            text = (
                f"row {row}: {budget_text} {total / n_layers:.3g} of {length} tokens a "
                f"layer, {'all' if fits else 'too few'} for {', '.join(pinned)}"
            )
            if window != policy.window_size:
                text += f"; its window is {window} instead"
            if budget_left < 0:
                text += f"; each layer keeps {n_pinned}"
            notes.append(text)
        return notes

    def log_shortfalls(self, masks: TokenMasks, n_layers: int) -> None:
        """Log the first notes of `shortfalls` in one line, once a wrap."""
        notes = [] if "shortfalls" in self.logged else self.shortfalls(masks, n_layers)
        if notes:
            self.logged.add("shortfalls")
            rest = f"; and {len(notes) - _MOST_NAMED} rows more" if len(notes) > _MOST_NAMED else ""
            logger.warning("%s%s", "; ".join(notes[:_MOST_NAMED]), rest)


@dataclass(frozen=True)
class TokenMasks:
    """Masks of the T tokens seen so far and those of the next pass, and counts for each row.

    Attributes:
        valid: bool [B, T], False for padding.
        image: bool [B, T], True for image tokens.
        is_prompt: bool [B, T], True for tokens of a prompt, False for generated ones.
        pinned: bool [B, T], tokens that every layer keeps whatever their scores.
        protected: bool [B, T], the part of `pinned` that decoding may not drop either.
        lengths: the number of valid tokens.
        windows: the length of the observation window, whose tokens are all `pinned`; less
            than the policy's if a short row's budget is below the number of `pinned` tokens.
        n_pinned: the number of `pinned` tokens.
        n_protected: the number of protected tokens.
        inner_padding: how many padding tokens follow a row's first token, such as in a later turn.
        granted: the share of the `pinned` tokens that the budget has room for, in [0, 1].
        ends_in_padding: whether the row ends in padding, so that it loses no token before the next
            chunk.
    """

    valid: Tensor
    image: Tensor
    is_prompt: Tensor
    pinned: Tensor
    protected: Tensor
    lengths: list[int]
    windows: list[int]
    n_pinned: list[int]
    n_protected: list[int]
    inner_padding: list[int]
    granted: list[float]
    ends_in_padding: list[bool]

    @classmethod
    def of(
        cls,
        plan: CacheConfig,
        valid: Tensor,
        image: Tensor | None = None,
        *,
        n_layers: int,
        before: TokenMasks | None = None,
        earlier: Tensor | None = None,
    ) -> TokenMasks:
        """Mark the pinned tokens: sinks, the observation window, protected text.

        Args:
            plan, n_layers: they give each row's budget, which may make its window smaller. Without
                a budget (`retention`) windows keep their size.
            valid: bool [B, q], the new tokens; q is 0 in a round of generated tokens, of which the
                last `decode.latest` are pinned.
            image: bool [B, q], or None without pictures.
            before: the masks of the tokens up to the end of the last prompt.
            earlier: bool [B, seen], valid earlier tokens, those generated since `before` included.
        """
        policy, budget, round_of_replies = plan.policy, plan.budget, valid.shape[1] == 0
        image = torch.zeros_like(valid) if image is None else image
        is_prompt = torch.ones_like(valid)
        if before is not None and earlier is not None:
            generated = earlier.shape[1] - before.valid.shape[1]
            padding = valid.new_zeros(valid.shape[0], generated)
            valid = torch.cat([earlier, valid], dim=1)
            image = torch.cat([before.image, padding, image], dim=1)
            is_prompt = torch.cat([before.is_prompt, padding, is_prompt], dim=1)
        order, window = valid.cumsum(-1), policy.window_size
        length = order[:, -1:]
        protected = valid & (order <= policy.sinks)
        if policy.protect is not None:
            marks = policy.protect.marks(valid, is_prompt, image)
            fits = isinstance(marks, Tensor) and marks.dtype == torch.bool
            if not fits or marks.shape != valid.shape:
                name = f"{type(policy.protect).__name__}.marks"
                raise ValueError(f"{name}: expected a bool tensor of shape {tuple(valid.shape)}")
            protected = protected | (valid & marks)
        pinned = protected | (valid & (order > length - window))
        before_first = (order == 0).sum(-1)
        counts = length[:, 0], pinned.sum(-1), protected.sum(-1), before_first
        columns = torch.stack([*counts, valid[:, -1].long()])
        lengths, n_pinned, n_protected, n_before, ends = columns.tolist()
        inner_padding = [valid.shape[1] - n - m for n, m in zip(lengths, n_before, strict=True)]
        totals = [plan.total_kept(n_layers, n) for n in lengths]
        windows = [
            window
            if budget is None or total >= n_layers * n
            else min(window, max(1, total // (2 * n_layers)))  # at most half of the row's budget
            for total, n in zip(totals, n_pinned, strict=True)
        ]
        if any(w < window for w in windows):
            windows_column = torch.tensor(windows, device=valid.device)[:, None]
            pinned = protected | (valid & (order > length - windows_column))
            n_pinned = pinned.sum(-1).tolist()
        if round_of_replies:
            pinned = pinned | (valid & (order > length - policy.decode.latest))
            n_pinned = pinned.sum(-1).tolist()
        granted = [
            1.0 if budget is None or n == 0 else min(1.0, total / (n_layers * n))
            for total, n in zip(totals, n_pinned, strict=True)
        ]
        masks = valid, image, is_prompt, pinned, protected
        ends_in_padding = [end == 0 for end in ends]
        return cls(
            *masks, lengths, windows, n_pinned, n_protected, inner_padding, granted, ends_in_padding
        )

    def rows(self, batch: Tensor) -> TokenMasks:
        """Return the rows `batch`, which may repeat."""
        fields: dict[str, Any] = {}
        for name, x in vars(self).items():
            is_mask = isinstance(x, Tensor)
            fields[name] = x[batch.to(x.device)] if is_mask else [x[b] for b in batch.tolist()]
        return TokenMasks(**fields)

    def check_ends(self) -> None:
        """Check that every row can be continued by generated tokens.

        Raises:
            ValueError: a row has only padding, or ends in padding.
        """
        if not all(self.lengths):
            raise ValueError(
                f"row {self.lengths.index(0)} of the batch is padding alone: it has no token"
            )
        if any(self.ends_in_padding):
            raise ValueError(
                "a row of the batch ends in padding: pad on the left (processor.tokenizer."
                "padding_side = 'left'), as generation needs; for logits or a loss alone, call the "
                "model with use_cache=False"
            )

    def without_gaps(self, positions: Tensor) -> Tensor:
        """Return positions [B, 1 or H, U], each plus the padding after it.

        Distances between the results so count tokens alone. Position -1 means no token.
        """
        if not any(self.inner_padding):
            return positions
        absent = (~self.valid).long().to(positions.device)
        after = absent.flip(-1).cumsum(-1).flip(-1) - absent
        flat = positions.flatten(1)
        moved = flat + after.gather(1, flat.clamp(0, after.shape[1] - 1).long())
        return torch.where(flat < 0, flat, moved).view_as(positions).to(positions.dtype)

    def last_positions(self, n: int) -> Tensor | None:
        """Return the positions of each row's n last tokens, int64 [B, n]; None without gaps.

        They are ascending, with -1 as filler before a row's first token.
        """
        if not any(self.inner_padding):
            return None
        T = self.valid.shape[1]
        positions = torch.arange(T, device=self.valid.device).expand_as(self.valid)
        ordered = positions.masked_fill(~self.valid, -1).sort(dim=-1).values
        return pad(ordered, (max(0, n - T), 0), value=-1)[:, -n:]
