"""The requests whose replies grow together, so that a step attends to all kept pairs at once.

A row is one key-value head of one request; rows lie in `mmkv.serving.shared_blocks`. The slot of a
new token follows from the slot schedules of its request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import Decoding, outside_inference_mode, refuse_gradient
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.cache.plain import PlainKV
from mmkv.contexts import Context
from mmkv.parts.slots import plan as plan_slots
from mmkv.parts.slots import send
from mmkv.serving.shared_blocks import STEP, SharedBlock, SharedLayer, SharedPrefix, capacity, tails


class Member:
    """A request in the pool; `kept` are its blocks of each layer, which move into the pool."""

    def __init__(
        self, owner: Any, cache: CompressedCache, kept: Sequence[Sequence[PaddedBlock]]
    ) -> None:
        self.owner, self.cache = owner, cache
        self.prefix: SharedPrefix | None = None  # pairs that it attends to besides its own
        self.schedules = [block.schedule for blocks in kept for block in blocks]
        self.ahead = deque[np.ndarray]()  # slots of the next tokens, [L, H] each
        plan_slots(self.schedules)
        heads, offset = sum(len(x.row_numbers) for x in kept[0]), 0
        # [L, H]: the columns of each layer's heads among the slots of all `schedules`.
        self.columns = np.empty((len(kept), heads), np.int64)
        for columns, blocks in zip(self.columns, kept, strict=True):
            for block in blocks:
                rows, schedule = block.row_numbers, block.schedule
                schedule.prepare()
                columns[rows] = offset + schedule.own_columns(len(rows))
                offset += schedule.planned.shape[1]

    def next(self) -> np.ndarray:
        """Return the next token's slots, [L, H]."""
        if not self.ahead:
            slots = np.concatenate([x.ahead() for x in self.schedules], axis=1)
            self.ahead.extend(slots[:, self.columns])
        return self.ahead.popleft()


