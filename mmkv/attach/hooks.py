"""Hooks of a wrapped model: they prepare the cache for each pass before its layers run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmkv.attach import attention, longrope, repetition
from mmkv.cache import checks
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import ForwardPass, Reading, current
from mmkv.calls import cache_in, passing, without
from mmkv.layer_inputs import Rotary
from mmkv.policy import Policy
from mmkv.sizes.squeeze import residual_similarity

if TYPE_CHECKING:
    from mmkv.adapters import Adapter
    from mmkv.attach.attachment import Attachment

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# The attention mask of `generate`'s next call.
generated_mask: ContextVar[Any] = ContextVar("mmkv_generated_mask", default=None)


def check_cache(cache: Any, attachment: Attachment) -> None:
    """Check that the wrapped model can continue this cache.

    Raises:
        ValueError: it is of another kind, was made by another model, in another type or with
            another policy, or was interrupted within a pass.
    """
    if not isinstance(cache, CompressedCache):
        raise ValueError(
            f"the cache given is a {type(cache).__name__}, but a wrapped model makes and continues "
            "a CompressedCache: pass none, or mmkv.unwrap(model) first"
        )
    checks.check_plan(cache, attachment.parts.config, attachment.plan)
    checks.check_dtype(cache, attachment.parts.dtype)
    checks.check_whole(cache)


@torch.compiler.disable
def before_model(attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Record those arguments of the model's call that its decoder does not receive."""
    if module is not attachment.model:
        raise ValueError(
            "this is a shallow copy of a wrapped model and shares its hooks: use "
            "copy.deepcopy(model), or copy first and wrap the copy"
        )
    kwargs = _named(module, args, kwargs)
    mask = kwargs.get("attention_mask")
    ForwardPass.begin(
        module,
        ids=kwargs.get("input_ids"),
        mask=mask,
        has_cache=cache_in(kwargs) is not None,
        generating=mask is not None and mask is generated_mask.get(),
    )
    generated_mask.set(None)


