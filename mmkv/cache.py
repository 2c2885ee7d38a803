"""The compressed cache: what `generate` holds as `past_key_values` on a wrapped model.

The way of one prompt: `begin` (before the first layer) learns the prompt and, where they are known,
the layer sizes; `attend` (once a layer) delegates the prefill and evicts, at once or, when sizes
depend on all layers, in `finish` (after the last layer). A decode step writes the new token into a
slot, attends, and empties the slot of the token it drops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from mmkv import eviction
from mmkv.decoding import Grow, make_schedule
from mmkv.eviction import Prompt
from mmkv.merging import merge
from mmkv.policy import Policy
from mmkv.storage import Block, group_rows

if TYPE_CHECKING:
    from mmkv.report import CacheReport

# Slots reserved at prefill for tokens to come, at the most; beyond it storage grows in chunks.
_MOST_RESERVED = 256


class Incoming(NamedTuple):
    """What `update` hands to the attention function that runs next in the same layer."""

    cache: CompressedCache
    layer_idx: int
    key: Tensor


incoming: ContextVar[Incoming | None] = ContextVar("mmkv_incoming", default=None)


@dataclass
class Held:
    """A layer's whole prefill, kept until its size is known."""

    keys: Tensor
    values: Tensor
    scores: Tensor | None


