"""Models with linear attention beside full attention: the states of the former are left alone."""

import pytest
import torch
from rich.console import Console

import mmkv
from helpers.oracle import prefilled, short
from helpers.zoo import PAD, VOCAB, inputs_of, model_of

NAME = "Qwen3_5ForCausalLM"


def words(rows, n, seed=3):
    return torch.randint(8, VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def test_report_counts_state_bytes():
    model = model_of(NAME)
    cache = prefilled(model, inputs_of(model, "one"), "prefixkv", 0.3, **short("prefixkv"))
    layer = cache.report().layers[0]
    # 2 x 16 channels of queries and of keys, 4 x 16 of values, each of 4 tokens; and the state.
    assert layer.nbytes == 4 * (128 * 4 + 4 * 16 * 16)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(cache.report())
    assert "not compressed" in console.export_text()
    with pytest.raises(ValueError, match="layer 0 has a sliding window or linear attention"):
        cache.kept(0)


def test_saving_its_context_raises(tmp_path):
    model = model_of(NAME)
    with mmkv.wrapped(model, "condense", 0.3, least=0):
        context = mmkv.read(model, inputs_of(model, "one"))
        with pytest.raises(ValueError, match="linear-attention layers cannot be saved"):
            context.save(tmp_path / "read.safetensors")


def test_a_context_answers_several_questions():
    model, text = model_of(NAME), words(1, 60)
    asked = {"input_ids": words(3, 8), "attention_mask": torch.ones(3, 8, dtype=torch.long)}
    options = {"max_new_tokens": 5, "do_sample": False}
    whole = torch.cat([text.expand(3, -1), asked["input_ids"]], dim=1)
    mask = torch.ones_like(whole)
    want = model.generate(input_ids=whole, attention_mask=mask, pad_token_id=PAD, **options)
    with mmkv.wrapped(model, "condense", 1.0):
        context = mmkv.read(model, {"input_ids": text})
        for _ in range(2):  # the context stays as it is
            assert torch.equal(context.ask(asked, **options), want[:, -5:])


def test_padding_after_a_token_raises():
    """It would change the state: padding is in front of a row's first token, or refused."""
    model, text, refused = model_of(NAME), words(1, 60), "row 1, after .* the state of linear atten"
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    asked = {"input_ids": words(2, 8), "attention_mask": mask}
    with mmkv.wrapped(model, "condense", 1.0), torch.no_grad():
        context = mmkv.read(model, {"input_ids": text})
        with pytest.raises(ValueError, match=refused):
            context.ask(asked, max_new_tokens=2)
        model(**asked, use_cache=True)
        mask[1, 5] = 0
        with pytest.raises(ValueError, match=f"hides token 5 of {refused}"):
            model(**asked, use_cache=True)
    chunks = {**asked, "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    chunks["attention_mask"][1, :5] = 0
    with mmkv.wrapped(model, "condense", 1.0):
        whole, parts = (
            model.generate(**chunks, max_new_tokens=4, do_sample=False, prefill_chunk_size=n)
            for n in (None, 3)
        )
    assert torch.equal(whole, parts)


def test_mask_hiding_state_tokens_raises():
    model = model_of(NAME)
    with mmkv.wrapped(model, "prefixkv", 1.0, **short("prefixkv")), torch.no_grad():
        cache = model(input_ids=words(1, 40), use_cache=True).past_key_values
        mask = torch.ones(1, 41, dtype=torch.long)
        mask[0, 7] = 0
        with pytest.raises(ValueError, match="in the state of linear attention: keep showing them"):
            model(input_ids=words(1, 1), attention_mask=mask, past_key_values=cache)
