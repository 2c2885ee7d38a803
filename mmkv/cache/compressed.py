"""The compressed cache: what a wrapped model's `generate` holds.

The way of one prompt: `begin` (before the first layer) learns the prompt and, where they are known,
the layer sizes; `attend` (once a layer) delegates the prefill and evicts, at once or, when sizes
depend on all layers, in `finish` (after the last layer). A decode step writes the new token into a
slot, attends, and empties the slot of the token it drops. A new turn of a conversation is a prompt
again: what is left of earlier turns competes with the new tokens under the same budget. What the
cache then holds, and can be asked for, is its `CacheState`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmkv.cache.config import sizes_of_rows
from mmkv.cache.evict import evict
from mmkv.cache.forward_pass import (
    NOT_ATTENDED,
    ForwardPass,
    between,
    current,
    outside_inference_mode,
    refuse_gradient,
)
from mmkv.cache.layer import CompressedLayer, KeptKV
from mmkv.cache.phases import Decoding, Reading
from mmkv.cache.prompt_kv import PromptKV, Tail
from mmkv.cache.selection import head_sizes
from mmkv.cache.state import CacheState
from mmkv.cache.token_masks import TokenMasks
from mmkv.layer_inputs import LayerInputs
from mmkv.parts.slots import plan as plan_slots
from mmkv.parts.slots import send


class CompressedCache(CacheState):
    """A key-value cache that keeps what a policy finds worth keeping.

    `model.generate` on a wrapped model makes one; `return_dict_in_generate=True` returns it as
    `past_key_values`, from transformers 5.24 on as `cache`. Layers with a sliding window or linear
    attention are left alone.

    Args:
        config: the decoder's config.
        plan: policy, budget and profile.
        max_length: prompt and generated tokens at the most, if known: slots are set aside.
    """

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
        running, layer = current.get(), self.layers[layer_idx]
        if running is not None and running.pending is not None:
            running.check_attended()
        if not isinstance(layer, CompressedLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if running is None or running.cache is not self:
            raise ValueError(NOT_ATTENDED.format(what="a model that is not wrapped"))
        layer.is_initialized = True
        layer.seen += key_states.shape[-2]
        running.pending = layer_idx
        return key_states, value_states

    def begin(
        self,
        running: ForwardPass,
        valid: Tensor,
        earlier: Tensor | None,
        image: Tensor | None,
        mini_prefill: Callable[[TokenMasks], list[Tensor]],
    ) -> None:
        """Before a prompt, or its next chunk: learn it; size the layers where sizes are known.

        `mini_prefill` gives the scores of every layer in a pass that stores nothing; the masks are
        those of `TokenMasks.of`.

        Raises:
            ValueError: a row without tokens or padded on the right, or tokens that were masked
                before and are gone.
        """
        phase, seen = self.phase, self.compressed[0].seen
        assert isinstance(phase, Reading)
        if seen == 0:
            self.plan = self.plan.started()
        self.clock, plan = None, self.plan
        self._check_whole()
        known = self._tokens_known(seen)
        if known is not None and earlier is not None:
            earlier = earlier.to(known.device)
            phase.hides = self._hides(known, earlier)
            known = known & earlier
        self.prompt = prompt = self._marked(valid, image, known)
        phase.sizes, running.cache = None, self
        if phase.until is not None and prompt.valid.shape[1] >= phase.until:
            phase.until = None
        whole = phase.until is None
        phase.evicts = whole or (plan.evict_chunks and all(prompt.lengths))
        phase.postpones = bool(plan.policy.postpone) and not (
            phase.keeps_all or plan.keeps_everything
        )
        self._prepare_scores(prompt, phase)
        if not phase.evicts:
            return
        prompt.check_ends()
        if phase.postpones:
            return
        if whole and not phase.keeps_all:
            plan.log_shortfalls(prompt, len(self.compressed))
        if plan.runs_mini_prefill and seen == 0 and plan.evicts(prompt):
            scores = mini_prefill(prompt)
            everywhere = torch.arange(valid.shape[1], device=valid.device)
            positions = everywhere.masked_fill(~prompt.valid, -1)[:, None]
            phase.sizes = self._sizes(prompt, scores, [positions.to(x.device) for x in scores])
        elif phase.keeps_all:
            phase.sizes = [prompt.lengths] * len(self.compressed)
        elif not plan.needs_all_layers:
            phase.sizes = self._sizes(prompt)

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Before q generated tokens; `mask` [B, seen + q] is False for those that they do not see.

        Raises:
            ValueError: several tokens where decoding drops one a step, padding among the new ones,
                or earlier tokens that were masked when they came and are gone.
        """
        self._check_step(running, mask, q)
        running.cache = self
        blocks = self.blocks
        plan_slots([b.schedule for b in blocks])
        if not self.on_clock:
            for block in blocks:
                block.schedule.look_up(block.positions.device)
        phase, decode = self.phase, self.plan.policy.decode
        running.observes = self.observes_replies
        if not isinstance(phase, Decoding) or not running.observes:
            return
        phase.waiting += q
        if self.due:
            return
        phase.waiting = decode.latest
        known = self._tokens_known(self.get_seq_length() + q)
        assert known is not None
        self.prompt = self._marked(known[:, :0], None, known)
        phase.reading = Reading(evicts=True, similarity=phase.similarity)
        self._prepare_scores(self.prompt, phase.reading)
        if phase.postponed:
            self.plan.log_shortfalls(self.prompt, len(self.compressed))
        if not self.plan.needs_all_layers:
            phase.reading.sizes = self._sizes(self.prompt)

    def _marked(self, valid: Tensor, image: Tensor | None, earlier: Tensor | None) -> TokenMasks:
        """What is known of all tokens, with the new ones; arguments as of `TokenMasks.of`."""
        return TokenMasks.of(
            self.plan.policy,
            valid,
            image,
            budget=self.plan.budget,
            n_layers=len(self.compressed),
            before=self.prompt,
            earlier=earlier,
        )

    def _check_step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Whether `step` can be done; what the mask hides."""
        self._check_whole()
        if q > 1 and any(b.schedule.drops for b in self.blocks):
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
        known = self._tokens_known(mask.shape[1] - q)
        assert known is not None
        earlier = mask[:, :-q].to(known.device)
        if self._hides(known, earlier):
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
        layer, running, phase = self.layers[layer_idx], current.get(), self.phase
        assert isinstance(layer, CompressedLayer)
        assert running is not None
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        options: Any = {"scale": factor, "softcap": softcap}
        if isinstance(phase, Decoding):
            if not torch.is_inference_mode_enabled():
                return self._step(layer_idx, running, query, key, value, mask, options), None
            with outside_inference_mode():
                return self._step(layer_idx, running, query, key, value, mask, options), None
        assert self.prompt is not None
        out = delegate() if layer.state is None else None
        first = layer.seen - query.shape[2]
        new = self.prompt.valid[:, first:]
        view = running.view(mask, new)
        with outside_inference_mode():
            positions = torch.arange(first, layer.seen, device=key.device)
            positions = positions.masked_fill(~new.to(key.device), -1)[:, None]
            held = PromptKV(key, value, positions)
            if out is None:
                past: Any = layer.dense()
                if phase.hides:
                    past = past.masked(self.prompt.valid)
                held = past.extended(key, value, positions)
        if out is None:
            inv_freq = self.plan.inv_freq
            attended = held.attend(query, first, among=view, inv_freq=inv_freq, **options)
            out = refuse_gradient(attended), None
        with outside_inference_mode(), torch.no_grad():
            inputs = running.inputs(layer_idx, held, query=query, mask=view, **options)
            self._read(layer_idx, phase, held, inputs)
        return out

    def _step(
        self,
        layer_idx: int,
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
                "turn and the cache to model.generate"
            )
        layer: Any = self.layers[layer_idx]
        kept, clock = layer.state, self.clock if self.on_clock else None
        assert isinstance(kept, KeptKV)
        hidden = None if running.hidden is None else running.hidden.to(key.device)
        out = kept.attend(query, key, value, layer.seen, clock=clock, hidden=hidden, **options)
        if running.observes:
            layer.remember(query, running.rotary.get(layer_idx))
            assert isinstance(self.phase, Decoding)
            if self.phase.reading is not None:
                held = kept.dense()
                queries, rotary = layer.remembered()
                held.tail = layer.tail.of_last(held.keys.shape[2] - queries.shape[2])
                if rotary is not None:
                    running.rotary[layer_idx] = rotary
                inputs = running.inputs(layer_idx, held, query=queries, mask=None, **options)
                with torch.no_grad():
                    self._read(layer_idx, self.phase.reading, held, inputs)
        return refuse_gradient(out) if out.requires_grad else out

    def _read(self, layer_idx: int, phase: Reading, held: PromptKV, new: LayerInputs) -> None:
        """Score what a layer holds; evict at once if its size is known, else hold it whole."""
        policy, prompt = self.plan.policy, self.prompt
        assert prompt is not None
        layer: Any = self.layers[layer_idx]
        layer.asked, layer.tail = [], Tail()
        if phase.scores:
            if phase.mean_sizes is not None:
                known = send(np.array(phase.mean_sizes, np.float32), new.key.device)
                new = replace(new, size=known)
            held.score(policy, new, prompt)
        if phase.evicts and not phase.postpones:
            held.tail = Tail()  # the prompt is complete
        else:
            held.remember(policy, new)
        layer.state = held
        if phase.evicts and phase.postpones:
            self._hold(layer_idx, held)
        if phase.sizes is not None:
            self._evict(layer_idx, phase.sizes[self.ordinal[layer_idx]])

    def _hold(self, layer_idx: int, held: PromptKV) -> None:
        """The layer holds all its tokens where generated ones come in, until it is evicted."""
        assert self.prompt is not None
        layer: Any = self.layers[layer_idx]
        prompt, ahead = self.prompt.to(held.keys.device), self.plan.policy.postpone
        layer.tail = held.tail.by_age(held.positions)
        whole = replace(self.plan, budget=1.0, kv_dtype=None)
        layer.state = evict(held, whole, prompt, prompt.lengths, ahead, layer_idx)

    def finish(self) -> None:
        """After the last layer of a pass: size and evict the layers that had to wait."""
        phase, prompt, layers = self.phase, self.prompt, self.compressed
        reading = self._reading
        if reading is None or prompt is None or not reading.evicts:
            return
        waiting = [x.state for x in layers if isinstance(x.state, PromptKV)]
        if waiting:
            scores = [x.scores for x in waiting if x.scores is not None]
            measured = [x.measured for x in waiting if x.measured is not None]
            sizes = self._sizes(prompt, scores, [x.positions for x in waiting], measured)
            with outside_inference_mode(), torch.no_grad():
                split = head_sizes(waiting, self.plan.policy, prompt, sizes)
                for i, size, heads in zip(self.ordinal, sizes, split, strict=True):
                    between.get()()
                    self._evict(i, size, heads)
        if isinstance(phase, Decoding):
            phase.reading, phase.postponed = None, False
        elif phase.until is None:
            self.phase = Decoding(postponed=phase.postpones, similarity=phase.similarity)

    @property
    def _reading(self) -> Reading | None:
        """What this pass reads: a prompt, or a round of replies; None where it only decodes."""
        return self.phase if isinstance(self.phase, Reading) else self.phase.reading

    @property
    def repeats(self) -> bool:
        """Whether the prompt is to be fed again before this pass evicts."""
        phase, plan = self.phase, self.plan
        asked = plan.policy.score.repeats and not plan.keeps_everything
        return asked and isinstance(phase, Reading) and phase.evicts and not phase.keeps_all

    def _prepare_scores(self, prompt: TokenMasks, phase: Reading) -> None:
        """Say whether this pass scores: where it evicts, and always where scores add up."""
        plan, score = self.plan, self.plan.policy.score
        evicts = phase.evicts and not (phase.keeps_all or phase.postpones)
        adds = score.turn_reduction == "sum" and not plan.keeps_everything
        phase.scores = (adds or (evicts and plan.evicts(prompt))) and not score.repeats
        sized = phase.scores and score.uses_size
        phase.mean_sizes = plan.mean_sizes(prompt, len(self.compressed)) if sized else None

    def _sizes(
        self,
        prompt: TokenMasks,
        scores: Sequence[Tensor] = (),
        positions: Sequence[Tensor] = (),
        measured: Sequence[Tensor] = (),
    ) -> list[list[int]]:
        """Every layer's size for every row [L][B], from what was found of the layers."""
        phase, reading = self.phase, self._reading
        found = {} if reading is None else reading.similarity
        similarity = [found[i][0] for i in sorted(found)]
        known = scores, positions, measured or similarity
        sizes = sizes_of_rows(self.plan, prompt, len(self.compressed), *known)
        if isinstance(phase, Reading) and phase.until is None and not self.sizes_learned:
            self.sizes_learned = True
            self.plan.learn(sizes, prompt.lengths)
        return [list(layer) for layer in zip(*sizes, strict=True)]

    def _evict(self, layer_idx: int, sizes: list[int], split: Tensor | None = None) -> None:
        """The layer keeps a copy of what it keeps, and lets go of the rest."""
        layer: Any = self.layers[layer_idx]
        assert isinstance(layer.state, PromptKV)
        assert self.prompt is not None
        expected = max(0, self.max_length - self.prompt.valid.shape[1])
        if isinstance(self.phase, Reading) and self.phase.until is not None:
            expected = 0  # a chunk of the prompt comes next, which makes new storage
        device, prompt = layer.state.keys.device, self.prompt
        prompt = prompt if prompt.valid.device == device else prompt.to(device)
        layer.state = evict(layer.state, self.plan, prompt, sizes, expected, layer_idx, split)
