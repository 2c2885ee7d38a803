"""One pass of a prompt through the model, and from it the cache of every policy.

What a policy keeps of a prompt follows from the queries, keys and values of its layers, which are
the same whatever it keeps. `Capture.of` takes them in one plain pass; `Capture.cache` gives them to
a new cache as a pass would, in a fraction of its time: scores, sizes, eviction and storage are the
cache's own. Policies that feed the prompt again, or evict while it is read, need passes of their
own: `applies` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.forward_pass import ForwardPass, current
from mmkv.cache.selection import importance
from mmkv.cache.token_masks import TokenMasks
from mmkv.calls import CACHE, passing
from mmkv.forcing import Read, Steps, up_to_end
from mmkv.layer_inputs import Rotary
from mmkv.registry import get_policy
from mmkv.wrapping import comparing, wrapped

if TYPE_CHECKING:
    from mmkv import Context


@dataclass(frozen=True, eq=False)
class Capture:
    """What one pass of a batch's prompts brought to each layer's attention."""

    logits: Tensor  # float [B, 1, V], of the token behind the prompt
    ids: Tensor  # int64 [B, N]
    recorded: _Recorder

    @classmethod
    def of(cls, model: Any, inputs: Mapping[str, Any]) -> Capture:
        """Run left-padded prompts on the model's device through a model that is not wrapped."""
        # With all that some score or layer part asks of a pass.
        asking = get_policy("snapkv", score="observers", layers="squeeze")
        with comparing(), wrapped(model, asking, 0.5), torch.no_grad():
            attachment = attachment_of(model)
            cache = _Recorder(attachment.parts.config, attachment.plan)
            steps = Steps(model, inputs)
            out = steps.run(inputs, **passing(model, cache), **steps.last)
        return cls(out.logits[:, -1:], inputs["input_ids"], cache)

    def cache(self, model: Any) -> CompressedCache:
        """What the wrapped model would hold after these prompts; the next pass decodes."""
        attachment = attachment_of(model)
        cache = CompressedCache(attachment.parts.config, attachment.plan)
        # Other policies' passes are not told of it.
        recorded: Any = self.recorded
        rotary = dict(recorded.rotary) if attachment.plan.policy.score.uses_rotary else {}
        running = ForwardPass(ids=self.ids, parts=attachment.parts, rotary=rotary)
        before = current.set(running)
        output = torch.empty(0), None  # of a layer, which nothing reads
        try:
            with torch.no_grad():
                first = partial(self._scores, running, attachment.plan)
                cache.begin(running, recorded.prompt.valid, None, recorded.prompt.image, first)
                for i, (key, value, query, options) in recorded.calls.items():
                    cache.update(key, value, i)
                    if query is not None:
                        running.pending = None
                        cache.attend(i, query, key, value, lambda: output, **options)
                phase: Any = cache.phase
                phase.similarity = dict(recorded.phase.similarity)
                cache.finish()
        finally:
            current.reset(before)
        return cache

    def read(self, model: Any) -> Read:
        """In place of the wrapped model's pass of the prompts, see `mmkv.forcing.forced`."""
        return lambda: (self.cache(model), self.logits)

    def _scores(self, running: ForwardPass, plan: CacheConfig, prompt: TokenMasks) -> list[Tensor]:
        """What XKV's first pass would find."""
        found = list[Tensor]()
        for i, (key, value, query, options) in self.recorded.calls.items():
            if query is not None:
                view = running.view(options["mask"], prompt.valid)
                held: Any = {"query": query, "key": key, "value": value, "image": prompt.image}
                held |= {**options, "valid": prompt.valid, "mask": view}
                layer = running.inputs(i, **held)
                found.append(importance(plan.policy, layer, prompt.windows))
        return found


def applies(plan: CacheConfig) -> bool:
    """Whether what a plan keeps follows from one plain pass."""
    policy = plan.policy
    return not (
        policy.score.repeats or policy.postpone or policy.layers.learns or plan.evict_chunks
    )


@torch.no_grad()
def continued(
    model: Any, inputs: Mapping[str, Tensor], read: Read, limits: Sequence[int], ends: set[int]
) -> tuple[list[list[int]], Any]:
    """Greedy replies behind prompts that are read already: new tokens of each row, and the cache.

    `read` gives the cache and the first logits; a reply ends with one of `ends` or at its limit.
    """
    steps = Steps(model, inputs)
    cache, logits = read()
    tokens, ended = list[Tensor](), [False] * len(limits)
    for n in range(1, max(limits) + 1):
        tokens.append(token := logits[:, -1].argmax(-1, keepdim=True))
        each = zip(ended, token[:, 0].tolist(), limits, strict=True)
        ended = [over or t in ends or n == limit for over, t, limit in each]
        if all(ended):
            break
        logits = steps.behind(cache, token)
    new = zip(torch.cat(tokens, dim=1).tolist(), limits, strict=True)
    return [up_to_end(ids, ends)[:limit] for ids, limit in new], cache


def behind(context: Context, question: Mapping[str, Tensor]) -> tuple[dict[str, Any], Read]:
    """All tokens of a context and a question of text, and what reads the question behind it."""
    given = context.behind(question)
    cache, ids = given.pop(CACHE), question["input_ids"]

    def read() -> tuple[Any, Tensor]:
        before, mask = given["attention_mask"].tensor_split([-ids.shape[1]], dim=1)
        cache.expect()
        steps = Steps(context.model, {"input_ids": ids, "attention_mask": before})
        return cache, steps.behind(cache, ids, mask)[:, -1:]

    return given, read


class _Recorder(CompressedCache):
    """Remembers what each layer was given, and holds nothing.

    `calls` has by layer its keys and values [B, H, N, D], and, where it is compressed, its query
    [B, Hq, N, D] and the options of its attention; `rotary` its rotary embedding.
    """

    def __init__(self, config: Any, plan: CacheConfig) -> None:
        super().__init__(config, plan)
        self.calls: dict[int, tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]] = {}
        self.rotary: dict[int, Rotary] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Of a layer that is left alone, its keys and values."""
        self.calls[layer_idx] = key_states, value_states, None, {}
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Refuse states that are no keys and values."""
        raise ValueError("a pass of a model with linear attention cannot be taken in")

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        delegate: Callable[[], tuple[Tensor, Any]],
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Of a layer that is compressed, all that its attention is given."""
        running = current.get()
        assert running is not None
        self.calls[layer_idx] = key, value, query, options
        self.rotary |= running.rotary
        return delegate()

    def finish(self) -> None:
        """Nothing is evicted."""
