"""The compressed cache: what `generate` holds as `past_key_values` on a wrapped model.

The way of one prompt: `begin` (before the first layer) learns the prompt and, where they are known,
the layer sizes; `attend` (once a layer) delegates the prefill and evicts, at once or, when sizes
depend on all layers, in `finish` (after the last layer). A decode step writes the new token into a
slot, attends, and empties the slot of the token it drops. A new turn of a conversation is a prompt
again: what is left of earlier turns competes with the new tokens under the same budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from mmkv import eviction
from mmkv.eviction import Prompt
from mmkv.held import Held
from mmkv.layer import CompressedLayer, nbytes
from mmkv.plan import Plan
from mmkv.storage import Clock
from mmkv.storing import evict

if TYPE_CHECKING:
    from mmkv.report import CacheReport


class NotCapturableError(RuntimeError):
    """A step that cannot be captured or replayed, see `mmkv.graph`."""


class Incoming(NamedTuple):
    """What `update` hands to the attention function that runs next in the same layer."""

    cache: CompressedCache
    layer_idx: int
    key: Tensor


incoming: ContextVar[Incoming | None] = ContextVar("mmkv_incoming", default=None)


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
        # What drives steps that are replayed (`mmkv.graph`), and whether this is such a step.
        self.clock: Clock | None = None
        self.on_clock = False
        plain = DynamicCache(config=config).layers
        layers = [CompressedLayer() if type(x) is DynamicLayer else x for x in plain]
        super().__init__(layers=layers)
        self.plan = plan
        self.max_length = max_length
        self.prompt: Prompt | None = None
        # The next forward pass brings a prompt, not a generated token.
        self.expects_prompt = True
        # Tokens at which a prompt fed in chunks is complete; None: each pass brings a whole one.
        self.complete_at: int | None = None
        # Between `begin` and `finish`.
        self.prefilling = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, not kept."""
        if self.on_clock:
            raise NotCapturableError("the model asks the cache for the number of tokens each step")
        return super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where a mask's new tokens begin; its columns begin there too, see `get_mask_sizes`."""
        return super().get_seq_length(layer_idx)

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
        """Before a prompt, or its next chunk: learn it; size the layers where sizes are known.

        Args:
            valid: bool [B, q], False for padding.
            image: bool [B, q], True for image tokens, or None.
            arguments: the decoder's, for a mini-prefill.

        Raises:
            ValueError: a row of padding alone, or one that ends in padding.
        """
        self.clock = None
        plan, seen = self.plan, self.get_seq_length()
        known = 0 if self.prompt is None else self.prompt.valid.shape[1]
        prompt = Prompt.of(
            plan.policy,
            valid,
            image,
            budget=plan.budget,
            n_layers=len(self.compressed),
            before=self.prompt,
            generated=seen - known,
        )
        self.expects_prompt = (
            self.complete_at is not None and prompt.valid.shape[1] < self.complete_at
        )
        if not self.expects_prompt:
            if not all(prompt.lengths):
                raise ValueError(
                    f"row {prompt.lengths.index(0)} of the batch is padding alone: it has no token"
                )
            if not bool(valid[:, -1].all()):
                raise ValueError(
                    "a row of the batch ends in padding: pad on the left (processor.tokenizer."
                    "padding_side = 'left'), as generation needs"
                )
            plan.log_shortfalls(prompt, len(self.compressed))
        for layer in self.compressed:
            layer.sizes = None
            if layer.held is None:  # not a later chunk of the same prompt
                layer.similarity = None
        first = plan.mini_prefill if seen == 0 and not self.expects_prompt else None
        if first is not None and self._evicts(prompt):
            scores = first(arguments, prompt)
            everywhere = torch.arange(valid.shape[1], device=valid.device)
            positions = everywhere.masked_fill(~prompt.valid, -1)[:, None]
            self._size_layers(prompt, scores, [positions.to(x.device) for x in scores])
        elif not self.expects_prompt and not plan.needs_all_layers:
            self._size_layers(prompt)
        self.prompt, self.prefilling = prompt, True

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        delegate: Callable[[], tuple[Tensor, Any]],
        *,
        scale: float | None,
        softcap: float | None = None,
        among: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """One layer's attention: a first prompt's is delegated, a later one's and a step's is ours.

        Args:
            layer_idx: which layer.
            query: [B, Hq, q, D].
            key: [B, H, q, D].
            value: [B, H, q, D].
            delegate: the model's own attention over just these tokens.
            scale: factor of the query-key products, None for D ** -0.5.
            softcap: bound of the logits, or None.
            among: bool [B, 1, q, q], which of these tokens see which; None: causal.

        Returns:
            [B, q, Hq, D], and attention weights where the model's own attention gives them.
        """
        layer, prompt, plan = self.layers[layer_idx], self.prompt, self.plan
        assert isinstance(layer, CompressedLayer)
        if prompt is None:
            raise ValueError(
                "this CompressedCache was not started by a wrapped model: let the model make it"
            )
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if not self.prefilling:
            if among is not None and bool(among.triu(1).any()):
                raise ValueError(
                    "image tokens that see later ones continue a compressed prompt: give the new "
                    "turn to model.generate(..., past_key_values=cache)"
                )
            clock = self.clock if self.on_clock else None
            out = layer.attend(query, key, value, clock=clock, scale=factor, softcap=softcap)
            return out, None
        first = layer.seen - query.shape[2]
        positions = torch.arange(first, layer.seen, device=key.device)
        valid = prompt.valid[:, first:].to(key.device)
        positions = positions.masked_fill(~valid, -1)[:, None]
        past = layer.past()
        if past is None:
            held, out = Held(key, value, positions), delegate()
        else:
            held = past.extended(key, value, positions)
            options: Any = {"scale": factor, "softcap": softcap, "inv_freq": plan.inv_freq}
            out = held.attend(query, first, among=among, **options), None
        with torch.no_grad():
            self._keep(layer, held, query, scale, first=past is None)
        return out

    def _keep(
        self, layer: CompressedLayer, held: Held, query: Tensor, scale: float | None, *, first: bool
    ) -> None:
        """Score what a layer holds; evict at once if its size is known, else hold it whole."""
        policy, prompt = self.plan.policy, self.prompt
        assert prompt is not None
        accumulates = policy.score == "accumulated" and not self.plan.keeps_everything
        if accumulates or (self._evicts(prompt) and not self.expects_prompt):
            if first:
                valid = prompt.valid.to(query.device)
                held.scores = eviction.importance(
                    policy, query, held.keys, scale=scale, valid=valid, windows=prompt.windows
                )
            else:
                held.score(policy, query, scale=scale, windows=prompt.windows)
        if self.expects_prompt:
            held.remember(policy, query)
        else:
            held.tail = None
        layer.blocks = None
        layer.held = held
        if layer.sizes is not None:
            self._store(layer)

    def finish(self) -> None:
        """After the last layer of a prompt: size and evict the layers that had to wait."""
        prompt, layers = self.prompt, self.compressed
        if not self.prefilling or prompt is None:
            return
        self.prefilling = False
        if self.expects_prompt:
            return
        waiting = [x for x in layers if x.held is not None]
        if waiting:
            held = [x.held for x in waiting if x.held is not None]
            scores = [h.scores for h in held if h.scores is not None]
            self._size_layers(prompt, scores, [h.positions for h in held])
            with torch.no_grad():
                for layer in waiting:
                    self._store(layer)

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
        """Tokens of each row up to the end of the last prompt, without padding."""
        return [] if self.prompt is None else self.prompt.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of the storages really held for keys and values, empty slots included."""
        return sum(nbytes(x) for x in self.layers)

    def report(self) -> CacheReport:
        """Per layer: kept per head, bytes, retained importance; and the totals."""
        from mmkv.report import CacheReport

        return CacheReport.of(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues what row beam_idx[i] was."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select_rows(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, by index or by a bool mask."""
        self._select_rows(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def _select_rows(self, batch: Tensor) -> None:
        """Everything a row has moves with it."""
        self.clock = None
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.select_rows(batch)
            elif isinstance(layer, DynamicLayer):
                layer.batch_select_indices(batch)
        if self.prompt is not None:
            self.prompt = self.prompt.rows(batch)

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        super().reset()
        self.prompt, self.expects_prompt, self.prefilling = None, True, False
        self.clock = None

    def _evicts(self, prompt: Prompt) -> bool:
        """Whether any row is long enough to lose a token."""
        budget = self.plan.budget
        if self.plan.keeps_everything or prompt.lengths == prompt.floors:
            return False
        return isinstance(budget, float | None) or max(prompt.lengths) > budget

    def _size_layers(
        self, prompt: Prompt, scores: Sequence[Tensor] = (), positions: Sequence[Tensor] = ()
    ) -> None:
        """Set every layer's size for every row, from the layers' scores where sizes need them."""
        layers, plan = self.compressed, self.plan
        importance: Sequence[Tensor | None] = [None] * len(prompt.lengths)
        if scores and plan.policy.layers in ("prefix", "pooled"):
            importance = eviction.competing(scores, positions, prompt)
        similarity = None
        if plan.policy.layers == "squeeze" and layers[0].similarity is not None:
            measured = [x.similarity.cpu() for x in layers if x.similarity is not None]
            similarity = torch.stack(measured, dim=1)
        sizes = [
            eviction.row_sizes(
                plan.policy,
                plan.budget,
                n_layers=len(layers),
                length=length,
                floor=floor,
                fractions=plan.fractions,
                importance=importance[row],
                similarity=None if similarity is None else similarity[row],
            )
            for row, (length, floor) in enumerate(zip(prompt.lengths, prompt.floors, strict=True))
        ]
        for i, layer in enumerate(layers):
            layer.sizes = [row[i] for row in sizes]

    def _store(self, layer: CompressedLayer) -> None:
        """Evict: the layer keeps a copy of what it keeps, and lets go of the rest."""
        held, layer.held = layer.held, None
        assert held is not None
        assert self.prompt is not None
        assert layer.sizes is not None
        expected = max(0, self.max_length - self.prompt.valid.shape[1])
        layer.blocks, layer.retained, layer.error = evict(
            held, self.plan, self.prompt.to(held.keys.device), layer.sizes, expected
        )
