"""`wrap` and `unwrap`: attach a policy to a model, and undo every step of it.

What is changed on the model: its text config's attention implementation, the creation of its cache,
and hooks that tell the cache about the prompt. State of a sequence lives on the cache, so one
wrapped model serves several threads.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmkv import adapters, attention, quantised, scores
from mmkv import graph as replaying
from mmkv.cache import CompressedCache, incoming
from mmkv.decoding import Grow
from mmkv.layer import CompressedLayer
from mmkv.plan import Plan
from mmkv.policy import Policy
from mmkv.profiles import Profile
from mmkv.refusing import refuse_moved, refuse_other_caches
from mmkv.registry import get_policy

M = TypeVar("M", bound=nn.Module)

# What the model was called with at its top, which its decoder does not see: ids, mask, cache.
_top: ContextVar[dict[str, Any] | None] = ContextVar("mmkv_top", default=None)


def wrap(
    model: M,
    policy: str | Policy = "prefixkv",
    budget: float | int | None = None,
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    kv_dtype: str | None = None,
    graph: bool = True,
    **policy_options: Any,
) -> M:
    """Attach an eviction policy to a model; `model.generate(...)` then works as before.

    Args:
        model: a `from_pretrained` object, see `mmkv.adapters` for the supported classes; or one
            inside PEFT, torch.compile or DataParallel.
        policy: a registered name (`mmkv.list_policies()`) or a `Policy`.
        budget: what is kept. A float in (0, 1] is the fraction of the prompt's key-value pairs,
            averaged over layers and heads; 1.0 keeps everything, in decoding too. An int is the
            mean number of tokens per layer and head.
        profile: per-layer kept fractions measured by `mmkv.calibrate`, or a file of them; it
            replaces the policy's layer sizes, and gives the budget where none is named.
        kv_dtype: "int8" or "int4" to hold what is kept in 8 or 4 bits; None for the model's type.
        graph: on a GPU, replay decode steps as a CUDA graph where that is possible and pays.
        policy_options: override the policy's defaults.

    Returns:
        The same model, configured.

    Raises:
        ValueError: an unsupported model, an unknown policy or option, a budget out of range, a
            profile of another model or budget, or a model that is wrapped already. Nothing is
            changed then.
    """
    given, model = model, adapters.innermost(model)
    if is_wrapped(model):
        raise ValueError(
            f"this {type(model).__name__} is wrapped already ({_describe(model)}): "
            "call mmkv.unwrap(model) first"
        )
    if isinstance(policy, Policy) and policy_options:
        raise ValueError(
            f"options {sorted(policy_options)} were given beside a Policy object: "
            "give them to the policy, or name it by a string"
        )
    chosen = policy if isinstance(policy, Policy) else get_policy(policy, **policy_options)
    parts = adapters.find(given)
    everywhere = CompressedCache(parts.config, Plan(chosen, None)).layers
    compressed = [i for i, x in enumerate(everywhere) if isinstance(x, CompressedLayer)]
    n_layers = len(compressed)
    if n_layers == 0:
        raise ValueError(
            f"every layer of this {type(model).__name__} has a sliding window "
            f"(sliding_window={parts.config.sliding_window}) and keeps its own cache small: "
            "there is nothing to compress"
        )
    fractions = None
    if profile is not None:
        loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
        fractions = loaded.fractions_for(parts.config, n_layers, budget)
        budget = loaded.budget if budget is None else budget
    budget = _checked_budget(chosen, budget)
    base = parts.config._attn_implementation
    if base not in attention.NAMES:
        raise ValueError(
            f"attn_implementation={base!r} is not supported: load the model with one of "
            f"{', '.join(attention.NAMES)}"
        )
    if chosen.protect == "instruction" and not parts.image_token_ids:
        raise ValueError(
            f"protect='instruction' keeps the prompt's text and lets image tokens compete; "
            f"{type(model).__name__} has no image tokens: use protect='none'"
        )
    mini_prefill = None
    if chosen.needs_all_layers and chosen.allocation == "mini-prefill" and fractions is None:
        mini_prefill = partial(attention.run_mini_prefill, parts.decoder, chosen, compressed)
    inv_freq = parts.rotary_frequencies() if chosen.reposition else None
    quantised.check(kv_dtype, adapters.head_dim(parts.config))
    plan = Plan(chosen, budget, fractions, inv_freq, mini_prefill, kv_dtype, graph)
    attention.register()
    with ExitStack() as undo:
        _attach(model, parts, plan, base, undo)
        vars(model)["_mmkv"] = (plan, undo.pop_all())
    return given


def unwrap(model: M) -> M:
    """Restore a wrapped model exactly.

    Raises:
        ValueError: the model is not wrapped.
    """
    inner = adapters.innermost(model)
    if not is_wrapped(inner):
        raise ValueError(f"this {type(inner).__name__} is not wrapped: call mmkv.wrap(model) first")
    undo: ExitStack = vars(inner).pop("_mmkv")[1]
    undo.close()
    return model


@contextmanager
def wrapped(model: M, *args: Any, **kwargs: Any) -> Generator[M]:
    """`wrap` for the length of a `with` block; takes the same arguments."""
    wrap(model, *args, **kwargs)
    try:
        yield model
    finally:
        unwrap(model)


def is_wrapped(model: nn.Module) -> bool:
    """Whether `wrap` was called on this very model, or on what stands around it."""
    return "_mmkv" in vars(adapters.innermost(model))


def _describe(model: nn.Module) -> str:
    plan: Plan = vars(model)["_mmkv"][0]
    return f"policy={plan.policy.name!r}, budget={plan.budget}"


def _checked_budget(policy: Policy, budget: float | int | None) -> float | int | None:
    if policy.keeps_all:
        return 1.0
    if policy.retention is not None:
        if budget is not None:
            raise ValueError(
                f"budget={budget} and retention={policy.retention} both size the cache: give one"
            )
        return None
    if budget is None:
        raise ValueError(
            f"policy {policy.name!r} needs a budget: a float in (0, 1] for a fraction of the "
            "prompt, or an int for a number of tokens"
        )
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ValueError(f"budget={budget!r}: expected a float in (0, 1] or an int of at least 1")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget}: a float is the fraction kept, in (0, 1]; "
            "use an int for a number of tokens"
        )
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"budget={budget}: an int is the number of tokens kept, at least 1")
    always = policy.observed + policy.sinks
    if isinstance(budget, int) and budget < always:
        raise ValueError(
            f"budget={budget} is below the {always} tokens that {policy.name!r} always keeps "
            f"(window={policy.observed}, sinks={policy.sinks}): raise it, or lower those"
        )
    return budget


def _attach(
    model: nn.Module, parts: adapters.Adapter, plan: Plan, base: str, undo: ExitStack
) -> None:
    """Change the model; each change is registered for undo before it is made."""
    config = parts.config

    undo.callback(setattr, config, "_attn_implementation_internal", base)
    config._attn_implementation_internal = attention.NAMES[base]

    def prepare_cache(
        generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        mode = kwargs.get("generation_mode", args[0] if args else "")
        refuse_other_caches(generation_config, str(getattr(mode, "value", mode)))
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            _check_cache(cache)
            cache._is_user_defined = True
        elif generation_config.use_cache is False:
            return
        else:
            cache = model_kwargs["past_key_values"] = CompressedCache(config, plan)
        cache.max_length = generation_config.max_length or 0
        cache.expects_prompt = True
        cache.complete_at = None
        if getattr(generation_config, "prefill_chunk_size", None) is not None:
            mask = model_kwargs.get("attention_mask")
            cache.complete_at = generation_config._mask_length if mask is None else mask.shape[1]

    def refuse_batching(*args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "continuous batching keeps a paged cache of its own: mmkv.unwrap(model) first"
        )

    def prepare_config(*args: Any, **kwargs: Any) -> Any:
        found = type(model)._prepare_generation_config(model, *args, **kwargs)  # type: ignore[operator]
        refuse_moved(found[0])
        return found

    overrides: dict[str, Any] = {
        **replaying.overrides(model),
        "_prepare_cache_for_generation": prepare_cache,
        "_prepare_generation_config": prepare_config,
    }
    for name in ("generate_batch", "init_continuous_batching"):
        if hasattr(model, name):
            overrides[name] = refuse_batching
    for name, function in overrides.items():
        undo.callback(vars(model).pop, name, None)
        vars(model)[name] = function

    if parts.facts.forward is not None:
        for attn in parts.attentions:
            own = {k: v for k, v in vars(attn).items() if k == "forward"}
            undo.callback(vars(attn).update, own)
            undo.callback(vars(attn).pop, "forward", None)
            vars(attn)["forward"] = partial(parts.facts.forward, attn)

    hooks = [
        parts.decoder.register_forward_pre_hook(_decoder_pre_hook(parts, plan), with_kwargs=True),
        parts.decoder.register_forward_hook(_decoder_post_hook, with_kwargs=True),
        model.register_forward_pre_hook(_model_pre_hook, with_kwargs=True),
        model.register_forward_hook(_model_post_hook, always_call=True),
    ]
    if plan.needs_all_layers and plan.policy.layers == "squeeze":
        for i, (layer, attn) in enumerate(zip(parts.layers, parts.attentions, strict=True)):
            before = _Residual(parts, i)
            hooks.append(layer.register_forward_pre_hook(before.enter, with_kwargs=True))
            hooks.append(attn.register_forward_hook(before.leave, with_kwargs=True))
    for hook in hooks:
        undo.callback(hook.remove)


def _check_cache(cache: Any) -> None:
    if not isinstance(cache, CompressedCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but a wrapped model makes and continues "
            "a CompressedCache: pass none, or mmkv.unwrap(model) first"
        )


def _is_new(cache: Any) -> bool:
    return isinstance(cache, DynamicCache) and cache.get_seq_length() == 0


def _model_pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    _top.set({"ids": ids, "mask": mask, "cache": kwargs.get("past_key_values")})


def _model_post_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    # Called after an exception too: nothing of this prompt may reach the next one.
    _top.set(None)
    incoming.set(None)


def _decoder_pre_hook(parts: adapters.Adapter, plan: Plan) -> Any:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if module.training:
            raise ValueError(
                "a wrapped model is for inference: call model.eval(), or to train it "
                "mmkv.unwrap(model)"
            )
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        cache: Any = kwargs.get("past_key_values")
        top = _top.get() or {"cache": cache}
        if top["cache"] is None and _is_new(cache):
            cache = None  # Idefics3 made it on its way down
        if cache is None:
            use_cache = kwargs.get("use_cache")
            if not (module.config.use_cache if use_cache is None else use_cache):  # type: ignore[union-attr]
                return None
            cache = CompressedCache(parts.config, plan)
            kwargs = {**kwargs, "past_key_values": cache}
        _check_cache(cache)
        embeds = kwargs.get("inputs_embeds")
        tokens = kwargs["input_ids"] if embeds is None else embeds
        mask = kwargs.get("attention_mask")
        if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4):
            # Gemma 3 and PaliGemma say above the decoder which tokens see each other.
            mask = top.get("mask", mask)
        if cache.expects_prompt:
            valid = _valid(tokens, mask, cache.get_seq_length())
            cache.begin(valid, _image_tokens(parts, valid), kwargs)
        elif tokens.shape[1] > 1:
            _check_continuation(cache, tokens, mask)
        return (), kwargs

    return hook


def _decoder_post_hook(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    cache = kwargs.get("past_key_values")
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    if isinstance(cache, CompressedCache):
        cache.finish()


def _valid(tokens: Tensor, mask: Any, seen: int) -> Tensor:
    """Bool [B, q], False for padding among the new tokens."""
    B, q = tokens.shape[:2]
    if mask is None:
        return torch.ones(B, q, dtype=torch.bool, device=tokens.device)
    if not isinstance(mask, Tensor) or mask.shape != (B, seen + q):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask of shape {shape}: a compressed cache reads padding from a mask of "
            f"shape {(B, seen + q)}"
        )
    return mask[:, seen:].to(tokens.device).bool()


def _image_tokens(parts: adapters.Adapter, valid: Tensor) -> Tensor | None:
    """Bool [B, N], True where the prompt holds an image token; None where there is none to see."""
    ids = (_top.get() or {}).get("ids")
    if not parts.image_token_ids or ids is None or ids.shape != valid.shape:
        return None
    return torch.isin(ids, torch.tensor(parts.image_token_ids, device=ids.device)).to(valid.device)


def _check_continuation(cache: CompressedCache, tokens: Tensor, mask: Any) -> None:
    """Several tokens at once behind a compressed prompt: only where nothing has to be dropped."""
    q = tokens.shape[1]
    schedules = [b.schedule for x in cache.compressed for b in x.blocks or ()]
    if not all(isinstance(s, Grow) for s in schedules):
        raise ValueError(
            f"{q} tokens at once behind a compressed prompt: policy {cache.plan.policy.name!r} "
            "drops a token a step while decoding; feed them one by one, or use decode='grow'"
        )
    if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, -q:].all()):
        raise ValueError("padding among tokens that continue a compressed cache is not supported")


class _Residual:
    """Measures how much one layer's attention changes the residual stream (SqueezeAttention)."""

    def __init__(self, parts: adapters.Adapter, index: int) -> None:
        self.parts, self.index = parts, index

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the stream before a prompt's attention, on the cache."""
        cache, layer = self._layer(kwargs)
        if cache is not None and layer is not None and cache.prefilling:
            layer.stream = args[0] if args else kwargs["hidden_states"]

    def leave(
        self, attn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Compare it with the stream after the attention was added back."""
        cache, layer = self._layer(kwargs)
        if cache is None or cache.prompt is None or layer is None or layer.stream is None:
            return
        before, layer.stream = layer.stream, None
        valid = cache.prompt.valid[:, -before.shape[1] :].to(before.device)
        after = before + self.parts.added(self.index, output[0])
        layer.compare(scores.residual_similarity(before, after, valid), valid.sum(-1))

    def _layer(self, kwargs: dict[str, Any]) -> tuple[CompressedCache | None, Any]:
        cache = kwargs.get(self.parts.facts.cache)
        if not isinstance(cache, CompressedCache):
            return None, None
        layer = cache.layers[self.index]
        return cache, layer if isinstance(layer, CompressedLayer) else None
