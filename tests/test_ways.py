"""Ways of generating: each equals its unwrapped twin at full budget."""

from __future__ import annotations

import pytest
import torch
from conftest import make_inputs, make_model, short
from masking import masked_logits
from test_oracles import generate
from transformers.generation.streamers import BaseStreamer

import mmkv

ROWS = (70, 41, 55)
SOME = ["prefixkv", "adakv", "h2o", "streaming", "xkv"]


class Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value)

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
        {"num_beams": 4, "do_sample": True},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"do_sample": False, "prefill_chunk_size": 16},
        {"do_sample": False, "use_cache": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", SOME)
def test_full_budget_equals_the_plain_model(models, policy, way):
    model, inputs = models("llama"), make_inputs("llama", ROWS)

    def run():
        torch.manual_seed(7)
        return model.generate(**inputs, max_new_tokens=10, **way)

    plain = run()
    with mmkv.wrapped(model, policy, 1.0):
        assert torch.equal(run(), plain)
    with mmkv.wrapped(model, policy, 0.4, **short(policy)):
        assert torch.equal(run(), run())  # evicting, the same seed gives the same tokens


def test_streaming_puts_every_token(models):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, "prefixkv", 0.3):
        streamer = Collect()
        out = model.generate(**inputs, max_new_tokens=9, do_sample=False, streamer=streamer)
    assert streamer.ended
    assert torch.cat([p.reshape(-1) for p in streamer.pieces]).tolist() == out[0].tolist()


def test_beams_over_pictures(models):
    """Rows of different pictures are repeated and reordered together with their caches."""
    model, inputs = models("llava-llama"), make_inputs("llava-llama", ROWS)
    way = {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "max_new_tokens": 8}
    plain = model.generate(**inputs, **way)
    for policy in SOME:
        with mmkv.wrapped(model, policy, 1.0):
            assert torch.equal(model.generate(**inputs, **way), plain)


@pytest.mark.parametrize("policy", SOME)
def test_layers_on_disk(policy, tmp_path):
    """A model that accelerate keeps on disk and loads layer by layer."""
    from accelerate import disk_offload

    model, inputs = make_model("llama"), make_inputs("llama", ROWS)
    twin = make_model("llama")
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    logits = []
    for each in (twin, model):
        with mmkv.wrapped(each, policy, 0.4, **short(policy)):
            logits.append(generate(each, inputs, new=6)[0])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)


def test_gradients_may_be_on(text_model):
    """Evaluation with gradients enabled neither fails nor stores a graph in the cache."""
    inputs = make_inputs("llama", ROWS)
    with mmkv.wrapped(text_model, "prefixkv", 0.4):
        out = text_model(**inputs, use_cache=True)
        out.logits.sum().backward()
        step = text_model(input_ids=torch.tensor([[5]] * 3), past_key_values=out.past_key_values)
    assert step.logits.requires_grad
    for layer in out.past_key_values.compressed:
        assert not any(b.keys.requires_grad for b in layer.blocks)


@pytest.mark.parametrize("policy", ["prefixkv", "h2o"])
def test_a_compiled_model(policy):
    """model.compile(): our attention is a break in the graph, and the answer is the same."""
    model, twin, inputs = make_model("llama"), make_model("llama"), make_inputs("llama", ROWS)
    model.compile(backend="aot_eager", dynamic=True)
    results = []
    for each in (twin, model):
        with mmkv.wrapped(each, policy, 0.4):
            results.append(generate(each, inputs, new=6))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=0)
    logits, tokens, _, held = results[1]
    expected = masked_logits(twin, inputs, tokens, held)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
