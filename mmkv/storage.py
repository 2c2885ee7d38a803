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

from mmkv.decoding import Lightest, Schedule
from mmkv.quantised import Quantised, Stored, nbytes, select
from mmkv.repositioning import reposition

# Slots added at a time once the reserve made at prefill is used up: a share of those in use.
_CHUNK = 1 / 8


@dataclass(eq=False)
class Block:
    """Rows of similar length and the slots they share.

    Attributes:
        rows: int64 [R], index into the layer's B * H rows; None when the block holds all, in order.
        keys, values: [R, S, D]; S is the capacity, of which the schedule's `width` is in use. In 8
            or 4 bits they are read and written in the model's type all the same.
        positions: int32 [R, S], original position of each slot's token, -1 where empty.
        bias: [R, 1, S], added to the logits: 0 for filled slots, -inf for empty ones; None while
            all in use are filled. A bool mask would be turned into one in every step.
        mass: float32 [R, S], attention accumulated by each slot, for policies that score by it;
            decoding adds to it where it also drops by it (H2O), and then inf marks empty slots.
        schedule: which slot is next.
        inv_freq: [D / 2], to count positions inside the cache; None to keep the original ones.
    """

    rows: Tensor | None
    keys: Stored
    values: Stored
    positions: Tensor
    bias: Tensor | None
    mass: Tensor | None
    schedule: Schedule
    inv_freq: Tensor | None = None
    # [R] numbers of the rows, and attention weights [R, G, S] of a step; made when first needed.
    numbers: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(
        cls,
        keys: Stored,
        values: Stored,
        positions: Tensor,
        mass: Tensor | None,
        schedule: Schedule,
        *,
        rows: Tensor | None = None,
        inv_freq: Tensor | None = None,
    ) -> Block:
        """Take over storage [R, S, D] that holds kept pairs, and after them empty slots."""
        bias, empty = None, positions < 0
        if not schedule.gapless:
            bias = torch.zeros(positions.shape, dtype=keys.dtype, device=keys.device)[:, None]
            bias.masked_fill_(empty[:, None], -torch.inf)
            if schedule.shared:  # what lies behind `width` is never looked at
                bias[:, :, schedule.width - 1 :] = 0.0
        if mass is not None and isinstance(schedule, Lightest):
            mass = mass.masked_fill(empty, torch.inf)
        return cls(rows, keys, values, positions, bias, mass, schedule, inv_freq)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values, empty slots included."""
        return nbytes(self.keys) + nbytes(self.values)

    @property
    def held(self) -> Tensor:
        """Positions [R, S], -1 where empty: where the next token goes, nothing is held any more."""
        slots = self.schedule.slots(self.keys.device)
        if isinstance(slots, int):
            if slots >= self.positions.shape[1]:
                return self.positions
            slots = torch.full(self.positions.shape[:1], slots, device=self.positions.device)
        inside = slots.clamp(max=self.positions.shape[1] - 1)[:, None]
        kept = self.positions.gather(1, inside).masked_fill((slots[:, None] == inside), -1)
        return self.positions.scatter(1, inside, kept)

    def append(self, key: Tensor, value: Tensor, position: int) -> None:
        """Write the pairs [R, q, D] of q new tokens, the first at `position`, into their slots."""
        q = key.shape[1]
        self._ensure(self.schedule.width + q - 1)
        slots = self.schedule.slots(self.keys.device)
        if isinstance(slots, int):
            where: tuple[Any, ...] = (slice(None), slice(slots, slots + q))
            self.keys[where], self.values[where] = key, value
            new = torch.arange(position, position + q, device=key.device) if q > 1 else position
            self.positions[where] = new
        else:
            if self.numbers is None:
                self.numbers = torch.arange(len(self.positions), device=self.keys.device)
            where = (self.numbers, slots)
            self.keys[where], self.values[where] = key[:, 0], value[:, 0]
            self.positions[where] = position
            if self.bias is not None:
                self.bias[self.numbers, 0, slots] = 0.0
        if self.mass is not None and isinstance(self.schedule, Lightest):
            self.mass[where] = 0.0

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

        def used(x: Stored) -> Tensor:
            return x if isinstance(x, Tensor) and width == x.shape[1] else x[:, :width]

        keys, values, positions = used(self.keys), used(self.values), used(self.positions)
        visible = None if self.bias is None else self.bias[:, :, :width]
        if q > 1:
            visible = causal_view(positions, position, q)
        if self.inv_freq is not None:
            keys = reposition(keys, positions, position + q - 1, self.inv_freq)
        if self.mass is None or not isinstance(self.schedule, Lightest):
            return attend(query, keys, values, visible, scale=scale, softcap=softcap)
        if self.weights is None or self.weights.shape[2] != width:
            self.weights = torch.empty(*query.shape[:2], width, device=query.device)
        out = weigh(query, keys, values, visible, self.weights, scale=scale, softcap=softcap)
        mean = self.weights.new_full((1, 1, 1), 1 / query.shape[1])
        used(self.mass)[:, None].baddbmm_(mean.expand(len(query), 1, query.shape[1]), self.weights)
        return out

    def advance(self, newest: int, q: int) -> None:
        """Count a step of q tokens, the last at `newest`; find what it drops."""
        if self.mass is not None and isinstance(self.schedule, Lightest):
            self.schedule.drop(self.mass, self.positions, newest)
        self.schedule.advance(q)

    def select(self, chosen: np.ndarray, rows: Tensor | None) -> Block:
        """A copy holding the block's rows `chosen`, which become the layer's rows `rows`."""
        index = torch.from_numpy(chosen).to(self.keys.device)
        return replace(
            self,
            rows=rows,
            keys=select(self.keys, index),
            values=select(self.values, index),
            positions=self.positions[index],
            bias=None if self.bias is None else self.bias[index],
            mass=None if self.mass is None else self.mass[index],
            schedule=self.schedule.select(chosen),
            numbers=None,
            weights=None,
        )

    def _ensure(self, width: int) -> None:
        """Grow the storage in chunks when the next token has no slot left."""
        short = width - self.keys.shape[1]
        if short <= 0:
            return
        more = max(short, 16, int(width * _CHUNK))

        def grown(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((x.shape[0], more, *x.shape[2:]), fill)], dim=1)

        def longer(x: Stored) -> Stored:
            return x.grown(more) if isinstance(x, Quantised) else grown(x, 0)

        lightest = isinstance(self.schedule, Lightest)
        self.keys, self.values = longer(self.keys), longer(self.values)
        self.positions = grown(self.positions, -1)
        if self.mass is not None:
            self.mass = grown(self.mass, torch.inf if lightest else 0)
        if self.bias is not None:
            self.bias = grown(self.bias[:, 0], 0 if self.schedule.shared else -torch.inf)[:, None]


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
) -> Tensor:
    """Attention of G query heads of q tokens each over one row's keys; no key is repeated.

    Args:
        query: [R, G * q, D], the q tokens of each head side by side.
        keys, values: [R, U, D].
        visible: bool [R, 1 or q, U], or a bias of the logits; None: all.
        scale: factor of the query-key products.
        softcap: bound of the logits (Gemma 2), or None.

    Returns:
        [R, G * q, D].
    """
    if softcap is not None:
        weights = torch.empty(*query.shape[:2], keys.shape[1], device=query.device)
        return weigh(query, keys, values, visible, weights, scale=scale, softcap=softcap)
    if visible is not None:
        visible = _for_heads(visible, query)[:, None]
    out = scaled_dot_product_attention(
        query[:, None], keys[:, None], values[:, None], attn_mask=visible, scale=scale
    )
    return out[:, 0]


def weigh(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    weights: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """`attend` that leaves the attention weights in `weights`, float32 [R, G * q, U]."""
    if query.dtype == weights.dtype:
        torch.bmm(query * scale, keys.mT, out=weights)
    else:
        weights.copy_((query * scale) @ keys.mT)
    if softcap is not None:
        weights.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        visible = _for_heads(visible, query)
        if visible.dtype == torch.bool:
            weights.masked_fill_(~visible, -torch.inf)
        else:
            weights.add_(visible)
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    weights.div_(weights.sum(-1, keepdim=True))
    return weights.to(values.dtype) @ values


def _for_heads(visible: Tensor, query: Tensor) -> Tensor:
    """The q rows of `visible`, repeated for each head that shares a row's keys."""
    q = visible.shape[1]
    return visible if q == 1 else visible.repeat(1, query.shape[1] // q, 1)


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
