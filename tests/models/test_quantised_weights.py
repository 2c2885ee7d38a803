"""Weights loaded in 8 and 4 bits (bitsandbytes): wrapping and evicting are as they were.

bitsandbytes rounds what goes into its layers too. A number halfway between two roundings may get
either when it is computed in another way, hence the tolerance; eviction moves logits by units.
"""

import pytest
import torch
from transformers import (
    BitsAndBytesConfig,
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import mmkv
from helpers.marks import cases
from helpers.masking import Feed, masked_logits
from helpers.models import IMAGE, PAD, make_inputs, make_model
from helpers.oracle import generate, short

ROWS = (60, 31, 44)
CLOSE = 0.15
LOADED = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def save(name, folder):
    """A tiny model whose layers have widths in multiples of 64, as 4 bits need."""
    text = make_model("llama").config
    text.intermediate_size = 128
    torch.manual_seed(0)
    if name == "llama":
        LlamaForCausalLM(text).save_pretrained(folder)
        return
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=4,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Models by class and bits, loaded as a user does."""
    folder, made = tmp_path_factory.mktemp("weights"), {}

    def get(name, bits):
        if not (folder / name).exists():
            save(name, folder / name)
        if (name, bits) not in made:
            cls = LlamaForCausalLM if name == "llama" else LlavaForConditionalGeneration
            config = BitsAndBytesConfig(**LOADED[bits])
            model = cls.from_pretrained(folder / name, quantization_config=config).eval()
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = PAD
            made[name, bits] = model
        return made[name, bits]

    return get


@cases("policy", ["prefixkv", "h2o", "adakv", "streaming"], "adakv")
@cases("bits", LOADED, "4 bits")
@cases("name", ["llama", "llava-llama"], "llava-llama")
def test_weights_in_few_bits(loaded, name, bits, policy):
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
    assert small.nbytes < 0.4 * cache.nbytes
    again, *_ = generate(model, inputs, new=6)
    assert torch.equal(again, plain), "unwrapping leaves the model as it was"
