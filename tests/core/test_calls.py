"""A cache under the names that releases of transformers, and models of others, have for it."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, LlamaModel
from transformers.utils import generic

import mmkv
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import generate, prefilled, short
from mmkv.calls import CACHE
from mmkv.forcing import log_probabilities, score_answers

INPUTS = make_inputs("llama", (90,))
NAMES = [
    "past_key_values",
    pytest.param("cache", marks=pytest.mark.skipif(CACHE != "cache", reason="from 5.24 on")),
]


def knows_the_old_name(self, input_ids=None, attention_mask=None, past_key_values=None, **more):
    more |= {"attention_mask": attention_mask, CACHE: past_key_values}
    return type(self).__base__.forward(self, input_ids, **more)


def knows_the_new_name(self, input_ids=None, attention_mask=None, cache=None, **more):
    more |= {"attention_mask": attention_mask, CACHE: cache}
    return type(self).__base__.forward(self, input_ids, **more)


OTHER, FORWARD = (
    ("past_key_values", knows_the_old_name) if CACHE == "cache" else ("cache", knows_the_new_name)
)


class Decoder(LlamaModel):
    forward = FORWARD


class Model(LlamaForCausalLM):
    forward = FORWARD

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prepare_inputs_for_generation(*args, **kwargs)
        return found | {OTHER: found.pop(CACHE, None)}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the old name, on releases with the new
@pytest.mark.parametrize("name", NAMES)
def test_turn_continues_under_each_cache_name(name, text_model):
    more = torch.cat([INPUTS["input_ids"], make_inputs("llama", (20,), 1)["input_ids"]], dim=1)
    before = prefilled(text_model, INPUTS, "snapkv", 0.3)
    with mmkv.wrapped(text_model, "snapkv", 0.3):
        how: Any = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        out = text_model.generate(more, **{name: copy.deepcopy(before)}, **how)
        step = text_model(more[:, 90:], **{name: before})
        assert out.past_key_values.get_seq_length() == 115
        assert step.past_key_values is before
        assert before.get_seq_length() == 110
        with pytest.raises(ValueError, match=r"the cache given is a DynamicCache, but a wrapped"):
            text_model(more, **{name: DynamicCache()})
        with pytest.raises(ValueError, match=r"the cache given is a DynamicCache, but a wrapped"):
            text_model.generate(more, **{name: DynamicCache()}, **how)


@cases(
    "part, policy",
    [(Decoder, "h2o"), (Model, "xkv"), (Decoder, "kvzip"), (Model, "h2o")],
    (Decoder, "kvzip"),
)
def test_foreign_model_with_one_cache_name(part, policy):
    """Each decoder is called by its own name, in passes that repeat a prompt too."""
    model = make_model("llama")
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        logits, tokens, cache, _ = generate(model, INPUTS)
    (model if part is Model else model.model).__class__ = part
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        found, same, kept, _ = generate(model, INPUTS)
        scored = score_answers(model, INPUTS, [[5, 6, 7]])
    assert torch.equal(same, tokens)
    torch.testing.assert_close(found, logits)
    assert torch.equal(kept.kept(1), cache.kept(1))
    assert scored.cache.report().kept_fraction < 0.4


@pytest.mark.slow
def test_own_calls_use_the_new_cache_name(monkeypatch):
    """No warning that a user could do nothing about."""
    said: list[str] = []
    monkeypatch.setattr(generic.logger, "warning_once", lambda x, *_: said.append(x), raising=False)
    model, sample = make_model("llava-llama"), make_inputs("llava-llama", (90,))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        full = log_probabilities(model, sample, [[5, 6, 7]])
        for policy in ("prefixkv", "sparsemm"):
            mmkv.calibrate(model, [sample], policy)
        with mmkv.wrapped(model, "kvzip", 0.3, **short("kvzip")):
            score_answers(model, sample, [[5, 6, 7]], full=full)
            context = mmkv.read(model, sample)
            context.append(make_inputs("llama", (20,), 1))
            context.ask(make_inputs("llama", (9,), 2), num_beams=2, max_new_tokens=3)
    assert not said