class Pool:
    """Requests whose kept pairs lie in the same blocks."""

    def __init__(self) -> None:
        self.members: list[Member] = []  # in the order of the batch's rows
        self.layers: list[SharedLayer] = []
        self.prefixes: list[SharedPrefix] = []  # prefixes that members attend to

    @property
    def blocks(self) -> list[SharedBlock]:
        """The blocks of all layers."""
        return [block for layer in self.layers for block in layer]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, unused rows included."""
        return sum(x.held for x in self.blocks)

    @property
    def most(self) -> int:
        """The most bytes that the members' rows may take."""
        return sum(x.promised for x in self.blocks)

    @property
    def spare(self) -> int:
        """Bytes held beyond `most`, which `trim` frees."""
        return sum(max(0, x.held - x.promised) for x in self.blocks)

    def trim(self) -> None:
        """Free the memory that no member will need."""
        for block in self.blocks:
            if block.held > block.promised:
                block.resize(len(block.rows), block.used.max())

    def bytes_of(self, member: Member) -> int:
        """Return the bytes of a member's rows."""
        at, heads = self.members.index(member), member.columns.shape[1]
        rows = [(x, int((x.rows // heads == at).sum())) for x in self.blocks]
        return sum(n * x.stored[0].shape[1] * x.slot_bytes for x, n in rows)

    def takes(self, cache: CompressedCache) -> bool:
        """Return whether a cache can join: one that decodes by attention to its pairs alone."""
        if not isinstance(cache.phase, Decoding) or cache.observes_replies:
            return False
        kept = [x.state for x in cache.compressed if isinstance(x.state, KeptKV)]
        alike = {x.batch for x in kept} == {1} and len({x.heads for x in kept}) == 1
        # Shared blocks have pairs in the model's type with a bias, and no more.
        plain = all(
            isinstance(block.stored, PlainKV)
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
        """Move the kept pairs of a cache of one row, which the pool `takes`, into the pool.

        At most `new` tokens will be generated. `limit` bounds the bytes, and is at least what the
        pairs need. If the pairs of `context`, of which the cache began as a copy, are unchanged,
        the member attends to these and stores only the later ones.
        """
        kept: list[Sequence[PaddedBlock]] = [x.keeping().blocks for x in cache.compressed]
        own_pairs = None if context is None else tails(context, kept)
        kept = kept if own_pairs is None else own_pairs
        member = Member(owner, cache, kept)
        if context is not None and own_pairs is not None:
            known = (x for x in self.prefixes if x.context is context)
            member.prefix = next(known, None) or SharedPrefix(context)
        needed = 0
        for block in (x for blocks in kept for x in blocks):
            needed += capacity(block.schedule.most(new)) * block.nbytes // block.positions.shape[1]
        step = STEP if limit is not None and needed > limit else None
        self.layers = self.layers or [SharedLayer() for _ in cache.layers]
        first = len(self.members) * member.columns.shape[1]
        self.members.append(member)
        try:
            with outside_inference_mode(), torch.no_grad():
                for cache_layer, layer in zip(cache.compressed, self.layers, strict=True):
                    # Popped, so that a layer's memory is freed once it is copied.
                    blocks, cache_layer.state, layer.rows = kept.pop(0), None, None
                    for block in blocks:
                        block_key = capacity(block.schedule.most(new), step), own_pairs is not None
                        if block_key not in layer.blocks:
                            layer.blocks[block_key] = SharedBlock(block, *block_key)
                        layer.blocks[block_key].add(first + block.row_numbers, block)
        except Exception:
            self.leave(member)
            raise
        self._find_members()
        return member

    def _find_members(self) -> None:
        """List the prefixes of members, and set `members` of each."""
        devices = {x.device for x in self.layers if x.blocks}
        self.prefixes = list(dict.fromkeys(x.prefix for x in self.members if x.prefix is not None))
        for prefix in self.prefixes:
            at = np.array([i for i, x in enumerate(self.members) if x.prefix is prefix])
            prefix.members = {device: send(at, device) for device in devices}

    def leave(self, member: Member) -> None:
        """Free a member's rows; the last member takes its place in the batch."""
        at, last = self.members.index(member), len(self.members) - 1
        with outside_inference_mode(), torch.no_grad():
            for layer in self.layers:
                layer.remove(at, last, member.columns.shape[1])
        self.members[at] = self.members[last]
        self.members.pop()
        self._find_members()

    def step(self) -> None:
        """Set where the next pair of each row goes, on the devices of the layers."""
        plan_slots([x for member in self.members if not member.ahead for x in member.schedules])
        slots = np.concatenate([x.next() for x in self.members], axis=1)  # [L, R]
        with outside_inference_mode(), torch.no_grad():
            places = np.stack([x.advance(y) for x, y in zip(self.layers, slots, strict=True)])
        sent = {device: send(places, device) for device in {x.device for x in self.layers}}
        for i, layer in enumerate(self.layers):
            layer.at = list(sent[layer.device][i].split(layer.sizes))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Return one layer's attention of a step, as `CompressedCache.attend`: [B, 1, Hq, Dv]."""
        B, Hq, _, D = query.shape
        R, width = B * key.shape[1], value.shape[-1]
        key, value = (x.detach().reshape(R, -1) for x in (key, value))
        query, prefix = query.reshape(R, -1, D), tuple[Tensor, ...]()
        with outside_inference_mode():
            if self.prefixes:
                by_member = query.view(B, R // B, -1, D)
                exact = torch.promote_types(query.dtype, torch.float32)
                attended = query.new_zeros(*by_member.shape[:3], width, dtype=exact)
                log_sums = attended.new_full(attended.shape[:3], -torch.inf)
                for shared in self.prefixes:
                    shared.attend(layer, by_member, attended, log_sums, **options)
                prefix = attended.flatten(0, 1), log_sums.flatten(0, 1)
            out = self.layers[layer].attend(query, key, value, *prefix, **options)
        return refuse_gradient(out.view(B, 1, Hq, -1))
