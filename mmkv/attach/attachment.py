"""The changes that `wrap` makes to one model, and their undo.

Replaced methods of `generate` make the cache and refuse options that it does not support. Hooks
and overrides are partial functions bound to an `Attachment`, not closures, so that a wrapped
model can be pickled, and its deep copy is a separate wrapped model.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.generation.utils import GenerationMixin

from mmkv.adapters import Adapter, short_positions
from mmkv.attach import attention, copy_probe, graph, hooks, longrope
from mmkv.cache import checks
from mmkv.cache.allotment import for_type
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.calls import CACHE, cache_in, has_pictures, reads_chunks, unwrap_container
from mmkv.decode.victims import Fixed, LeastAttended

_recording_lock = threading.Lock()
# The generation config of the latest call, a copy of its own, which takes the position offset of
# text after pictures to the cache: a streamer may call `generate` before the cache is made.
_latest_config: ContextVar[Any] = ContextVar("mmkv_generation_config", default=None)
_OFFSETS = "_mmkv_rope_deltas"  # int64 [B, 1]; None: not known
_rope_deltas_lock = threading.Lock()
# Generation modes that transformers moved to code on the Hub, and the settings that choose them.
_MOVED = {
    "contrastive_search": ("penalty_alpha",),
    "dola_generation": ("dola_layers",),
    "group_beam_search": ("num_beam_groups",),
    "constrained_beam_search": ("force_words_ids", "constraints"),
}


class Attachment:
    """A policy attached to a model.

    Attributes:
        model: the wrapped model.
        parts: its decoder, layers and attention modules.
        plan: policy, budget and profile; for the model's type, and with the copy probe's head
            sizes, once it is complete.
        compressed_layers: the indices of the compressed layers.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Adapter,
        plan: CacheConfig,
        compressed_layers: tuple[int, ...],
    ) -> None:
        self.model, self.parts, self.plan = model, parts, plan
        self.compressed_layers = compressed_layers
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._records_inputs = False

    def complete_plan(self) -> None:
        """Adapt the plan to the model's present type; run the copy probe if head sizes need it.

        The probe runs once, as soon as the model can run.
        """
        if self.plan.allotment is not None:
            _, head_dim = self.parts.pair_shape(self.compressed_layers[0])
            self.plan = for_type(self.plan, self.parts.dtype.itemsize, head_dim)
        if self.plan.waits_for_probe:
            self.plan = copy_probe.completed(self, self.plan)

    def record_attention_inputs(self) -> None:
        """Record the inputs of attention modules in all later passes that repeat a prompt."""
        with _recording_lock:
            if not self._records_inputs:
                self._records_inputs = True
                for module in self.parts.attentions:
                    self._hook(module, "register_forward_pre_hook", hooks.before_repetition)

    def detach(self) -> None:
        """Undo the changes of the model, the latest first."""
        while self._undo:
            function, arguments = self._undo.pop()
            function(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: it learns layer sizes and logs warnings by itself."""
        sampling, logged = copy.deepcopy(self.plan.sampling), set(self.plan.logged)
        return {**vars(self), "plan": replace(self.plan, sampling=sampling, logged=logged)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register our attention functions too, as this may be another process."""
        vars(self).update(state)
        attention.register()

    def attach(self) -> None:
        """Change the model; each change is registered for undo before it is made."""
        attention.register()
        model, parts = self.model, self.parts
        view = attention.view(parts.config)
        for module in parts.decoder.modules():
            if vars(module).get("config") is parts.config:
                self._set(module, "config", view)

        overrides: dict[str, Any] = {
            "_valid_auto_compile_criteria": partial(graph.pays, model),
            "get_compiled_call": partial(graph.Runner, model),
            "_prepare_cache_for_generation": partial(prepare_cache, self),
            "_prepare_generation_config": partial(prepare_config, self),
            "prepare_inputs_for_generation": partial(prepare_inputs, self),
            "_prepare_position_ids_for_generation": partial(prepare_positions, self),
            "_ipython_display_": partial(_show, self),
        }
        for name in ("generate_batch", "init_continuous_batching"):
            if hasattr(model, name):
                overrides[name] = refuse_batching
        for name, function in overrides.items():
            self._set(model, name, function)
        if parts.facts.forward is not None:
            for module in parts.attentions:
                self._set(module, "forward", partial(parts.facts.forward, module))

        self._set(parts.decoder, "forward", partial(hooks.uncompiled, parts.decoder.forward))
        self._hook(parts.decoder, "register_forward_pre_hook", hooks.before_decoder)
        self._hook(parts.decoder, "register_forward_hook", hooks.after_decoder, always_call=True)
        self._hook(model, "register_forward_pre_hook", hooks.before_model)
        self._hook(model, "register_forward_hook", hooks.after_model, always_call=True)
        if short_positions(parts.config) is not None:
            rotary: Any = parts.decoder.rotary_emb
            self._hook(rotary, "register_forward_pre_hook", longrope.before_rotary)
            self._hook(rotary, "register_forward_hook", longrope.after_rotary)
        if self.plan.policy.uses_rotary:
            for i in self.compressed_layers:
                attn = parts.attentions[i]
                self._hook(attn, "register_forward_pre_hook", partial(hooks.before_attention, i))
        # A plan in bytes that keeps everything may keep less once the model is cast.
        compares = self.plan.needs_all_layers or self.plan.allotment is not None
        if compares and self.plan.policy.layers.needs == "similarity":
            for i in self.compressed_layers:
                layer, attn = parts.layers[i], parts.attentions[i]
                self._hook(layer, "register_forward_pre_hook", partial(hooks.before_layer, i))
                self._hook(attn, "register_forward_hook", partial(hooks.after_attention, i))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of one module instance, and register its undo."""
        was_set = name in vars(module)
        self._undo.append((_restore, (module, name, value, was_set, vars(module).get(name))))
        vars(module)[name] = value

    def _hook(
        self, module: nn.Module, register: str, hook: Callable[..., Any], **options: Any
    ) -> None:
        handle = getattr(module, register)(partial(hook, self), with_kwargs=True, **options)
        self._undo.append((handle.remove, ()))


def attachment_of(model: Any) -> Attachment:
    """Return the attachment of a wrapped model, or of the model inside a container such as PEFT's.

    Raises:
        ValueError: the model is not wrapped.
    """
    inner = unwrap_container(model)
    attachment: Attachment | None = vars(inner).get("_mmkv")
    if attachment is None:
        raise ValueError(
            f"this {type(inner).__name__} is not wrapped: call mmkv.wrap(model, ...) first"
        )
    return attachment


def _show(attachment: Attachment) -> None:
    """Print one line, not all modules, in a notebook cell that ends with `mmkv.wrap(...)`."""
    name = type(attachment.model).__name__
    print(f"{name}, wrapped: {attachment.plan.describe()}; print(model) shows its modules")


def _restore(module: nn.Module, name: str, value: Any, was_set: bool, original: Any) -> None:
    """Undo setting `value`, unless the attribute has been set to something else since.

    A hook that accelerate added later stays, and calls the original again.
    """
    attrs, saved = vars(module), f"_old_{name}"
    if attrs.get(saved) is value:
        attrs[saved] = original if was_set else getattr(type(module), name).__get__(module)
    if attrs.get(name) is not value:
        return
    if was_set:
        attrs[name] = original
    else:
        del attrs[name]


def prepare_cache(
    attachment: Attachment,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Replace `_prepare_cache_for_generation`: make a compressed cache, or continue one."""
    attachment.complete_plan()
    name = generation_config.cache_implementation
    if name not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={name!r} asks for a cache of its own, but this model makes a "
            "compressed one: drop it, or mmkv.unwrap(model) first"
        )
    if "assisted" in str(generation_mode.value):
        raise ValueError(
            "assisted decoding takes tokens back from the cache, which a compressed cache cannot: "
            "generate without an assistant, or mmkv.unwrap(model) first"
        )
    if generation_config.use_cache is False:
        raise ValueError(
            "use_cache=False leaves nothing to compress: pass use_cache=True (the model's "
            "generation_config may say False), or mmkv.unwrap(model) first"
        )
    cache = model_kwargs.get(CACHE)
    if cache is not None:
        hooks.check_cache(cache, attachment)
        cache._is_user_defined = True
    else:
        cache = CompressedCache(attachment.parts.config, attachment.plan)
        model_kwargs[CACHE] = cache
    if generation_config.num_beams > 1:  # beam search does not call it, so the log would lack it
        graph.pays(attachment.model, model_kwargs, generation_config)
    cache.max_length = max_cache_length
    cache.rope_deltas = getattr(generation_config, _OFFSETS, None)
    if cache.rope_deltas is not None:  # one for each row, before rows are repeated for beams
        rows = model_kwargs["position_ids"].shape[-2]
        cache.rope_deltas = cache.rope_deltas.repeat_interleave(rows // len(cache.rope_deltas), 0)
    until = None
    if (size := getattr(generation_config, "prefill_chunk_size", None)) is not None:
        if not reads_chunks(cache, has_pictures(model_kwargs)):
            raise ValueError(
                f"prefill_chunk_size={size}: transformers looks at pictures in chunks from 5.23, "
                "and reads a later turn's chunks from 5.21 on: leave it out, or update transformers"
            )
        mask = model_kwargs.get("attention_mask")
        until = generation_config._mask_length if mask is None else mask.shape[1]
    cache.expected = (until,)


def prepare_config(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """Replace `_prepare_generation_config`: refuse what a compressed cache does not support."""
    model: Any = attachment.model
    prepared = type(model)._prepare_generation_config(model, *args, **kwargs)
    # Modes that run code from the Hub, which may not handle a compressed cache.
    mode = str(getattr(prepared[0].get_generation_mode(), "value", ""))
    for name in _MOVED.get(mode, ()):
        if (value := getattr(prepared[0], name, None)) is not None:
            raise ValueError(
                f"{name}={value!r} asks for {mode.replace('_', ' ')}, which transformers leaves to "
                "code on the Hub: drop it (greedy, sampling and beams work), or "
                "mmkv.unwrap(model) first"
            )
    _check_guidance(attachment.plan, prepared[0].guidance_scale)
    _latest_config.set(prepared[0])
    return prepared


def _check_guidance(plan: CacheConfig, scale: float | None) -> None:
    """Refuse guidance whose second prompt, by default of one token, would fix the cache's size."""
    fixed = isinstance(plan.policy.decode, Fixed | LeastAttended) and isinstance(plan.budget, float)
    if scale in (None, 1) or not fixed or plan.keeps_all or plan.policy.least:
        return
    raise ValueError(
        f"guidance_scale={scale}: guidance reads a second prompt, by default of one token, and "
        f"decode={plan.policy.decode.name!r} would keep its cache at that size: use decode='grow', "
        "or a budget in tokens"
    )


def prepare_positions(
    attachment: Attachment, inputs: Tensor, model_kwargs: dict[str, Any]
) -> Tensor:
    """Replace `_prepare_position_ids_for_generation`: use the offsets of this call's cache.

    Models with three axes of positions (Qwen2-VL) store the position offset after pictures of the
    last call. Here each cache stores its own. If it has none (`mmkv.contexts`), the model computes
    positions from all tokens and the grids of all pictures.

    Raises:
        ValueError: the cache cannot be continued, or it has seen all of the tokens.
    """
    model: Any = attachment.model
    cache: Any = model_kwargs.get(CACHE)
    if cache is not None:
        hooks.check_cache(cache, attachment)
    parts: list[Any] = [model, getattr(model, "model", None)]
    owners = [x for x in parts if hasattr(x, "rope_deltas")]
    prepare = type(model)._prepare_position_ids_for_generation
    deltas = None if cache is None else cache.rope_deltas
    if deltas is not None:  # `generate` repeats the rows of positions for beams after this
        deltas = deltas[:: max(1, len(deltas) // len(inputs))]
    with _rope_deltas_lock:
        for owner in owners:
            owner.rope_deltas = deltas
        positions: Tensor = prepare(model, inputs, model_kwargs)
        if (config := _latest_config.get()) is not None:
            for owner in owners:
                setattr(config, _OFFSETS, owner.rope_deltas)
    ids, mask = model_kwargs.get("input_ids", inputs), model_kwargs.get("attention_mask")
    if cache is not None and 0 < cache.get_seq_length() >= positions.shape[-1]:
        if mask is not None and ids.ndim == 2 and ids.shape[1] > mask.shape[1]:
            raise ValueError(
                f"attention_mask has {mask.shape[1]} columns, and there are {ids.shape[1]} ids: "
                "give it one for each token, the new ones included"
            )
        raise ValueError(
            f"the cache has seen {cache.get_seq_length()} tokens, and there are "
            f"{positions.shape[-1]}: give all that it has seen, and at least one more. To go on "
            "from an earlier turn, for example after an error, continue a copy.deepcopy(cache) "
            "made then"
        )
    if cache is not None and ids.ndim == 2 and ids.shape[1] == positions.shape[-1]:
        checks.check_read(cache, ids, mask)
    if cache is not None and mask is not None and mask.ndim == 2:
        # Here, as `generate` drops a mask of ones, by which it has computed positions.
        checks.check_mask(cache, mask)
    return positions


def prepare_inputs(
    attachment: Attachment, ids: Tensor, *args: Any, inputs_embeds: Any = None, **kwargs: Any
) -> Any:
    """Replace `prepare_inputs_for_generation`: record the mask and ids of the next call.

    `generate` takes `inputs_embeds` only where it finds this name in the signature.
    """
    model: Any = attachment.model
    kwargs["inputs_embeds"] = inputs_embeds
    cache: Any = cache_in(kwargs)
    # Phi-3's own would drop the cache at the end of the short positions, see `longrope`.
    kind: Any = GenerationMixin if attachment.parts.facts.drops_cache else type(model)
    inputs: Any = kind.prepare_inputs_for_generation(model, ids, *args, **kwargs)
    tokens = inputs.get("input_ids")
    if isinstance(cache, CompressedCache):
        if cache.expected is not None:  # the first pass of this call
            checks.check_tokens(cache, inputs["inputs_embeds"] if tokens is None else tokens)
            cache.expect(*cache.expected)
        if tokens is not None:
            cache.record_ids(ids, cache.get_seq_length() + tokens.shape[1])
    hooks.generated_mask.set(inputs.get("attention_mask"))
    return inputs


def refuse_batching(*args: Any, **kwargs: Any) -> None:
    """Refuse continuous batching, in place of the model's methods that begin it."""
    raise ValueError("continuous batching keeps a paged cache of its own: mmkv.unwrap(model) first")
