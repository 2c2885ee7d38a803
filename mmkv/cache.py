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
from transformers.cache_utils import Cache, DynamicLayer

from mmkv import eviction
from mmkv.decoding import make_schedule
from mmkv.eviction import Prompt
from mmkv.layer import CompressedLayer, Held
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
class Plan:
    """How a cache is made smaller: what `wrap` was asked for."""

    policy: Policy
    budget: float | int | None
    fractions: tuple[float, ...] | None = None
    # Frequencies of the decoder's rotary embedding [D / 2], for policy.reposition.
    inv_freq: Tensor | None = field(default=None, repr=False)
    # Called with the decoder's arguments before the prefill; returns the scores of every layer.
    mini_prefill: Callable[[dict[str, Any], Prompt], list[Tensor]] | None = field(
        default=None, repr=False
    )

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
                f"row {prompt.lengths.index(0)} of the batch is padding alone: it has no token"
            )
        if self.plan.late:
            self._check_budget(prompt)
        else:
            scores = None
            if self.plan.mini_prefill is not None and self._evicts(prompt):
                self._check_budget(prompt)
                scores = self.plan.mini_prefill(arguments, prompt)
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
                scores = eviction.importance(
                    self.plan.policy, query, key, scale=scale, prompt=prompt
                )
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
        scores = [
            x.held.scores for x in waiting if x.held is not None and x.held.scores is not None
        ]
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
                plan.policy,
                plan.budget,
                n_layers=n,
                length=length,
                floor=floor,
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
                similarity = torch.stack(
                    [x.similarity[row].cpu() for x in layers if x.similarity is not None]
                )
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
        assert self.prompt is not None
        assert layer.sizes is not None
        policy, (B, H, N, _) = self.plan.policy, key.shape
        prompt = self.prompt.to(key.device)
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
            mass = (
                scores.expand(B, H, N).gather(2, indices.clamp(min=0)).masked_fill(indices < 0, 0)
            )
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
        assert self.prompt is not None
        H = key.shape[1]
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
                    inv_freq=self.plan.inv_freq,
                )
            )
