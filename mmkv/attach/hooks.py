"""Hooks on a wrapped model: they tell the cache what comes, before the layers see it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmkv.attach import attention, repetition
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import ForwardPass, current
from mmkv.cache.phases import Reading
from mmkv.calls import cache_in, passing, without
from mmkv.layer_inputs import Rotary
from mmkv.policy import Policy
from mmkv.sizes.squeeze import residual_similarity

if TYPE_CHECKING:
    from mmkv.adapters import Adapter
    from mmkv.attach.attachment import Attachment

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# The mask of the call that `generate` makes next.
generated_mask: ContextVar[Any] = ContextVar("mmkv_generated_mask", default=None)


def check_cache(cache: Any, attachment: Attachment) -> None:
    """Whether the wrapped model may continue this cache.

    Raises:
        ValueError: it is of another kind, another model's, or made under another policy.
    """
    if not isinstance(cache, CompressedCache):
        raise ValueError(
            f"the cache given is a {type(cache).__name__}, but a wrapped model makes and continues "
            "a CompressedCache: pass none, or mmkv.unwrap(model) first"
        )
    cache.check_plan(attachment.parts.config, attachment.plan)


@torch.compiler.disable
def before_model(attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Remember what the model is called with, which its decoder does not see."""
    if module is not attachment.model:
        raise ValueError(
            "this is a shallow copy of a wrapped model and shares its hooks: use "
            "copy.deepcopy(model), or copy first and wrap the copy"
        )
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    current.set(
        ForwardPass(
            ids=kwargs.get("input_ids", args[0] if args else None),
            mask=mask,
            cache_given=cache_in(kwargs),
            generating=mask is not None and mask is generated_mask.get(),
        )
    )
    generated_mask.set(None)


@torch.compiler.disable
def after_model(*call: Any) -> None:
    """Nothing of this call may reach the next one; called after an exception too."""
    current.set(None)


@torch.compiler.disable
def before_decoder(
    attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs] | None:
    """Make the cache where none was given, and tell it what comes."""
    parts = attachment.parts
    if module.training:
        raise ValueError(
            "a wrapped model is for inference: call model.eval(), or to train it mmkv.unwrap(model)"
        )
    if args:
        kwargs = {"input_ids": args[0], **kwargs}
    cache: Any = cache_in(kwargs)
    running = current.get()
    if running is None or running.entered:  # the decoder is called by itself
        running = ForwardPass(mask=kwargs.get("attention_mask"), cache_given=cache)
        current.set(running)
    running.entered, running.parts = True, parts
    if running.cache_given is None and isinstance(cache, DynamicCache):
        cache = cache if cache.get_seq_length() else None  # Idefics3 made it on its way down
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
    tokens = kwargs["input_ids"] if embeds is None else embeds
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4):
        # Gemma 3 and PaliGemma say above the decoder which tokens see each other.
        mask = running.mask
    seen, q = cache.get_query_offset(), tokens.shape[1]
    if isinstance(cache.phase, Reading):
        seen_by = _mask(mask, tokens, seen)
        valid = tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
        earlier = None
        if seen_by is not None:
            earlier, valid = seen_by[:, :seen], seen_by[:, seen:]
        policy = cache.plan.policy
        given = running, parts.decoder, policy, attachment.compressed, kwargs
        first = partial(attention.run_mini_prefill, *given)
        image = _image_tokens(attachment, policy, running, valid)
        cache.begin(running, valid, earlier, image, first)
        if running.ids is not None and running.ids.shape == valid.shape and not running.generating:
            cache.remember(running.ids, seen + q)
    else:
        # `generate` only ever adds ones to its mask: to look at it would make a GPU wait.
        looks = q > 1 or tokens.device.type == "cpu" or not running.generating
        cache.step(running, _mask(mask, tokens, seen) if looks else None, q)
    return (), kwargs


@torch.compiler.disable
def after_decoder(
    attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs, output: Any
) -> None:
    """Evict the layers that had to wait for all others."""
    running = current.get()
    if running is None or running.cache is None or output is None:
        return
    if running.pending is not None:
        running.check_attended()
    if running.cache.plan.policy.score.repeats:
        repetition.run(attachment, running, kwargs)
    running.cache.finish()
    running.cache = None


