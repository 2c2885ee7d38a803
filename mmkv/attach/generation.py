"""What `generate` asks a wrapped model for: its cache, and whether it can do what is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmkv.attach import graph, hooks
from mmkv.attach.unsupported import refuse_moved, refuse_other_caches
from mmkv.cache.compressed import CompressedCache

if TYPE_CHECKING:
    from mmkv.attach.attachment import Attachment


def prepare_cache(
    attachment: Attachment,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """In place of `_prepare_cache_for_generation`: make a compressed cache, or continue one."""
    mode = kwargs.get("generation_mode", args[0] if args else "")
    refuse_other_caches(generation_config, str(getattr(mode, "value", mode)))
    cache = model_kwargs.get("past_key_values")
    if cache is not None:
        hooks.check_cache(cache, attachment)
        cache._is_user_defined = True
    elif generation_config.use_cache is False:
        return
    else:
        cache = CompressedCache(attachment.parts.config, attachment.plan)
        model_kwargs["past_key_values"] = cache
    if generation_config.num_beams > 1:  # beams do not ask
        graph.pays(attachment.model, cache, generation_config)
    cache.max_length = generation_config.max_length or 0
    until = None
    if getattr(generation_config, "prefill_chunk_size", None) is not None:
        mask = model_kwargs.get("attention_mask")
        until = generation_config._mask_length if mask is None else mask.shape[1]
    cache.expect(until)


def prepare_config(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """In place of `_prepare_generation_config`: refuse what a compressed cache cannot do."""
    model: Any = attachment.model
    found = type(model)._prepare_generation_config(model, *args, **kwargs)
    refuse_moved(found[0])
    return found


def prepare_inputs(attachment: Attachment, *args: Any, **kwargs: Any) -> Any:
    """In place of `prepare_inputs_for_generation`: the call that follows is `generate`'s."""
    model: Any = attachment.model
    found = type(model).prepare_inputs_for_generation(model, *args, **kwargs)
    hooks.generated_mask.set(found.get("attention_mask"))
    return found


def refuse_batching(*args: Any, **kwargs: Any) -> None:
    """In place of `generate_batch`.

    Raises:
        ValueError: always.
    """
    raise ValueError("continuous batching keeps a paged cache of its own: mmkv.unwrap(model) first")
