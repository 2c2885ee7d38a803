"""The requests that grow together, so that a step attends to all that they keep at once.

A row is one key-value head of one request; rows lie in `mmkv.serving.shared_blocks`. Which slot a
token takes is what each request's own schedules say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import outside_inference_mode, refuse_gradient
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.cache.phases import Decoding
from mmkv.contexts import Context
from mmkv.parts.slots import plan as plan_slots
from mmkv.parts.slots import send
from mmkv.serving.shared_blocks import (
    STEP,
    SharedBlock,
    SharedLayer,
    SharedPrefix,
    capacity,
    tails,
)


class Member:
    """A request in the pool: a cache whose pairs, the blocks of each layer, are going into it."""

    def __init__(
        self, owner: Any, cache: CompressedCache, kept: Sequence[Sequence[PaddedBlock]]
    ) -> None:
        self.owner, self.cache = owner, cache
        self.prefix: SharedPrefix | None = None  # what it attends to before its own pairs
        self.schedules = [block.schedule for blocks in kept for block in blocks]
        self.ahead = deque[np.ndarray]()  # the slots of the next tokens, [L, H] each
        plan_slots(self.schedules)
        heads, end = sum(len(x.row_numbers) for x in kept[0]), 0
        # [L, H], where the slots of each layer's heads lie in those of `schedules`.
        self.columns = np.empty((len(kept), heads), np.int64)
        for mine, blocks in zip(self.columns, kept, strict=True):
            for block in blocks:
                rows, schedule = block.row_numbers, block.schedule
                schedule.prepare()
                mine[rows] = end + schedule.own_columns(len(rows))
                end += schedule.planned.shape[1]

    def next(self) -> np.ndarray:
        """The next token's slots [L, H]."""
        if not self.ahead:
            slots = np.concatenate([x.ahead() for x in self.schedules], axis=1)
            self.ahead.extend(slots[:, self.columns])
        return self.ahead.popleft()