@torch.compiler.disable
def uncompiled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The decoder's pass in a model that torch.compile took: what it keeps, no graph foresees."""
    return forward(*args, **kwargs)


def before_attention(
    layer_idx: int, attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Remember a layer's rotary embedding of the new tokens, for a score that needs it."""
    running, found = current.get(), kwargs.get("position_embeddings")
    cache = None if running is None else running.cache
    if running is None or cache is None or found is None:
        return
    if not (running.observes or isinstance(cache.phase, Reading)):
        return
    if not getattr(module, "use_rope", True):  # Llama 4's layers with full attention
        return
    if running.turned is None or running.turned[0] is not found:
        running.turned = found, _rotary(attachment.parts, found, len(cache.lengths))
    running.rotary[layer_idx] = running.turned[1]


def _rotary(parts: Adapter, found: Any, rows: int) -> Rotary:
    """A layer's `position_embeddings`, of every row."""
    if isinstance(found, Tensor):  # complex [B, Q, R / 2]
        found = tuple(x.repeat_interleave(2, dim=-1) for x in (found.real, found.imag))
    cos, sin = found
    inv_freq = parts.turns_by().to(cos.device)  # a device_map keeps them elsewhere
    rotary = Rotary.of(cos, sin, inv_freq, parts.config, interleaved=parts.facts.interleaved)
    cos, sin = (x.expand(rows, -1, -1) for x in (rotary.cos, rotary.sin))
    return replace(rotary, cos=cos, sin=sin)


def before_repetition(
    attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Tell what repeats a prompt in this pass what a layer's attention is given."""
    running = current.get()
    if running is not None and running.collector is not None:
        running.collector.hidden = args[0] if args else kwargs["hidden_states"]


def before_layer(
    layer_idx: int, attachment: Attachment, module: nn.Module, args: Args, kwargs: Kwargs
) -> None:
    """Remember the residual stream before a layer's attention (SqueezeAttention)."""
    running = current.get()
    if running is None or running.collector is not None:
        return
    if running.cache is not None and running.cache.expects_prompt:
        running.streams[layer_idx] = args[0] if args else kwargs["hidden_states"]


def after_attention(layer_idx: int, attachment: Attachment, module: nn.Module, *call: Any) -> None:
    """Compare it with the stream after the attention's output was added back."""
    running = current.get()
    if running is None or running.cache is None or layer_idx not in running.streams:
        return
    before, cache = running.streams.pop(layer_idx), running.cache
    if cache.prompt is None or not isinstance(cache.phase, Reading):
        return
    added = attachment.parts.added(layer_idx, call[-1][0])  # the output is the last
    before = before.to(added.device)  # a device_map moves the stream behind this layer's hooks
    valid = cache.prompt.valid[:, -before.shape[1] :].to(before.device)
    after = before + added
    with torch.no_grad():
        similarity = residual_similarity(before, after, valid)
    cache.phase.compare(layer_idx, similarity, valid.sum(-1))


def _mask(mask: Any, tokens: Tensor, seen: int) -> Tensor | None:
    """Bool [B, seen + q], False for padding and what is masked; None where there is no mask."""
    if mask is None:
        return None
    wanted = (tokens.shape[0], seen + tokens.shape[1])
    if not isinstance(mask, Tensor) or mask.shape != wanted:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask of shape {shape}: a compressed cache reads padding from a mask of "
            f"shape {wanted}"
        )
    return mask.to(tokens.device).bool()


def _image_tokens(
    attachment: Attachment, policy: Policy, running: ForwardPass, valid: Tensor
) -> Tensor | None:
    """Bool [B, q], True where the prompt holds an image token; None where there is none to see."""
    tokens, ids = attachment.parts.image_token_ids, running.ids
    if not tokens:
        return None
    if ids is None or ids.shape != valid.shape:
        if policy.protect is not None or policy.text_prior:
            asked, less = (
                ("text_prior=True", "text_prior=False")
                if policy.protect is None
                else ("protect='instruction'", "protect='none'")
            )
            raise ValueError(
                f"{asked} tells text from image tokens by input_ids, and the model "
                f"was given inputs_embeds alone: pass input_ids, or use {less}"
            )
        return None
    return torch.isin(ids, torch.tensor(tokens, device=ids.device)).to(valid.device)
