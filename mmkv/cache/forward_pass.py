"""What is known of the call that is running through a wrapped model.

One value per call, in one context variable: the hooks of `mmkv.attach` fill it in, the cache and
the attention function read it. The next call replaces it, and every way out of this one drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mmkv.layer_inputs import LayerInputs, Rotary

if TYPE_CHECKING:
    from mmkv.adapters import Adapter
    from mmkv.cache.compressed import CompressedCache
    from mmkv.cache.prompt_kv import PromptKV

NOT_ATTENDED = (
    "{what} took keys and values into a compressed cache, but the attention function that attends "
    "to it did not run: after model.set_attn_implementation(...), or with a model that is not "
    "wrapped any more, call mmkv.unwrap(model) if it is wrapped, mmkv.wrap(model, ...) again, and "
    "start a new cache"
)


class AttentionCall(NamedTuple):
    """What one layer's attention function was given: query [B, Hq, q, D], key [B, H, q, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float | None
    softcap: float | None


@dataclass(eq=False)
class ForwardPass:
    """One call of a wrapped model.

    Attributes:
        ids: int [B, q], the model's input ids; None where it was given embeddings.
        mask: the attention mask that the model was called with.
        cache_given: the cache that the model was called with.
        generating: whether `generate` makes the call: its masks only ever grow by ones.
        entered: whether the decoder has begun.
        cache: the cache of this pass; None before the decoder begins, and without a cache.
        hidden: bool [B, seen], tokens held that the mask hides from this pass; None: none.
        streams: the residual stream [B, q, hidden] that entered each layer, for SqueezeAttention.
        collector: in a pass that stores nothing, its `add` is given each layer's `AttentionCall`
            and returns its output, or None for the model's own; None otherwise.
        observes: whether queries of this step are remembered, see `CacheState.observes_replies`.
        parts: the model's; None before the decoder begins.
        rotary: each layer's rotary embedding of the new tokens, where the score needs it.
        turned: what the latest of these was made of, and it: layers share one.
    """

    ids: Tensor | None = None
    mask: Any = None
    cache_given: Any = None
    generating: bool = False
    entered: bool = False
    cache: CompressedCache | None = None
    hidden: Tensor | None = None
    streams: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    collector: Any = None
    observes: bool = False
    parts: Adapter | None = None
    rotary: dict[int, Rotary] = field(default_factory=dict[int, Rotary])
    turned: tuple[Any, Rotary] | None = None
    # The layer whose new tokens the cache's `update` took, until its attention function runs.
    pending: int | None = None
    # Per mask that the layers were given: the mask, and what `view` found.
    _views: dict[int, tuple[Tensor, Tensor | None]] = field(
        default_factory=dict[int, "tuple[Tensor, Tensor | None]"]
    )

    def check_attended(self) -> None:
        """Every layer's new tokens were attended to by our attention function.

        Raises:
            ValueError: those of one were not.
        """
        if self.pending is not None:
            layer_idx, self.pending = self.pending, None
            raise ValueError(NOT_ATTENDED.format(what=f"layer {layer_idx}"))

    def inputs(self, layer_idx: int, held: PromptKV | None = None, **given: Any) -> LayerInputs:
        """What a layer's score is given: `given`, and what this call knows of the layer.

        Keys, values, bias and which of them are tokens are those that are `held`, or given.
        """
        if held is not None:
            given |= {"key": held.keys, "value": held.values, "bias": held.bias}
            given["valid"] = held.positions[:, 0] >= 0
        parts = self.parts
        weight = None if parts is None else partial(parts.output_weight, layer_idx)
        rotary = self.rotary.get(layer_idx)
        return LayerInputs(layer_idx=layer_idx, rotary=rotary, weight=weight, **given)

    def view(self, mask: Tensor | None, valid: Tensor) -> Tensor | None:
        """Which of the q new tokens see which, bool [B, 1, q, q]; None where it is plainly causal.

        Prefix-LM masks (PaliGemma) and images whose tokens see all of themselves (Gemma 3) are not.
        The mask is compared once a pass, not once a layer.

        Args:
            mask: [B or 1, 1, q, K], bool or added to the logits, as the layer was given it; None
                where transformers left it out, because it is causal.
            valid: bool [B, q], False for padding, of which it does not matter what it sees.
        """
        q = valid.shape[1]
        if mask is None or mask.ndim != 4 or q == 1:
            return None
        if id(mask) not in self._views:
            block = mask[..., -q:]
            if block.dtype != torch.bool:
                block = block > torch.finfo(block.dtype).min / 2
            valid = valid.to(mask.device)
            both = valid[:, None, None, :] & valid[:, None, :, None]
            causal = torch.ones(q, q, dtype=torch.bool, device=mask.device).tril()
            plain = bool((((block ^ causal) & both) == 0).all())
            self._views[id(mask)] = mask, None if plain else block & both
        return self._views[id(mask)][1]


class NotCapturableError(RuntimeError):
    """A step that cannot be captured or replayed, see `mmkv.attach.graph`."""


class GraphInputs(NamedTuple):
    """What a replayed step reads on the device, so that it does not wait for the host."""

    row: Tensor  # int64 [1], of the schedules' tables
    position: Tensor  # int32 [], the new token's

    @classmethod
    def at(cls, device: torch.device) -> GraphInputs:
        """On a device, still to be set."""
        row = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(row, torch.zeros((), dtype=torch.int32, device=device))

    def set(self, row: int, position: int) -> None:
        """To a step; the host does not wait."""
        self.row.fill_(row)
        self.position.fill_(position)


current: ContextVar[ForwardPass | None] = ContextVar("mmkv_forward_pass", default=None)
# What this thread does between two layers that are evicted at a prompt's end.
between: ContextVar[Callable[[], None]] = ContextVar("mmkv_between", default=lambda: None)


def outside_inference_mode() -> AbstractContextManager[None]:
    """What is made in here is written to after the pass, which may run in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class _NoGradient(torch.autograd.Function):
    """The identity, which says at `backward` that gradients do not reach what is cached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise ValueError(
            "gradients cannot flow through a compressed cache: its keys and values are copies. "
            "Give the model the whole sequence in one pass, or mmkv.unwrap(model) to train it"
        )


def refuse_gradient(x: Tensor) -> Tensor:
    """x [B, q, Hq, D] as it is; a gradient that comes back to it is an error."""
    return _NoGradient.apply(x) if x.requires_grad else x  # type: ignore[return-value]
