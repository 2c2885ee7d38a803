"""The compressed cache: what `generate` holds as `past_key_values` on a wrapped model.

The way of one prompt: `begin` (before the first layer) learns the prompt and, where they are known,
the layer sizes; `attend` (once a layer) delegates the prefill and evicts, at once or, when sizes
depend on all layers, in `finish` (after the last layer). A decode step writes the new token into a
slot, attends, and empties the slot of the token it drops. A new turn of a conversation is a prompt
again: what is left of earlier turns competes with the new tokens under the same budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from mmkv import adapters
from mmkv.cache.config import CacheConfig
from mmkv.cache.dense import DenseKV
from mmkv.cache.evict import evict, head_sizes
from mmkv.cache.forward_pass import NOT_ATTENDED, ForwardPass, current
from mmkv.cache.head_groups import GraphInputs, HeadGroup, step_of
from mmkv.cache.hidden import hides, tokens_known
from mmkv.cache.layer import CompressedLayer, nbytes
from mmkv.cache.layer_sizes import sizes_of_rows
from mmkv.cache.modes import outliving, refuse_gradient
from mmkv.cache.phases import Decoding, Reading
from mmkv.cache.ragged_rows import RaggedRows
from mmkv.cache.token_masks import TokenMasks
from mmkv.layer_inputs import LayerInputs
from mmkv.parts.slots import plan as plan_slots
from mmkv.parts.slots import send
from mmkv.report import CacheReport


class NotCapturableError(RuntimeError):
    """A step that cannot be captured or replayed, see `mmkv.attach.graph`."""


class CompressedCache(Cache):
    """A key-value cache that keeps what a policy finds worth keeping.

    `model.generate` on a wrapped model makes one; `return_dict_in_generate=True` returns it as
    `past_key_values`. Layers with a sliding window or linear attention are left alone.

    Args:
        config: the decoder's config.
        plan: policy, budget and profile.
        max_length: prompt and generated tokens at the most, if known: slots are set aside.
    """

    def __init__(self, config: Any, plan: CacheConfig, *, max_length: int = 0) -> None:
        # What drives steps that are replayed (`mmkv.attach.graph`), and whether this is one.
        self.clock: GraphInputs | None = None
        self.on_clock = False
        # The same for all other steps, by device, and the position it was set to.
        self.clocks: dict[torch.device, tuple[GraphInputs, int]] = {}
        plain = DynamicCache(config=config).layers
        layers = [CompressedLayer() if type(x) is DynamicLayer else x for x in plain]
        super().__init__(layers=layers)
        self.plan = plan
        self.max_length = max_length
        self.phase: Reading | Decoding = Reading()
        # False where later turns only ask (`mmkv.contexts`): they are kept whole, as is all else.
        self.evicts_turns = True
        # Whether the plan is this cache's own (`mmkv.serving`), not that of the model's wrap.
        self.own_plan = False
        # Whether layer sizes were learned from it, see `mmkv.cache.sampling`.
        self.sizes_learned = False
        # What is known of all tokens up to the end of the last prompt.
        self.prompt: TokenMasks | None = None
        self.shape = _shape(config)

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

    @property
    def expects_prompt(self) -> bool:
        """Whether the next pass brings a prompt, or more of one, and not a generated token."""
        return isinstance(self.phase, Reading)

    def _blocks(self) -> list[HeadGroup | RaggedRows]:
        return [b for layer in self.compressed for b in layer.blocks or ()]

    def expect(self, until: int | None = None) -> None:
        """The next pass begins a prompt or a new turn, complete at `until` tokens seen."""
        self.phase = Reading(until, keeps_all=not self.evicts_turns)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the layer's new tokens to the attention function that runs next.

        Raises:
            ValueError: no wrapped model is running with this cache, or the attention function of
                the layer before did not take up its tokens.
        """
        if not isinstance(self.layers[layer_idx], CompressedLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        running = current.get()
        if running is None or running.cache is not self:
            raise ValueError(NOT_ATTENDED.format(what="a model that is not wrapped"))
        running.check_taken()
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        running.hand_over(layer_idx, out[0])
        return out

    def begin(
        self,
        running: ForwardPass,
        valid: Tensor,
        earlier: Tensor | None,
        image: Tensor | None,
        mini_prefill: Callable[[TokenMasks], list[Tensor]] | None = None,
    ) -> None:
        """Before a prompt, or its next chunk: learn it; size the layers where sizes are known.

        Args:
            running: the call that brings it.
            valid: bool [B, q], False for padding.
            earlier: bool [B, seen], False for earlier tokens that are masked; None: none is.
            image: bool [B, q], True for image tokens, or None.
            mini_prefill: gives the scores of every layer in a pass that stores nothing, or None.

        Raises:
            ValueError: a row without tokens or padded on the right, or tokens that were masked
                before and are gone.
        """
        phase, seen = self.phase, self.get_seq_length()
        assert isinstance(phase, Reading)
        if seen == 0:
            self.plan = self.plan.started()
        self.clock, self.clocks, plan = None, {}, self.plan
        self._check_whole()
        known = tokens_known(self.prompt, seen)
        if known is not None and earlier is not None:
            earlier = earlier.to(known.device)
            phase.hides = hides(self.layers, known, earlier)
            known = known & earlier
        prompt = TokenMasks.of(
            plan.policy,
            valid,
            image,
            budget=plan.budget,
            n_layers=len(self.compressed),
            before=self.prompt,
            earlier=known,
        )
        phase.sizes = None
        self.prompt, running.cache = prompt, self
        if phase.until is not None and prompt.valid.shape[1] >= phase.until:
            phase.until = None
        whole = phase.until is None
        phase.evicts = whole or (plan.evict_chunks and all(prompt.lengths))
        phase.postpones = bool(plan.policy.postpone) and not (
            phase.keeps_all or plan.keeps_everything
        )
        if not phase.evicts:
            return
        if not all(prompt.lengths):
            raise ValueError(
                f"row {prompt.lengths.index(0)} of the batch is padding alone: it has no token"
            )
        if not bool(valid[:, -1].all()):
            raise ValueError(
                "a row of the batch ends in padding: pad on the left (processor.tokenizer."
                "padding_side = 'left'), as generation needs"
            )
        if phase.postpones:
            return
        if whole and not phase.keeps_all:
            plan.log_shortfalls(prompt, len(self.compressed))
        asks = mini_prefill is not None and plan.runs_mini_prefill
        if asks and seen == 0 and self._evicts(prompt):
            assert mini_prefill is not None
            scores = mini_prefill(prompt)
            everywhere = torch.arange(valid.shape[1], device=valid.device)
            positions = everywhere.masked_fill(~prompt.valid, -1)[:, None]
            phase.sizes = self._sizes(prompt, scores, [positions.to(x.device) for x in scores])
        elif phase.keeps_all:
            phase.sizes = [prompt.lengths] * len(self.compressed)
        elif not plan.needs_all_layers:
            phase.sizes = self._sizes(prompt)

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Before q generated tokens.

        Args:
            running: the call that brings them.
            mask: bool [B, seen + q], False for tokens that they do not see; None: they see all.
            q: how many; more than one only where none has to be dropped.

        Raises:
            ValueError: several tokens where decoding drops one a step, padding among the new ones,
                or earlier tokens that were masked when they came and are gone.
        """
        self._check_step(running, mask, q)
        running.cache = self
        plan_slots([b.schedule for b in self._blocks()])
        phase, decode = self.phase, self.plan.policy.decode
        if not isinstance(phase, Decoding) or not self.observes_replies:
            return
        phase.waiting += q
        if self.due:
            return
        phase.waiting = decode.latest
        known = tokens_known(self.prompt, self.get_seq_length() + q)
        assert known is not None
        self.prompt = TokenMasks.of(
            self.plan.policy,
            known[:, :0],
            budget=self.plan.budget,
            n_layers=len(self.compressed),
            before=self.prompt,
            earlier=known,
        )
        phase.reading = Reading(evicts=True, similarity=phase.similarity)
        if phase.postponed:
            self.plan.log_shortfalls(self.prompt, len(self.compressed))
        if not self.plan.needs_all_layers:
            phase.reading.sizes = self._sizes(self.prompt)

    def _clock_at(self, device: torch.device, position: int) -> GraphInputs:
        """What tells layers on a device which step this is; set once a step."""
        clock, there = self.clocks.get(device, (None, -1))
        if clock is None:
            clock = GraphInputs.at(device)
        if there != position:
            clock.set(step_of(self._blocks()), position)
            self.clocks[device] = clock, position
        return clock

    @property
    def observes_replies(self) -> bool:
        """Whether queries of generated tokens are remembered: they will observe."""
        rounds = self.plan.policy.decode.every > 0
        return (rounds or self.postpones) and not self.plan.keeps_everything

    @property
    def postpones(self) -> bool:
        """Whether the prompt is held whole until some more tokens are generated."""
        return isinstance(self.phase, Decoding) and self.phase.postponed

    @property
    def due(self) -> int:
        """How many tokens must be generated until what is held is evicted, where it will be."""
        assert isinstance(self.phase, Decoding)
        policy = self.plan.policy
        after = policy.decode.every + policy.decode.latest
        return max(0, (policy.postpone if self.phase.postponed else after) - self.phase.waiting)

    def _check_step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Whether `step` can be done; what the mask hides."""
        self._check_whole()
        if q > 1 and any(b.schedule.drops for b in self._blocks()):
            raise ValueError(
                f"{q} tokens at once behind a compressed prompt: policy {self.plan.policy.name!r} "
                "drops a token a step while decoding; feed them one by one, or use decode='grow'"
            )
        if self.postpones and q > self.due:
            raise ValueError(
                f"{q} tokens at once behind a prompt that is evicted after {self.due} more "
                f"(postpone={self.plan.policy.postpone}): feed them one by one"
            )
        if mask is None:
            return
        if q > 1 and not bool(mask[:, -q:].all()):
            raise ValueError(
                "padding among tokens that continue a compressed cache is not supported"
            )
        known = tokens_known(self.prompt, mask.shape[1] - q)
        assert known is not None
        earlier = mask[:, :-q].to(known.device)
        if hides(self.layers, known, earlier):
            running.hidden = known & ~earlier

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        delegate: Callable[[], tuple[Tensor, Any]],
        *,
        mask: Tensor | None = None,
        scale: float | None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Any]:
        """One layer's attention: a first prompt's is delegated, a later one's and a step's is ours.

        Args:
            layer_idx: which layer.
            query: [B, Hq, q, D].
            key: [B, H, q, D].
            value: [B, H, q, D].
            delegate: the model's own attention over just these tokens.
            mask: [B or 1, 1, q, K], what the layer was given.
            scale: factor of the query-key products, None for D ** -0.5.
            softcap: bound of the logits, or None.

        Returns:
            [B, q, Hq, D], and attention weights where the model's own attention gives them.
        """
        layer, running = self.layers[layer_idx], current.get()
        assert isinstance(layer, CompressedLayer)
        assert running is not None
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        options: Any = {"scale": factor, "softcap": softcap}
        if isinstance(self.phase, Decoding):
            with outliving():
                return self._step(layer, running, query, key, value, mask, options), None
        assert self.prompt is not None
        first = layer.seen - query.shape[2]
        new = self.prompt.valid[:, first:]
        view = running.view(mask, new)
        with outliving():
            positions = torch.arange(first, layer.seen, device=key.device)
            positions = positions.masked_fill(~new.to(key.device), -1)[:, None]
            held = past = layer.dense()
            if past is None:
                held = DenseKV(key, value, positions)
            else:
                if self.phase.hides:
                    past = past.masked(self.prompt.valid)
                held = past.extended(key, value, positions)
        if past is None:
            out = delegate()
        else:
            inv_freq = self.plan.inv_freq
            attended = held.attend(query, first, among=view, inv_freq=inv_freq, **options)
            out = refuse_gradient(attended), None
        with outliving(), torch.no_grad():
            inputs = running.inputs(layer_idx, query=query, mask=view, **held.pairs, **options)
            self._read(layer, self.phase, held, inputs)
        return out

    def _step(
        self,
        layer: CompressedLayer,
        running: ForwardPass,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Any,
    ) -> Tensor:
        """One layer's attention in a decode step, or a continuation by several tokens."""
        assert self.prompt is not None
        B, q = len(query), query.shape[2]
        if q > 1 and running.view(mask, self.prompt.valid.new_ones(B, q)) is not None:
            raise ValueError(
                "image tokens that see later ones continue a compressed prompt: give the new "
                "turn to model.generate(..., past_key_values=cache)"
            )
        kept, clock = layer.keeping(), self.clock if self.on_clock else None
        if clock is None and kept.reads_clock:
            clock = self._clock_at(key.device, layer.seen - q)
        hidden = None if running.hidden is None else running.hidden.to(key.device)
        out = kept.attend(query, key, value, layer.seen, clock=clock, hidden=hidden, **options)
        if self.observes_replies:
            layer_idx = self.layers.index(layer)
            layer.remember(query, running.rotary.get(layer_idx))
            assert isinstance(self.phase, Decoding)
            if self.phase.reading is not None:
                held = kept.dense()
                held.tail = layer.tail.of_last(held.keys.shape[2] - layer.asking)
                queries, rotary = layer.remembered()
                if rotary is not None:
                    running.rotary[layer_idx] = rotary
                inputs = running.inputs(
                    layer_idx, query=queries, mask=None, **held.pairs, **options
                )
                with torch.no_grad():
                    self._read(layer, self.phase.reading, held, inputs)
        return refuse_gradient(out)

    def _read(
        self,
        layer: CompressedLayer,
        phase: Reading,
        held: DenseKV,
        new: LayerInputs,
    ) -> None:
        """Score what a layer holds; evict at once if its size is known, else hold it whole."""
        policy, prompt = self.plan.policy, self.prompt
        assert prompt is not None
        layer.forget()
        if self._scores(prompt, phase) and not policy.score.repeats:
            if policy.score.uses_size:
                sizes = self.plan.mean_sizes(prompt, len(self.compressed))
                known = None if sizes is None else send(np.array(sizes, np.float32), new.key.device)
                new = replace(new, size=known)
            held.score(policy, new, prompt)
        if phase.evicts and not phase.postpones:
            held.forget()
        else:
            held.remember(policy, new)
        layer.state = held
        if phase.evicts and phase.postpones:
            self._hold(layer, held)
        if phase.sizes is not None:
            self._evict(layer, phase.sizes[self.compressed.index(layer)])

    def _hold(self, layer: CompressedLayer, held: DenseKV) -> None:
        """The layer holds all its tokens where generated ones come in, until it is evicted."""
        assert self.prompt is not None
        prompt, ahead = self.prompt.to(held.keys.device), self.plan.policy.postpone
        layer.tail = held.tail.by_age(held.positions)
        layer_idx = self.layers.index(layer)
        layer.state = evict(held, self.plan.whole, prompt, prompt.lengths, ahead, layer_idx)

    def finish(self) -> None:
        """After the last layer of a pass: size and evict the layers that had to wait."""
        phase, prompt, layers = self.phase, self.prompt, self.compressed
        reading = phase if isinstance(phase, Reading) else phase.reading
        if reading is None or prompt is None or not reading.evicts:
            return
        waiting = [x.state for x in layers if isinstance(x.state, DenseKV)]
        if waiting:
            scores = [x.scores for x in waiting if x.scores is not None]
            measured = [x.measured for x in waiting if x.measured is not None]
            sizes = self._sizes(prompt, scores, [x.positions for x in waiting], measured)
            with outliving(), torch.no_grad():
                split = head_sizes(waiting, self.plan.policy, prompt, sizes)
                for layer, size, heads in zip(layers, sizes, split, strict=True):
                    self._evict(layer, size, heads)
        if isinstance(phase, Decoding):
            phase.reading, phase.postponed = None, False
        elif phase.until is None:
            self.phase = Decoding(postponed=phase.postpones, similarity=phase.similarity)

    def kept(self, layer: int) -> Tensor:
        """Original positions kept by a layer, int64 [B, H, n], ascending, -1 as filler.

        Positions count along the sequence axis of the batch, padding included, as
        `get_seq_length` does.

        Raises:
            ValueError: no such layer, one that is not compressed (sliding, linear attention), or
                nothing was run.
        """
        return self._compressed_layer(layer).kept()

    def groups(self, layer: int) -> tuple[Tensor, Tensor]:
        """The groups of a layer, for policies with merge="groups".

        Returns:
            weights: int64 [B, H, n], how many tokens each group stands for, 0 as filler.
            group: int64 [B, H, N], in which of them each token of the prompt lies, earlier turns
                included; -1 for tokens that are kept as they are, gone, or padding.

        Raises:
            ValueError: no such layer, one that is not compressed (sliding, linear attention), or
                nothing was run.
        """
        found = self._compressed_layer(layer).keeping()
        assert self.prompt is not None
        return found.groups(self.prompt.valid.shape[1])

    def shares(self, layer: int) -> Tensor:
        """How much of a pair each token seen has in a layer, float32 [B, H, T].

        1 for a token that is kept as it is, 1 / m for one in a group of m tokens, 0 for one that is
        gone or padding: over tokens they add up to the pairs held.

        Raises:
            ValueError: no such layer, one that is not compressed (sliding, linear attention), or
                nothing was run.
        """
        found = self._compressed_layer(layer)
        return found.keeping().shares(found.seen)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row up to the end of the last prompt, without padding."""
        return [] if self.prompt is None else self.prompt.lengths

    def _compressed_layer(self, layer: int) -> CompressedLayer:
        if not -len(self.layers) <= layer < len(self.layers):
            raise ValueError(f"layer {layer}: the cache has layers 0 to {len(self.layers) - 1}")
        found = self.layers[layer]
        if not isinstance(found, CompressedLayer):
            raise ValueError(
                f"layer {layer} has a sliding window or linear attention: it is not compressed"
            )
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the storages really held for keys and values, empty slots included."""
        return sum(self.layer_nbytes)

    @property
    def layer_nbytes(self) -> list[int]:
        """`nbytes` layer by layer."""
        return [nbytes(x) for x in self.layers]

    def report(self) -> CacheReport:
        """Per layer: kept per head, bytes, retained importance; and the totals."""
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
            elif isinstance(layer, LinearAttentionLayer):
                layer.reorder_cache(cast(torch.LongTensor, batch))
        if self.prompt is not None:
            self.prompt = self.prompt.rows(batch)
        self.phase.select_rows(batch)

    def reset(self) -> None:
        """Drop everything, ready for a new prompt."""
        super().reset()
        self.prompt, self.phase, self.clock, self.sizes_learned = None, Reading(), None, False
        self.clocks = {}

    def check_plan(self, config: Any, plan: CacheConfig) -> None:
        """Whether a model wrapped as `plan` says may continue this cache.

        Raises:
            ValueError: it was made under another policy or budget, or by another model.
        """
        if self.shape != _shape(config):
            raise ValueError(
                f"this CompressedCache was made by another model ({self.shape}, here "
                f"{_shape(config)}): start a new one"
            )
        if self.plan != plan and not self.own_plan:
            raise ValueError(
                f"this CompressedCache was made under {self.plan.describe()}, and the model is "
                f"wrapped with {plan.describe()} now: continue it under the wrap that made it, or "
                "start a new one"
            )

    def _check_whole(self) -> None:
        """Whether every layer has seen every token: not so after an interrupted pass.

        Raises:
            ValueError: some layers have not.
        """
        seen = {x.seen for x in self.compressed}
        if len(seen) > 1:
            raise ValueError(
                f"this CompressedCache was interrupted within a pass (its layers have seen "
                f"{min(seen)} to {max(seen)} tokens): start a new one"
            )

    def _evicts(self, prompt: TokenMasks) -> bool:
        """Whether any row is long enough to lose a token."""
        budget = self.plan.budget
        if self.plan.keeps_everything or prompt.lengths == prompt.floors:
            return False
        return isinstance(budget, float | None) or max(prompt.lengths) > budget

    @property
    def repeats(self) -> bool:
        """Whether the prompt is to be fed again before this pass evicts."""
        phase, plan = self.phase, self.plan
        asked = plan.policy.score.repeats and not plan.keeps_everything
        return asked and isinstance(phase, Reading) and phase.evicts and not phase.keeps_all

    def _scores(self, prompt: TokenMasks, phase: Reading) -> bool:
        """Whether this pass scores: where it evicts, and always where scores add up."""
        if self.plan.keeps_everything:
            return False
        adds = self.plan.policy.score.combines == "sum"
        evicts = phase.evicts and not (phase.keeps_all or phase.postpones)
        return adds or (evicts and self._evicts(prompt))

    def _sizes(
        self,
        prompt: TokenMasks,
        scores: Sequence[Tensor] = (),
        positions: Sequence[Tensor] = (),
        measured: Sequence[Tensor] = (),
    ) -> list[list[int]]:
        """Every layer's size for every row [L][B], from what was found of the layers."""
        reading = self.phase if isinstance(self.phase, Reading) else self.phase.reading
        found = {} if reading is None or not reading.similarity else reading.similarity
        similarity = [found[i][0] for i in sorted(found)]
        known = scores, positions, measured, similarity
        sizes = sizes_of_rows(self.plan, prompt, len(self.compressed), *known)
        self._learn(prompt, sizes)
        return [list(layer) for layer in zip(*sizes, strict=True)]

    def _learn(self, prompt: TokenMasks, sizes: Sequence[Sequence[int]]) -> None:
        """Take in the sizes [B][L] of a first prompt's rows that lose tokens, where it is whole.

        Beams of one request are rows alike, which count once.
        """
        plan, phase = self.plan, self.phase
        first = isinstance(phase, Reading) and phase.until is None and not self.sizes_learned
        if plan.sampling is None or plan.learned is not None or not first:
            return
        self.sizes_learned = True
        for row, length in dict.fromkeys(zip(map(tuple, sizes), prompt.lengths, strict=True)):
            if any(n < length for n in row):
                plan.sampling.add(plan.task, row)

    def _evict(self, layer: CompressedLayer, sizes: list[int], split: Tensor | None = None) -> None:
        """The layer keeps a copy of what it keeps, and lets go of the rest."""
        assert isinstance(layer.state, DenseKV)
        assert self.prompt is not None
        expected = max(0, self.max_length - self.prompt.valid.shape[1])
        if isinstance(self.phase, Reading) and self.phase.until is not None:
            expected = 0  # a chunk of the prompt comes next, which makes new storage
        prompt = self.prompt.to(layer.state.keys.device)
        layer.state = evict(
            layer.state, self.plan, prompt, sizes, expected, self.layers.index(layer), split
        )


def _shape(config: Any) -> str:
    """What a cache and the decoder it is for must agree in."""
    return ", ".join(f"{name}={value}" for name, value in adapters.shape(config).items())