def _named(module: nn.Module, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return all arguments of a call by name."""
    if not args:
        return kwargs
    names = list(signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@torch.compiler.disable
def after_model(attachment: Attachment, *call: Any) -> None:
    """End the pass of this call, after an exception too."""
    ForwardPass.end(attachment.model)


@torch.compiler.disable
def before_decoder(
    attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs] | None:
    """Make the cache if the model was called without one, and prepare it for this pass."""
    parts = attachment.parts
    if module.training:
        raise ValueError(
            "a wrapped model is for inference: call model.eval(), or to train it mmkv.unwrap(model)"
        )
    attachment.complete_plan()
    kwargs = _named(module, args, kwargs)
    cache: Any = cache_in(kwargs)
    running = current.get()
    if running is None or running.entered or not running.is_of(attachment.model):
        # The decoder was called directly.
        mask, has_cache = kwargs.get("attention_mask"), cache is not None
        running = ForwardPass.begin(module, mask=mask, has_cache=has_cache)
    running.entered, running.parts = True, parts
    if not running.has_cache and isinstance(cache, DynamicCache):
        cache = cache if cache.get_seq_length() else None  # an empty one is made by Idefics3
    if cache is None:
        use_cache = kwargs.get("use_cache")
        if not (module.config.use_cache if use_cache is None else use_cache):  # type: ignore[union-attr]
            return None
        cache = CompressedCache(parts.config, attachment.plan)
    kwargs = {**without(kwargs), **passing(module, cache)}
    if (name := parts.config._attn_implementation) not in attention.NAMES:
        raise ValueError(
            f"the attention implementation was changed to {name!r} after mmkv.wrap, which cannot "
            f"attend to a compressed cache: set one of {', '.join(attention.NAMES)}, or "
            "mmkv.unwrap(model)"
        )
    check_cache(cache, attachment)
    embeds = kwargs.get("inputs_embeds")
    tokens = kwargs.get("input_ids") if embeds is None else embeds
    if tokens is None:  # the decoder raises its own error
        return None
    checks.check_tokens(cache, tokens)
    if cache.short_positions is not None:
        longrope.use_one_frequency(attachment, cache, tokens.shape[1], kwargs.get("position_ids"))
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4):
        # Gemma 3 and PaliGemma make the 4-D mask above the decoder: use the model's own argument.
        mask = running.mask
    if kwargs.get("output_attentions") and cache.get_query_offset() > 0:
        raise ValueError(
            "output_attentions=True: on a compressed cache a decode step, a later turn or a later "
            "chunk returns no attention weights: leave it out, or mmkv.unwrap(model)"
        )
    if isinstance(cache.phase, Reading):
        _begin_prompt(attachment, cache, running, mask, tokens, kwargs)
    else:
        _begin_step(cache, running, mask, tokens)
    cache.in_pass = True
    return (), kwargs


def _begin_prompt(
    attachment: Attachment,
    cache: CompressedCache,
    running: ForwardPass,
    mask: Any,
    tokens: Tensor,
    kwargs: Kwargs,
) -> None:
    """Prepare the cache for a prompt's pass; `tokens` are ids [B, q] or embeddings."""
    seen = cache.get_query_offset()
    full_mask = _mask(mask, tokens, seen)
    valid = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
    earlier = None
    if full_mask is not None:
        earlier, valid = full_mask[:, :seen], full_mask[:, seen:]
    image = _image_tokens(attachment, cache.plan.policy, running, valid)
    attachment.parts.forget_changed()
    cache.dtype = attachment.parts.dtype
    if cache.begin(running, valid, earlier, image):
        cache.set_sizes(attention.run_mini_prefill(running, attachment.parts.decoder, kwargs))
    if running.ids is not None and running.ids.shape == valid.shape and not running.generating:
        cache.record_ids(running.ids, seen + tokens.shape[1])


def _begin_step(cache: CompressedCache, running: ForwardPass, mask: Any, tokens: Tensor) -> None:
    """Prepare the cache for a decode step; `tokens` are ids [B, q] or embeddings."""
    seen, q = cache.get_query_offset(), tokens.shape[1]
    # `generate` only appends ones to its mask, and reading it would wait for the GPU.
    needs_mask = q > 1 or tokens.device.type == "cpu" or not running.generating
    cache.step(running, _mask(mask, tokens, seen) if needs_mask else None, q)
    fed = not (running.generating or cache.in_graph)  # by a caller's own loop
    if fed and cache.short_positions is not None and running.ids is not None:
        cache.record_ids(running.ids, seen + q)  # they may have to be read again


@torch.compiler.disable
def after_decoder(
    attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs, output: Any
) -> None:
    """Evict the layers whose sizes depend on all layers, and end the pass of a direct call."""
    running = current.get()
    if running is None or running.parts is not attachment.parts:
        return
    try:
        if running.cache is not None and output is not None:
            running.check_attended()
            if running.cache.plan.policy.score.repeats:
                repetition.run(attachment, running, kwargs)
            running.cache.finish()
            running.cache.in_pass = False
    finally:
        running.cache = running.parts = None
        ForwardPass.end(module)


@torch.compiler.disable
def uncompiled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the decoder outside of torch.compile, as a cache's sizes change from call to call."""
    try:
        return forward(*args, **kwargs)
    except Exception:
        raise
    except BaseException:  # such as KeyboardInterrupt, after which no hook runs
        current.set(None)
        raise


def before_attention(
    layer_idx: int, attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Record a layer's rotary embedding of the new tokens, for a score that needs it."""
    running, cos_sin = current.get(), kwargs.get("position_embeddings")
    cache = None if running is None else running.cache
    if running is None or cache is None or cos_sin is None:
        return
    if not (running.observes or isinstance(cache.phase, Reading)):
        return
    if not getattr(module, "use_rope", True):  # Llama 4's layers with full attention
        return
    if running.latest_rotary is None or running.latest_rotary[0] is not cos_sin:
        running.latest_rotary = cos_sin, _rotary(attachment.parts, cos_sin, len(cache.lengths))
    running.rotary[layer_idx] = running.latest_rotary[1]


def _rotary(parts: Adapter, cos_sin: Any, rows: int) -> Rotary:
    """Return a layer's `position_embeddings` as a `Rotary` of every row."""
    if isinstance(cos_sin, Tensor):  # complex [B, Q, R / 2]
        cos_sin = tuple(x.repeat_interleave(2, dim=-1) for x in (cos_sin.real, cos_sin.imag))
    if cos_sin[0].ndim == 4:  # [3, B, Q, R], for the axes of MRoPE
        sections = parts.config.rope_parameters["mrope_section"] * 2
        by_section = [x.split(sections, dim=-1) for x in cos_sin]
        cos_sin = (torch.cat([x[i % 3] for i, x in enumerate(y)], dim=-1) for y in by_section)
    cos, sin = (x.expand(rows, -1, -1) for x in cos_sin)
    inv_freq = parts.frequencies().to(cos.device)  # with a device_map they may be elsewhere
    return Rotary(cos, sin, inv_freq, parts.facts.interleaved)


def before_repetition(
    attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Pass the input of a layer's attention on to the collector that repeats a prompt."""
    running = current.get()
    if running is not None and running.collector is not None:
        running.collector.hidden = args[0] if args else kwargs["hidden_states"]


def before_layer(
    layer_idx: int, attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Record the residual stream before a layer's attention (SqueezeAttention)."""
    running = current.get()
    if running is None or running.collector is not None:
        return
    if running.cache is not None and running.cache.expects_prompt:
        running.streams[layer_idx] = args[0] if args else kwargs["hidden_states"]


def after_attention(layer_idx: int, attachment: Attachment, module: nn.Module, *call: Any) -> None:
    """Compare the residual stream before attention and after its output is added.

    SqueezeAttention sizes layers by the result.
    """
    running = current.get()
    if running is None or running.cache is None or layer_idx not in running.streams:
        return
    before, cache = running.streams.pop(layer_idx), running.cache
    if cache.masks is None or not isinstance(cache.phase, Reading):
        return
    output = attachment.parts.added(layer_idx, call[-1][0])  # the output is the last
    before = before.to(output.device)  # a device_map moves it after this layer's hooks
    valid = cache.masks.valid[:, -before.shape[1] :].to(before.device)
    after = before + output
    with torch.no_grad():
        similarity = residual_similarity(before, after, valid)
    cache.phase.compare(layer_idx, similarity, valid.sum(-1))


def _mask(mask: Any, tokens: Tensor, seen: int) -> Tensor | None:
    """Return the mask, bool [B, seen + q], False for padding and masked tokens; None: no mask."""
    if mask is None:
        return None
    expected = (tokens.shape[0], seen + tokens.shape[1])
    if not isinstance(mask, Tensor) or mask.shape != expected:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask of shape {shape}: a compressed cache reads padding from a mask of "
            f"shape {expected}: give one, or use_cache=False, which makes no cache"
        )
    return mask.to(tokens.device).bool()


def _image_tokens(
    attachment: Attachment, policy: Policy, running: ForwardPass, valid: Tensor
) -> Tensor | None:
    """Return which tokens are image tokens, bool [B, q]; None if the model has none, or no ids."""
    ids = running.ids
    if not attachment.parts.image_token_ids:
        return None
    if ids is None or ids.shape != valid.shape:
        if policy.protect is None or not policy.protect.needs_image:
            return None
        raise ValueError(
            f"protect={policy.protect.name!r} tells text from image tokens by input_ids, and the "
            "model was given inputs_embeds alone: pass input_ids, or use protect='none'"
        )
    return attachment.parts.is_image(ids).to(valid.device)
