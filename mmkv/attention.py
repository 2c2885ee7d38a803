"""The attention function, registered with transformers' `AttentionInterface`.

It delegates to what the model used before (sdpa, eager, flash) wherever all keys are present, and
to the cache's own layer in decoding. On a model that is not wrapped it only delegates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv.cache import incoming
from mmkv.eviction import Prompt, importance
from mmkv.policy import Policy

# The model's attention implementation -> ours. transformers treats any name containing "flash"
# as its own flash attention, so ours avoid the word.
NAMES = {
    "sdpa": "mmkv_sdpa",
    "eager": "mmkv_eager",
    "flash_attention_2": "mmkv_fa2",
    "flash_attention_3": "mmkv_fa3",
}


class Enough(Exception):  # noqa: N818 - a signal, not an error
    """Ends a mini-prefill inside the last layer's attention."""


class Collector:
    """Gathers the scores of the layers that are compressed, in a pass that stores nothing."""

    def __init__(self, policy: Policy, layers: Sequence[int], prompt: Prompt) -> None:
        self.policy, self.layers, self.prompt = policy, layers, prompt
        self.scores: list[Tensor] = []

    def add(self, layer_idx: int, query: Tensor, key: Tensor, scale: float | None) -> None:
        """Score one layer; after the last one nothing more is needed."""
        if layer_idx not in self.layers:
            return
        valid, windows = self.prompt.valid, self.prompt.windows
        self.scores.append(
            importance(self.policy, query, key, scale=scale, valid=valid, windows=windows)
        )
        if len(self.scores) == len(self.layers):
            raise Enough


collecting: ContextVar[Collector | None] = ContextVar("mmkv_collecting", default=None)


def register() -> None:
    """Register our attention and mask functions; idempotent, changes no model."""
    for base, name in NAMES.items():
        AttentionInterface.register(name, partial(_attention, base))
        # Without a mask function of its own, an attention name gets no mask at all.
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])


def _attention(
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of one layer: query [B, Hq, q, D], key and value [B, H, q, D]."""

    def delegate() -> tuple[Tensor, Any]:
        function, owner = _base_function(base, module)
        return function(owner, query, key, value, attention_mask, **kwargs)

    scale = kwargs.get("scaling")
    if (collector := collecting.get()) is not None:
        collector.add(module.layer_idx, query, key, scale)
        return delegate()
    new = incoming.get()
    incoming.set(None)
    # The key is compared too: one left behind by an interrupted step must not be taken for this.
    if new is None or new.key is not key:
        return delegate()
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} uses learned sinks or position biases, which the compressed "
            "cache does not compute: mmkv.unwrap(model)"
        )
    return new.cache.attend(
        new.layer_idx,
        query,
        key,
        value,
        delegate,
        scale=scale,
        softcap=kwargs.get("softcap"),
        among=_among(attention_mask, query.shape[2]),
    )


def _among(mask: Tensor | None, q: int) -> Tensor | None:
    """Which of q new tokens see which, bool [B, 1, q, q]: Gemma 3's images see all of themselves.

    None where it is plainly causal, as a mask that was not made says.
    """
    if mask is None or mask.ndim != 4 or q == 1:
        return None
    block = mask[..., -q:]
    return block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2


def _base_function(base: str, module: nn.Module) -> tuple[Callable[..., Any], Any]:
    """The model's own attention function, and the module it should see."""
    if base == "eager":
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        # Where a model has none (Falcon) the same is computed by sdpa.
        return own or ALL_ATTENTION_FUNCTIONS["sdpa"], module
    if base.startswith("flash"):
        # It looks its kernel up by the config's implementation name.
        config = _Overlay(module.config, _attn_implementation=base)
        return ALL_ATTENTION_FUNCTIONS[base], _Overlay(module, config=config)
    return ALL_ATTENTION_FUNCTIONS[base], module


class _Overlay:
    """An object with some attributes replaced, the original untouched."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def run_mini_prefill(
    decoder: nn.Module,
    policy: Policy,
    layers: Sequence[int],
    arguments: dict[str, Any],
    prompt: Prompt,
) -> list[Tensor]:
    """Scores [B, H or 1, N] of the compressed `layers`, from a pass that stores nothing.

    XKV (arXiv 2412.05896, section IV-A): the pass ends inside the last layer, once its attention
    scores are known.
    """
    collector = Collector(policy, layers, prompt)
    token = collecting.set(collector)
    try:
        with torch.no_grad():
            decoder.forward(**{**arguments, "past_key_values": None, "use_cache": False})
    except Enough:
        pass
    finally:
        collecting.reset(token)
    return collector.scores
