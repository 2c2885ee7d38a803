"""The compressed cache that a wrapped model's `generate` uses: the passes of a prompt and a step.

What it holds, and what it does between passes, is in `state`.

A prompt takes three steps: `begin` (before the first layer) marks its tokens and computes the layer
sizes that do not depend on scores; `read` (in each layer, after its attention) scores the tokens,
and evicts the layer if its size is known; `finish` (after the last layer) sizes and evicts the
others.
A decode step writes the new token into a slot, attends, and frees the slot of the token it drops.
A new turn of a conversation is read like a prompt: the kept tokens of earlier turns compete with
the new ones under the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmkv.cache import checks
from mmkv.cache.config import TokenMasks
from mmkv.cache.evict import evict
from mmkv.cache.forward_pass import (
    NOT_ATTENDED,
    AttentionCall,
    Decoding,
    ForwardPass,
    Reading,
    current,
    outside_inference_mode,
    refuse_gradient,
)
from mmkv.cache.layer import CompressedLayer, KeptKV
from mmkv.cache.padded_blocks import Step
from mmkv.cache.prompt_kv import PromptKV, Tail
from mmkv.cache.selection import importance
from mmkv.cache.sizing import head_sizes, sizes_of_rows
from mmkv.cache.state import CacheState
from mmkv.decode.slots import plan_together
from mmkv.layer_inputs import LayerInputs
from mmkv.tensors import no_autocast


class CompressedCache(CacheState):
    """A key-value cache that keeps the tokens a policy scores highest.

    `model.generate` on a wrapped model makes one; `return_dict_in_generate=True` returns it as
    `past_key_values`, from transformers 5.24 on as `cache`. Layers with a sliding window or linear
    attention are not compressed.

    Args:
        config: the decoder's config.
        plan: policy, budget and profile.
        max_length: how many tokens it reads at most, to allocate slots for; 0: not known.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass the layer's new keys and values on to the attention function that runs next.

        Raises:
            ValueError: no wrapped model is running with this cache, or our attention function did
                not run in the layer before.
        """
        running, layer = current.get(), self.layers[layer_idx]
        if running is not None and running.pending is not None:
            running.check_attended()
        if running is None or running.cache is not self:
            raise ValueError(NOT_ATTENDED.format(what="a model that is not wrapped"))
        if not isinstance(layer, CompressedLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        running.pending = layer_idx
        return layer.update(key_states, value_states)

    def begin(
        self,
        running: ForwardPass,
        valid: Tensor,
        earlier: Tensor | None,
        image: Tensor | None,
    ) -> bool:
        """Mark the tokens of a prompt or of its next chunk; set the layer sizes that are known.

        The masks are those of `TokenMasks.of`.

        Returns:
            whether a first pass over the prompt, which stores nothing, has to compute the scores of
            all layers for `set_sizes`.

        Raises:
            ValueError: a row has no tokens or is padded on the right, the mask shows tokens that it
                hid before, which were not stored, or padding would change a layer's state.
        """
        phase, seen = self.phase, self.compressed[0].seen
        assert isinstance(phase, Reading)
        if seen == 0:
            self.plan = self.plan.started()
        self.graph_inputs, plan = None, self.plan
        earlier_valid = self.valid_tokens(seen)
        checks.check_linear_layers(self, valid, earlier_valid)
        if earlier_valid is not None and earlier is not None:
            earlier = earlier.to(earlier_valid.device)
            phase.masks_earlier = checks.masks_earlier(self, earlier_valid, earlier)
            if phase.masks_earlier:
                checks.log_hidden_replies(self, earlier_valid & ~earlier)
            earlier_valid = earlier_valid & earlier
        masks = self._marked(valid, image, earlier_valid)
        is_complete = phase.until is None or masks.valid.shape[1] >= phase.until
        if is_complete:
            masks.check_ends()
            phase.until = None
        self.masks = masks
        phase.sizes, running.cache, running.valid = None, self, valid
        phase.evicts = is_complete or (plan.evict_chunks and not all(masks.ends_in_padding))
        self._prepare_scores(masks, phase)
        if not phase.evicts:
            return False
        if is_complete and not phase.keeps_all:
            plan.log_shortfalls(masks, len(self.compressed))
        scores_first = plan.needs_all_layers and plan.policy.layers.needs == "mini-prefill"
        if scores_first and seen == 0 and any(plan.evicting(masks)):
            return True
        if phase.keeps_all:
            phase.sizes = [masks.lengths] * len(self.compressed)
        elif not plan.needs_all_layers:
            phase.sizes = self._sizes(masks)
        return False

    def first_scores(self, layer: LayerInputs) -> Tensor:
        """Score a prompt's tokens in a pass before the layer sizes are known: [B, H or 1, N]."""
        masks, reading = self.masks, self.reading
        assert masks is not None
        assert reading is not None
        layer = replace(layer, image=masks.image.to(layer.key.device)).sized(reading.mean_sizes)
        present = layer.valid if any(masks.inner_padding) else None
        return importance(self.plan.policy, layer, masks.windows, present)

    def set_sizes(self, scores: Sequence[Tensor]) -> None:
        """Set the layer sizes by the scores [B, H or 1, N] of each layer from a first pass."""
        reading, masks = self.reading, self.masks
        assert reading is not None
        assert masks is not None
        numbers = torch.arange(masks.valid.shape[1], device=masks.valid.device)
        positions = numbers.masked_fill(~masks.valid, -1)[:, None]
        reading.sizes = self._sizes(masks, scores, [positions.to(x.device) for x in scores])

    def step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Prepare a step of q tokens; `mask` [B, seen + q] is False for tokens they do not see.

        Raises:
            ValueError: several tokens where decoding drops one a step, padding among the new ones,
                or a mask that shows tokens that it hid before, which were not stored.
        """
        self._check_step(running, mask, q)
        running.cache = self
        blocks = self.blocks
        plan_together([b.schedule for b in blocks])
        if not self.in_graph:
            with outside_inference_mode():
                for block in blocks:
                    block.schedule.set_now(block.positions.device)
        phase, decode = self.phase, self.plan.policy.decode
        running.observes = self.observes_replies
        if not isinstance(phase, Decoding) or not running.observes:
            return
        phase.waiting += q
        if self.tokens_until_round:
            return
        phase.waiting = decode.latest
        valid = self.valid_tokens(self.get_seq_length() + q)
        assert valid is not None
        self.masks = self._marked(valid[:, :0], None, valid)
        phase.reading = Reading(evicts=True)
        self._prepare_scores(self.masks, phase.reading)
        if not self.plan.needs_all_layers:
            phase.reading.sizes = self._sizes(self.masks)

    def _marked(self, valid: Tensor, image: Tensor | None, earlier: Tensor | None) -> TokenMasks:
        """Return the masks of all tokens, the new ones included; arguments of `TokenMasks.of`."""
        return TokenMasks.of(
            self.plan,
            valid,
            image,
            n_layers=len(self.compressed),
            before=self.masks,
            earlier=earlier,
        )

    def _check_step(self, running: ForwardPass, mask: Tensor | None, q: int) -> None:
        """Check that `step` can be done, and record which kept tokens the mask hides."""
        if q > 1 and any(b.schedule.drops for b in self.blocks):
            raise ValueError(
                f"{q} tokens at once after a compressed prompt: policy {self.plan.policy.name!r} "
                "drops a token a step while decoding; feed them one by one, or use decode='grow'"
            )
        if mask is None:
            return
        if q > 1 and not bool(mask[:, -q:].all()):
            row = int((~mask[:, -q:].all(-1)).nonzero()[0])
            raise ValueError(
                f"row {row} has padding among its {q} new tokens, which continue a compressed "
                "cache: give the new turn and the cache to model.generate"
            )
        valid = self.valid_tokens(mask.shape[1] - q)
        assert valid is not None
        earlier = mask[:, :-q].to(valid.device)
        if checks.masks_earlier(self, valid, earlier):
            running.masked = valid & ~earlier

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend from new tokens to all that a layer holds and to themselves; store their pairs.

        Returns:
            [B, q, Hq, D].
        """
        layer, running = self.compressed_layer(call.layer_idx), current.get()
        assert running is not None
        if isinstance(self.phase, Reading):
            with outside_inference_mode():
                earlier = layer.dense()
                assert earlier is not None
                if self.phase.masks_earlier:
                    assert self.masks is not None
                    earlier = earlier.masked(self.masks.valid)
                positions = self._new_positions(layer, call.key)
                layer.state = earlier.extended(call.key, call.value, positions)
            among = running.view(call.mask)
            out = layer.state.attend(
                call.query, scale=call.scale, softcap=call.softcap, among=among
            )
        else:
            with outside_inference_mode():
                out = self._step(layer, running, call)
        return refuse_gradient(out)

    def _step(self, layer: CompressedLayer, running: ForwardPass, call: AttentionCall) -> Tensor:
        """Run a decode step, or a continuation by several tokens, in one layer."""
        q = call.query.shape[2]
        if q > 1 and running.view(call.mask) is not None:
            raise ValueError(
                f"the {q} new tokens have image tokens that attend to later ones: give the new "
                "turn and the cache to model.generate"
            )
        masked = None if running.masked is None else running.masked.to(call.key.device)
        graph_inputs = self.graph_inputs if self.in_graph else None
        step = Step(layer.seen - q, q, call.scale, call.softcap, graph_inputs)
        # Codes are multiplied in float32.
        quantised = self.plan.kv_dtype is not None
        with no_autocast(call.key.device) if quantised else nullcontext():
            out = layer.keeping().attend(call, step, masked)
        if running.observes:
            layer.record_queries(call.query, running.rotary.get(call.layer_idx))
        return out

    def read(self, inputs: LayerInputs) -> None:
        """Score the tokens of a layer, and evict it if its size is known, else keep them all.

        In a round, the queries of all tokens generated since the last round observe. `inputs` are
        those of the new tokens. `attend` has stored their pairs, except in a prompt's first pass.
        """
        layer, reading, masks = self.compressed_layer(inputs.layer_idx), self.reading, self.masks
        assert reading is not None
        assert masks is not None
        policy = self.plan.policy
        with outside_inference_mode(), torch.no_grad():
            if isinstance(layer.state, KeptKV):
                layer.state = layer.state.dense()
                queries, rotary = layer.recorded_queries()
                inputs = replace(inputs, query=queries, rotary=rotary, mask=None)
            elif layer.state is None:
                positions = self._new_positions(layer, inputs.key)
                layer.state = PromptKV(inputs.key, inputs.value, positions)
            prompt_kv, layer.reply_queries = layer.state, []
            if reading.needs_scores:
                prompt_kv.score(policy, inputs, masks, reading.mean_sizes)
            if reading.evicts:
                prompt_kv.tail = Tail()  # the prompt is complete
            else:
                prompt_kv.record_tail(policy, inputs, masks)
            if reading.sizes is not None:
                self._evict(inputs.layer_idx, reading.sizes[self.ordinal[inputs.layer_idx]])

    def _new_positions(self, layer: CompressedLayer, key: Tensor) -> Tensor:
        """Return the positions of the new tokens, int64 [B, 1, q], -1 for padding."""
        assert self.masks is not None
        first = layer.seen - key.shape[2]
        positions = torch.arange(first, layer.seen, device=key.device)
        return positions.masked_fill(~self.masks.valid[:, first:].to(key.device), -1)[:, None]

    def finish(self) -> None:
        """Size and evict the layers that wait for the last layer of the pass."""
        phase, masks, layers = self.phase, self.masks, self.compressed
        reading = self.reading
        if reading is None or masks is None or not reading.evicts:
            return
        waiting = [x.state for x in layers if isinstance(x.state, PromptKV)]
        if waiting:
            scores = [x.scores for x in waiting if x.scores is not None]
            measured = [x.measured for x in waiting if x.measured is not None]
            sizes = self._sizes(masks, scores, [x.positions for x in waiting], measured)
            with outside_inference_mode(), torch.no_grad():
                split = head_sizes(waiting, self.plan.policy, masks, sizes)
                for i, size, heads in zip(self.ordinal, sizes, split, strict=True):
                    self._evict(i, size, heads)
        if isinstance(phase, Decoding):
            phase.reading = None
        elif phase.until is None:
            self.phase = Decoding()

    def _prepare_scores(self, masks: TokenMasks, phase: Reading) -> None:
        """Set whether this pass scores: if it evicts, and always if scores are sums over turns."""
        plan, score = self.plan, self.plan.policy.score
        evicts = phase.evicts and not phase.keeps_all
        adds = score.turn_reduction == "sum" and not plan.keeps_all
        phase.needs_scores = (adds or (evicts and any(plan.evicting(masks)))) and not score.repeats
        phase.mean_sizes = plan.mean_sizes(masks, len(self.compressed))

    def _sizes(
        self,
        masks: TokenMasks,
        scores: Sequence[Tensor] = (),
        positions: Sequence[Tensor] = (),
        measured: Sequence[Tensor] = (),
    ) -> list[list[int]]:
        """Return each layer's size for each row, [L][B], from the layers' scores and measures."""
        phase, reading = self.phase, self.reading
        by_layer = {} if reading is None else reading.similarity
        if not measured:
            measured = [by_layer[i][0] for i in sorted(by_layer)]
        n_layers = len(self.compressed)
        sizes = sizes_of_rows(self.plan, masks, n_layers, scores, positions, measured)
        if isinstance(phase, Reading) and phase.until is None and not self.sizes_learned:
            self.sizes_learned = True
            self.plan.learn(sizes, masks.lengths)
        return [list(layer) for layer in zip(*sizes, strict=True)]

    def _evict(self, layer_idx: int, sizes: list[int], split: Tensor | None = None) -> None:
        """Replace a layer's tokens by a copy of those that it keeps."""
        layer: Any = self.layers[layer_idx]
        assert isinstance(layer.state, PromptKV)
        assert self.masks is not None
        expected = max(0, self.max_length - self.masks.valid.shape[1])
        if isinstance(self.phase, Reading) and self.phase.until is not None:
            expected = 0  # the next chunk of the prompt allocates new storage
        n_newest = 0
        if isinstance(self.phase, Decoding):
            last = self.masks.is_prompt[0].nonzero()[-1]
            n_newest = self.masks.valid.shape[1] - 1 - int(last)
        layer.state = evict(
            layer.state, self.plan, self.masks, sizes, expected, layer_idx, split, n_newest
        )
