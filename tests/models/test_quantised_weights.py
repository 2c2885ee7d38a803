"""Weights loaded in 8 and 4 bits (bitsandbytes): wrapping and evicting are as they were.

bitsandbytes rounds what goes into its layers too. A number halfway between two roundings may get
either when it is computed in another way, hence the tolerance; eviction moves logits by units.
"""

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM, LlavaForConditionalGeneration

import mmkv
from helpers.configs import CONFIGS
from helpers.marks import cases
from helpers.masking import Feed, masked_logits
from helpers.models import PAD, make_inputs, make_model
from helpers.oracle import generate, short

ROWS = (60, 31, 44)
CLOSE = 0.15
LOADED = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


CLASSES = {"llama": LlamaForCausalLM, "llava-llama": LlavaForConditionalGeneration}


def save(cls, folder):
    """A tiny model whose layers have widths in multiples of 64, as 4 bits need."""
    config = CONFIGS[cls.__name__]()
    config.get_text_config().intermediate_size = 128
    if cls is LlavaForConditionalGeneration:
        config.vision_config.hidden_size = config.vision_config.intermediate_size = 64
    torch.manual_seed(0)
    cls(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Models by class and bits, loaded as a user does."""
    folder, made = tmp_path_factory.mktemp("weights"), {}

    def get(name, bits):
        cls = CLASSES[name]
        if not (folder / name).exists():
            save(cls, folder / name)
        if (name, bits) not in made:
            config = BitsAndBytesConfig(**LOADED[bits])
            model = cls.from_pretrained(folder / name, quantization_config=config).eval()
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = PAD
            made[name, bits] = model
        return made[name, bits]

    return get


@cases(
    "name, bits, policy",
    [(name, bits, policy) for name in CLASSES for bits in LOADED for policy in ("adakv", "h2o")],
    ("llava-llama", "4 bits", "adakv"),
)
def test_quantised_weights_compress_like_others(loaded, name, bits, policy):
    model, inputs = loaded(name, bits), make_inputs(name, ROWS)
    kinds = {type(x).__name__ for x in model.get_decoder().modules()}
    assert ("Linear8bitLt" if bits == "8 bits" else "Linear4bit") in kinds
    plain, tokens, _, _ = generate(model, inputs, new=6)
    with mmkv.wrapped(model, policy, 1.0, **short(policy)):
        said = Feed(tokens, inputs["input_ids"].shape[1])
        whole, *_ = generate(model, inputs, new=6, logits_processor=[said])
    torch.testing.assert_close(whole, plain, atol=CLOSE, rtol=0)
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        logits, tokens, cache, held = generate(model, inputs, new=6)
    torch.testing.assert_close(
        logits, masked_logits(model, inputs, tokens, held), atol=CLOSE, rtol=0
    )
    assert (logits[1:] - plain[1:]).abs().max() > 10 * CLOSE
    with mmkv.wrapped(model, policy, 0.3, kv_dtype="int8", **short(policy)):
        logits, tokens, small, held = generate(model, inputs, new=6)
    expected = masked_logits(model, inputs, tokens, held, bits=8)
    torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=0)
    # Of so short a prompt the exact tokens of the window take more than the codes.
    codes = [x.keeping().stored.codes for x in small.compressed]
    assert sum(x.untyped_storage().nbytes() for x in codes) < 0.4 * cache.nbytes
    again, *_ = generate(model, inputs, new=6)
    assert torch.equal(again, plain), "unwrapping leaves the model as it was"


def test_layers_without_a_weight_are_scored_by_their_outputs():
    """As torch's dynamically quantised layers, whose `weight` is a method."""
    model, inputs = make_model("llama"), make_inputs("llama", ROWS)
    kept = []
    for hidden in (False, True):
        if hidden:
            for layer in model.model.layers:
                layer.self_attn.o_proj = _Weightless(layer.self_attn.o_proj)
        with mmkv.wrapped(model, "condense", 0.4, least=0, heads="uniform"):
            *_, held = generate(model, inputs, new=3)
        kept.append(held[0])
    for with_weight, without in zip(*kept, strict=True):
        assert torch.equal(with_weight, without)


class _Weightless(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.run, self.in_features = linear.forward, linear.in_features

    def forward(self, x):
        return self.run(x)
