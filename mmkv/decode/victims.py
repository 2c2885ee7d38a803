"""The slot that a generated token takes where attention decides what is dropped (H2O, TOVA)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmkv.decode.slots import Ring, SlotSchedule
from mmkv.parts import Decode, RowSizes, register_part
from mmkv.tensors import send

if TYPE_CHECKING:
    from mmkv.policy import Policy


class HeavyHitterSlots(SlotSchedule):
    """Constant size: drop the token with the lowest accumulated attention, but no recent one (H2O).

    The dropped token, the victim, depends on attention. `drop` finds it on the device, without
    synchronising, and the next token takes its slot.
    """

    per_row = ("counts", "protected", "capacity", "recent", "n_tokens")
    needs_decode_attention = True
    protected: np.ndarray
    capacity: np.ndarray
    recent: np.ndarray
    freed: Tensor | None = None
    protected_slots: Tensor

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.n_tokens = self.counts.copy()  # tokens before the step, dropped ones included
        self.recent = np.maximum(self.recent, 1)  # the newest is never the victim
        # If padding lies between turns: the positions [R, n] of the prompt's last tokens, and the
        # position after the prompt.
        self.prompt_positions: Tensor | None = None
        self.end = 0
        self.lacks_candidates = bool((self.capacity < self.protected + self.recent).any())
        self.columns: dict[str, int | Tensor] = {}
        self.buffers: tuple[Tensor, Tensor] | None = None

    @property
    def width(self) -> int:
        """Number of slots in use during the next step, constant once the capacity is reached."""
        return int(np.minimum(self.n_tokens + 1, self.capacity + 1).max())

    @property
    def used(self) -> int:
        """Number of slots in use before the next step; a freed one may count or not."""
        return self.width - 1

    @property
    def full(self) -> bool:
        """Whether every row drops a token in each step from now on."""
        return bool((self.n_tokens >= self.capacity).all())

    @property
    def filling(self) -> bool:
        """Whether some row has not dropped a token yet."""
        return self.freed is None or not self.full

    def slots(self, device: torch.device) -> int | Tensor:
        """Return the slot that the last victim freed; before the first drop, the next new one."""
        if self.freed is None:
            if self.shared:
                return int(self.n_tokens[0])
            self.freed = send(self.n_tokens, device)
        return self.freed

    def slots_at(self, row: Tensor) -> Tensor:
        """Return the slots that the last step freed."""
        assert self.freed is not None
        return self.freed

    def slots_bound(self, steps: int) -> np.ndarray:
        """Return the slots in use: at most the capacity and one more."""
        return np.minimum(self.n_tokens + steps, self.capacity + 1)

    def advance(self, steps: int = 1) -> None:
        """Count steps; `drop` has chosen the victims."""
        self.n_tokens = self.n_tokens + steps

    def drop(self, attention: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Choose the tokens that are dropped after this step; the next ones take their slots.

        `attention` is float32 [R, S], accumulated by slot; it is inf and `positions` [R, S] are -1
        for an empty slot; `newest` is the position of the token just written.
        """
        is_full = self.n_tokens >= self.capacity
        if not is_full.any():
            self.freed = None if self.shared else send(self.n_tokens + 1, attention.device)
            return
        victim = self._victim(attention, positions, newest)
        if not is_full.all():
            next_slot, full = (send(a, attention.device) for a in (self.n_tokens + 1, is_full))
            victim = torch.where(full, victim, next_slot)
        if self.freed is None:
            self.freed = victim
        else:  # in place: a captured graph reads it
            self.freed.copy_(victim)

    def select(self, rows: np.ndarray) -> HeavyHitterSlots:
        """Return this schedule for a choice of rows, with their freed slots."""
        new = copy.copy(self)
        new.columns, new.buffers = {}, None
        for name in self.per_row:
            setattr(new, name, getattr(self, name)[slice(None) if self.shared else rows].copy())
        if self.freed is not None:
            new.freed = self.freed[send(rows, self.freed.device)]
        if self.prompt_positions is not None:
            new.prompt_positions = self.prompt_positions[send(rows, self.prompt_positions.device)]
        return new

    def skip_padding(self, prompt_positions: Tensor, end: int) -> None:
        """Do not count padding between turns among recent tokens.

        `prompt_positions` [R, n] are those of the prompt's last tokens, ascending, n enough for
        `recent`; `end` is T, the prompt's length with padding.
        """
        self.prompt_positions, self.end = prompt_positions, end

    def _newer_than(self, newest: int | Tensor, device: torch.device) -> int | Tensor:
        """Return the position after which tokens are recent: an int, or [R, 1]."""
        recent = self._column("recent", device)
        if self.prompt_positions is None:
            return newest - recent
        generated = newest - self.end + 1
        n_of_prompt = torch.as_tensor(recent - generated, device=device).expand(
            len(self.prompt_positions), 1
        )
        n = self.prompt_positions.shape[1]
        before_recent = (
            self.prompt_positions.gather(1, (n - n_of_prompt).clamp(0, n - 1).long()) - 1
        )
        return torch.where(n_of_prompt > 0, before_recent, newest - recent)

    def _victim(self, attention: Tensor, positions: Tensor, newest: int | Tensor) -> Tensor:
        """Return the slot of the token to drop, int64 [R]; arguments are those of `drop`."""
        # Buffers are reused, so that no step allocates a tensor with an element per slot.
        if self.buffers is None or self.buffers[0].shape != attention.shape:
            mask = torch.empty_like(attention, dtype=torch.bool)
            self.buffers = torch.empty_like(attention), mask
            slot = torch.arange(attention.shape[1], device=attention.device)
            self.protected_slots = slot < self._column("protected", attention.device)
        candidates, excluded = self.buffers
        torch.gt(positions, self._newer_than(newest, attention.device), out=excluded)
        if self.protected.any():
            excluded.logical_or_(self.protected_slots)
        torch.where(excluded, attention.new_full((), torch.inf), attention, out=candidates)
        if not self.lacks_candidates:
            return candidates.argmin(-1)
        # If protected and recent tokens fill a row, the oldest recent one is dropped.
        never = (positions < 0) | self.protected_slots
        oldest = positions.masked_fill(never, 2**31 - 1)
        no_candidates = (excluded | never).all(-1, keepdim=True)
        return torch.where(no_candidates, oldest.float(), candidates).argmin(-1)

    def _column(self, name: str, device: torch.device) -> int | Tensor:
        """Return a per-row array as [R, 1] on the device, or as an int if all rows are equal."""
        if name not in self.columns:
            array = getattr(self, name)
            same = len(np.unique(array)) == 1
            self.columns[name] = int(array[0]) if same else send(array, device)[:, None]
        return self.columns[name]


