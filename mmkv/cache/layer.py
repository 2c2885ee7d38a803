"""One layer of the compressed cache, in one of three states: empty, all tokens, or kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from mmkv.cache.forward_pass import AttentionCall
from mmkv.cache.group_index import GroupIndex
from mmkv.cache.padded_blocks import PaddedBlock, Step
from mmkv.cache.plain import PlainKV
from mmkv.cache.prompt_kv import PromptKV, token_numbers
from mmkv.cache.quantize import QuantizedKV
from mmkv.layer_inputs import Rotary, rows_of
from mmkv.tensors import send


@dataclass(eq=False)
class KeptKV:
    """The pairs that a layer keeps after eviction, in blocks of rows of similar length.

    Attributes:
        blocks: each has some of the B * H rows, a row being one key-value head of one sequence.
        stored: the pairs in the slots of the blocks.
        batch, heads: B and H.
        sizes: tokens kept per head when the prompt was read, for each of the B rows.
        retained: [B], share of the importance kept; None if the policy has no attention score.
        error: [B, 2], relative error of keys and values in 8 or 4 bits; None if not quantised.
        group_index: the group of each token of the prompt; None if there are no groups.
    """

    blocks: Sequence[PaddedBlock]
    stored: PlainKV | QuantizedKV
    batch: int
    heads: int
    sizes: list[int]
    retained: Tensor | None = None
    error: Tensor | None = None
    group_index: GroupIndex | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of pairs, of positions, scores and biases, and of the group index.

        Empty slots count.
        """
        groups = 0 if self.group_index is None else self.group_index.nbytes
        return self.stored.nbytes + sum(x.nbytes for x in self.blocks) + groups

    def dense(self) -> PromptKV:
        """Return all kept pairs as one rectangle in new storage, in order of position."""
        positions, order = self._joined([b.held for b in self.blocks], -1).long().sort(dim=-1)
        start, group_index = int((positions < 0).sum(-1).min()), self._leaders()

        def by_age(parts: Sequence[Any]) -> Tensor:
            x = self._joined(parts, 0)
            at = order[:, start:] if x.ndim == 2 else order[:, start:, None]
            return torch.take_along_dim(x, at, dim=1).unflatten(0, (self.batch, self.heads))

        positions = positions[:, start:].unflatten(0, (self.batch, self.heads))
        scores = log_weights = weights = means = None
        if self.blocks[0].scores is not None:
            scores = by_age([b.scores for b in self.blocks]).float().masked_fill(positions < 0, 0.0)
        if self.blocks[0].weighted:
            log_weights = by_age([b.log_weights for b in self.blocks]).float()
        if group_index is not None:
            weights = token_numbers(positions, group_index)
        if isinstance(self.stored, QuantizedKV):
            means = self._joined([x.mean for x in self.stored.split()], 0)
            means = means.unflatten(0, (self.batch, self.heads))
            # A row without codes has no mean yet.
            means = means.masked_fill((means == 0).all(-1, keepdim=True), torch.nan)
        keys, values = map(by_age, zip(*self.stored.read(), strict=True))
        return PromptKV(
            keys,
            values,
            positions,
            scores,
            weights=weights,
            log_weights=log_weights,
            group_index=group_index,
            means=means,
            evicted=True,
        )

    def _joined(self, parts: Sequence[Tensor], fill: float) -> Tensor:
        """Join a tensor [R, S, ...] of each block in one tensor [B * H, U, ...]."""
        shape = self.batch * self.heads, max(x.shape[1] for x in parts), *parts[0].shape[2:]
        out = parts[0].new_full(shape, fill)
        for block, x in zip(self.blocks, parts, strict=True):
            out[send(block.row_numbers, x.device), : x.shape[1]] = x
        return out

    def kept(self) -> Tensor:
        """Return original positions kept, int64 [B, H, n], ascending, -1 as filler at the end.

        Only those of single tokens, not those of groups.
        """
        positions, weights = self._positions()
        if weights is not None:
            positions = positions.masked_fill(weights > 1, -1)
        largest = torch.iinfo(torch.int64).max
        ordered = positions.masked_fill(positions < 0, largest).sort(dim=-1).values
        longest = int((positions >= 0).sum(-1).max()) if ordered.numel() else 0
        return ordered.masked_fill(ordered == largest, -1)[..., :longest]

    def counts(self, end: int | None = None) -> Tensor:
        """Count the kept pairs [B, H], groups included; with `end`, those before position `end`."""
        positions = self._positions()[0]
        present = positions >= 0
        return (present if end is None else present & (positions < end)).sum(-1)

    def _positions(self) -> tuple[Tensor, Tensor | None]:
        """Return the positions [B, H, U] of all pairs, and how many tokens each stands for."""
        positions = self._joined([b.held for b in self.blocks], -1).long()
        positions = positions.unflatten(0, (self.batch, self.heads))
        leaders = self._leaders()
        return positions, None if leaders is None else token_numbers(positions, leaders)

    def _leaders(self) -> Tensor | None:
        """Return the position of each token's leader, see `GroupIndex.of`; None without groups."""
        return None if self.group_index is None else self.group_index.leaders()

    def groups(self, seen: int) -> tuple[Tensor, Tensor]:
        """Return group sizes, and the group of each of `seen` tokens, see the cache's `groups`."""
        positions, sizes = self._positions()
        if sizes is None or self.group_index is None:
            no_groups = positions.new_full((self.batch, self.heads, seen), -1)
            return no_groups[..., :0], no_groups
        # Which tokens lead a group, and which group that is.
        leads = positions.new_zeros(self.batch, self.heads, seen + 1, dtype=torch.bool)
        leads = leads.scatter_(-1, positions.masked_fill(sizes < 2, seen), True)[..., :seen]
        number, leader = leads.cumsum(-1) - 1, self.group_index.leaders()
        leader = pad(leader, (0, seen - leader.shape[-1]), value=-1)
        is_grouped = (leader >= 0) & leads.gather(-1, leader.clamp(min=0))
        group = number.gather(-1, leader.clamp(min=0)).masked_fill(~is_grouped, -1)
        n = int(number.max()) + 1
        weights = group.new_zeros(self.batch, self.heads, n + 1)
        weights.scatter_add_(-1, group.masked_fill(~is_grouped, n), is_grouped.long())
        return weights[..., :n], group

    def shares(self, seen: int) -> Tensor:
        """Return the share of a pair of each of `seen` tokens, see `CompressedCache.shares`."""
        positions, sizes = self._positions()
        share = torch.ones_like(positions, dtype=torch.float32) if sizes is None else 1 / sizes
        shares = share.new_zeros(self.batch, self.heads, seen + 1)
        shares = shares.scatter_(-1, positions.masked_fill(positions < 0, seen), share)[..., :seen]
        if self.group_index is None:
            return shares
        leader = self.group_index.leaders()
        leader = pad(leader, (0, seen - leader.shape[-1]), value=-1)
        return torch.where(leader < 0, shares, shares.gather(-1, leader.clamp(min=0)))

    def attend(self, call: AttentionCall, step: Step, masked: Tensor | None = None) -> Tensor:
        """Run a decode step, or a continuation by q tokens: write, attend, drop.

        In 8 or 4 bits the q tokens are taken some at a time, as older ones become codes in between.
        `masked`, bool [B, T], is True for kept tokens that the attention mask hides; None: none.

        Returns:
            [B, q, Hq, D].
        """
        lengths = self.stored.pieces(step.first, step.q)
        if len(lengths) == 1:
            return self._attend(call.query, call.key, call.value, step, masked)
        starts = [step.first + n for n in accumulate([0, *lengths[:-1]])]
        steps = [replace(step, first=x, q=n) for x, n in zip(starts, lengths, strict=True)]
        query, key, value = (x.split(lengths, 2) for x in (call.query, call.key, call.value))
        pieces = zip(query, key, value, steps, strict=True)
        return torch.cat([self._attend(q, k, v, x, masked) for q, k, v, x in pieces], dim=1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, step: Step, masked: Tensor | None
    ) -> Tensor:
        B, Hq, q, D = query.shape
        R = self.batch * self.heads
        rows = query.reshape(R, Hq // self.heads * q, D)
        key, value = key.detach().flatten(0, 1), value.detach().flatten(0, 1)
        if (rotation := self.stored.rotation) is not None:
            rows, key = rows.to(rotation.dtype) @ rotation, key.to(rotation.dtype) @ rotation
        new = self.stored.new(key, value)
        order, inverse = self._order
        if masked is not None:
            masked = masked.repeat_interleave(self.heads, dim=0)
        if order is not None:
            rows = rows.index_select(0, order)
            new = [x.index_select(1, order) for x in new]
            masked = None if masked is None else masked.index_select(0, order)
        self._write(new, step)
        widths = [b.width_of(q) for b in self.blocks]
        pairs = self.stored.pairs(widths, whole=step.softcap is not None)
        n_rows = [len(b.positions) for b in self.blocks]
        hidden = [None] * len(n_rows) if masked is None else masked.split_with_sizes(n_rows)
        parts = zip(self.blocks, rows.split_with_sizes(n_rows), pairs, hidden, strict=True)
        out = [block.attend(x, kv, unseen, step) for block, x, kv, unseen in parts]
        joined = out[0] if len(out) == 1 else torch.cat(out)
        if inverse is not None:
            joined = joined.index_select(0, inverse)
        return joined.view(B, Hq, q, -1).transpose(1, 2).to(value.dtype)

    def _write(self, new: Sequence[Tensor], step: Step) -> None:
        """Choose slots for the new tokens, and write their pairs, which `stored.new` returned."""
        slots = [b.append(step) for b in self.blocks]
        if step.graph_inputs is None:
            self.fit()
            self.stored.write(new, slots, step.first)
        else:
            self.stored.write_replayed(new, slots, step.graph_inputs.place)

    def fit(self) -> None:
        """Make room for pairs in all slots of the blocks."""
        self.stored = self.stored.fitted([b.capacity for b in self.blocks])

    def select_rows(self, batch: Tensor) -> KeptKV:
        """Return some sequences of the batch, by index [n]; they may repeat."""
        sequences = batch.cpu().numpy()
        old_rows = (sequences[:, None] * self.heads + np.arange(self.heads)).reshape(-1)
        blocks, indices = [], []
        for block in self.blocks:
            new_rows = np.flatnonzero(np.isin(old_rows, block.row_numbers))
            chosen = np.searchsorted(block.row_numbers, old_rows[new_rows])
            indices.append(send(chosen, block.positions.device))
            if len(new_rows):
                blocks.append(block.select(chosen, new_rows))
        return replace(
            self,
            blocks=blocks,
            stored=self.stored.select(indices),
            batch=len(sequences),
            sizes=[self.sizes[int(b)] for b in sequences],
            retained=rows_of(self.retained, batch),
            error=rows_of(self.error, batch),
            group_index=rows_of(self.group_index, batch),
        )

    @cached_property
    def _order(self) -> tuple[Tensor | None, Tensor | None]:
        """The row numbers in the order of blocks, and the indices that put them in order again.

        Both are None if they are in order anyway.
        """
        order = np.concatenate([b.row_numbers for b in self.blocks])
        if (np.diff(order) > 0).all():
            return None, None
        device = self.blocks[0].positions.device
        return send(order, device), send(order.argsort(), device)


class CompressedLayer(CacheLayerMixin):
    """One layer of a `CompressedCache`.

    Attributes:
        seen: tokens seen, padding included.
        state: None before the first prompt; `PromptKV` before eviction; `KeptKV` after it. It is
            replaced as a whole, so that no value of an earlier state remains.
        reply_queries: queries [B, Hq, q, D] of the generated tokens since the last round, and
            their rotary embedding, if the next round scores with them (decode="rounds").
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        self.seen = 0
        self.state: PromptKV | KeptKV | None = None
        self.reply_queries: list[tuple[Tensor, Rotary | None]] = []
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Mark the layer as initialised; storage is allocated at eviction."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return them; the attention function stores them."""
        self.is_initialized = True
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Return the number of tokens seen, not kept: the next token's position."""
        return self.seen

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the mask's width and offset: new tokens only, as layers keep different tokens."""
        return query_length, self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Refuse: a compressed cache is small and stays on the device."""
        raise ValueError(
            "a compressed cache cannot be offloaded: generate without cache offloading"
        )

    prefetch = offload

    def record_queries(self, query: Tensor, rotary: Rotary | None) -> None:
        """Store a copy of a step's queries [B, Hq, q, D] and of their rotary embedding."""
        if rotary is not None:
            rotary = rotary.last(query.shape[2])
        self.reply_queries.append((query.detach().clone(), rotary))

    def recorded_queries(self) -> tuple[Tensor, Rotary | None]:
        """Return all queries [B, Hq, n, D] since the last round, and their rotary embedding."""
        queries, rotaries = zip(*self.reply_queries, strict=True)
        present = [x for x in rotaries if x is not None]
        return torch.cat(queries, dim=2), reduce(Rotary.followed_by, present) if present else None

    def select_rows(self, batch: Tensor) -> None:
        """Keep the rows `batch`, which may repeat."""
        if self.state is not None:
            self.state = self.state.select_rows(batch)
        replies = self.reply_queries
        self.reply_queries = [(rows_of(x, batch), rows_of(rotary, batch)) for x, rotary in replies]

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored of tokens, and of queries stored for the next round.

        Between chunks of a prompt these are keys and values alone.
        """
        kv_bytes = 0 if self.state is None else self.state.nbytes
        return kv_bytes + sum(query.untyped_storage().nbytes() for query, _ in self.reply_queries)

    def dense(self) -> PromptKV | None:
        """Return all stored pairs of earlier tokens; None before the first prompt."""
        return self.state.dense() if isinstance(self.state, KeptKV) else self.state

    def keeping(self) -> KeptKV:
        """Return the state after eviction.

        Raises:
            ValueError: the layer has not been evicted yet.
        """
        if not isinstance(self.state, KeptKV):
            raise ValueError("nothing is kept yet: run a prompt through the wrapped model first")
        return self.state


def nbytes(layer: object) -> int:
    """Return the bytes of a layer of any cache: keys and values, or a linear layer's state."""
    if isinstance(layer, CompressedLayer):
        return layer.nbytes
    tensors: list[Tensor | None] = [getattr(layer, name, None) for name in ("keys", "values")]
    if isinstance(layer, LinearAttentionLayer):
        tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)
