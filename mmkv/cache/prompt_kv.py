"""A layer's tokens as one rectangle, before eviction: a whole prefill, or what is left of earlier
turns together with a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmkv.cache import selection
from mmkv.cache.padded_blocks import attend
from mmkv.cache.rerotate import reposition
from mmkv.cache.token_masks import TokenMasks
from mmkv.layer_inputs import LayerInputs, Rotary
from mmkv.merge.weights import ReferenceQueries
from mmkv.policy import Policy
from mmkv.scores.attention import tile

# Elements of masks in flight, on a device that takes more of attention.
_MASK_TILE = 2**26


@dataclass(frozen=True)
class Tail:
    """The last queries of what was read of a prompt so far, where its score needs them."""

    query: Tensor | None = None  # [B, Hq, w, D]
    mask: Tensor | None = None  # bool [B, 1 or H, w, U], which keys they saw; None: plainly causal
    rotary: Rotary | None = None  # theirs, where the score needs it

    def select_rows(self, batch: Tensor) -> Tail:
        """Rows of the batch, which may repeat."""
        if self.query is None:
            return self
        batch = batch.to(self.query.device)
        mask = None if self.mask is None else self.mask[batch]
        rotary = None if self.rotary is None else self.rotary.rows(batch)
        return Tail(self.query[batch], mask, rotary)

    def by_age(self, positions: Tensor) -> Tail:
        """With the columns of its mask in the order of `positions` [B, 1 or H, U]."""
        if self.mask is None:
            return self
        order = positions.argsort(dim=-1, stable=True)
        mask = self.mask.expand(-1, order.shape[1], -1, -1)
        return replace(self, mask=mask.gather(-1, order[:, :, None].expand_as(mask)))

    def of_last(self, n: int) -> Tail:
        """What it says of the last `n` keys: padding may have gone from before them."""
        if self.query is None:
            return self
        w = min(n, self.query.shape[2])
        mask = None if self.mask is None else self.mask[:, :, -w:, -n:]
        rotary = None if self.rotary is None else self.rotary.last(w)
        return Tail(self.query[:, :, -w:], mask, rotary)


@dataclass
class PromptKV:
    """Tokens of one layer, by age.

    Attributes:
        keys, values: [B, H, U, D].
        positions: int64 [B, 1 or H, U], ascending; -1 where there is no token.
        scores: float32 [B, 1 or H, U], importance; None where none was needed.
        tail: the last queries of the prompt's chunks so far.
        weights: float32 [B, H, U], how many tokens each pair stands for; None: itself alone.
        bias: float32 [B, H, U], added to the logits of each pair; None where `weights` is.
        group_index: [B, H, T], the group of each token seen up to the last turn, see
            `KeptKV.group_index`; None: there is none.
        measured: float32 [B], what layer sizes follow from (`Layers.measure`); None: nothing.
        readers: queries that the weights of groups are fitted to; None: weights are counted.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    scores: Tensor | None = None
    tail: Tail = Tail()
    weights: Tensor | None = None
    bias: Tensor | None = None
    group_index: Tensor | None = None
    measured: Tensor | None = None
    readers: ReferenceQueries | None = None

    @classmethod
    def from_blocks(
        cls, blocks: Sequence[Any], batch: int, heads: int, group_index: Tensor | None
    ) -> PromptKV:
        """What a layer kept, sorted by position, in fresh tensors."""
        names = ("keys", "values", "mass", "log_weights")
        positions, (keys, values, mass, bias) = by_age(blocks, batch, heads, *names)
        assert keys is not None
        assert values is not None
        return cls(
            keys,
            values,
            positions,
            None if mass is None else mass.masked_fill(positions < 0, 0.0),
            weights=None if group_index is None else token_numbers(positions, group_index),
            bias=bias,
            group_index=group_index,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the storages behind keys and values."""
        storages = [x.untyped_storage() for x in (self.keys, self.values)]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def masked(self, valid: Tensor) -> PromptKV:
        """Without the tokens for which `valid`, bool [B, T] by position, is False."""
        B, P, U = self.positions.shape
        known = valid.to(self.positions.device)[:, None].expand(B, P, -1)
        stays = known.gather(-1, self.positions.clamp(min=0)) & (self.positions >= 0)
        # Those that stay lie behind, by age, as if the others had never been there.
        order = (self.positions.masked_fill(~stays, -1)).argsort(dim=-1, stable=True)
        start = int((~stays).sum(-1).min())
        order = order[..., start:]

        def by_age(x: Tensor) -> Tensor:
            at = order.expand(B, x.shape[1], -1)
            return x.gather(2, at if x.ndim == 3 else at[..., None].expand(-1, -1, -1, x.shape[3]))

        positions = by_age(self.positions.masked_fill(~stays, -1))
        scores = self.scores
        if scores is not None:
            scores = scores.expand(B, max(P, scores.shape[1]), U)
            scores = by_age(scores.masked_fill(~stays, 0.0))
        return PromptKV(
            by_age(self.keys),
            by_age(self.values),
            positions,
            scores,
            weights=None if self.weights is None else by_age(self.weights),
            bias=None if self.bias is None else by_age(self.bias),
            group_index=self.group_index,
        )

    def select_rows(self, batch: Tensor) -> PromptKV:
        """Rows of the batch, which may repeat, in storage of their own."""

        def rows(x: Any) -> Any:
            if isinstance(x, Tail | ReferenceQueries):
                return x.select_rows(batch)
            return None if x is None else x[batch.to(x.device)]

        return PromptKV(**{f.name: rows(getattr(self, f.name)) for f in fields(self)})

    def extended(self, key: Tensor, value: Tensor, positions: Tensor) -> PromptKV:
        """With the pairs [B, H, q, D] of new tokens at `positions` [B, 1, q] behind the old."""
        B, _, q, _ = key.shape
        heads = self.positions.shape[1]
        return replace(
            self,
            keys=torch.cat([self.keys, key], dim=2),
            values=torch.cat([self.values, value], dim=2),
            positions=torch.cat([self.positions, positions.expand(B, heads, q)], dim=2),
            scores=None if self.scores is None else pad(self.scores, (0, q)),
            weights=None if self.weights is None else pad(self.weights, (0, q), value=1.0),
            bias=None if self.bias is None else pad(self.bias, (0, q)),
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
        which (None: causal); the other arguments are those of `padded_blocks.attend`.
        """
        B, Hq, q, _ = query.shape
        H, U = self.keys.shape[1:3]
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        positions = self.positions.expand(B, H, -1).flatten(0, 1)
        if inv_freq is not None:
            keys = reposition(keys, positions, first + q - 1, inv_freq)
        if among is not None:
            among = among.to(keys.device).expand(B, H, q, q).flatten(0, 1)
        old, known = U - q, positions[:, None] >= 0
        past = torch.zeros(known[..., :old].shape, dtype=query.dtype, device=keys.device)
        if self.bias is not None:
            past += self.bias.flatten(0, 1)[:, None, :old]
        past.masked_fill_(~known[..., :old], -torch.inf)
        # What each query sees is an [R, n, U] of its own: n queries at a time.
        out: list[Tensor] = []
        most = max(1, min(tile(keys.device), _MASK_TILE) // (B * H * U))
        for start in range(0, q, most):
            n = min(most, q - start)
            if among is None:
                causal = torch.ones(n, q, dtype=torch.bool, device=keys.device).tril(start)
                sees = causal & known[..., old:]
            else:
                sees = among[:, start : start + n].clone()
            # Every new token sees itself, padding too: a row of the softmax is never empty.
            sees[..., start:].diagonal(dim1=1, dim2=2).fill_(True)
            visible = past.new_zeros(B * H, n, U)
            visible[..., :old] = past
            visible[..., old:].masked_fill_(~sees, -torch.inf)
            rows = query[:, :, start : start + n].reshape(B * H, Hq // H * n, -1)
            part = attend(rows, keys, values, visible, scale=scale, softcap=softcap)
            out.append(part.view(B, Hq, n, -1).transpose(1, 2))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def score(self, policy: Policy, new: LayerInputs, prompt: TokenMasks) -> None:
        """Add what the new queries find important to what is known already.

        Window scores pool over tokens as they lie in the cache. The layer's inputs `new` are all
        keys and values, queries of the tokens that came last, and which of these see which.
        """
        windows: Sequence[int] = prompt.windows
        layer = self._inputs(new)
        if policy.merge is not None and policy.merge.fit:
            self.readers = ReferenceQueries.of(layer, policy.merge.fit, policy.queries)
        if layer.query.shape[2] < self.keys.shape[2] and policy.window_size:
            # A turn shorter than the window is observed by all the queries it has.
            given = (self.positions[:, 0, -layer.query.shape[2] :] >= 0).sum(-1).tolist()
            windows = [min(w, n) for w, n in zip(windows, given, strict=True)]
        apart = self.positions.shape[1] > 1
        (image,) = prompt.to(self.positions.device).at(self.positions, "image")
        if apart:  # heads hold different tokens: each is a row of its own
            layer = layer.by_head(self.positions >= 0, image)
            windows = [w for w in windows for _ in range(self.keys.shape[1])]
        else:
            layer = replace(layer, image=image[:, 0])
        if policy.layers.needs == "measure":
            self.measured = policy.layers.measure(layer).unflatten(0, (len(self.keys), -1)).mean(1)
        found = selection.importance(policy, layer, windows)
        if apart:
            found = found.view(self.keys.shape[:3])
            if policy.score.average_heads:
                found = found.mean(dim=1, keepdim=True)
        if self.scores is not None and (combines := policy.score.turn_reduction):
            known = self.scores[:, : found.shape[1]]
            old = found[..., : known.shape[-1]]
            old.add_(known) if combines == "sum" else torch.maximum(old, known, out=old)
        self.scores = found

    def remember(self, policy: Policy, new: LayerInputs) -> None:
        """Keep a chunk's last queries, in storage of their own: the score may need them later."""
        if policy.queries == 0:
            return
        layer = self._inputs(new)
        last = layer.query.shape[2] if policy.queries is None else policy.queries
        self.tail = Tail(
            layer.query[:, :, -last:].clone(),
            None if layer.mask is None else layer.mask[:, :, -last:].clone(),
            None if layer.rotary is None else layer.rotary.last(last),
        )

    def _inputs(self, new: LayerInputs) -> LayerInputs:
        """A layer's inputs with all tokens held, and with the queries of earlier chunks."""
        rotary = new.rotary
        query, mask = self._with_tail(new.query, self._mask(new.query.shape[2], new.mask))
        if rotary is not None and self.tail.rotary is not None:
            rotary = self.tail.rotary.followed_by(rotary)
        return replace(new, query=query, mask=mask, rotary=rotary)

    def _mask(self, q: int, among: Tensor | None) -> Tensor | None:
        """Which keys each of the last q tokens sees, bool [B, 1 or H, q, U]; None: causal."""
        if among is None:
            return None
        old = self.positions.shape[-1] - q
        earlier = (self.positions[:, :, None, :old] >= 0).expand(-1, -1, q, -1)
        among = among.to(earlier.device).expand(-1, earlier.shape[1], -1, -1)
        return torch.cat([earlier, among], dim=-1)

    def _with_tail(self, query: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The queries of earlier chunks before the new ones, and what all of them see."""
        tail = self.tail.query
        if tail is None:
            return query, mask
        both = torch.cat([tail, query], dim=2)
        if mask is None and self.tail.mask is None:
            return both, None
        q, w, U = query.shape[2], tail.shape[2], self.keys.shape[2]
        known = (self.positions >= 0)[:, :, None]
        place = torch.arange(U, device=known.device)

        def causal(last: int, n: int) -> Tensor:
            until = torch.arange(last - n, last, device=known.device)
            return known & (place <= until[:, None])

        old = self.tail.mask
        if old is None:
            old = causal(U - q, w)
        old = pad(old, (0, U - old.shape[-1]))
        new = causal(U, q) if mask is None else mask
        heads = max(old.shape[1], new.shape[1])
        parts = [x.expand(-1, heads, -1, -1) for x in (old, new)]
        return both, torch.cat(parts, dim=2)


def by_age(
    blocks: Sequence[Any], batch: int, heads: int, *names: str
) -> tuple[Tensor, list[Tensor | None]]:
    """What blocks hold of a layer, sorted by position, in fresh tensors.

    Returns:
        positions: int64 [B, H, U], ascending, -1 first where there is no token.
        found: each of `names` of the blocks, [B, H, U] or [B, H, U, D]; None where they lack it.
    """
    R, width = batch * heads, max(b.positions.shape[1] for b in blocks)

    def gathered(name: str, fill: float) -> Tensor:
        one = getattr(blocks[0], name)
        whole = torch.full((R, width, *one.shape[2:]), fill, dtype=one.dtype, device=one.device)
        for block in blocks:
            part: Tensor = getattr(block, name)[:, :]  # in 8 or 4 bits: read
            whole[block.rows, : part.shape[1]] = part
        return whole

    positions, order = gathered("held", -1).long().sort(dim=-1)
    start = int((positions < 0).sum(-1).min())
    order, positions = order[:, start:], positions[:, start:]

    def found(name: str) -> Tensor | None:
        if getattr(blocks[0], name) is None:
            return None
        x = gathered(name, 0)
        at = order if x.ndim == 2 else order[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, at).unflatten(0, (batch, heads))

    return positions.unflatten(0, (batch, heads)), [found(name) for name in names]


def token_numbers(positions: Tensor, group_index: Tensor) -> Tensor:
    """How many tokens each pair stands for, float32 [B, H, U]; 1 where there is none.

    `group_index` is [B, H, T], the group of each token, see `KeptKV`.
    """
    T, at = group_index.shape[-1], group_index.long()
    led = torch.zeros(*at.shape[:2], T + 1, device=at.device)  # behind all tokens: of none
    led.scatter_add_(-1, at.clamp(min=0), (at >= 0).to(led.dtype))
    there = positions.masked_fill(positions < 0, T).clamp(max=T)
    return led.gather(-1, there).clamp(min=1.0)