class LeastAttendedSlots(HeavyHitterSlots):
    """Constant size: drop the token that the newest query attends to least, over all heads (TOVA).

    The heads of a layer keep the same tokens in the same slots.
    """

    def __init__(self, heads: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.heads = heads

    def drop(self, attention: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Choose by the mean over a layer's heads; then set this step's attention to 0."""
        of_layer = attention.unflatten(0, (-1, self.heads)).mean(1, keepdim=True)
        mean = of_layer.expand(-1, self.heads, -1).flatten(0, 1)
        super().drop(mean, positions, newest)
        attention.masked_fill_(attention < torch.inf, 0.0)


@register_part("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Decode):
    """A layer keeps its size after the prompt, or grows to a budget in tokens that is larger.

    Each new token replaces the one with the lowest accumulated score (H2O), or with score="recency"
    the oldest (StreamingLLM).
    """

    def check(self, policy: Policy) -> None:
        """Check that the score says which token to drop."""
        if policy.score.ranks and policy.score.turn_reduction != "sum":
            raise ValueError(
                "decode='fixed' drops the lowest accumulated score or the oldest token; "
                f"score={policy.score.name!r} has neither: use score='accumulated' or 'recency'"
            )
        if policy.score.ranks and policy.score.average_heads:
            raise ValueError(
                "average_heads=True ranks tokens once per layer, but decode='fixed' drops a token "
                "of each head by its own scores: use average_heads=False, or decode='ratio' or "
                "'grow'"
            )

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Return a ring of slots, or a schedule that drops by accumulated attention."""
        sizes = _sizes(rows)
        if not policy.score.ranks:
            return Ring(**sizes)
        recent = (policy.recent * rows.capacity).astype(int)
        return HeavyHitterSlots(**sizes, recent=recent)


@register_part("least-attended")
@dataclass(frozen=True, kw_only=True)
class LeastAttended(Decode):
    """As "fixed", but each new token replaces the one that it attends to least (TOVA).

    Its attention is the mean over a layer's heads. The newest token stays.

    Source: TOVA, arXiv 2401.06104, section 3.
    """

    needs_decode_attention = True

    def check(self, policy: Policy) -> None:
        """Check that heads of a layer keep the same tokens, and scores are not accumulated."""
        if policy.score.turn_reduction:
            raise ValueError(
                "decode='least-attended' looks at the newest query alone, and "
                f"score={policy.score.name!r} combines scores of all turns: use score='window'"
            )
        if not (policy.score.average_heads and not policy.heads.scope):
            raise ValueError(
                "decode='least-attended' drops a token from all heads of a layer: use "
                f"average_heads=True (score={policy.score.name!r}) and heads='uniform' "
                f"(heads={policy.heads.name!r})"
            )
        if policy.merge is not None and policy.merge.weighted:
            raise ValueError(
                "decode='least-attended' needs heads that hold the same tokens, and merge='groups' "
                "makes groups of each head's own: use one of them"
            )

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """Return a schedule that drops by the newest query's attention."""
        recent = (policy.recent * rows.capacity).astype(int)
        return LeastAttendedSlots(rows.heads, **_sizes(rows), recent=recent)


def _sizes(rows: RowSizes) -> dict[str, np.ndarray]:
    """Return the arrays of a schedule of constant size."""
    protected = rows.protected.clip(max=rows.capacity)
    return {"counts": rows.counts, "protected": protected, "capacity": rows.capacity}
