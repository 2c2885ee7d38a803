"""Which slot a generated token takes where attention decides what is dropped (H2O, TOVA)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmkv.parts import Decode, RowSizes, register_part
from mmkv.parts.slots import Ring, SlotSchedule, send

if TYPE_CHECKING:
    from mmkv.policy import Policy


class HeavyHitterSlots(SlotSchedule):
    """Constant size: the token with the lowest accumulated attention outside the recent ones (H2O).

    The victim depends on the attention, so it stays on the device: `drop` finds it without
    synchronising, and the next token takes its slot.
    """

    rows = ("counts", "protected", "capacity", "recent", "held")
    needs_decode_attention = True
    protected: np.ndarray
    capacity: np.ndarray
    recent: np.ndarray
    freed: Tensor | None = None
    guarded: Tensor

    def __init__(self, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.held = self.counts.copy()  # tokens held, if none had been dropped
        self.recent = np.maximum(self.recent, 1)  # the newest is never the victim
        # Whether a row may have nothing but protected and recent tokens to choose from.
        # Where padding lies between turns: places [R, n] of the prompt's last tokens, and its end.
        self.places: Tensor | None = None
        self.end = 0
        self.crowded = bool((self.capacity < self.protected + self.recent).any())
        self.columns: dict[str, int | Tensor] = {}
        self.scratch: tuple[Tensor, Tensor] | None = None

    @property
    def width(self) -> int:
        """Constant once the capacity is reached."""
        return int(np.minimum(self.held + 1, self.capacity + 1).max())

    @property
    def used(self) -> int:
        """One less than with the next token, whose slot is never known ahead."""
        return self.width - 1

    @property
    def full(self) -> bool:
        """Whether every row drops a token each step from now on."""
        return bool((self.held >= self.capacity).all())

    @property
    def filling(self) -> bool:
        """From the first drop on slots are victims'."""
        return self.freed is None or not self.full

    def slots(self, device: torch.device) -> int | Tensor:
        """The slot freed by the last victim; before the first, the next fresh one."""
        if self.freed is None:
            if self.shared:
                return int(self.held[0])
            self.freed = send(self.held, device)
        return self.freed

    def prepare(self) -> None:
        """Nothing: the victims are found on the device."""

    def slots_at(self, row: Tensor) -> Tensor:
        """The slots that the last step freed."""
        assert self.freed is not None
        return self.freed

    def reach(self, steps: int) -> np.ndarray:
        """The constant size, and one spare slot, once they are reached."""
        return np.minimum(self.held + steps, self.capacity + 1)

    def advance(self, steps: int = 1) -> None:
        """Count a step; `drop` has found the victims."""
        self.held = self.held + steps

    def drop(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """Find the tokens that are dropped after this step: the next ones take their slots.

        `mass` is float32 [R, S], the attention that each slot accumulated, inf where it is empty,
        as positions [R, S] are -1 there; `newest` is that of the token just written.
        """
        over = self.held >= self.capacity
        if not over.any():
            self.freed = None if self.shared else send(self.held + 1, mass.device)
            return
        victim = self._victim(mass, positions, newest)
        if not over.all():
            fresh, late = (send(a, mass.device) for a in (self.held + 1, over))
            victim = torch.where(late, victim, fresh)
        if self.freed is None:
            self.freed = victim
        else:  # in place: a captured graph reads it
            self.freed.copy_(victim)

    def select(self, rows: np.ndarray) -> HeavyHitterSlots:
        """The freed slot moves with its row."""
        new = copy.copy(self)
        new.columns, new.scratch = {}, None
        for name in self.rows:
            setattr(new, name, getattr(self, name)[slice(None) if self.shared else rows].copy())
        if self.freed is not None:
            new.freed = self.freed[send(rows, self.freed.device)]
        if self.places is not None:
            new.places = self.places[send(rows, self.places.device)]
        return new

    def behind(self, places: Tensor, end: int) -> None:
        """Count recent tokens over padding: the prompt's last ones [R, n] lie at `places`.

        Ascending, n at least the most that any row keeps as recent; the prompt ends at `end`, T.
        """
        self.places, self.end = places, end

    def _newer_than(self, newest: int | Tensor, device: torch.device) -> int | Tensor:
        """The position behind which tokens are recent: an int, or [R, 1]."""
        recent = self._column("recent", device)
        if self.places is None:
            return newest - recent
        generated = newest - self.end + 1
        wide = torch.as_tensor(recent - generated, device=device).expand(len(self.places), 1)
        n = self.places.shape[1]
        of_prompt = self.places.gather(1, (n - wide).clamp(0, n - 1).long()) - 1
        return torch.where(wide > 0, of_prompt, newest - recent)

    def _victim(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> Tensor:
        # Into memory of their own: nothing as large as the cache is allocated in a step.
        if self.scratch is None or self.scratch[0].shape != mass.shape:
            self.scratch = torch.empty_like(mass), torch.empty_like(mass, dtype=torch.bool)
            slot = torch.arange(mass.shape[1], device=mass.device)
            self.guarded = slot < self._column("protected", mass.device)
        lightest, kept = self.scratch
        torch.gt(positions, self._newer_than(newest, mass.device), out=kept)
        if self.protected.any():
            kept.logical_or_(self.guarded)
        torch.where(kept, mass.new_full((), torch.inf), mass, out=lightest)
        if not self.crowded:
            return lightest.argmin(-1)
        # Where the recent ones fill the whole capacity, the oldest of them has to go.
        barred = (positions < 0) | self.guarded
        oldest = positions.masked_fill(barred, 2**31 - 1)
        none_left = (kept | barred).all(-1, keepdim=True)
        return torch.where(none_left, oldest.float(), lightest).argmin(-1)

    def _column(self, name: str, device: torch.device) -> int | Tensor:
        """A per-row array as [R, 1] on the device, or as an int where all rows have the same."""
        if name not in self.columns:
            a = getattr(self, name)
            same = len(np.unique(a)) == 1
            self.columns[name] = int(a[0]) if same else send(a, device)[:, None]
        return self.columns[name]


class LeastAttended(HeavyHitterSlots):
    """Constant size: the token that the newest query attends to least, over all heads (TOVA).

    The heads of a layer hold the same tokens in the same slots.
    """

    def __init__(self, heads: int, **arrays: np.ndarray) -> None:
        super().__init__(**arrays)
        self.heads = heads

    def drop(self, mass: Tensor, positions: Tensor, newest: int | Tensor) -> None:
        """The mean over a layer's heads decides; then nothing of this step is left."""
        of_layer = mass.unflatten(0, (-1, self.heads)).mean(1, keepdim=True)
        mean = of_layer.expand(-1, self.heads, -1).flatten(0, 1)
        super().drop(mean, positions, newest)
        mass.masked_fill_(mass < torch.inf, 0.0)


@register_part("fixed")
@dataclass(frozen=True, kw_only=True)
class Fixed(Decode):
    """A layer goes on with the size the prompt left it, filled up to a larger budget in tokens.

    Each new token takes the place of the lowest accumulated score (H2O), or with score="recency" of
    the oldest (StreamingLLM).
    """

    def check(self, policy: Policy) -> None:
        """Something must say which token goes."""
        if policy.score.ranks and policy.score.turn_reduction != "sum":
            raise ValueError(
                "decode='fixed' drops the lowest accumulated score or the oldest token; "
                f"score={policy.score.name!r} has neither: use score='accumulated' or 'recency'"
            )
        if policy.score.ranks and policy.score.average_heads:
            raise ValueError(
                "average_heads=True ranks tokens once per layer, but decode='fixed' drops the "
                "lightest token of each head: use average_heads=False, or decode='ratio' or 'grow'"
            )

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """A ring of slots, or what attention finds lightest."""
        sizes = _sizes(rows)
        if not policy.score.ranks:
            return Ring(**sizes)
        recent = (policy.recent * rows.capacity).astype(int)
        return HeavyHitterSlots(**sizes, recent=recent)


@register_part("least")
@dataclass(frozen=True, kw_only=True)
class Least(Decode):
    """As "fixed", but each new token takes the place of the one that it attends to least (TOVA).

    The mean over a layer's heads decides, arXiv 2401.06104, section 3; the newest token stays.
    """

    needs_decode_attention = True

    def check(self, policy: Policy) -> None:
        """All heads of a layer hold the same tokens, and nothing is added up over steps."""
        if policy.score.turn_reduction:
            raise ValueError(
                "decode='least' looks at the newest query alone, and "
                f"score={policy.score.name!r} goes on from step to step: use score='window'"
            )
        if not (policy.score.average_heads and policy.heads.equal):
            raise ValueError(
                "decode='least' drops a token from all heads of a layer: use average_heads=True "
                f"(score={policy.score.name!r}) and heads='uniform' (heads={policy.heads.name!r})"
            )
        if policy.merge is not None and policy.merge.weighted:
            raise ValueError(
                "decode='least' needs heads that hold the same tokens, and merge='groups' makes "
                "groups of each head's own: use one of them"
            )

    def schedule(self, policy: Policy, rows: RowSizes) -> SlotSchedule:
        """What the newest query finds lightest."""
        recent = (policy.recent * rows.capacity).astype(int)
        return LeastAttended(rows.heads, **_sizes(rows), recent=recent)


def _sizes(rows: RowSizes) -> dict[str, np.ndarray]:
    protected = rows.protected.clip(max=rows.capacity)
    return {"counts": rows.counts, "protected": protected, "capacity": rows.capacity}
