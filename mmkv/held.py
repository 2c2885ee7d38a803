"""A layer's tokens as one rectangle, before eviction: a whole prefill, or what is left of earlier
turns together with a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv import eviction
from mmkv.policy import Policy
from mmkv.repositioning import reposition
from mmkv.storage import Block, attend, causal_view


@dataclass
class Held:
    """Tokens of one layer, by age.

    Attributes:
        keys, values: [B, H, U, D].
        positions: int64 [B, 1 or H, U], ascending; -1 where there is no token.
        scores: float32 [B, 1 or H, U], importance; None where none was needed.
        tail: [B, Hq, w, D], the last queries of the prompt's chunks so far, for window scores.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None
    tail: Tensor | None = None

    @classmethod
    def from_blocks(cls, blocks: list[Block], batch: int, heads: int) -> Held:
        """What a layer kept, sorted by position, in fresh tensors."""
        R, width = batch * heads, max(b.positions.shape[1] for b in blocks)
        first = blocks[0]

        def gathered(name: str, fill: float) -> Tensor:
            one = getattr(first, name)
            shape = (R, width, *one.shape[2:])
            whole = torch.full(shape, fill, dtype=one.dtype, device=one.device)
            for block in blocks:
                part: Tensor = getattr(block, name)[:, :]  # in 8 or 4 bits: read
                whole[slice(None) if block.rows is None else block.rows, : part.shape[1]] = part
            return whole

        positions, order = gathered("held", -1).long().sort(dim=-1)
        start = int((positions < 0).sum(-1).min())
        order, positions = order[:, start:], positions[:, start:]

        def by_age(name: str) -> Tensor:
            x = gathered(name, 0)
            at = order if x.ndim == 2 else order[..., None].expand(-1, -1, x.shape[-1])
            return x.gather(1, at).unflatten(0, (batch, heads))

        empty = positions.unflatten(0, (batch, heads)) < 0
        return cls(
            by_age("keys"),
            by_age("values"),
            positions.unflatten(0, (batch, heads)),
            None if first.mass is None else by_age("mass").masked_fill(empty, 0.0),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the storages behind keys and values."""
        storages = [x.untyped_storage() for x in (self.keys, self.values)]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def extended(self, key: Tensor, value: Tensor, positions: Tensor) -> Held:
        """With the pairs [B, H, q, D] of new tokens at `positions` [B, 1, q] behind the old."""
        B, H, q, _ = key.shape
        old = self.positions.expand(B, H, -1)
        return replace(
            self,
            keys=torch.cat([self.keys, key], dim=2),
            values=torch.cat([self.values, value], dim=2),
            positions=torch.cat([old, positions.expand(B, H, q)], dim=2),
        )

    def attend(
        self,
        query: Tensor,
        first: int,
        *,
        scale: float,
        softcap: float | None = None,
        inv_freq: Tensor | None = None,
        among: Tensor | None = None,
    ) -> Tensor:
        """Attention of the last q tokens over all: query [B, Hq, q, D] -> [B, q, Hq, D].

        `first` is the position of the first of them, `among` bool [B, 1, q, q] which of them see
        which (None: causal); the other arguments are those of `storage.attend`.
        """
        B, Hq, q, _ = query.shape
        H = self.keys.shape[1]
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        positions = self.positions.expand(B, H, -1).flatten(0, 1)
        visible = causal_view(positions, first, q)
        if among is not None:
            visible[..., -q:] = among.to(keys.device).expand(B, H, q, q).flatten(0, 1)
        # Every new token sees itself, padding too: a row of the softmax is never empty.
        own = torch.arange(q, device=keys.device)
        visible[:, own, positions.shape[1] - q + own] = True
        if inv_freq is not None:
            keys = reposition(keys, positions, first + q - 1, inv_freq)
        rows = query.reshape(B * H, Hq // H * q, -1)
        out = attend(rows, keys, values, visible, scale=scale, softcap=softcap)
        return out.view(B, Hq, q, -1).transpose(1, 2)

    def score(
        self, policy: Policy, query: Tensor, *, scale: float | None, windows: Sequence[int]
    ) -> None:
        """Add what the new queries [B, Hq, q, D] find important to what is known already.

        Heads hold different tokens here, so each is scored as a row of its own. Window scores pool
        over tokens as they lie in the cache; `windows` [B] is how many last queries observe a row.
        """
        B, Hq, _, D = query.shape
        H, U = self.keys.shape[1], self.keys.shape[2]
        if policy.observed:
            if self.tail is not None:
                query = torch.cat([self.tail, query], dim=2)
            # A turn shorter than the window is observed by all the queries it has.
            given = (self.positions[:, 0, -query.shape[2] :] >= 0).sum(-1).tolist()
            windows = [min(w, n) for w, n in zip(windows, given, strict=True)]
        valid = (self.positions >= 0).expand(B, H, U).flatten(0, 1)
        found = eviction.importance(
            policy,
            query.reshape(B * H, Hq // H, query.shape[2], D),
            self.keys.flatten(0, 1)[:, None],
            scale=scale,
            valid=valid,
            windows=[w for w in windows for _ in range(H)],
        ).view(B, H, U)
        if policy.average_heads:
            found = found.mean(dim=1, keepdim=True)
        if policy.score == "accumulated" and self.scores is not None:
            old = self.scores.shape[-1]
            found[..., :old] += self.scores[:, : found.shape[1]]
        self.scores = found

    def remember(self, policy: Policy, query: Tensor) -> None:
        """Keep the last queries of a chunk: the window may reach back into it."""
        if policy.observed:
            both = query if self.tail is None else torch.cat([self.tail, query], dim=2)
            self.tail = both[:, :, -policy.window :]
