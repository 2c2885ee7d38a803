"""The reference for models of every class: a full cache in which evicted keys are masked.

It is the same model with transformers' own cache, fed the same tokens through its own `generate` or
forward, so that it finds positions (multimodal ones too) and masks for itself. From the second pass
on, the layers that are compressed see only what the compressed cache held. Layers with a sliding
window are left as they are.
"""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from helpers.masking import held_by, naive_means, naive_reposition

NEW = 6  # tokens generated at a time

_state: dict = {"kept": {}, "inv_freq": None}


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """Plain attention in which a layer may be told which earlier tokens it still has."""
    G = query.shape[1] // key.shape[1]
    kept = _state["kept"].get(module.layer_idx)
    if kept is not None and _state["inv_freq"] is not None:
        visible = torch.cat(
            [seen_by(kept, key.shape[2] - 1), torch.ones_like(kept[..., :1]) > 0], -1
        )
        key = naive_reposition(key, visible, _state["inv_freq"])
    # What stands for groups of tokens: pairs of their own, with a bias.
    means = bias = None
    if getattr(kept, "groups", None) is not None:
        means = [naive_means(x, *kept.groups[:2]).repeat_interleave(G, dim=1) for x in (key, value)]
        bias = kept.groups[2].repeat_interleave(G, dim=1)[:, :, None]
    key, value = key.repeat_interleave(G, dim=1), value.repeat_interleave(G, dim=1)
    if means is not None:
        key, value = (torch.cat(x, dim=2) for x in zip(means, (key, value), strict=True))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    n = 0 if bias is None else bias.shape[-1]
    logits[..., :n] += 0 if bias is None else bias
    if attention_mask is not None:
        # Not in place: in 16 bits the mask's lowest number would be -inf.
        logits = torch.cat([logits[..., :n], logits[..., n:] + attention_mask], dim=-1)
    if kept is not None:
        gone = ~seen_by(kept, key.shape[2] - n - query.shape[2]).repeat_interleave(G, dim=1)
        logits[..., n : n + gone.shape[-1]].masked_fill_(gone[:, :, None], -math.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def seen_by(kept: torch.Tensor, seen: int) -> torch.Tensor:
    """Positions kept [B, H, n], -1 as filler -> bool [B, H, seen]."""
    found = torch.zeros(*kept.shape[:2], seen + 1, dtype=torch.bool)
    return found.scatter_(-1, kept.masked_fill(kept < 0, seen), True)[..., :seen]


AttentionInterface.register("test_reference", _attention)
AttentionMaskInterface.register("test_reference", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


class Feed(LogitsProcessor):
    """Makes `generate` choose given tokens [B, T]."""

    def __init__(self, tokens: torch.Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids, scores):
        t = input_ids.shape[1] - self.start
        return torch.full_like(scores, -1e9).scatter(1, self.tokens[:, t : t + 1], 0.0)


def generate(model, inputs, new=NEW, **kwargs):
    """Greedy: logits [T, B, V], tokens and the cache."""
    out = model.generate(
        **inputs,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return torch.stack(out.logits), out.sequences[:, -new:], out.past_key_values


@contextmanager
def recorded(model):
    """What each compressed layer held after each of a wrapped model's passes."""
    held: list[dict[int, torch.Tensor]] = []

    def record(module, args, output):
        cache = output.past_key_values
        if not cache.expects_prompt:
            layers = [i for i, x in enumerate(cache.layers) if hasattr(x, "blocks")]
            held.append({i: held_by(cache, i) for i in layers})

    hook = model.register_forward_hook(record)
    try:
        yield held
    finally:
        hook.remove()


def hide(attn, args, kwargs):
    """Put what a layer no longer holds into its mask."""
    kept = _state["kept"].get(attn.layer_idx)
    if kept is None:
        return None
    mask = kwargs["attention_mask"]
    gone = ~seen_by(kept, mask.shape[-1] - mask.shape[-2])
    mask = mask.expand(-1, gone.shape[1], -1, -1).clone()
    mask[..., : gone.shape[-1]].masked_fill_(gone[:, :, None], -math.inf)
    return args, {**kwargs, "attention_mask": mask}


@contextmanager
def seeing(model, held, inv_freq=None, chunks=1):
    """The plain model, its passes after the prompt's seeing only what was `held` before them."""
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    kept = iter([{}] * chunks + held)
    _state["inv_freq"] = inv_freq
    hooks = [decoder.register_forward_pre_hook(lambda *_: _state.update(kept=next(kept)))]
    decoder.config._attn_implementation_internal = "test_reference"
    if decoder.config.model_type == "falcon":  # does not ask for an attention function
        decoder.config._attn_implementation_internal = "eager"
        blocks = [layer.self_attention for layer in decoder.h]
        hooks += [x.register_forward_pre_hook(hide, with_kwargs=True) for x in blocks]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()
        decoder.config._attn_implementation_internal = before


def fed(model, inputs, tokens, **kwargs):
    """`generate` that chooses `tokens`."""
    feed = Feed(tokens, inputs["input_ids"].shape[1])
    return generate(model, inputs, logits_processor=[feed], **kwargs)
