"""Every supported class, on a tiny random model: evicting is masking, a full budget is identity.

The reference is the same model with transformers' own cache, fed the same tokens through its own
`generate` or forward, so that it finds positions (multimodal ones too) and masks for itself. From
the first step on, the layers that are compressed see only what the compressed cache held. Layers
with a sliding window are left as they are.
"""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager

import pytest
import torch
import zoo
from conftest import short
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import mmkv

NEW = 6
POLICIES = ["prefixkv", "adakv", "h2o", "streaming", "squeeze"]
SUPPORTED = [row["class"] for row in mmkv.adapters.table() if row["status"] == "supported"]
NAMES = [name for name in zoo.CONFIGS if name.partition(":")[0] in SUPPORTED]
VISION = [name for name in NAMES if "Conditional" in name]

_state: dict = {"kept": {}}


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    """Plain attention in which a layer may be told which earlier tokens it still has."""
    G = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(G, dim=1), value.repeat_interleave(G, dim=1)
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = _state["kept"].get(module.layer_idx)
    if attention_mask is not None:
        logits = logits + attention_mask
    if kept is not None:
        gone = ~seen_by(kept, key.shape[2] - query.shape[2]).repeat_interleave(G, dim=1)
        logits[..., : gone.shape[-1]].masked_fill_(gone[:, :, None], -math.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def seen_by(kept: torch.Tensor, seen: int) -> torch.Tensor:
    """Positions kept [B, H, n], -1 as filler -> bool [B, H, seen]."""
    found = torch.zeros(*kept.shape[:2], seen + 1, dtype=torch.bool)
    return found.scatter_(-1, kept.masked_fill(kept < 0, seen), True)[..., :seen]


AttentionInterface.register("test_models", _attention)
AttentionMaskInterface.register("test_models", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@functools.cache
def model_of(name: str) -> torch.nn.Module:
    return zoo.make(name)


def inputs_of(model, rows: str, seed: int = 0) -> dict[str, torch.Tensor]:
    wide = model.config.model_type in ("llava_next", "llava_onevision")  # 52 tokens a picture
    lengths = {"one": (132 if wide else 90,), "padded": (132, 81) if wide else (88, 47)}
    return zoo.prompt(model, lengths[rows], seed)


class Feed(LogitsProcessor):
    """Makes `generate` choose given tokens [B, T]."""

    def __init__(self, tokens: torch.Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids, scores):
        t = input_ids.shape[1] - self.start
        return torch.full_like(scores, -1e9).scatter(1, self.tokens[:, t : t + 1], 0.0)


def generate(model, inputs, **kwargs):
    """Greedy: logits [T, B, V] and tokens."""
    out = model.generate(
        **inputs,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return torch.stack(out.logits), out.sequences[:, -NEW:], out.past_key_values


@contextmanager
def recorded(model):
    """What each compressed layer held after each of a wrapped model's passes."""
    held: list[dict[int, torch.Tensor]] = []

    def record(module, args, output):
        cache = output.past_key_values
        if not cache.expects_prompt:
            layers = [i for i, x in enumerate(cache.layers) if hasattr(x, "blocks")]
            held.append({i: cache.kept(i).clone() for i in layers})

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
def seeing(model, held):
    """The plain model, its passes after the first seeing only what was `held` before them."""
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    kept = iter([{}, *held])
    hooks = [decoder.register_forward_pre_hook(lambda *_: _state.update(kept=next(kept)))]
    decoder.config._attn_implementation_internal = "test_models"
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


def test_every_class_is_tried():
    """What the table calls supported is in the lists of this file, and the other way round."""
    assert sorted({name.partition(":")[0] for name in NAMES}) == sorted(SUPPORTED)
    assert set(mmkv.adapters.MODELS) == set(SUPPORTED)
    tried = {model_of(name).get_decoder().config.model_type for name in NAMES}
    assert tried == set(mmkv.adapters.DECODERS)


@pytest.mark.parametrize("rows", ["one", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_eviction_equals_masking(name, policy, rows):
    model = model_of(name)
    inputs = inputs_of(model, rows)
    with mmkv.wrapped(model, policy, 0.3, **short(policy)), recorded(model) as held:
        logits, tokens, cache = generate(model, inputs)
    assert cache.report().kept_fraction < 0.5, "nothing was evicted: the oracle saw nothing"
    with seeing(model, held):
        expected = fed(model, inputs, tokens)[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("policy", ["prefixkv", "h2o"])
@pytest.mark.parametrize("name", NAMES)
def test_full_budget_is_identity(name, policy):
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    expected, tokens, _ = generate(model, inputs)
    with mmkv.wrapped(model, policy, 1.0, **short(policy)):
        logits, got, _ = generate(model, inputs)
        chunked, _, _ = generate(model, inputs, prefill_chunk_size=33)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    assert torch.equal(got, tokens)
    torch.testing.assert_close(
        chunked, generate(model, inputs, prefill_chunk_size=33)[0], atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("policy", ["prefixkv", "h2o"])
@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_equals_masking(name, picture, policy):
    """A conversation goes on: positions count what was said, not what was kept."""
    if picture and name not in VISION:
        pytest.skip("takes no pictures")
    model = model_of(name)
    inputs = inputs_of(model, "one")
    with mmkv.wrapped(model, policy, 0.4, **short(policy)), recorded(model) as held:
        first, words, cache = generate(model, inputs)
        turn = zoo.next_turn(model, inputs, words, picture)
        second, answer, _ = generate(model, turn, past_key_values=cache)
    with seeing(model, held):
        plain, _, cache = fed(model, inputs, words)
        again, _, _ = fed(model, turn, answer, past_key_values=cache)
    torch.testing.assert_close(first, plain, atol=2e-4, rtol=0)
    torch.testing.assert_close(second, again, atol=2e-4, rtol=0)
