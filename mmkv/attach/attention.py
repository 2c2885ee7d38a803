"""The attention function, registered with transformers' `AttentionInterface`.

It delegates to the model's own implementation (sdpa, eager, flash) in the first pass of a prompt,
and to the cache in later passes. For a model that is not wrapped it only delegates. Several models
may share one config object, so `wrap` changes no config: a wrapped model's decoder has a view of
its config that names our attention function.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import AttentionCall, ForwardPass, current
from mmkv.calls import without
from mmkv.layer_inputs import LayerInputs

# The model's attention implementation -> ours. transformers treats any name containing "flash"
# as its own flash attention, so ours avoid the word.
NAMES = {
    "sdpa": "mmkv_sdpa",
    "eager": "mmkv_eager",
    "flash_attention_2": "mmkv_fa2",
    "flash_attention_3": "mmkv_fa3",
}


def register() -> None:
    """Register our attention and mask functions; this is idempotent and changes no model."""
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
    """Compute one layer's attention: query [B, Hq, q, D], key and value [B, H, q, D]."""

    def delegate() -> tuple[Tensor, Any]:
        function, owner = _base_function(base, module)
        return function(owner, query, key, value, attention_mask, **kwargs)

    running = current.get()
    if running is None:
        return delegate()
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    softcap = kwargs.get("softcap")
    call = AttentionCall(query, key, value, attention_mask, scale, softcap, module.layer_idx)
    if running.collector is not None:
        out = running.collector.add(running.inputs(call))
        return delegate() if out is None else (out, None)
    layer_idx, running.pending = running.pending, None
    if layer_idx is None:  # this layer is not compressed
        return delegate()
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} uses learned sinks or position biases, which the compressed "
            "cache does not compute: mmkv.unwrap(model)"
        )
    cache = running.cache
    assert cache is not None
    output = delegate() if cache.is_empty(layer_idx) else (cache.attend(call), None)
    if cache.reading is not None:
        cache.read(running.inputs(call))
    return output


def _base_function(base: str, module: nn.Module) -> tuple[Callable[..., Any], Any]:
    """Return the model's own attention function, and the module to call it with."""
    if base == "eager":
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        # If a model has none (Falcon), sdpa computes the same.
        return eager or ALL_ATTENTION_FUNCTIONS["sdpa"], module
    if base.startswith("flash"):
        # Flash attention looks up its kernel by the config's implementation name.
        config = _Overlay(module.config, _attn_implementation=base)
        return ALL_ATTENTION_FUNCTIONS[base], _Overlay(module, config=config)
    return ALL_ATTENTION_FUNCTIONS[base], module


class _Overlay:
    """A view of an object with some attributes replaced; the original does not change."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class _Enough(Exception):  # noqa: N818 - a signal, not an error
    """Ends a mini-prefill inside the last layer's attention."""


@dataclass
class _Collector:
    """Collects the scores of the compressed layers in a pass that stores nothing."""

    cache: CompressedCache
    scores: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, layer: LayerInputs) -> None:
        """Score one layer; end the pass after the last one."""
        if layer.layer_idx not in self.cache.ordinal:
            return
        self.scores.append(self.cache.first_scores(layer))
        if len(self.scores) == len(self.cache.compressed):
            raise _Enough


def run_mini_prefill(
    running: ForwardPass, decoder: nn.Module, arguments: dict[str, Any]
) -> list[Tensor]:
    """Return the scores [B, H or 1, N] of the compressed layers from a pass that stores nothing.

    XKV (arXiv 2412.05896, section IV-A): the pass ends inside the last layer, once its attention
    scores are known.
    """
    cache = running.cache
    assert cache is not None
    running.collector = collector = _Collector(cache)
    try:
        with torch.no_grad():
            decoder.forward(**{**without(arguments), "use_cache": False})
    except _Enough:
        pass
    finally:
        running.collector = None
    return collector.scores


def is_view(config: Any) -> bool:
    """Return whether a config is the view of a wrapped model's decoder."""
    return hasattr(type(config), "_mmkv_original")


def view(config: Any) -> Any:
    """Return a view of a config, sharing its attributes, that names our attention function.

    A deep or pickled copy of a view is a view of the copied config.
    """
    view_config = object.__new__(_view_class(type(config)))
    object.__setattr__(view_config, "__dict__", vars(config))
    object.__setattr__(view_config, "_mmkv_original", config)
    return view_config


@cache
def _view_class(kind: Any) -> type[Any]:
    implementation: property = kind._attn_implementation
    originals = {ours: name for name, ours in NAMES.items()}

    def get(self: Any) -> str | None:
        name = implementation.__get__(self)
        return NAMES.get(name, name)

    def put(self: Any, value: Any) -> None:
        if isinstance(value, dict) and "" not in value:  # it has those of sub-configs only
            value = {"": implementation.__get__(self), **value}
        implementation.__set__(self, value)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        # A model that is built from the view stores the name that it read there.
        if name == "_attn_implementation_internal":
            value = originals.get(value, value)
        kind.__setattr__(self, name, value)

    def reduce(self: Any, protocol: Any) -> Any:
        return view, (self._mmkv_original,)

    def shallow(self: Any) -> Any:
        return copy.copy(self._mmkv_original)

    # Its __class__ must not be `kind`: torch.compile would read the properties of `kind`.
    members = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__slots__": ("_mmkv_original",),
        "_attn_implementation": property(get, put),
        "__setattr__": set_attribute,
        "__copy__": shallow,
        "__reduce_ex__": reduce,
    }
    return type(kind.__name__, (kind,), members)
