"""One layer of the compressed cache, in one of three states: empty, whole, or kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from mmkv.cache.forward_pass import GraphInputs
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.cache.prompt_kv import PromptKV, Tail, by_age, token_numbers
from mmkv.layer_inputs import Rotary


@dataclass(eq=False)
class KeptKV:
    """What a layer keeps after eviction, in blocks of rows of similar length.

    Attributes:
        blocks: each holds some of the B * H rows, a row being one key-value head of one sequence.
        batch, heads: B and H.
        sizes: tokens kept per head when the prompt was read, for each of the B rows.
        retained: [B], share of the importance kept; None where the policy has no attention score.
        error: [B, 2], what 8 or 4 bits cost keys and values; None where nothing is quantised.
        group_index: [B, H, T], the group of each token of the prompt, see `grouping.Groups.places`;
            None where there is none.
    """

    blocks: Sequence[PaddedBlock]
    batch: int
    heads: int
    sizes: list[int]
    retained: Tensor | None = None
    error: Tensor | None = None
    group_index: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values, and for their groups."""
        groups = 0 if self.group_index is None else self.group_index.untyped_storage().nbytes()
        return sum(b.nbytes for b in self.blocks) + groups

    def dense(self) -> PromptKV:
        """All that is kept, as one rectangle in fresh storage, by age."""
        return PromptKV.from_blocks(self.blocks, self.batch, self.heads, self.group_index)

    def kept(self) -> Tensor:
        """Original positions held, int64 [B, H, n], ascending, -1 as filler at the end.

        Those of tokens that are held as they are, not of groups.
        """
        positions, weights = self._positions()
        if weights is not None:
            positions = positions.masked_fill(weights > 1, -1)
        return _ascending(positions)

    def counts(self, end: int | None = None) -> Tensor:
        """Pairs held, groups included, of tokens before `end` if that is given: int64 [B, H]."""
        positions = self._positions()[0]
        held = positions >= 0
        return (held if end is None else held & (positions < end)).sum(-1)

    def _positions(self) -> tuple[Tensor, Tensor | None]:
        """Positions [B, H, U] of all pairs, and how many tokens each stands for."""
        positions, _ = by_age(self.blocks, self.batch, self.heads)
        if self.group_index is None:
            return positions, None
        return positions, token_numbers(positions, self.group_index)

    def groups(self, seen: int) -> tuple[Tensor, Tensor]:
        """The groups held, and where each of the `seen` tokens lies, see `CacheState.groups`."""
        positions, sizes = self._positions()
        if sizes is None or self.group_index is None:
            none = positions.new_full((self.batch, self.heads, seen), -1)
            return none[..., :0], none
        here = sizes > 1
        places = _ascending(positions.masked_fill(~here, -1))  # of group_index
        n, far = places.shape[-1], torch.iinfo(torch.int64).max
        group_index = pad(self.group_index.long(), (0, seen - self.group_index.shape[-1]), value=-1)
        order = places.masked_fill(places < 0, far)
        found = torch.searchsorted(order, group_index).clamp(max=max(0, n - 1))
        same = torch.zeros_like(group_index, dtype=torch.bool)
        if n:
            same = (group_index >= 0) & (order.gather(-1, found) == group_index)
        order = positions.masked_fill(~here, far).argsort(dim=-1)[..., :n]
        weights = sizes.masked_fill(~here, 0).gather(-1, order).long()
        return weights, found.masked_fill(~same, -1)

    def shares(self, seen: int) -> Tensor:
        """How much of a pair each of `seen` tokens has, see `CacheState.shares`."""
        kept = self.kept()
        found = torch.zeros(self.batch, self.heads, seen + 1, device=kept.device)
        found.scatter_(-1, kept.masked_fill(kept < 0, seen), 1.0)
        weights, group = self.groups(seen)
        if weights.shape[-1]:
            share = 1 / weights.gather(-1, group.clamp(min=0)).clamp(min=1)
            found[..., :seen] += share.masked_fill(group < 0, 0.0)
        return found[..., :seen]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: int,
        *,
        clock: GraphInputs | None = None,
        hidden: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """A decode step, or a continuation by q tokens: write, attend, drop.

        Args:
            query: [B, Hq, q, D].
            key, value: [B, H, q, D].
            seen: tokens seen with these.
            clock: what drives the step in place of the host, or None.
            hidden: bool [B, seen - q], tokens held that these do not see; None: they see all.
            options: scale and softcap.

        Returns:
            [B, q, Hq, D].
        """
        B, Hq, q, D = query.shape
        first, R = seen - q, self.batch * self.heads
        rows = query.reshape(R, Hq // self.heads * q, D)
        key, value = key.detach().flatten(0, 1), value.detach().flatten(0, 1)
        if hidden is not None:
            hidden = hidden.repeat_interleave(self.heads, dim=0)
        given = (rows, key, value) if hidden is None else (rows, key, value, hidden)
        order, back = self._order
        if order is None:
            parts = [[x[block.rows] for x in given] for block in self.blocks]
        else:
            sizes = [len(b.positions) for b in self.blocks]
            parts = [list(x) for x in zip(*(x[order].split(sizes) for x in given), strict=True)]
        out = [
            block.step(x, k, v, first, clock, hidden=unseen[0] if unseen else None, **options)
            for block, (x, k, v, *unseen) in zip(self.blocks, parts, strict=True)
        ]
        done = out[0] if len(out) == 1 else torch.cat(out)
        if back is not None:
            done = done.index_select(0, back)
        return done.view(B, Hq, q, -1).transpose(1, 2)

    def select_rows(self, batch: Tensor) -> KeptKV:
        """Rows of the batch, which may repeat; everything a row has moves with it."""
        chosen = batch.cpu().numpy()
        wanted = (chosen[:, None] * self.heads + np.arange(self.heads)).reshape(-1)
        blocks = []
        for block in self.blocks:
            everything = self.batch * self.heads
            place = np.full(everything, -1)
            place[block.row_numbers] = np.arange(len(block.positions))
            mine = np.flatnonzero(place[wanted] >= 0)
            if len(mine):
                blocks.append(block.select(place[wanted[mine]], mine))

        def chosen_of(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[batch.to(x.device)]

        return replace(
            self,
            blocks=blocks,
            batch=len(chosen),
            sizes=[self.sizes[int(b)] for b in chosen],
            retained=chosen_of(self.retained),
            error=chosen_of(self.error),
            group_index=chosen_of(self.group_index),
        )

    @cached_property
    def _order(self) -> tuple[Tensor | None, Tensor | None]:
        """The rows as they lie in the blocks, None where all are slices; and the way back."""
        order = np.concatenate([b.row_numbers for b in self.blocks])
        slices = all(isinstance(b.rows, slice) for b in self.blocks)
        device, rising = self.blocks[0].positions.device, bool((np.diff(order) > 0).all())
        there, back = (torch.from_numpy(x) for x in (order, order.argsort()))
        return (
            None if slices else there.to(device, non_blocking=True),
            None if rising else back.to(device, non_blocking=True),
        )


def _ascending(positions: Tensor) -> Tensor:
    """Positions [B, H, n] in rising order, -1 at the end, as narrow as they allow."""
    far = torch.iinfo(torch.int64).max
    found = positions.masked_fill(positions < 0, far).sort(dim=-1).values
    most = int((positions >= 0).sum(-1).max()) if found.numel() else 0
    return found.masked_fill(found == far, -1)[..., :most]


class CompressedLayer(CacheLayerMixin):
    """One layer of a `CompressedCache`.

    Attributes:
        seen: tokens seen, padding included.
        state: None before the first prompt; `PromptKV` while a prompt is being read and its tokens
            wait whole; `KeptKV` after eviction. It is replaced whole, so nothing of one state
            outlives it.
        asked: queries [B, Hq, q, D] of generated tokens since the last round, and their rotary
            embedding, where they will observe (decode="rounds", postpone).
        tail: the prompt's last queries, where they will observe together with those.
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
        self.asked: list[tuple[Tensor, Rotary | None]] = []
        self.tail = Tail()
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: storage is made at eviction."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the tokens and hand them on; the attention function stores them."""
        self.is_initialized = True
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens seen, not kept: positions go on from here."""
        return self.seen

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The new tokens' own block: each layer knows itself which old ones it holds."""
        return query_length, self.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted tokens cannot come back."""
        raise ValueError(
            "a compressed cache cannot be cropped, so assisted and contrastive decoding cannot "
            "use it: generate without them, or mmkv.unwrap(model) first"
        )

    def offload(self) -> None:
        """Refused: the cache is small because it was compressed; it stays on the device."""
        raise ValueError(
            "a compressed cache cannot be offloaded: generate without cache offloading"
        )

    prefetch = offload

    def remember(self, query: Tensor, rotary: Rotary | None) -> None:
        """Keep a copy of a step's queries [B, Hq, q, D] and of their rotary embedding."""
        if rotary is not None:
            rotary = rotary.last(query.shape[2])
        self.asked.append((query.detach().clone(), rotary))

    def remembered(self) -> tuple[Tensor, Rotary | None]:
        """All queries [B, Hq, n, D] since they last observed, and their rotary embedding."""
        queries, rotaries = zip(*self.asked, strict=True)
        known = [x for x in rotaries if x is not None]
        return torch.cat(queries, dim=2), reduce(Rotary.followed_by, known) if known else None

    def select_rows(self, batch: Tensor) -> None:
        """Choose rows of the batch, which may repeat."""
        if self.state is not None:
            self.state = self.state.select_rows(batch)
        self.tail = self.tail.select_rows(batch)
        for i, (query, rotary) in enumerate(self.asked):
            at = batch.to(query.device)
            self.asked[i] = query[at], None if rotary is None else rotary.rows(at)

    @property
    def blocks(self) -> Sequence[PaddedBlock] | None:
        """The blocks of what is kept; None before eviction."""
        return self.state.blocks if isinstance(self.state, KeptKV) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values, and for queries that will observe."""
        held = 0 if self.state is None else self.state.nbytes
        asked = [query for query, _ in self.asked]
        asked += [] if self.tail.query is None else [self.tail.query]
        return held + sum(query.untyped_storage().nbytes() for query in asked)

    def dense(self) -> PromptKV | None:
        """All that is held of earlier tokens; None before the first."""
        return self.state.dense() if isinstance(self.state, KeptKV) else self.state

    def kept(self) -> Tensor:
        """Original positions held, int64 [B, H, n], ascending, -1 as filler at the end."""
        return self.keeping().kept()

    def keeping(self) -> KeptKV:
        """What is kept.

        Raises:
            ValueError: nothing is, yet.
        """
        if not isinstance(self.state, KeptKV):
            raise ValueError("nothing is kept yet: run a prompt through the wrapped model first")
        return self.state


def nbytes(layer: object) -> int:
    """Bytes of the storages a layer of any cache holds for keys and values, or for its state."""
    if isinstance(layer, CompressedLayer):
        return layer.nbytes
    held: list[Tensor | None] = [getattr(layer, name, None) for name in ("keys", "values")]
    if isinstance(layer, LinearAttentionLayer):
        held += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(x.untyped_storage().nbytes() for x in held if x is not None)
