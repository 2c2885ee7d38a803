"""What a caller hands in: models inside others, numbers, names, and policies of other packages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conftest import make_inputs, make_model
from torch import nn
from transformers import LlamaForCausalLM

import mmkv
from mmkv.wrapping import is_wrapped

INPUTS = make_inputs("llama", (60, 40))


def answer(model: Any, **inputs: Any) -> tuple[torch.Tensor, Any]:
    """Logits [B, 6, V] of six greedy steps, and the cache."""
    out = model.generate(
        **(inputs or INPUTS), max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    return torch.stack(out.logits, dim=1), out.past_key_values


class PeftModel(nn.Module):
    """Stands in for PEFT's, where that is not installed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def get_base_model(self) -> nn.Module:
        return self.base_model["model"]

    def generate(self, **options: Any) -> Any:
        return self.get_base_model().generate(**options)


class PeftModelForCausalLM(PeftModel):
    pass


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def both(model: nn.Module) -> Any:
    return compiled(PeftModelForCausalLM(model))


@pytest.mark.parametrize("around", [PeftModelForCausalLM, compiled, both])
def test_a_model_is_found_inside_another(text_model, around):
    with mmkv.wrapped(make_model("llama"), "h2o", 0.3) as plain:
        expected, cache = answer(plain)
    full, _ = answer(text_model)
    outer = around(text_model)
    assert not is_wrapped(outer)
    assert mmkv.wrap(outer, "h2o", 0.3) is outer
    assert is_wrapped(outer)
    assert is_wrapped(text_model)
    logits, found = answer(outer)
    assert torch.equal(logits, expected)
    assert torch.equal(found.kept(1), cache.kept(1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is wrapped already .*'h2o'"):
        mmkv.wrap(text_model, "snapkv", 0.3)
    assert mmkv.unwrap(outer) is outer
    assert not is_wrapped(text_model)
    assert torch.equal(answer(outer)[0], full)
    # From the inside too, and around a model that is wrapped already.
    mmkv.wrap(text_model, "h2o", 0.3)
    assert is_wrapped(outer)
    assert is_wrapped(around(text_model))
    assert mmkv.unwrap(text_model) is text_model
    assert not is_wrapped(outer)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not wrapped"):
        mmkv.unwrap(outer)


# PEFT itself asks transformers for a name that is deprecated.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
class TestPeft:
    """PEFT's own classes."""

    @pytest.fixture
    def peft(self):
        return pytest.importorskip("peft", reason="peft is not installed")

    @pytest.mark.parametrize("kind", ["lora", "prompt", "encoder"])
    def test_its_models_generate_compressed(self, peft, kind):
        made = {
            "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
            "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7),
            "encoder": lambda: peft.PromptEncoderConfig(
                task_type="CAUSAL_LM", num_virtual_tokens=7, encoder_hidden_size=16
            ),
        }
        torch.manual_seed(1)
        model = peft.get_peft_model(make_model("llama"), made[kind]()).eval()
        plain, _ = answer(model)
        with mmkv.wrapped(model, "h2o", 1.0):
            assert is_wrapped(model.get_base_model())
            full, _ = answer(model)
        torch.testing.assert_close(full, plain, atol=1e-4, rtol=0)
        with mmkv.wrapped(model, "h2o", 0.3):
            logits, cache = answer(model)
        assert cache.report().kept_fraction < 0.4
        assert cache.get_seq_length() == 60 + 5 + (0 if kind == "lora" else 7)
        assert not torch.allclose(logits, plain, atol=1e-2)
        assert torch.equal(answer(model)[0], plain)

    def test_an_adapter_with_a_cache_of_its_own_is_refused(self, peft):
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7)
        model = peft.get_peft_model(make_model("llama"), config)
        with pytest.raises(ValueError, match=r"PeftModelForCausalLM with prefix tuning.*LoRA"):
            mmkv.wrap(model, "h2o", 0.3)
        assert not is_wrapped(model)


@torch.no_grad()
def test_a_data_parallel_model(text_model):
    with mmkv.wrapped(make_model("llama"), "h2o", 0.3) as plain:
        expected = plain(**INPUTS, use_cache=True)
    outer = nn.DataParallel(text_model)
    assert mmkv.wrap(outer, "h2o", 0.3) is outer
    found = outer(**INPUTS, use_cache=True)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.past_key_values.kept(2), expected.past_key_values.kept(2))
    mmkv.unwrap(outer)
    outer.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"DataParallel over 2 devices.*model\.module"):
        mmkv.wrap(outer, "h2o", 0.3)


@torch.no_grad()
def test_a_distributed_model(text_model):
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        outer = nn.parallel.DistributedDataParallel(text_model)
        mmkv.wrap(outer, "h2o", 0.3)
        cache = outer(**INPUTS, use_cache=True).past_key_values
        assert cache.report().kept_fraction < 0.4
        assert is_wrapped(mmkv.unwrap(outer)) is is_wrapped(text_model) is False
    finally:
        distributed.destroy_process_group()


@torch.no_grad()
def test_a_compiled_prompt_is_compressed_alike():
    """Through the compiled code; `generate` goes past it. One layer: tracing takes its time."""
    config = make_model("llama").config
    config.num_hidden_layers = 1
    model = LlamaForCausalLM(config).eval()
    ids = INPUTS["input_ids"][:1]
    with mmkv.wrapped(model, "local", 0.3):
        expected = model(input_ids=ids, use_cache=True)
    with mmkv.wrapped(compiled(model), "local", 0.3) as outer:
        found = outer(input_ids=ids, use_cache=True)
    torch.testing.assert_close(found.logits, expected.logits)
    assert torch.equal(found.past_key_values.kept(0), expected.past_key_values.kept(0))
    assert found.past_key_values.report().kept_fraction < 0.4


