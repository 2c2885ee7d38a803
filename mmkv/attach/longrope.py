"""Models whose rotary frequencies change with the length (`rope_type="longrope"`, Phi-3 128k).

The rotary embedding of transformers takes the long frequencies in a pass that reaches beyond
`original_max_position_embeddings`, for all tokens of that pass. So all tokens must be read in one
kind of pass: keys with short frequencies do not go with later queries. Phi-3's `generate` drops the
cache at that length and reads everything again. Here the cache reads again what it has seen: a
context as a prompt, and then its question without eviction. A prompt in chunks uses the frequencies
of its whole length from the first chunk on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmkv.cache.compressed import CompressedCache
from mmkv.cache.forward_pass import Reading, current
from mmkv.calls import passing

if TYPE_CHECKING:
    from mmkv.attach.attachment import Attachment


def use_one_frequency(
    attachment: Attachment, cache: CompressedCache, q: int, positions: Tensor | None
) -> None:
    """Before a pass of q tokens, make all tokens have the same frequencies.

    Args:
        attachment: that of the model.
        cache: reads again what it has seen if this pass is the first that needs the long ones.
        q: number of new tokens.
        positions: int [B, q], theirs; None: they follow the tokens seen.

    Raises:
        ValueError: it cannot read them again.
    """
    limit, phase, seen = cache.short_positions, cache.phase, cache.get_query_offset()
    assert limit is not None
    if seen == 0:
        until = phase.until if isinstance(phase, Reading) else None
        cache.long |= until is not None and until > limit
    elif cache.crosses(q) and (positions is None or int(positions.max()) >= limit):
        _read_again(attachment, cache, limit, q)


def _read_again(attachment: Attachment, cache: CompressedCache, limit: int, q: int) -> None:
    """Read all tokens seen anew, a context as a prompt and what follows it as a question."""
    ids, seen = cache.ids, cache.get_query_offset()
    valid = cache.valid_tokens(seen)
    if (
        ids is None
        or valid is None
        or ids.shape[1] < seen
        or bool(attachment.parts.is_image(ids).any())
    ):
        raise ValueError(
            f"{q} tokens after {seen} pass position {limit}, beyond which this model (longrope) "
            "reads all tokens with other rotary frequencies, and the cache cannot read these again "
            "(pictures, or tokens not given as input_ids): start a new cache, and give all tokens "
            "to model.generate"
        )
    phase, plan, learned = cache.phase, cache.plan, cache.sizes_learned
    context, decoder = cache.context_length, attachment.parts.decoder
    mask, positions = valid.long(), (valid.cumsum(-1) - 1).clamp(min=0)
    cache.reset()
    cache.plan = plan
    cache.long, cache.sizes_learned, cache.context_length = True, learned, context
    until = None
    if context is None and isinstance(phase, Reading):  # one prompt, which this pass completes
        until = phase.until or seen + q
    start = 0
    for end in (seen,) if context in (None, seen) else (context, seen):
        cache.phase = Reading(until, keeps_all=start > 0)
        inputs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        with torch.no_grad():
            decoder(input_ids=ids[:, start:end], **inputs, **passing(decoder, cache))
        start = end
    if isinstance(phase, Reading) and until is None:
        cache.expect(phase.until)
    cache.ids = ids


def before_rotary(
    attachment: Attachment, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add a position beyond the short ones, so that the module takes the long frequencies."""
    running = current.get()
    cache = None if running is None else running.cache
    if cache is None or not cache.long:
        return None
    positions = kwargs["position_ids"] if len(args) < 2 else args[1]
    beyond = positions.new_full((*positions.shape[:-1], 1), cache.short_positions)
    return args[:1], {**kwargs, "position_ids": torch.cat([positions, beyond], dim=-1)}


def after_rotary(
    attachment: Attachment,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...] | None:
    """Leave out the added position's cosines and sines [B, 1, R]."""
    running = current.get()
    cache = None if running is None else running.cache
    return tuple(x[:, :-1] for x in output) if cache is not None and cache.long else None
