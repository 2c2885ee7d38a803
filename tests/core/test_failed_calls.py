"""A call that fails before its first layer leaves its cache as it was."""

import copy

import pytest
import torch

import mmkv
from helpers import zoo
from helpers.models import continued, make_inputs, row_of

NEW = torch.arange(20, 29)


def reply(model, inputs, cache=None, **options):
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, **options}
    return model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, **options)


def turn_after(inputs, sequences):
    return continued({**inputs, "input_ids": sequences}, NEW.expand(len(sequences), -1))


def steps(model, cache, token):
    """Logits of six steps of a caller's own loop."""
    logits = []
    with torch.no_grad():
        for _ in range(6):
            logits.append(model(input_ids=token, past_key_values=cache).logits[:, -1:])
            token = logits[-1].argmax(-1)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o", {"budget": 0.3}),
        ("condense", {"budget": 24, "decode": "rounds", "every": 4, "latest": 2}),
    ],
)
def test_generate_that_fails_before_its_first_pass_changes_no_cache(models, policy, options):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, policy, **options):
        first = reply(model, inputs)
        cache, token = first.past_key_values, first.sequences[:, -1:]
        expected = steps(model, copy.deepcopy(cache), token)
        with pytest.raises(ValueError, match="temperature"):
            reply(
                model, turn_after(inputs, first.sequences), cache, do_sample=True, temperature=-1.0
            )
        assert torch.equal(steps(model, cache, token), expected)


def test_a_refused_beam_search_runs_once_rows_are_repeated(models):
    model, inputs = models("llama"), make_inputs("llama", (60, 33))
    with mmkv.wrapped(model, "snapkv", 0.3, window=6):
        first = reply(model, inputs)
        cache, turn = first.past_key_values, turn_after(inputs, first.sequences)
        fresh = copy.deepcopy(cache)
        with pytest.raises(ValueError, match=r"cache has 2, this pass 4"):
            reply(model, turn, cache, num_beams=2)
        plain = reply(model, turn, copy.deepcopy(cache))
        assert torch.equal(plain.sequences, reply(model, turn, copy.deepcopy(fresh)).sequences)
        for x in (cache, fresh):
            x.batch_repeat_interleave(2)
        found, expected = (reply(model, turn, x, num_beams=2) for x in (cache, fresh))
    assert torch.equal(found.sequences, expected.sequences)


def test_a_later_turn_with_beams_has_the_positions_of_its_pictures():
    model = zoo.make("Qwen2_5_VLForConditionalGeneration")
    inputs = zoo.inputs_of(model, "one")

    def both():
        first = reply(model, inputs, max_new_tokens=6)
        turn = zoo.next_turn(model, inputs, first.sequences[:, -6:], False)
        refused = copy.deepcopy(first.past_key_values)
        if mmkv.is_wrapped(model):
            with pytest.raises(ValueError, match="rows differ"):
                reply(model, turn, refused, num_beams=2)
        one = reply(model, turn, copy.deepcopy(refused)).sequences
        refused.batch_repeat_interleave(2)
        return one, reply(model, turn, refused, num_beams=2).sequences

    expected = both()
    with mmkv.wrapped(model, "snapkv", 1.0):
        found = both()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_turn_refused_for_its_padding_can_be_corrected(models):
    model, inputs = models("llama"), make_inputs("llama", (60, 33))
    with mmkv.wrapped(model, "snapkv", 0.3, window=6):
        first = reply(model, inputs)
        cache, turn = first.past_key_values, turn_after(inputs, first.sequences)
        expected = reply(model, turn, copy.deepcopy(cache)).sequences
        mask = turn["attention_mask"].clone()
        mask[1, -2:] = 0
        with pytest.raises(ValueError, match="ends in padding"):
            reply(model, {**turn, "attention_mask": mask}, cache)
        assert torch.equal(reply(model, turn, cache).sequences, expected)


def test_an_unwrapped_model_changes_no_layer_of_a_compressed_cache():
    """The first layer of Gemma 2 has a sliding window, and so keeps a cache of its own."""
    model = zoo.make("Gemma2ForCausalLM")
    inputs = zoo.prompt(model, (40,))
    with mmkv.wrapped(model, "snapkv", 0.3, window=6):
        first = reply(model, inputs)
    cache, turn = first.past_key_values, turn_after(inputs, first.sequences)
    fresh = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="a model that is not wrapped"):
        reply(model, turn, cache)
    with mmkv.wrapped(model, "snapkv", 0.3, window=6):
        found, expected = (torch.stack(reply(model, turn, x).logits) for x in (cache, fresh))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("given", ["ones", "none"])
def test_a_mask_that_shows_earlier_padding_is_refused(models, given):
    """`generate` drops a mask of ones once it has computed positions by it."""
    model, inputs = models("llama"), make_inputs("llama", (60, 33))
    with mmkv.wrapped(model, "snapkv", 0.3, window=6):
        first = reply(model, inputs)
        cache, turn = first.past_key_values, turn_after(inputs, first.sequences)
        shown = {"input_ids": turn["input_ids"]}
        if given == "ones":
            shown["attention_mask"] = torch.ones_like(turn["attention_mask"])
        pad = model.generation_config.pad_token_id
        with pytest.raises(ValueError, match="shows token 0 of row 1, which was padding"):
            reply(model, shown, cache, eos_token_id=pad)
        found = torch.stack(reply(model, turn, cache).logits)[:, 1]
        row = row_of(inputs, 1)
        alone = reply(model, row)
        turn = turn_after(row, alone.sequences)
        expected = torch.stack(reply(model, turn, alone.past_key_values).logits)[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
