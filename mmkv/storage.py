"""Where kept keys and values lie: a few rectangular blocks of rows of similar length.

A row is one key-value head of one sequence, R = B * H of them. Rows that keep about as much share a
block [R', S, D]; a layer whose rows all agree is a single block. Each block is one attention call,
so per-head sizes free memory without a loop over heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmkv.decoding import Lightest, Schedule, Slots
from mmkv.repositioning import reposition

# Slots added at a time once the reserve made at prefill is used up: a share of those in use.
_CHUNK = 1 / 8


@dataclass(eq=False)
class Block:
    """Rows of similar length and the slots they share.

    Attributes:
        rows: int64 [R], index into the layer's B * H rows; None when the block holds all, in order.
        keys, values: [R, S, D]; S is the capacity, of which the schedule's `width` is in use.
        positions: int32 [R, S], original position of each slot's token, -1 where empty.
        bias: [R, 1, S], added to the logits: 0 for filled slots, -inf for empty ones; None while
            all in use are filled. A bool mask would be turned into one in every step.
        mass: float32 [R, S], attention accumulated by each slot, for policies that score by it;
            decoding adds to it where it also drops by it (H2O).
        schedule: which slot is next.
        inv_freq: [D / 2], to count positions inside the cache; None to keep the original ones.
    """

    rows: Tensor | None
    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor | None
    mass: Tensor | None
    schedule: Schedule
    inv_freq: Tensor | None = None

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        mass: Tensor | None,
        schedule: Schedule,
        *,
        reserve: int,
        rows: Tensor | None = None,
        inv_freq: Tensor | None = None,
    ) -> Block:
        """Copy kept pairs [R, M, D] into storage of their own, with `reserve` empty slots."""
        R, M, D = keys.shape
        block = cls(
            rows=rows,
            keys=keys.new_zeros(R, M + reserve, D),
            values=values.new_zeros(R, M + reserve, values.shape[-1]),
            positions=positions.new_full((R, M + reserve), -1, dtype=torch.int32),
            bias=None,
            mass=None if mass is None else mass.new_zeros(R, M + reserve),
            schedule=schedule,
            inv_freq=inv_freq,
        )
        block.keys[:, :M], block.values[:, :M], block.positions[:, :M] = keys, values, positions
        if block.mass is not None and mass is not None:
            block.mass[:, :M] = mass
        if not schedule.agree:
            empty = (block.positions < 0)[:, None]
            block.bias = keys.new_zeros(empty.shape).masked_fill(empty, float("-inf"))
        return block

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values, empty slots included."""
        return sum(x.untyped_storage().nbytes() for x in (self.keys, self.values))

    def append(self, key: Tensor, value: Tensor, position: int) -> None:
        """Write the pairs [R, q, D] of q new tokens, the first at `position`, into their slots."""
        q = key.shape[1]
        slots = self.schedule.slots()
        self._ensure(self.schedule.width + q - 1)
        if isinstance(slots, int):
            where: tuple[Any, ...] = (slice(None), slice(slots, slots + q))
            self.keys[where], self.values[where] = key, value
            self.positions[where] = torch.arange(
                position, position + q, dtype=torch.int32, device=self.positions.device
            )
        else:
            where = self._where(slots)
            self.keys[where], self.values[where] = key[:, 0], value[:, 0]
            self.positions[where] = position
        if self.mass is not None:
            self.mass[where] = 0.0
        if self.bias is not None:
            self.bias[where[0], 0, where[1]] = 0.0

    def attend(
        self, query: Tensor, q: int, position: int, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Attention of q new tokens, appended before, over the slots in use.

        Args:
            query: [R, G * q, D], the G query heads of each row's group, q tokens each.
            q: new tokens; more than one see each other causally.
            position: the first new token's.
            scale: factor of the query-key products.
            softcap: bound of the logits (Gemma 2), or None.

        Returns:
            [R, G * q, D].
        """
        width = self.schedule.width + q - 1
        keys, values = self.keys[:, :width], self.values[:, :width]
        visible = None if self.bias is None else self.bias[:, :, :width]
        if q > 1:
            visible = causal_view(self.positions[:, :width], position, q)
        if self.inv_freq is not None:
            keys = reposition(keys, self.positions[:, :width], position + q - 1, self.inv_freq)
        counted = self.mass is not None and isinstance(self.schedule, Lightest)
        out, weights = attend(
            query, keys, values, visible, scale=scale, softcap=softcap, weigh=counted
        )
        if self.mass is not None and weights is not None:
            self.mass[:, :width] += weights.mean(dim=1)
        return out

    def drop(self, newest: int) -> None:
        """Count the step and empty the slots of the tokens it drops."""
        victims = self.schedule.advance()
        if isinstance(self.schedule, Lightest) and self.mass is not None:
            victims = self.schedule.drop(self.mass, self.positions, newest)
        if victims is None:
            return
        if isinstance(victims, int):
            self.positions[:, victims] = -1
            return
        victims = victims.to(self.positions.device)
        # A slot of -1 drops nothing: write back what its last slot holds.
        row, slot = self._where(victims)
        keep = victims < 0
        self.positions[row, slot] = torch.where(keep, self.positions[row, slot], -1)
        if self.bias is not None:
            self.bias[row, 0, slot] = torch.where(keep, self.bias[row, 0, slot], float("-inf"))

    def select(self, chosen: np.ndarray, rows: Tensor | None) -> Block:
        """A copy holding the block's rows `chosen`, which become the layer's rows `rows`."""
        index = torch.from_numpy(chosen).to(self.keys.device)
        return replace(
            self,
            rows=rows,
            keys=self.keys[index],
            values=self.values[index],
            positions=self.positions[index],
            bias=None if self.bias is None else self.bias[index],
            mass=None if self.mass is None else self.mass[index],
            schedule=self.schedule.select(chosen),
        )

    def _where(self, slots: Slots) -> tuple[Tensor, Tensor]:
        slots = torch.as_tensor(slots, device=self.keys.device)
        return torch.arange(len(slots), device=self.keys.device), slots

    def _ensure(self, width: int) -> None:
        """Grow the storage in chunks when the next token has no slot left."""
        short = width - self.keys.shape[1]
        if short <= 0:
            return
        more = max(short, 16, int(width * _CHUNK))

        def grown(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((x.shape[0], more, *x.shape[2:]), fill)], dim=1)

        self.keys, self.values = grown(self.keys, 0), grown(self.values, 0)
        self.positions = grown(self.positions, -1)
        if self.mass is not None:
            self.mass = grown(self.mass, 0)
        if self.bias is not None:
            self.bias = grown(self.bias[:, 0], float("-inf"))[:, None]


def causal_view(positions: Tensor, first: int, q: int) -> Tensor:
    """Which tokens [R, U] the q new ones at `first`, `first` + 1, ... may see: bool [R, q, U]."""
    last = torch.arange(first, first + q, device=positions.device)[None, :, None]
    return (positions[:, None] >= 0) & (positions[:, None] <= last)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    weigh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of G query heads of q tokens each over one row's keys; no key is repeated.

    Args:
        query: [R, G * q, D], the q tokens of each head side by side.
        keys, values: [R, U, D].
        visible: bool [R, 1 or q, U], or a bias of the logits; None: all.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.
        weigh: return the weights too.

    Returns:
        [R, G * q, D], and float32 weights [R, G * q, U] if asked for.
    """
    if visible is not None and visible.shape[1] > 1:
        visible = visible.repeat(1, query.shape[1] // visible.shape[1], 1)
    if softcap is None and not weigh:
        out = scaled_dot_product_attention(
            query[:, None],
            keys[:, None],
            values[:, None],
            attn_mask=None if visible is None else visible[:, None],
            scale=scale,
        )
        return out[:, 0], None
    logits = (query @ keys.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if visible is not None and visible.dtype == torch.bool:
        logits = logits.masked_fill(~visible, float("-inf"))
    elif visible is not None:
        logits = logits + visible
    weights = logits.softmax(dim=-1)
    return weights.to(values.dtype) @ values, weights


def group_rows(counts: np.ndarray, *, most: int = 6, slack: float = 0.04) -> list[np.ndarray]:
    """Split rows into as few blocks as hold them with little padding.

    Args:
        counts: [R], tokens kept by each row.
        most: blocks at the most; each costs one attention call a step.
        slack: padding allowed as a share of what is kept; more blocks are tried until it is met.

    Returns:
        Row indices of each block, each in rising order.
    """
    order = np.argsort(-counts, kind="stable")
    size = counts[order].astype(np.int64)
    # Cut only where the rounded length changes: at most 33 places, so the search is cheap.
    rounded = np.ceil(size / max(1, size[0]) * 32)
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(rounded)) + 1, [len(size)]])
    allowed = (1 + slack) * size.sum()
    n = len(cuts) - 1
    # cost[j]: slots needed for the first cuts[j] rows; `back`: where their last block starts.
    cost = np.full(n + 1, np.inf)
    cost[0] = 0.0
    back: list[np.ndarray] = []
    for _ in range(min(most, n)):
        longest = size[np.minimum(cuts, len(size) - 1)]
        tried = cost[:, None] + (cuts[None, :] - cuts[:, None]) * longest[:, None]
        tried[np.tril_indices(n + 1)] = np.inf
        back.append(tried.argmin(0))
        cost = tried.min(0)
        if cost[n] <= allowed:
            break
    edges = [n]
    for step in reversed(back):
        edges.append(int(step[edges[-1]]))
    edges.reverse()
    return [np.sort(order[cuts[a] : cuts[b]]) for a, b in pairwise(edges) if a < b]