class Pipeline:
    """Stands in for transformers' pipelines."""

    def __init__(self) -> None:
        self.model = make_model("llama")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("llava-hf/llava-1.5-7b-hf", r"loaded model, not the path or name 'llava-hf/.*from_pretr"),
        (None, r"loaded model, not None: .*from_pretrained"),
        (3, r"loaded model, not an int: .*from_pretrained"),
        (LlamaForCausalLM, r"not the class LlamaForCausalLM: .*from_pretrained"),
        (Pipeline(), r"not the Pipeline around it: .*mmkv\.wrap\(x\.model"),
        ((make_model("llama"), "processor"), r"model alone: model, processor = "),
    ],
)
def test_what_is_no_model_says_what_to_call(given, message):
    calls = (lambda x: mmkv.wrap(x, "h2o", 0.3), mmkv.unwrap, is_wrapped)
    for call in calls:
        with pytest.raises(ValueError, match=message) as error:
            call(given)
        assert len(str(error.value)) <= 200  # two lines of 100 characters


def test_a_processor_is_no_model():
    from evaluation import make_tokenizer

    with pytest.raises(ValueError, match=r"not a TokenizersBackend: .*from_pretrained"):
        mmkv.wrap(make_tokenizer(), "h2o", 0.3)


def test_a_decoder_alone_says_which_class_to_load(text_model):
    with pytest.raises(ValueError, match=r"cannot wrap a LlamaModel: load it as LlamaForCausalLM"):
        mmkv.wrap(text_model.model, "h2o", 0.3)


class TestASharedConfig:
    """Two models made with one config object."""

    @pytest.fixture
    def pair(self):
        first = make_model("llama")
        torch.manual_seed(7)
        second = LlamaForCausalLM(first.config).eval()
        second.generation_config.eos_token_id = None
        second.generation_config.pad_token_id = 0
        assert first.config is second.config
        return first, second

    def test_wrapping_one_leaves_the_other(self, pair):
        first, second = pair
        plain, full = answer(second)
        with mmkv.wrapped(first, "h2o", 0.3):
            assert second.config._attn_implementation == "sdpa"
            assert second.model.layers[0].self_attn.config._attn_implementation == "sdpa"
            logits, cache = answer(second)
            assert answer(first)[1].report().kept_fraction < 0.4
        assert torch.equal(logits, plain)
        assert type(cache) is type(full)

    def test_both_are_wrapped_and_unwrapped_in_any_order(self, pair):
        first, second = pair
        plain = [answer(model)[0] for model in pair]
        alone = []
        for model, policy in zip(pair, ("h2o", "local"), strict=True):
            with mmkv.wrapped(model, policy, 0.3):
                alone.append(answer(model)[0])
        mmkv.wrap(first, "h2o", 0.3)
        mmkv.wrap(second, "local", 0.3)
        assert torch.equal(answer(first)[0], alone[0])
        assert torch.equal(answer(second)[0], alone[1])
        mmkv.unwrap(first)
        assert torch.equal(answer(first)[0], plain[0])
        assert torch.equal(answer(second)[0], alone[1])
        mmkv.unwrap(second)
        assert torch.equal(answer(second)[0], plain[1])
        assert first.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "llava-llama"])
@torch.no_grad()
def test_a_wrapped_models_config_is_its_own_still(name):
    """What is set on the config while the model is wrapped has its effect, and outlasts it."""
    model, inputs = make_model(name), make_inputs(name, (60,))
    decoder, text = model.get_decoder(), model.config.get_text_config()
    mmkv.wrap(model, "h2o", 0.3)
    assert isinstance(decoder.config, type(text))
    assert decoder.config.to_diff_dict() == text.to_diff_dict()
    text.use_cache = False
    assert decoder.config.use_cache is False
    decoder.config.use_cache = True
    assert text.use_cache is True
    model.set_attn_implementation({"vision_config": "eager"})
    assert decoder.config._attn_implementation == "mmkv_sdpa"
    decoder.config._attn_implementation = {"other": "eager"}
    assert text._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert decoder.config._attn_implementation == "mmkv_eager"
    cache = model(**inputs, use_cache=True).past_key_values
    assert cache.report().kept_fraction < 0.4
    assert mmkv.unwrap(model).get_decoder().config is text
    assert text._attn_implementation == "eager"


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_wrapped_model_has_its_own_config(text_model, how):
    mmkv.wrap(text_model, "h2o", 0.3)
    twin = (
        copy.deepcopy(text_model) if how == "deepcopy" else pickle.loads(pickle.dumps(text_model))
    )
    twin.config.use_cache = False
    assert twin.model.config.use_cache is False
    assert text_model.model.config.use_cache is True
    assert twin.model.config is twin.model.layers[0].self_attn.config
    assert mmkv.unwrap(twin).model.config is twin.config
    assert text_model.model.config._attn_implementation == "mmkv_sdpa"
    assert copy.copy(text_model.model.config)._attn_implementation == "sdpa"


def test_a_decoder_that_another_model_wraps_is_named(text_model):
    other = LlamaForCausalLM(text_model.config)
    other.model = text_model.model
    mmkv.wrap(text_model, "h2o", 0.3)
    with pytest.raises(ValueError, match=r"decoder of this LlamaForCausalLM is wrapped already"):
        mmkv.wrap(other, "h2o", 0.3)
