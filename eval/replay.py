"""The caches of all policies from one pass of a prompt through the model.

The queries, keys and values of a prompt do not depend on the policy, and what a policy keeps
depends only on them. `Capture.of` records them in one plain pass; `replayed` feeds them to a new
cache, which scores, sizes, evicts and stores as in a pass of its own, in much less time.
Policies that feed the prompt again, or evict while it is read, cannot be replayed: see `applies`.
Replies are read on by `generate` where it changes logits: see `mmkv.forcing.changes_logits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.forward_pass import ForwardPass, Reading, current
from mmkv.calls import CACHE, passing
from mmkv.contexts import Context
from mmkv.forcing import Read, Steps, up_to_end
from mmkv.layer_inputs import LayerInputs
from mmkv.planning import comparing
from mmkv.registry import get_policy
from mmkv.wrapping import wrapped


class Capture(CompressedCache):
    """A cache that records the inputs of each layer in one pass of a batch's prompts, and evicts
    nothing.

    Attributes:
        logits: float [B, 1, V], of the token after the prompt.
        calls: by layer keys and values [B, H, N, D], and, if the layer is compressed, its inputs.
    """

    logits: Tensor

    def __init__(self, config: Any, plan: CacheConfig) -> None:
        super().__init__(config, plan)
        self.calls: dict[int, tuple[Tensor, Tensor, LayerInputs | None]] = {}

    @classmethod
    def of(cls, model: Any, inputs: Mapping[str, Any]) -> Capture:
        """Record a pass of left-padded prompts, on the model's device, by the unwrapped model."""
        # These parts need every input that any score or layer part takes from a pass.
        policy = get_policy("snapkv", score="observers", layers="squeeze")
        with comparing(), wrapped(model, policy, 0.5), torch.no_grad():
            attachment = attachment_of(model)
            captured, steps = cls(attachment.parts.config, attachment.plan), Steps(model, inputs)
            out = steps.run(inputs, **passing(model, captured), **steps.last)
        captured.logits, captured.ids = out.logits[:, -1:], inputs["input_ids"]
        return captured

    def replayed(self, model: Any) -> CompressedCache:
        """Return the wrapped model's cache after these prompts; the next pass decodes."""
        attachment = attachment_of(model)
        cache = CompressedCache(attachment.parts.config, attachment.plan)
        masks: Any = self.masks
        uses_rotary = attachment.plan.policy.uses_rotary
        running = ForwardPass(ids=self.ids, parts=attachment.parts)
        token = current.set(running)
        try:
            with torch.no_grad():
                if cache.begin(running, masks.valid, None, masks.image):
                    layers = (inputs for *_, inputs in self.calls.values() if inputs is not None)
                    cache.set_sizes([cache.first_scores(x) for x in layers])
                for i, (key, value, inputs) in self.calls.items():
                    cache.update(key, value, i)
                    if inputs is not None:
                        running.pending = None
                        # Only policies that use rotary embeddings get them, as in a model's pass.
                        rotary = inputs.rotary if uses_rotary else None
                        cache.read(replace(inputs, rotary=rotary))
                assert isinstance(cache.phase, Reading)
                assert isinstance(self.phase, Reading)
                cache.phase.similarity = dict(self.phase.similarity)
                cache.finish()
        finally:
            current.reset(token)
        return cache

    def reader(self, model: Any) -> Read:
        """Return a replacement of the wrapped model's pass of the prompts, for `mmkv.forcing`."""
        return lambda: (self.replayed(model), self.logits)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record keys and values of a layer that is not compressed."""
        self.calls[layer_idx] = key_states, value_states, None
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Raise ValueError: recurrent states cannot be recorded."""
        raise ValueError(
            f"layer {layer_idx} has linear attention, which --replay cannot record: run without it"
        )

    def read(self, inputs: LayerInputs) -> None:
        """Record all inputs of a compressed layer's attention."""
        self.calls[inputs.layer_idx] = inputs.key, inputs.value, inputs

    def finish(self) -> None:
        """Evict nothing."""


def applies(plan: CacheConfig) -> bool:
    """Return whether a plan's cache can be replayed from one plain pass."""
    policy = plan.policy
    return not (policy.score.repeats or policy.layers.learns or plan.evict_chunks)


@torch.no_grad()
def continued(
    model: Any, inputs: Mapping[str, Tensor], read: Read, limits: Sequence[int], ends: set[int]
) -> tuple[list[list[int]], Any, int]:
    """Return greedy replies to prompts that are read already, as token ids, and the cache.

    `read` returns the cache and the first logits; a reply ends with one of `ends` or at its limit.
    Also return the cache's bytes before the replies.
    """
    steps = Steps(model, inputs)
    cache, logits = read()
    held_bytes: int = cache.nbytes
    tokens, ended = list[Tensor](), [False] * len(limits)
    for n in range(1, max(limits) + 1):
        tokens.append(token := logits[:, -1].argmax(-1, keepdim=True))
        each = zip(ended, token[:, 0].tolist(), limits, strict=True)
        ended = [over or t in ends or n == limit for over, t, limit in each]
        if all(ended):
            break
        logits = steps.feed(cache, token)
    new = zip(torch.cat(tokens, dim=1).tolist(), limits, strict=True)
    return [up_to_end(ids, ends)[:limit] for ids, limit in new], cache, held_bytes


def asked(context: Context, question: Mapping[str, Tensor]) -> tuple[dict[str, Any], Read]:
    """Return all tokens of a context and a text question, and a reader of the question."""
    inputs = context.arguments_for(question)
    cache, ids = inputs.pop(CACHE), question["input_ids"]

    def read() -> tuple[Any, Tensor]:
        context_mask, question_mask = inputs["attention_mask"].tensor_split([-ids.shape[1]], dim=1)
        cache.expect()
        steps = Steps(context.model, {"input_ids": ids, "attention_mask": context_mask})
        return cache, steps.feed(cache, ids, question_mask)[:, -1:]

    return inputs, read
