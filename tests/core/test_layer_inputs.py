"""What a score is given of a layer, against what the layer's own modules compute."""

import sys

import pytest
import torch

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.oracle import prefilled
from mmkv.layer_inputs import Rotary, rotate
from mmkv.policy import Score

CLASSES = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",
    "OPTForCausalLM",
    "Gemma3ForCausalLM",
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Llama4ForCausalLM",
]
QUICK = ("LlamaForCausalLM", "OPTForCausalLM", "Qwen2VLForConditionalGeneration")


class Recording(Score):
    """Keeps what it was given; every token scores alike."""

    uses_rotary = True
    seen = []  # noqa: RUF012

    def __call__(self, layer):
        self.seen.append(layer)
        return torch.zeros(layer.key.shape[:3])


def recorded(model, inputs):
    Recording.seen.clear()
    prefilled(model, inputs, mmkv.Policy(score=Recording()), 0.5)
    return list(Recording.seen)


@cases("name", CLASSES, *QUICK)
def test_layer_inputs_equal_module_outputs(name, monkeypatch):
    """Queries and keys are what the model turned, and turned once more what it attended with.

    The heads' outputs, projected one by one and added up, are the attention module's output.
    """
    model = zoo.make(name)
    inputs, outputs, before = zoo.prompt(model, (40, 23)), {}, []
    parts = mmkv.adapters.find(model)
    module = sys.modules[type(parts.attentions[0]).__module__]
    original = getattr(module, "apply_rotary_pos_emb", None)
    if original is not None:
        monkeypatch.setattr(
            module,
            "apply_rotary_pos_emb",
            lambda q, k, *args, **more: (before.append((q, k)), original(q, k, *args, **more))[1],
        )
    hooks = [
        x.register_forward_hook(lambda m, a, out, i=i: outputs.__setitem__(i, out[0]))
        for i, x in enumerate(parts.attentions)
    ]
    layers = recorded(model, inputs)
    for hook in hooks:
        hook.remove()
    assert layers
    for layer in layers:
        G = layer.query.shape[1] // layer.key.shape[1]
        keys, values = (x.repeat_interleave(G, dim=1) for x in (layer.key, layer.value))
        N = keys.shape[2]
        scale = layer.scale or keys.shape[-1] ** -0.5
        logits = layer.query @ keys.mT * scale
        sees = torch.ones(N, N, dtype=torch.bool).tril() & layer.valid[:, None, None]
        heads = logits.masked_fill(~sees, -1e9).softmax(-1) @ values
        found = torch.einsum(
            "bhnd,bhcd->bnc", heads, layer.output_weight.expand(len(keys), -1, -1, -1)
        )
        module = getattr(parts.attentions[layer.layer_idx], parts.facts.output)
        if module.bias is not None:
            found = found + module.bias
        real = layer.valid[..., None]
        torch.testing.assert_close(
            found * real, outputs[layer.layer_idx] * real, atol=1e-4, rtol=1e-4
        )
    if original is None:
        assert all(x.rotary is None for x in layers)
        return
    for layer in layers:
        turned, _ = before[layer.layer_idx]
        found = layer.plain_query[..., : turned.shape[-1]]  # some models give the turned part alone
        torch.testing.assert_close(found, turned.float(), atol=1e-4, rtol=1e-4)
        rotary = layer.rotary
        again = rotate(layer.plain_query, rotary.cos, rotary.sin, rotary.interleaved)
        torch.testing.assert_close(again, layer.query.float(), atol=1e-4, rtol=1e-4)


@cases("name", CLASSES, *QUICK)
def test_positions_ahead_are_those_of_the_next_tokens(name):
    """The embedding n positions behind a prompt is the last one's of a prompt n tokens longer."""
    model = zoo.make(name)
    inputs = zoo.prompt(model, (40,))
    short, *_ = recorded(model, inputs)
    if short.rotary is None:
        return
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], torch.full((1, 3), 7)], 1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    for k in ("mm_token_type_ids", "token_type_ids"):
        if k in inputs:
            longer[k] = torch.cat([inputs[k], inputs[k].new_zeros(1, 3)], 1)
    long, *_ = recorded(model, longer)
    cos, sin, _ = short.rotary.ahead(3)
    torch.testing.assert_close(cos, long.rotary.cos[:, -1:].float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sin, long.rotary.sin[:, -1:].float(), atol=1e-4, rtol=1e-4)


def test_later_turn_has_heads_as_rows_and_rotated_old_keys():
    model = zoo.make("LlamaForCausalLM")
    inputs = zoo.prompt(model, (60,))
    first = recorded(model, inputs)
    with mmkv.wrapped(model, mmkv.Policy(score=Recording()), 0.5):
        out = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
        ids = torch.cat([out.sequences, torch.arange(3, 15)[None]], dim=1)
        Recording.seen.clear()
        model.generate(input_ids=ids, max_new_tokens=1, past_key_values=out.past_key_values)
    layer = Recording.seen[0]
    B, Hq = layer.query.shape[:2]
    assert (B, Hq) == (first[0].key.shape[1], first[0].query.shape[1] // first[0].key.shape[1])
    torch.testing.assert_close(
        layer.output_weight.flatten(0, 1), first[0].output_weight[0], atol=0, rtol=0
    )
    again = rotate(layer.plain_query, layer.rotary.cos, layer.rotary.sin)
    torch.testing.assert_close(again, layer.query, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 6])
def test_rotation_moves_keys_to_new_positions(interleaved, rotated):
    """With a scale, as some models have, and dimensions that are not turned."""
    draw = torch.Generator().manual_seed(3)
    angle = torch.rand(2, 5, rotated // 2, generator=draw)
    angle = angle.repeat_interleave(2, -1) if interleaved else angle.repeat(1, 1, 2)
    inv_freq = torch.rand(rotated // 2, generator=draw)
    rotary = Rotary(1.3 * angle.cos(), 1.3 * angle.sin(), inv_freq, interleaved)
    x, to = torch.randn(2, 3, 5, 8, generator=draw), rotary.ahead(2)
    torch.testing.assert_close(rotate(x, *rotary.rotation(to)), rotate(rotary.undo(x), *to))
