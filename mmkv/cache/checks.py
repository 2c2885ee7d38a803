"""Checks of a compressed cache before a pass: what cannot be continued is refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

from mmkv import adapters
from mmkv.cache.config import CacheConfig
from mmkv.cache.layer import CompressedLayer
from mmkv.cache.prompt_kv import PromptKV

if TYPE_CHECKING:
    from mmkv.cache.state import CacheState

logger = logging.getLogger(__name__)


def check_plan(cache: CacheState, config: Any, plan: CacheConfig) -> None:
    """Check that a model wrapped with `plan` can continue this cache.

    Raises:
        ValueError: the cache has another policy or budget, or belongs to another model.
    """
    if cache.shape != shape(config):
        raise ValueError(
            f"this CompressedCache was made by another model ({cache.shape}, here "
            f"{shape(config)}): start a new one"
        )
    if cache.plan != plan:
        made, now = cache.plan.describe(), plan.describe()
        differs = ""
        if made == now and plan.allotment is not None:  # its options depend on the type
            differs = ", with other options or cast to another type"
        elif made == now:
            old, new = cache.plan.policy.flat(), plan.policy.flat()
            names = [x for x in old | new if old.get(x) != new.get(x)]
            changed = ", ".join(f"{x} was {old.get(x)!r} and is {new.get(x)!r}" for x in names)
            differs = f" ({changed or 'another profile'})"
        raise ValueError(
            f"this CompressedCache was made under {made}, and the model is wrapped with {now} now"
            f"{differs}: continue it under the wrap that made it, or start a new one"
        )


def shape(config: Any) -> str:
    """Return the sizes of a decoder that a cache for it must agree with, in words."""
    return ", ".join(f"{name}={value}" for name, value in adapters.shape(config).items())


def check_read(cache: CacheState, ids: Tensor, mask: Tensor | None) -> None:
    """Check that a prompt's ids [B, T] begin with the ids that the cache has read.

    Padding may differ, and tokens for which `mask` [B, T] is 0.

    Raises:
        ValueError: another token differs.
    """
    read, masks = cache.ids, cache.masks
    if read is None or masks is None or len(read) % len(ids):
        return
    n = min(read.shape[1], cache.get_seq_length(), ids.shape[1])
    ids, counts = ids[:, :n], masks.valid[:, :n].to(ids.device)
    differ = ids.repeat_interleave(len(read) // len(ids), 0) != read[:, :n].to(ids.device)
    differ[:, : counts.shape[1]] &= counts
    if mask is not None:
        hidden = mask[:, :n] == 0
        differ &= ~hidden.repeat_interleave(len(read) // len(hidden), 0)
    if bool(differ.any()):
        row, place = differ.nonzero()[0].tolist()
        rows = f" (of {len(read)} in the cache and {len(ids)} here)" if len(read) > len(ids) else ""
        raise ValueError(
            f"the cache has read another prompt: row {row}{rows} differs at token {place}; "
            "give all that it has read as it was, and new tokens after it, or start without it"
        )


def check_dtype(cache: CacheState, dtype: torch.dtype) -> None:
    """Check that the model still has the type in which it read the prompt. Raises ValueError."""
    if cache.masks is not None and cache.dtype not in (None, dtype):
        raise ValueError(
            f"this CompressedCache was made by a model in {cache.dtype}, which was cast to {dtype} "
            "since: cast it back, or start a new cache"
        )


def check_tokens(cache: CacheState, tokens: Tensor) -> None:
    """Check that a pass reads tokens, ids [B, q] or embeddings, in as many rows as the cache has.

    Raises:
        ValueError: there are none, or other rows.
    """
    n_rows, n_tokens = tokens.shape[:2]
    if not n_tokens:
        raise ValueError(f"input of shape {tuple(tokens.shape)}: give at least one token a row")
    if cache.masks is None or len(cache.masks.valid) == n_rows:
        return
    held = len(cache.masks.valid)
    repeats = n_rows % held == 0
    remedy = f"repeat_interleave({n_rows // held})" if repeats else "select_indices(rows)"
    raise ValueError(
        f"rows differ: the cache has {held}, this pass {n_rows}. Give as many, or call "
        f"cache.batch_{remedy} first"
    )


def check_mask(cache: CacheState, mask: Tensor) -> None:
    """Check that the mask [B, T] of a later turn does not show what earlier ones masked.

    The cache may have several rows for each of the mask, for beams. Raises ValueError.
    """
    valid = cache.valid_tokens(cache.get_seq_length())
    if valid is not None and len(valid) % len(mask) == 0:
        shown = mask[:, : valid.shape[1]].bool().to(valid.device)
        shown = shown.repeat_interleave(len(valid) // len(mask), 0)
        shown = shown & ~valid[:, : shown.shape[1]]
        if shown.any():
            raise _shown_error(shown)


def _shown_error(shown: Tensor) -> ValueError:
    """Return the error for the first token of `shown`, bool [B, seen], which was not stored."""
    row, position = shown.nonzero()[0].tolist()
    return ValueError(
        f"attention_mask shows token {position} of row {row}, which was padding or masked when "
        "it was read, so that it was not stored: keep masking it, or start a new cache"
    )


def masks_earlier(cache: CacheState, valid: Tensor, earlier: Tensor) -> bool:
    """Return whether the mask `earlier` hides any `valid` token, bool [B, seen] both.

    Raises:
        ValueError: it shows a token that was masked when it was read and so was not stored, or
            hides a token that is part of a group or of the state of a linear layer.
    """
    hidden, shown = valid & ~earlier, earlier & ~valid
    any_hidden, any_shown = torch.stack([hidden.any(), shown.any()]).tolist()  # one wait
    if any_shown:
        raise _shown_error(shown)
    if not any_hidden:
        return False
    if _has_linear_attention(cache):
        raise ValueError(
            "attention_mask hides tokens of an earlier pass, which are in the state of linear "
            "attention: keep showing them, or start a new cache"
        )
    if any(isinstance(x.state, PromptKV) for x in cache.compressed):
        raise ValueError(
            "the attention_mask of a later chunk hides tokens of an earlier chunk of the same "
            "prompt: mask them in every chunk"
        )
    for layer in cache.compressed:
        if (merged := _merged(cache, layer)) is None:
            continue
        hidden_merged = hidden.to(merged.device)[:, : merged.shape[1]] & merged
        if bool(hidden_merged.any()):
            row, position = hidden_merged.nonzero()[0].tolist()
            generated = bool(_generated(cache, hidden)[row, position])
            remedy = "use decode='grow', which merges none" if generated else "start a new cache"
            raise ValueError(
                f"attention_mask hides {'generated ' * generated}token {position} of row {row}, "
                f"which was merged with others: keep showing it, or {remedy}"
            )
    return True


def _merged(cache: CacheState, layer: CompressedLayer) -> Tensor | None:
    """Return which tokens some head of a layer has merged with others, bool [B, T].

    None if the policy merges none. An averaged pair does not record its tokens, so there all
    evicted tokens count, also those that decoding dropped.
    """
    merge, state = cache.plan.policy.merge, layer.keeping()
    if merge is None:
        return None
    if merge.weighted:
        return None if state.group_index is None else (state.group_index.leaders() >= 0).any(1)
    assert cache.masks is not None
    shares = state.shares(layer.seen)[..., : cache.masks.valid.shape[1]]
    return (shares == 0).any(1)


def check_linear_layers(cache: CacheState, valid: Tensor, earlier: Tensor | None) -> None:
    """Check that no row has padding after its first token, if layers have linear attention.

    Args:
        cache: the cache that the pass continues.
        valid: bool [B, q], which new tokens are not padding.
        earlier: bool [B, seen], the same of earlier tokens; None if there are none.

    Raises:
        ValueError: a row has, which would change the state of these layers.
    """
    if not _has_linear_attention(cache):
        return
    started = valid.cumsum(-1) > 0
    if earlier is not None:
        started |= earlier.any(-1, keepdim=True).to(valid.device)
    padding = started & ~valid
    if bool(padding.any()):
        row, token = padding.nonzero()[0].tolist()
        raise ValueError(
            f"attention_mask hides token {token} of row {row}, after tokens that it shows: padding "
            "there changes the state of linear attention. Give questions, or a batch's later "
            "turns, of equal length, or one at a time"
        )


def _has_linear_attention(cache: CacheState) -> bool:
    return any(isinstance(x, LinearAttentionLayer) for x in cache.layers)


def log_hidden_replies(cache: CacheState, hidden: Tensor) -> None:
    """Log, once a wrap, that generated tokens that the mask hides took the places of others.

    `hidden` is bool [B, seen]. Such tokens are padding: `generate` feeds it to a row whose reply
    has ended until the replies of all rows have.
    """
    plan = cache.plan
    if not cache.drops_tokens or "hidden" in plan.logged:
        return
    counts = (hidden & _generated(cache, hidden)).sum(-1).tolist()
    if any(counts):
        plan.logged.add("hidden")
        row = next(i for i, n in enumerate(counts) if n)
        logger.warning(
            "row %d: attention_mask hides %d generated tokens, for which decode=%r may have "
            "dropped others, so the row keeps less than it would alone; decode='grow' drops "
            "no token for a generated one",
            row,
            counts[row],
            plan.policy.decode.name,
        )


def _generated(cache: CacheState, seen: Tensor) -> Tensor:
    """Return which of the tokens `seen` [B, T] were generated, bool [B, T]."""
    assert cache.masks is not None
    of_prompts = cache.masks.is_prompt.to(seen.device)
    return ~pad(of_prompts, (0, seen.shape[1] - of_prompts.shape[1]), value=False)


def check_whole(cache: CacheState) -> None:
    """Raise ValueError after an interrupted pass, whose tokens some layers may not have stored."""
    seen = [x.seen for x in cache.compressed]
    marked = 0 if cache.masks is None else cache.masks.valid.shape[1]
    if cache.in_pass or min(seen) < max(*seen, marked):
        raise ValueError(
            "this CompressedCache was interrupted within a pass, by an error or Ctrl-C, so layers "
            f"may lack some of {max(*seen, marked)} tokens: start a new one"
        )