class CompressedLayer(CacheLayerMixin):
    """One layer's kept pairs, in blocks of rows; `None` before the prefill."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Drop everything."""
        self.seen = 0
        self.batch = 0
        self.heads = 0
        self.blocks: list[Block] | None = None
        self.held: Held | None = None
        self.sizes: list[int] | None = None
        self.retained: Tensor | None = None
        self.stream: Tensor | None = None
        self.similarity: Tensor | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn the layer's shape."""
        self.batch, self.heads = key_states.shape[:2]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the tokens and hand them on; the attention function stores them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Tokens seen, not kept: positions go on from here."""
        return self.seen

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The new tokens' own block: each layer knows itself which old ones it holds."""
        if isinstance(query_length, Tensor):  # older releases pass the cache positions
            query_length = query_length.shape[0]
        return query_length, self.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        self.forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: evicted tokens cannot come back."""
        raise ValueError(
            "a compressed cache cannot be cropped, so assisted and contrastive decoding cannot "
            "use it: generate without them, or mmkv.unwrap(model) first"
        )

    def offload(self) -> None:
        """Refused: the cache is small because it was compressed; it stays on the device."""
        raise ValueError("a compressed cache cannot be offloaded: generate without cache offloading")

    prefetch = offload

    def select_rows(self, batch: Tensor) -> None:
        """Choose rows of the batch; everything a row has moves with it."""
        if self.blocks is None:
            return
        chosen = batch.cpu().numpy()
        wanted = (chosen[:, None] * self.heads + np.arange(self.heads)).reshape(-1)
        blocks = []
        for block in self.blocks:
            old = np.arange(self.rows) if block.rows is None else block.rows.cpu().numpy()
            place = np.full(self.rows, -1)
            place[old] = np.arange(len(old))
            mine = np.flatnonzero(place[wanted] >= 0)
            if len(mine):
                rows = None if block.rows is None else torch.from_numpy(mine).to(block.rows.device)
                blocks.append(block.select(place[wanted[mine]], rows))
        self.blocks, self.batch = blocks, len(chosen)
        if self.sizes is not None:
            self.sizes = [self.sizes[int(b)] for b in chosen]
        if self.retained is not None:
            self.retained = self.retained[batch.to(self.retained.device)]

    @property
    def rows(self) -> int:
        """B * H."""
        return self.batch * self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held for keys and values."""
        stored = sum(b.nbytes for b in self.blocks or ())
        if self.held is not None:
            whole = (self.held.keys, self.held.values)
            stored += sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in whole}.values())
        return stored

    def kept(self) -> Tensor:
        """Original positions held, int64 [B, H, n], ascending, -1 as filler at the end."""
        if self.blocks is None:
            raise ValueError("nothing is kept yet: run a prompt through the wrapped model first")
        width = max(b.positions.shape[1] for b in self.blocks)
        device = self.blocks[0].positions.device
        found = torch.full((self.rows, width), -1, dtype=torch.int64, device=device)
        for block in self.blocks:
            where = slice(None) if block.rows is None else block.rows
            found[where, : block.positions.shape[1]] = block.positions.long()
        far = torch.iinfo(torch.int64).max
        found = found.masked_fill(found < 0, far).sort(dim=-1).values
        longest = int((found < far).sum(-1).max())
        found = found[:, :longest].masked_fill(found[:, :longest] == far, -1)
        return found.view(self.batch, self.heads, longest)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """A decode step, or a continuation by q tokens: write, attend, drop.

        Args:
            query: [B, Hq, q, D].
            key: [B, H, q, D].
            value: [B, H, q, D].
            options: scale and softcap.

        Returns:
            [B, q, Hq, D].
        """
        assert self.blocks is not None
        B, Hq, q, D = query.shape
        first = self.seen - q
        rows = query.reshape(self.rows, Hq // self.heads * q, D)
        key, value = key.flatten(0, 1).detach(), value.flatten(0, 1).detach()
        out = rows.new_empty(*rows.shape[:2], value.shape[-1])
        for block in self.blocks:
            where = slice(None) if block.rows is None else block.rows
            block.append(key[where], value[where], first)
            out[where] = block.attend(rows[where], q, first, **options)
            if q == 1:
                block.drop(first)
            elif isinstance(block.schedule, Grow):
                block.schedule.extend(q)
        return out.view(B, Hq, q, -1).transpose(1, 2)


@dataclass
class Plan:
    """How a cache is made smaller: what `wrap` was asked for."""

    policy: Policy
    budget: float | int | None
    fractions: tuple[float, ...] | None = None
    # Called with the decoder's arguments before the prefill; returns the scores of every layer.
    mini_prefill: Callable[[dict[str, Any]], list[Tensor]] | None = field(default=None, repr=False)

    @property
    def late(self) -> bool:
        """Whether sizes are known only after the prefill."""
        return (
            self.policy.needs_all_layers
            and self.fractions is None
            and self.mini_prefill is None
            and not eviction.keeps_everything(self.policy, self.budget)
        )


class CompressedCache(Cache):
    """A key-value cache that keeps what a policy finds worth keeping.

    `model.generate` on a wrapped model makes one; `return_dict_in_generate=True` returns it as
    `past_key_values`. Layers with a sliding window of their own are plain and left alone.

    Args:
        config: the decoder's config.
        plan: policy, budget and profile.
        max_length: prompt and generated tokens at the most, if known: slots are set aside.
    """

    def __init__(self, config: Any, plan: Plan, *, max_length: int = 0) -> None:
        plain = DynamicCache(config=config).layers
        layers = [CompressedLayer() if type(x) is DynamicLayer else x for x in plain]
        super().__init__(layers=layers)
        self.plan = plan
        self.max_length = max_length
        self.prompt: Prompt | None = None
        self._lengths: list[int] = []

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers that are compressed, in order."""
        return [x for x in self.layers if isinstance(x, CompressedLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the layer's new tokens to the attention function that runs next."""
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if isinstance(self.layers[layer_idx], CompressedLayer):
            incoming.set(Incoming(self, layer_idx, out[0]))
        return out

    def begin(self, valid: Tensor, image: Tensor | None, arguments: dict[str, Any]) -> None:
        """Before the prefill: learn the prompt; size the layers where sizes are known.

        Args:
            valid: bool [B, N], False for padding.
            image: bool [B, N], True for image tokens, or None.
            arguments: the decoder's, for a mini-prefill.

        Raises:
            ValueError: the budget is below what must be kept.
        """
        prompt = Prompt.of(self.plan.policy, valid, image)
        if not all(prompt.lengths):
            raise ValueError(
                f"row {prompt.lengths.index(0)} of the batch has no token: every position is padding"
            )
        if self.plan.late:
            self._check_budget(prompt)
        else:
            scores = None
            if self.plan.mini_prefill is not None and self._evicts(prompt):
                self._check_budget(prompt)
                scores = self.plan.mini_prefill(arguments)
            self._size_layers(prompt, scores)
        self.prompt, self._lengths = prompt, prompt.lengths

    def attend(
        self,
        layer_idx: int,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        delegate: Callable[[], tuple[Tensor, Any]],
        *,
        scale: float | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Any]:
        """One layer's attention: the prefill is delegated, then evicted; a decode step is ours."""
        layer = self.layers[layer_idx]
        assert isinstance(layer, CompressedLayer)
        if layer.blocks is not None:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            return layer.attend(query, key, value, scale=scale, softcap=softcap), None
        out = delegate()
        prompt = self.prompt
        if prompt is None:
            raise ValueError(
                "this CompressedCache was not started by a wrapped model: let the model make it"
            )
        with torch.no_grad():
            scores = None
            if self._evicts(prompt) or self._drops_later():
                valid = prompt.valid.to(key.device)
                scores = self.plan.policy.importance(query, key, scale=scale, valid=valid)
            if layer.sizes is None:
                layer.held = Held(key, value, scores)
            else:
                self._store(layer, key, value, scores)
        return out

    def finish(self) -> None:
        """After the last layer of a prefill: size and evict the layers that had to wait."""
        waiting = [x for x in self.compressed if x.held is not None]
        if not waiting or self.prompt is None:
            return
        scores = [x.held.scores for x in waiting if x.held is not None and x.held.scores is not None]
        self._size_layers(self.prompt, scores or None)
        with torch.no_grad():
            for layer in waiting:
                held, layer.held = layer.held, None
                assert held is not None
                self._store(layer, held.keys, held.values, held.scores)
                del held

    def kept(self, layer: int) -> Tensor:
        """Original positions kept by a layer, int64 [B, H, n], ascending, -1 as filler.

        Positions count along the sequence axis of the batch, padding included, as
        `get_seq_length` does.

        Raises:
            ValueError: the layer has a sliding window and is not compressed, or nothing was run.
        """
        found = self.layers[layer]
        if not isinstance(found, CompressedLayer):
            raise ValueError(f"layer {layer} has a sliding window of its own: it is not compressed")
        return found.kept()

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens of each row, without padding."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the storages really held for keys and values, empty slots included."""
        plain = [
            x
            for layer in self.layers
            if not isinstance(layer, CompressedLayer)
            for x in (layer.keys, layer.values)
            if x is not None
        ]
        return sum(x.nbytes for x in self.compressed) + sum(
            x.untyped_storage().nbytes() for x in plain
        )

    def report(self) -> CacheReport:
        """Per layer: kept per head, bytes, retained importance; and the totals."""
        from mmkv.report import CacheReport

        return CacheReport.of(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues what row beam_idx[i] was."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select_rows(torch.arange(len(self._lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, by index or by a bool mask."""
        self._select_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def _select_rows(self, batch: Tensor) -> None:
        """Everything a row has moves with it."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.select_rows(batch)
            else:
                layer.batch_select_indices(batch)
        self._lengths = [self._lengths[int(b)] for b in batch]

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        super().reset()
        self.prompt = None

    def _evicts(self, prompt: Prompt) -> bool:
        """Whether any row of the prompt is long enough to lose a token."""
        policy, budget = self.plan.policy, self.plan.budget
        if eviction.keeps_everything(policy, budget):
            return False
        longest = max(prompt.lengths)
        return longest > policy.observed and (isinstance(budget, float | None) or longest > budget)

    def _drops_later(self) -> bool:
        """Whether decoding will need the scores of a prompt that itself loses nothing."""
        policy, budget = self.plan.policy, self.plan.budget
        return (
            isinstance(budget, int) and policy.decode == "fixed" and policy.score == "accumulated"
        )

    def _check_budget(self, prompt: Prompt) -> None:
        """Fail before the work, not after it, when a row's budget is below what must be kept."""
        plan, n = self.plan, len(self.compressed)
        if plan.budget is None or eviction.keeps_everything(plan.policy, plan.budget):
            return
        for length, floor in zip(prompt.lengths, prompt.floors, strict=True):
            eviction.row_sizes(
                plan.policy, plan.budget, n_layers=n, length=length, floor=floor,
                fractions=[1.0] * n,
            )

    def _size_layers(self, prompt: Prompt, scores: Sequence[Tensor] | None) -> None:
        """Set every layer's size for every row."""
        layers, plan = self.compressed, self.plan
        for x in layers:
            x.sizes = []
        for row, (length, floor) in enumerate(zip(prompt.lengths, prompt.floors, strict=True)):
            importance = similarity = None
            if scores is not None and plan.policy.layers in ("prefix", "pooled"):
                importance = eviction.competing(scores, prompt, row)
            if plan.policy.layers == "squeeze" and layers[0].similarity is not None:
                similarity = torch.stack([x.similarity[row].cpu() for x in layers if x.similarity is not None])
            sizes = eviction.row_sizes(
                plan.policy,
                plan.budget,
                n_layers=len(layers),
                length=length,
                floor=floor,
                fractions=plan.fractions,
                importance=importance,
                similarity=similarity,
            )
            for x, n in zip(layers, sizes, strict=True):
                assert x.sizes is not None
                x.sizes.append(n)

    def _store(
        self, layer: CompressedLayer, key: Tensor, value: Tensor, scores: Tensor | None
    ) -> None:
        """Evict: copy what the layer keeps into storage of its own."""
        assert self.prompt is not None and layer.sizes is not None
        prompt, policy, (B, H, N, _) = self.prompt, self.plan.policy, key.shape
        prompt = prompt.to(key.device)
        shrinks = layer.sizes != prompt.lengths
        indices, counts = eviction.select(policy, scores if shrinks else None, prompt, layer.sizes)
        if scores is not None and policy.score != "recency":
            layer.retained = eviction.retained(scores, indices, prompt)
        indices, counts = indices.expand(B, H, -1), counts.expand(B, H)
        if policy.merge is not None and shrinks:
            key, value = merge(key, value, indices, prompt.valid, how=policy.merge)
        else:
            where = indices.clamp(min=0)[..., None]
            key = key.gather(2, where.expand(-1, -1, -1, key.shape[-1]))
            value = value.gather(2, where.expand(-1, -1, -1, value.shape[-1]))
        mass = None
        if policy.decode == "fixed" and policy.score == "accumulated" and scores is not None:
            mass = scores.expand(B, H, N).gather(2, indices.clamp(min=0)).masked_fill(indices < 0, 0)
        self._build_blocks(layer, key, value, indices, mass, counts.numpy().reshape(-1))

    def _build_blocks(
        self,
        layer: CompressedLayer,
        key: Tensor,
        value: Tensor,
        indices: Tensor,
        mass: Tensor | None,
        counts: np.ndarray,
    ) -> None:
        """Group the layer's rows by length and give each group storage and a schedule."""
        assert self.prompt is not None and layer.sizes is not None
        B, H, _, _ = key.shape
        policy, budget = self.plan.policy, self.plan.budget
        lengths = np.repeat(self.prompt.lengths, H)
        protected = np.repeat(self.prompt.anchored, H)
        capacity: np.ndarray | None = counts
        if eviction.keeps_everything(policy, budget):
            capacity = None
        elif isinstance(budget, int):
            capacity = np.maximum(counts, np.where(lengths <= budget, budget, counts))
        groups = group_rows(counts)
        expected = min(max(0, self.max_length - self.prompt.valid.shape[1]), _MOST_RESERVED)
        layer.blocks = []
        for rows in groups:
            n = counts[rows]
            schedule = make_schedule(
                policy,
                counts=n,
                lengths=lengths[rows],
                protected=protected[rows],
                capacity=None if capacity is None else capacity[rows],
            )
            index = torch.from_numpy(rows).to(key.device) if len(groups) > 1 else None
            at = slice(None) if index is None else index
            width = int(n.max())

            def take(x: Tensor, at: Any = at, width: int = width) -> Tensor:
                return x.flatten(0, 1)[at, :width]

            layer.blocks.append(
                Block.of(
                    take(key),
                    take(value),
                    take(indices),
                    None if mass is None else take(mass),
                    schedule,
                    reserve=schedule.room(expected),
                    rows=index,
                )
            )
