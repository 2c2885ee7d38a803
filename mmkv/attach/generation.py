"""What `generate` asks a wrapped model for: its cache, and whether it can do what is asked."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmkv.attach import graph, hooks
from mmkv.cache.compressed import CompressedCache
from mmkv.calls import CACHE, cache_in

if TYPE_CHECKING:
    from mmkv.attach.attachment import Attachment

# How far pictures move the text of the call in hand, int64 [B, 1], where the model says so.
_rope_deltas: ContextVar[Tensor | None] = ContextVar("_rope_deltas", default=None)
_remembered = threading.Lock()
# Ways that transformers moved into code on the Hub, and the settings that ask for them.
_MOVED = {
    "contrastive_search": ("penalty_alpha",),
    "dola_generation": ("dola_layers",),
    "group_beam_search": ("num_beam_groups",),
    "constrained_beam_search": ("force_words_ids", "constraints"),
}


def prepare_cache(
    attachment: Attachment,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """In place of `_prepare_cache_for_generation`: make a compressed cache, or continue one."""
    mode = kwargs.get("generation_mode", args[0] if args else "")
    _refuse_other_caches(generation_config, str(getattr(mode, "value", mode)))
    cache = model_kwargs.get(CACHE)
    if cache is not None:
        hooks.check_cache(cache, attachment)
        if generation_config.use_cache is False:
            raise ValueError(
                "use_cache=False behind a cache would read the new tokens alone: leave one of "
                "them out"
            )
        cache._is_user_defined = True
    elif generation_config.use_cache is False:
        return
    else:
        cache = CompressedCache(attachment.parts.config, attachment.plan)
        model_kwargs[CACHE] = cache
    if generation_config.num_beams > 1:  # beams do not ask
        graph.pays(attachment.model, model_kwargs, generation_config)
    cache.max_length = generation_config.max_length or 0
    cache.rope_deltas = _rope_deltas.get()
    if cache.rope_deltas is not None:  # of rows before they were repeated for beams
        rows = model_kwargs["position_ids"].shape[-2]
        cache.rope_deltas = cache.rope_deltas.repeat_interleave(rows // len(cache.rope_deltas), 0)
    until = None
    if getattr(generation_config, "prefill_chunk_size", None) is not None:
        mask = model_kwargs.get("attention_mask")
        until = generation_config._mask_length if mask is None else mask.shape[1]
    cache.expect(until)


def prepare_config(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """In place of `_prepare_generation_config`: refuse what a compressed cache cannot do."""
    model: Any = attachment.model
    found = type(model)._prepare_generation_config(model, *args, **kwargs)
    _refuse_moved(found[0])
    _rope_deltas.set(None)
    return found


def prepare_positions(
    attachment: Attachment, inputs: Tensor, model_kwargs: dict[str, Any]
) -> Tensor:
    """In place of `_prepare_position_ids_for_generation`: those of this cache, whoever called last.

    Models with three axes of positions (Qwen2-VL) remember how far pictures moved the text of the
    last call. Here a cache remembers it. Where it does not (`mmkv.contexts`), the model counts from
    all tokens and the grids of all pictures.

    Raises:
        ValueError: a cache that cannot be continued, or there is no token that it has not seen.
    """
    model: Any = attachment.model
    known: Any = model_kwargs.get(CACHE)
    if known is not None:
        hooks.check_cache(known, attachment)
    parts: list[Any] = [model, getattr(model, "model", None)]
    owners = [x for x in parts if hasattr(x, "rope_deltas")]
    prepare = type(model)._prepare_position_ids_for_generation
    with _remembered:
        for owner in owners:
            owner.rope_deltas = None if known is None else known.rope_deltas
        found: Tensor = prepare(model, inputs, model_kwargs)
        for owner in owners:
            _rope_deltas.set(owner.rope_deltas)
    if known is not None and 0 < known.get_seq_length() >= found.shape[-1]:
        raise ValueError(
            f"the cache has seen {known.get_seq_length()} tokens, and there are "
            f"{found.shape[-1]}: give all that it has seen, and at least one more"
        )
    ids = model_kwargs.get("input_ids", inputs)
    if known is not None and ids.ndim == 2 and ids.shape[1] == found.shape[-1]:
        known.check_read(ids, model_kwargs.get("attention_mask"))
    return found


def prepare_inputs(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """In place of `prepare_inputs_for_generation`: the call that follows is `generate`'s."""
    model: Any = attachment.model
    found = type(model).prepare_inputs_for_generation(model, *args, **kwargs)
    ids, mask, cache = args[0], kwargs.get("attention_mask"), cache_in(kwargs)
    if isinstance(cache, CompressedCache) and mask is not None and mask.ndim == 2:
        cache.remember(ids, mask.shape[1])
    hooks.generated_mask.set(found.get("attention_mask"))
    return found


def refuse_batching(*args: Any, **kwargs: Any) -> None:
    """In place of `generate_batch`: refused."""
    raise ValueError("continuous batching keeps a paged cache of its own: mmkv.unwrap(model) first")


def _refuse_moved(config: Any) -> None:
    """Refuse what needs foreign code, which treats the cache in ways that nobody has checked."""
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    for name in _MOVED.get(mode, ()):
        if (value := getattr(config, name, None)) is not None:
            raise ValueError(
                f"{name}={value!r} asks for {mode.replace('_', ' ')}, which transformers leaves to "
                "code on the Hub: drop it (greedy, sampling and beams work), or "
                "mmkv.unwrap(model) first"
            )


def _refuse_other_caches(config: Any, mode: str) -> None:
    """Refuse a cache of another kind, or one that tokens are taken back from."""
    name = config.cache_implementation
    if name not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={name!r} asks for a cache of its own, but this model makes a "
            "compressed one: drop it, or mmkv.unwrap(model) first"
        )
    if "assisted" in mode:
        raise ValueError(
            "assisted decoding takes tokens back from the cache, which a compressed cache cannot: "
            "generate without an assistant, or mmkv.unwrap(model) first"
        )