class Pool:
    """Requests whose kept pairs lie together."""

    def __init__(self) -> None:
        self.members: list[Member] = []  # in the order of the batch's rows
        self.layers: list[SharedLayer] = []
        self.prefixes: list[SharedPrefix] = []  # what members attend to without holding it

    @property
    def blocks(self) -> list[SharedBlock]:
        """Those of all layers."""
        return [block for layer in self.layers for block in layer]

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values, rows that are nobody's included."""
        return sum(x.held for x in self.blocks)

    @property
    def most(self) -> int:
        """Bytes that the members may come to."""
        return sum(x.promised for x in self.blocks)

    @property
    def spare(self) -> int:
        """Bytes held beyond those, which `trim` gives back."""
        return sum(max(0, x.held - x.promised) for x in self.blocks)

    def trim(self) -> None:
        """Give back what no member will need."""
        for block in self.blocks:
            if block.held > block.promised:
                block.resize(len(block.rows), block.used.max())

    def bytes_of(self, member: Member) -> int:
        """Of a member's rows."""
        at, heads = self.members.index(member), member.columns.shape[1]
        rows = [(x, int((x.rows // heads == at).sum())) for x in self.blocks]
        return sum(n * x.stored[0].shape[1] * x.slot_bytes for x, n in rows)

    def takes(self, cache: CompressedCache) -> bool:
        """Whether a cache can join: one that attends to what it holds, and does no more."""
        if not isinstance(cache.phase, Decoding) or cache.observes_replies:
            return False
        kept = [x.state for x in cache.compressed if isinstance(x.state, KeptKV)]
        alike = {x.batch for x in kept} == {1} and len({x.heads for x in kept}) == 1
        # Their attention is that of the pairs with a bias, in the model's type.
        plain = all(
            isinstance(block.keys, Tensor)
            and block.inv_freq is None
            and not block.schedule.needs_decode_attention
            for x in kept
            for block in x.blocks
        )
        return len(kept) == len(cache.layers) and alike and plain

    def join(
        self,
        owner: Any,
        cache: CompressedCache,
        new: int,
        limit: int | None = None,
        context: Context | None = None,
    ) -> Member:
        """Move what a cache of one row, which the pool `takes`, keeps into the pool.

        At most `new` tokens will be generated; it may come to `limit` bytes, at least what its
        pairs need. If the pairs of the context that it began as a copy of stay as they are, the
        member attends to these and holds only what came behind them.
        """
        kept: list[Sequence[PaddedBlock]] = [x.keeping().blocks for x in cache.compressed]
        own = None if context is None else tails(context, kept)
        kept = kept if own is None else own
        member = Member(owner, cache, kept)
        if context is not None and own is not None:
            known = (x for x in self.prefixes if x.context is context)
            member.prefix = next(known, None) or SharedPrefix(context)
        need = 0
        for block in (x for blocks in kept for x in blocks):
            need += capacity(block.schedule.most(new)) * block.nbytes // block.positions.shape[1]
        step = STEP if limit is not None and need > limit else None
        self.layers = self.layers or [SharedLayer() for _ in cache.layers]
        first = len(self.members) * member.columns.shape[1]
        self.members.append(member)
        try:
            with outside_inference_mode(), torch.no_grad():
                for mine, layer in zip(cache.compressed, self.layers, strict=True):
                    # Popped, so that a layer's storage is free once it is copied.
                    blocks, mine.state, layer.rows = kept.pop(0), None, None
                    for block in blocks:
                        which = capacity(block.schedule.most(new), step), own is not None
                        if which not in layer.blocks:
                            layer.blocks[which] = SharedBlock(block, *which)
                        layer.blocks[which].add(first + block.row_numbers, block)
        except Exception:
            self.leave(member)
            raise
        self._find_members()
        return member

    def _find_members(self) -> None:
        """Find the prefixes that members are behind, and tell each which these are."""
        devices = {x.device for x in self.layers if x.blocks}
        self.prefixes = list(dict.fromkeys(x.prefix for x in self.members if x.prefix is not None))
        for prefix in self.prefixes:
            at = np.array([i for i, x in enumerate(self.members) if x.prefix is prefix])
            prefix.members = {device: send(at, device) for device in devices}

    def leave(self, member: Member) -> None:
        """Give back what a member holds; the last one takes its place in the batch."""
        at, last = self.members.index(member), len(self.members) - 1
        with outside_inference_mode(), torch.no_grad():
            for layer in self.layers:
                layer.remove(at, last, member.columns.shape[1])
        self.members[at] = self.members[last]
        self.members.pop()
        self._find_members()

    def step(self) -> None:
        """Before one token of each member: where the pairs go, on the devices of the layers."""
        plan_slots([x for member in self.members if not member.ahead for x in member.schedules])
        slots = np.concatenate([x.next() for x in self.members], axis=1)  # [L, R]
        with outside_inference_mode(), torch.no_grad():
            places = np.stack([x.advance(y) for x, y in zip(self.layers, slots, strict=True)])
        sent = {device: send(places, device) for device in {x.device for x in self.layers}}
        for i, layer in enumerate(self.layers):
            layer.at = list(sent[layer.device][i].split(layer.sizes))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: Any, softcap: Any
    ) -> Tensor:
        """One layer's attention of a step, as `CompressedCache.attend`: [B, 1, Hq, Dv]."""
        B, Hq, _, D = query.shape
        R = B * key.shape[1]
        key, value = (x.detach().reshape(R, -1) for x in (key, value))
        options = {"scale": D**-0.5 if scale is None else scale, "softcap": softcap}
        query = query.reshape(R, -1, D)
        with outside_inference_mode():
            before = self._before(layer, query, value.shape[-1], **options) if self.prefixes else ()
            out = self.layers[layer].attend(query, key, value, *before, **options)
        return refuse_gradient(out.view(B, 1, Hq, -1))

    def _before(
        self, layer: int, query: Tensor, width: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """What queries [R, G, D] find in shared prefixes: see `part`; nothing where none is."""
        R, G, _ = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(R, G, width, dtype=exact)
        total = out.new_full((R, G), -torch.inf)
        members = [x.view(len(self.members), -1, *x.shape[1:]) for x in (query, out, total)]
        for prefix in self.prefixes:
            at = prefix.members[query.device]
            found = prefix.attend(layer, members[0][at], width, **options)
            for all_rows, mine in zip(members[1:], found, strict=True):
                all_rows[at] = mine
        return out, total
