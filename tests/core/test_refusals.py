"""What cannot be honoured is refused: one line that names the value and the remedy."""

import copy
import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import mmkv
from helpers import zoo
from helpers.memory import bounded
from helpers.models import make_inputs, make_model
from helpers.oracle import generate, prefilled
from mmkv import adapters
from mmkv.calls import cache_in
from mmkv.policy import Score
from mmkv.profiles import Profile
from mmkv.scores.window import WindowAttention

SAMPLED = {"allocation": "sampled"}
DROPS = {"decode": "least-attended"}
GROUPED = {"average_heads": True, "merge": "groups"}


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("snap", {}, r"unknown policy 'snap'. Did you mean 'snapkv'\?$"),
        ("key-difference", {}, r"no policy but a part: .*, score='key-difference'"),
        ("nosuchname", {}, r"unknown policy 'nosuchname'. Known: .*prefixkv.*snapkv"),
        (None, {}, r"policy=None: expected a name or a Policy object"),
        (mmkv.Policy, {}, r"or a Policy object: call it, Policy\(\)"),
        ("snapkv", {"windw": 3}, r"option 'windw' of policy 'snapkv'. Did you mean 'window'"),
        ("snapkv", {"memroy": 1 / 8}, r"Did you mean 'memory'"),
        ("snapkv", {"budget": 0.2}, r"'budget' is no option of a policy: give it to mmkv\.wrap"),
        ("snapkv", {"compression_ratio": 0.8}, r"give what is kept, budget=0\.2"),
        ("streaming", {"window": 3}, r"'window' has no effect"),
        ("full", {"window": 3}, r"'window' has no effect"),
        ("full", {"least": 3}, r"'least' has no effect on policy 'full'"),
        ("xkv", {"alpha": 0.3}, r"'alpha' has no effect on policy 'xkv'.*heads='uniform'"),
        ("squeeze", {"score": "window"}, r"'score' has no effect on policy 'squeeze'"),
        ("keydiff", {"value": "norm"}, r"option 'value' has no effect on policy"),
        ("prefixkv", {"diversity": True}, r"option 'diversity' has no effect on policy 'prefixkv'"),
        # Values out of range, or of another type
        ("snapkv", {"window": "wide"}, "window='wide': expected a whole number"),
        ("snapkv", {"window": 8.5}, "window=8.5: expected a whole number"),
        ("snapkv", {"window": 0}, r"window=0"),
        ("expected", {"epsilon": math.nan}, "epsilon=nan: expected a finite number"),
        ("expected", {"epsilon": math.inf}, "epsilon=inf: expected a finite number"),
        ("snapkv", {"sinks": True}, "sinks=True: expected a whole number"),
        ("snapkv", {"recent": "half"}, "recent='half': expected a number"),
        ("snapkv", {"average_heads": 1}, "average_heads=1: expected True or False"),
        ("snapkv", {"pooling": "min"}, r"pooling='min'.*avg"),
        ("snapkv", {"least": -1}, "least=-1: expected 0 or more"),
        ("snapkv", {"least": 0.5}, r"least=0\.5"),
        ("snapkv", {"value": "l2"}, r"value='l2': expected one of \['norm', 'output'"),
        ("prefixkv", {"value": "critical"}, r"value='critical': expected one of"),
        ("adakv", {"alpha": 1.5}, r"alpha=1.5: expected a number in \[0, 1\]"),
        ("xkv", {"score": "windy"}, r"score='windy': expected one of .*'window'"),
        ("xkv", {"heads": WindowAttention()}, r"heads=WindowAttention.*: expected .*Heads part"),
        ("condense", {"exact": 1.5}, "exact=1.5"),
        ("condense", {"chunk": 0}, "chunk=0"),
        ("condense", {"stride": 0}, "stride=0"),
        ("condense", {"value_weight": -1.0}, "value_weight=-1.0"),
        ("condense", {"decode": "rounds", "every": 0}, "every=0"),
        ("defensive", {"kernel_size": 4}, "kernel_size=4: expected an odd number"),
        ("defensive", {"window": 0}, "window=0: expected 1 or more"),
        ("defensive", {"mass": 1.5}, r"mass=1.5: expected a number in \[0, 1\]"),
        ("expected", {"positions": 0}, "positions=0: expected 1 or more"),
        ("expected", {"epsilon": -0.1}, r"epsilon=-0\.1: expected 0 or more"),
        ("kvzip", {"repeated": 0}, "repeated=0: expected 1 or more"),
        ("kvzip", {"instruction": "Repeat"}, "instruction='Repeat': expected token ids"),
        ("lagkv", {"lag": 1}, r"lag=1: expected 2 or more"),
        ("random", {"seed": -1}, "seed=-1: expected 0 or more"),
        ("sparsemm", {"rho": 2}, "rho=2"),
        ("xkv", {**SAMPLED, "samples": 0}, "samples=0: expected 1 or more"),
        # Parts that do not go together
        ("snapkv", {"decode": "fixed"}, r"decode='fixed' drops .*score='window' has neither"),
        ("h2o", {"average_heads": True}, r"average_heads=True.*decode='fixed'"),
        ("local", {"heads": "adaptive"}, r"heads='adaptive'"),
        ("local", {"layers": "prefix"}, r"layers='prefix'"),
        ("prefixkv", {"heads": "adaptive"}, r"average_heads"),
        (
            "streaming",
            {"heads": "retrieval"},
            "heads='retrieval' needs .* score='recency' ranks them once",
        ),
        ("xkv", {"heads": "global"}, r"layers='pooled' nothing to decide: use layers='uniform'"),
        (
            "xkv",
            {"heads": "global", "layers": "uniform", "average_heads": True},
            "heads='global' needs .* use average_heads=False or heads='uniform'",
        ),
        ("sparsemm", {"layers": "pyramid"}, "leaves layers='pyramid' nothing to decide"),
        ("sparsemm", {"average_heads": True}, "average_heads=True"),
        ("xkv", {"layers": "sparsity"}, "layers='sparsity' needs .*score='window'"),
        ("xkv", DROPS, r"decode='least-attended' drops .*use average_heads=True"),
        ("xkv", {**DROPS, "score": "observers"}, r"newest query.*score='observers'"),
        ("xkv", {**DROPS, **GROUPED}, r"decode='least-attended' needs .*merge='groups'"),
        ("h2o", {"value": "norm"}, "value='norm' changes a prompt's scores, but decode='fixed'"),
        ("squeeze", {"value": "norm"}, r"value='norm' changes .* decode='fixed' drops"),
        ("tova", {"value": "norm"}, r"value='norm' changes .* decode='least-attended' drops"),
        ("tova", {"diversity": True}, "diversity=True changes a prompt's scores"),
        ("snapkv", {"value": "critical", "diversity": True}, "which diversity=True would mix"),
        ("snapkv", {"layers": "squeeze", "decode": "rounds"}, "measures them on prompts alone"),
        ("kvzip", {"decode": "rounds"}, "decode='rounds' scores generated tokens"),
        (
            "kvzip",
            {"heads": "uniform", "layers": "pooled", "allocation": "mini-prefill"},
            "allocation='mini-prefill' sizes layers before the prompt is repeated",
        ),
        ("xkv", SAMPLED, "samples=None, requests=None: give one"),
        ("xkv", {**SAMPLED, "samples": 2, "requests": 9}, "samples=2, requests=9: give one"),
        ("xkv", {"samples": 5}, "samples=5 needs allocation='sampled'"),
        ("xkv", {**SAMPLED, "samples": 2, "retention": 0.5}, "retention=0.5 replaces"),
    ],
    ids=str,
)
def test_refused_policy_options(policy, options, message):
    with pytest.raises(ValueError, match=message) as error:
        mmkv.get_policy(policy, **options)
    assert "\n" not in str(error.value)


def test_allowed_options_are_accepted():
    assert mmkv.get_policy("snapkv", window=np.int64(8), recent=1).score.window == 8
    assert mmkv.get_policy("h2o", value="norm", decode="grow").score.value == "norm"
    built_in = [mmkv.get_policy(x) for x in mmkv.list_policies()]
    assert {x.name: x.least for x in built_in if x.least} == {"condense": 64}


@pytest.mark.parametrize(
    ("policy", "budget", "options", "message"),
    [
        ("xkv", 0.2, {"retention": 0.5}, r"budget=0.2 and retention=0.5"),
        ("snapkv", None, {"kv_dtype": "int8"}, r"needs a budget"),
        ("snapkv", 0.0, {}, "budget=0.0: a share must be above 0"),
        ("h2o", 0.2, {"protect": "instruction"}, r"no image tokens"),
        ("snapkv", 29, {"window": 30}, r"budget=29 is below the 30 .*window=30, sinks=0"),
        ("streaming", 29, {"sinks": 30}, r"budget=29 is below the 30 .*window=0, sinks=30"),
        ("xkv", 29, {"window": 20, "sinks": 10}, r"29 is below the 30 .*window=20, sinks=10"),
        ("snapkv", 0.3, {"evict_chunks": 64}, r"evict_chunks=64: expected True or False"),
        ("snapkv", 0.3, {"graph": "foo"}, r"graph='foo': expected True or False"),
        ("kvzip", 0.3, {"instruction": "7 120"}, r"has the id 120, .* vocabulary has ids 0 to 119"),
        ("kvzip", 0.3, {"instruction": "7 " * 2048}, r"has 2048 ids, .* has 2048 positions"),
        ("snapkv", None, {"profile": 3}, r"profile=3: expected a Profile, or the path of one"),
        ("snapkv", None, {"profile": [0.5] * 2}, r"profile=.*: expected a Profile, or the path of"),
    ],
)
def test_refused_arguments_of_wrap(text_model, policy, budget, options, message):
    before = sorted(vars(text_model))
    with pytest.raises(ValueError, match=message):
        mmkv.wrap(text_model, policy, budget, **options)
    assert sorted(vars(text_model)) == before
    assert text_model.config._attn_implementation == "sdpa"
    if budget == 29:  # one more is enough
        cache = prefilled(text_model, make_inputs("llama", (100,)), policy, 30, **options)
        assert [int((cache.kept(i)[0, 0] >= 0).sum()) for i in range(2)] == [30, 30]


def tiny(name, **settings):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    config = getattr(tf, f"{name}Config")(**sizes, num_attention_heads=2, **settings)
    return getattr(tf, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("Cohere"), r"CohereForCausalLM.*LlavaForConditionalGeneration"),
        (lambda: tiny("Mistral", sliding_window=8), r"sliding_window=8"),
        (lambda: make_model("llama").model, r"wrap a LlamaModel: load it as LlamaForCausalLM"),
        (lambda: nn.Linear(2, 2), "cannot wrap a Linear"),
    ],
)
def test_refused_models(make, message):
    for call in (lambda x: mmkv.wrap(x, "h2o", 0.5), mmkv.probe):
        with pytest.raises(ValueError, match=message):
            call(make())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cache_implementation": "static"}, r"cache_implementation='static'.*unwrap"),
        ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded'"),
        ({"cache_implementation": "quantized"}, r"cache_implementation='quantized'"),
        ({"use_cache": False}, r"use_cache=False leaves nothing to compress.*unwrap"),
        ({"cache_implementation": "paged"}, r"continuous batching.*unwrap"),
        ({"prompt_lookup_num_tokens": 3}, r"assisted decoding"),
        ({"assistant_early_exit": 1}, r"assisted decoding"),
        ({"assistant_model": make_model("llama")}, r"assisted decoding"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0.6 asks for contrastive.*unwrap"),
        ({"dola_layers": "low", "trust_remote_code": True}, r"dola_layers='low' asks for"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, r"num_beam_groups=2"),
        ({"num_beams": 4, "force_words_ids": [[[5]]]}, r"force_words_ids=\[\[\[5\]\]\] asks for"),
        (
            {"guidance_scale": 1.5},
            r"guidance_scale=1.5.* decode='fixed' would keep.* decode='grow'",
        ),
        ({"past_key_values": tf.DynamicCache()}, r"the cache given is a DynamicCache"),
    ],
)
def test_refused_arguments_of_generate(text_model, kwargs, message):
    inputs = make_inputs("llama", (40,))
    with mmkv.wrapped(text_model, "h2o", 0.5):
        with pytest.raises(ValueError, match=message):
            text_model.generate(**inputs, max_new_tokens=3, **kwargs)
        generate(text_model, inputs, new=3)  # and goes on working


def test_several_tokens_under_dropping_decode_raise(text_model):
    with mmkv.wrapped(text_model, "h2o", 0.5), torch.no_grad():
        cache = text_model(**make_inputs("llama", (40,)), use_cache=True).past_key_values
        for n in (2, 3):
            with pytest.raises(ValueError, match=f"{n} tokens at once after a compressed prompt"):
                text_model(input_ids=torch.full((1, n), 7), past_key_values=cache)
        text_model(input_ids=torch.full((1, 1), 7), past_key_values=cache)
    assert cache.get_seq_length() == 41


def test_attention_weights_of_steps_are_refused():
    model, inputs = make_model("llama", "eager"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "snapkv", 0.5, window=6), torch.no_grad():
        out = model(**inputs, output_attentions=True)
        assert out.attentions[0].shape == (1, 4, 40, 40)
        with pytest.raises(ValueError, match=r"output_attentions=True: .* a decode step"):
            model.generate(**inputs, max_new_tokens=3, output_attentions=True)
        first = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)
        turn, cache = torch.nn.functional.pad(first.sequences, (0, 9), value=7), cache_in(first)
        with pytest.raises(ValueError, match=r"output_attentions=True: .* a later turn"):
            model.generate(turn, past_key_values=cache, max_new_tokens=1, output_attentions=True)


@pytest.mark.parametrize("kv_dtype", [None, "int4"])
def test_rows_that_a_cache_does_not_have_are_refused(text_model, kv_dtype):
    inputs = make_inputs("llama", (40, 30))
    with mmkv.wrapped(text_model, "snapkv", 0.5, kv_dtype=kv_dtype, window=6), torch.no_grad():
        cache = text_model(**inputs, use_cache=True).past_key_values
        for call in (cache.batch_select_indices, cache.reorder_cache):
            with pytest.raises(IndexError, match="row 2: the cache has 2 rows"):
                call(torch.tensor([0, 2]))
        last = copy.deepcopy(cache)
        last.batch_select_indices(torch.tensor([-1]))
        cache.batch_select_indices(torch.tensor([1]))
        steps = [
            text_model(input_ids=torch.tensor([[5]]), past_key_values=x) for x in (cache, last)
        ]
    assert last.lengths == [30]
    torch.testing.assert_close(steps[0].logits, steps[1].logits)


def test_pass_with_another_number_of_rows_than_the_cache_is_refused(text_model):
    """Such as beams that continue it; with its rows repeated they run."""
    inputs = make_inputs("llama", (40,))
    with mmkv.wrapped(text_model, "snapkv", 0.5, window=6):
        _, words, cache, _ = generate(text_model, inputs, new=2)
        ids = torch.cat([inputs["input_ids"], words, torch.tensor([[5, 6]])], dim=1)
        turn: Any = {"input_ids": ids, "past_key_values": cache, "max_new_tokens": 3}
        with pytest.raises(
            ValueError, match=r"cache has 1, this pass 2\. .*repeat_interleave\(2\)"
        ):
            text_model.generate(**turn, num_beams=2)
        cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match=r"cache has 2, this pass 3\. .*select_indices\(rows"):
            text_model(input_ids=torch.tensor([[5]] * 3), past_key_values=cache)
        assert text_model.generate(**turn, num_beams=2).shape[1] == 47
        inputs = make_inputs("llama", (40, 40))
        _, words, cache, _ = generate(text_model, inputs, new=2)
        ids = torch.cat([inputs["input_ids"], words, words], dim=1)[:1]
        with pytest.raises(ValueError, match=r"row 1 \(of 2 in the cache and 1 here\) differs"):
            text_model.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_padding_among_tokens_that_continue(text_model):
    inputs, new = make_inputs("llama", (40,)), torch.tensor([[5, 6, 7]])
    mask = torch.ones(1, 43, dtype=torch.long)
    with mmkv.wrapped(text_model, "snapkv", 0.5, window=6), torch.no_grad():
        cache = text_model(**inputs, use_cache=True).past_key_values
        for hidden in (40, 41, 42):
            mask[0, hidden] = 0
            with pytest.raises(ValueError, match="row 0 has padding among its 3 new tokens"):
                text_model(input_ids=new, attention_mask=mask, past_key_values=cache)
            mask[0, hidden] = 1
        text_model(input_ids=new, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 43


def test_refused_caches(text_model):
    inputs = make_inputs("llama", (40,))
    with mmkv.wrapped(text_model, "condense", 0.5, least=0):
        *_, cache, _ = generate(text_model, inputs, new=3)
        for n in (40, 20):
            given = {"input_ids": inputs["input_ids"][:, :n]}
            with pytest.raises(ValueError, match=f"has seen 42 tokens, and there are {n}"):
                text_model.generate(**given, past_key_values=cache, max_new_tokens=2)
    assert not cache.is_croppable
    for call, message in (
        (lambda: cache.crop(-1), "cropped"),
        (lambda: cache.offload(0), "offloaded"),
        (lambda: type(cache)(text_model.config, cache.plan).kept(0), "nothing is kept yet"),
        *(
            (lambda read=read: read(99), "layer 99: the cache has layers 0 to 1")
            for read in (cache.kept, cache.groups, cache.shares)
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(cache.kept(-1), cache.kept(1))


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_model_cast_after_its_prompt_is_refused(kv_dtype):
    model, inputs = make_model("llama"), make_inputs("llama", (40,))
    cache = prefilled(model, inputs, "h2o", 20, kv_dtype=kv_dtype)
    with mmkv.wrapped(model, "h2o", 20, kv_dtype=kv_dtype), torch.no_grad():
        step = {"input_ids": torch.tensor([[7]]), "past_key_values": cache}
        model.to(torch.bfloat16)
        with pytest.raises(ValueError, match=r"in torch.float32, which was cast to torch.bfloat16"):
            model(**step)
        model(**inputs, use_cache=True)  # a new cache
        model.float()
        model(**step)


def test_a_mask_of_the_last_turn_alone_is_named(models):
    """The ids are all there, but the mask is that of the prompt."""
    model, inputs = models("llama"), make_inputs("llama", (40,))
    with mmkv.wrapped(model, "snapkv", 0.4, window=8):
        *_, words, cache, _ = generate(model, inputs, new=3)
        ids = torch.cat([inputs["input_ids"], words, torch.full((1, 5), 9)], dim=1)
        with pytest.raises(ValueError, match="attention_mask has 40 columns, and there are 48 ids"):
            model.generate(**{**inputs, "input_ids": ids}, past_key_values=cache)


def test_refused_batches(text_model, models):
    inputs = make_inputs("llama", (40, 30))
    right = {**inputs, "attention_mask": inputs["attention_mask"].flip(-1)}
    empty = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    empty["attention_mask"][1] = 0
    with mmkv.wrapped(text_model, "h2o", 0.5), torch.no_grad():
        with pytest.raises(ValueError, match="pad on the left"):
            text_model(**right, use_cache=True)
        with pytest.raises(ValueError, match=r"ends in padding|padding alone"):
            text_model(**empty, use_cache=True)
        with pytest.raises(ValueError, match=r"input of shape \(1, 0\): give at least one token"):
            text_model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)
        with pytest.raises(ValueError, match=r"shape \(2, 1, 40, 40\): .* or use_cache=False"):
            text_model(**{**inputs, "attention_mask": torch.ones(2, 1, 40, 40)})
        with pytest.raises(ValueError, match="inference"):
            text_model.train()(**inputs, use_cache=True)
    model, embeds = models("llava-llama"), torch.randn(1, 40, 64)
    for policy, options, message in (
        ("h2o", {"protect": "instruction"}, r"protect='instruction'.*inputs_embeds alone.*'none'"),
    ):
        with mmkv.wrapped(model, policy, 0.5, **options), pytest.raises(ValueError, match=message):
            model(inputs_embeds=embeds, use_cache=True)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda k: k.mean(-1)[..., 1:], r"Odd returned \(1, 2, 59\).*\(1, 2, 60\)"),
        (lambda k: k.mean(-1)[0], r"Odd returned \(2, 60\)"),
        (lambda k: None, r"Odd returned NoneType"),
        (lambda k: (k > 0).all(-1), r"Odd returned torch.bool"),
        (lambda k: k.mean(-1) * torch.nan, r"Odd returned NaN for 120 of 120"),
    ],
)
def test_refused_scores(models, scores, message):
    class Odd(Score):
        def __call__(self, layer):
            return scores(layer.key)

    model, inputs = models("llama"), make_inputs("llama", (60,))
    odd = mmkv.Policy(score=Odd())
    with mmkv.wrapped(model, odd, 0.6), pytest.raises(ValueError, match=message):
        generate(model, inputs, new=2)


def test_negative_scores_are_refused_with_turn_reduction_max(models):
    """A token that no turn has scored yet has a score of 0."""

    class Odd(Score):
        turn_reduction = "max"

        def __call__(self, layer):
            return -layer.key.norm(dim=-1)

    model, inputs = models("llama"), make_inputs("llama", (60,))
    message = r"Odd returned a score of -\d.*turn_reduction='max' scores must be 0 or more"
    with (
        mmkv.wrapped(model, mmkv.Policy(score=Odd()), 0.6),
        pytest.raises(ValueError, match=message),
    ):
        generate(model, inputs, new=2)


@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_and_nan_scores_are_ranked(models, sign):
    """inf counts more than any finite score, -inf nothing; NaN is no fault of a score's own."""

    class Odd(Score):
        def __call__(self, layer):
            found = sign * layer.key.norm(dim=-1)
            for place, x in ((7, torch.inf), (9, -torch.inf), (11, layer.query[0, 0, 0, 0] * 0)):
                found[..., place] = found[..., place] + x
            return found

    model, inputs, odd = make_model("llama"), make_inputs("llama", (60,)), mmkv.Policy(score=Odd())
    cache = prefilled(model, inputs, odd, 0.9)
    assert all(
        {7, 11} <= set(h) for i in range(len(cache.layers)) for h in cache.kept(i)[0].tolist()
    )
    assert not any(9 in h for i in range(len(cache.layers)) for h in cache.kept(i)[0].tolist())
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(torch.inf)
    assert prefilled(model, inputs, odd, 0.5).report().kept_fraction == 0.5


def test_taken_names_raise():
    with pytest.raises(ValueError, match=r"'snapkv' is taken by mmkv\.policies\.snapkv\.SnapKV"):
        mmkv.register_policy("snapkv")(type("Other", (mmkv.Policy,), {}))
    with pytest.raises(TypeError, match="not a subclass"):
        mmkv.register_policy("other")(dict)
    with pytest.raises(ValueError, match=r"score part 'window' is taken by .*WindowAttention"):
        mmkv.parts.register_part("window")(type("Other", (Score,), {}))
    with pytest.raises(ValueError, match="policy name 'with:colon': expected letters, digits"):
        mmkv.register_policy("with:colon")(type("Other", (mmkv.Policy,), {}))
    with pytest.raises(ValueError, match="score part name 'a,b': expected letters, digits"):
        mmkv.parts.register_part("a,b")(type("Other", (Score,), {}))
    with pytest.raises(TypeError, match=r"inherits from none of Score, Layers"):
        mmkv.parts.register_part("x")(int)


# Profiles: files of measured sizes, which a stranger may have written.

OWN = {"format": "mmkv-profile", "version": 1}
FRACTIONS = {**OWN, "budget": 0.4, "fractions": [0.5, 0.3]}
PAIR = [[0.1, 0.2]] * 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, r"No such file or directory$"),
        ("folder", r"Is a directory$"),
        (b"", r"no JSON \(Expecting value"),
        (b"\x80\x00", r"no JSON \('utf-8' codec"),
        (b"[" * 100_000, ""),
        (b'{"a":' * 100_000, ""),
        (b" " * (2**20 + 1), "has more than"),
        (b"[" + b"0.5," * 200_000 + b"0.5]", ""),
        (b"[]", r"no layers"),
        (b'[0.5, "x"]', r".*expected a number, got 'x'"),
        (b"[0.5, NaN]", r".*expected a number"),
        (b"[%d, 0.5]" % 10**400, ""),
        (b"[true, 0.5]", ""),
        (b"[[0.5], 0.5]", ""),
        (b"[0.5, 0.5, 0.5]", r"it has 3 layers, this model compresses 2$"),
        (b"[0.5, 2.0]", r"layer 1 keeps -1.0, expected a number in \[0, 1\]$"),
        (b"[1, 1]", r"budget=0.0, expected"),
        (b'{"a": 1}', r"expected a JSON list, or an object with format='mmkv-profile'$"),
        (FRACTIONS | {"version": 9}, r".*version 9"),
        (FRACTIONS | {"fractions": 3}, r".*not a list"),
        (FRACTIONS | {"fractions": [0.5, math.nan]}, ""),
        (FRACTIONS | {"model": {"model_type": "opt"}}, r"measured on another model: model_type 'o"),
        (FRACTIONS | {"model": {}}, r"measured on another model: model_type None there, 'llama' h"),
        (FRACTIONS | {"model": ["llama"]}, ""),
        (FRACTIONS | {"policy": 3}, ""),
        *((FRACTIONS | {"budget": x}, "") for x in (-1, 0, 1e300, "0.5")),
        (FRACTIONS | {"budget": None}, r"budget: expected a number, got 'None'"),
        (FRACTIONS, r"budget=0.2, but the profile keeps 0.4000: leave the budget out"),
        (OWN | {"visual": PAIR, "model": 3}, ".*'model' is '3', expected dict"),
        (OWN | {"retrieval": [[0.1, -1.0]] * 2}, r".*retrieval scores must be numbers in \[0, 1\]"),
        (OWN | {"retrieval": [[0.1, 1.5]] * 2}, r".*retrieval scores must be numbers in \[0, 1\]"),
        (OWN | {"retrieval": [[0.1], [0.1, 0.2]]}, ".*as many heads"),
        (OWN | {"retrieval": PAIR + PAIR[:1]}, ".*3 layers"),
        (OWN | {"visual": [[1.0, -1.0]] * 2}, ".*0 or more"),
        (OWN | {"visual": [[0.0, 0.0]] * 2}, ".*not all be 0"),
        (OWN | {"visual": [1.0, 2.0]}, ".*'visual' is not a list"),
        (OWN | {"visual": [[1.0, math.nan]] * 2}, ""),
    ],
    ids=lambda x: str(x)[:40],
)
def test_profile_files(text_model, tmp_path, content, why):
    path, kind = tmp_path / "p.json", "prefixkv"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, dict):
        if "fractions" not in content:
            shape = adapters.shape(text_model.config)
            content, kind = {"model": shape, "policy": "condense", **content}, "sparsemm"
        path.write_text(json.dumps(content))
    elif content is not None:
        path.write_bytes(content)
    message = f"^profile {re.escape(str(path))}: {why}"
    with bounded(), pytest.raises(ValueError, match=message) as error:
        mmkv.wrap(text_model, kind, 0.2, profile=path)
    assert str(error.value).count("p.json") == 1
    assert not mmkv.is_wrapped(text_model)


def test_refused_profiles(text_model, tmp_path):
    with bounded(), pytest.raises(ValueError, match="/dev/zero: has more than"):
        mmkv.wrap(text_model, "prefixkv", profile="/dev/zero")
    for given in ({"visual": PAIR, "retrieval": PAIR}, {"fractions": (0.5,), "budget": 0.5}):
        if "fractions" in given:
            given["visual"] = PAIR
        with pytest.raises(ValueError, match="give one"):
            Profile(**given)
    shape = adapters.shape(text_model.config)
    for kind in ("visual", "retrieval"):
        with pytest.raises(ValueError, match=f"{kind} needs as many heads in every layer"):
            Profile(**{kind: ()})
        made = Profile(policy="sparsemm", model=shape, **{kind: ((0.1, 0.2),) * 2})
        made.save(tmp_path / "p.json")
        assert Profile.load(tmp_path / "p.json") == made
        with pytest.raises(ValueError, match="average_heads=True"):
            mmkv.wrap(text_model, "tova", 0.3, profile=made)
    layers = Profile((0.5, 0.1), budget=0.3)
    for call, message in (
        (lambda: mmkv.wrap(text_model, "prefixkv", 40, profile=layers), "the profile keeps 0.3"),
        (
            lambda: mmkv.wrap(text_model, "snapkv", profile=layers, heads="global"),
            r"gives layer sizes, and heads='global' finds them",
        ),
        (
            lambda: mmkv.wrap(text_model, "xkv", profile=layers, samples=2, **SAMPLED),
            "allocation='sampled' learns them",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    zero = OWN | {"fractions": [0, 0], "budget": 0.5}  # says nothing, and divides nothing by 0
    (tmp_path / "p.json").write_text(json.dumps(zero))
    with mmkv.wrapped(text_model, "prefixkv", profile=tmp_path / "p.json"), torch.no_grad():
        cache = text_model(torch.arange(40)[None], use_cache=True).past_key_values
    assert sum(int(cache.kept(i).shape[-1]) for i in range(len(cache.layers))) == 40


def test_a_cache_with_sliding_windows_cannot_be_cropped():
    model = zoo.model_of("Gemma3ForCausalLM")
    with mmkv.wrapped(model, "snapkv", 0.5, window=4), torch.no_grad():
        cache = model(**make_inputs("llama", (40,)), use_cache=True).past_key_values
    seen = [x.get_seq_length() for x in cache.layers]
    with pytest.raises(ValueError, match="a compressed cache cannot be cropped"):
        cache.crop(-1)
    assert [x.get_seq_length() for x in cache.layers] == seen


@pytest.mark.parametrize("kind", ["Gemma3ForCausal", "OPT"])
def test_models_that_cannot_be_fed_a_prompt_again(kind):
    model = zoo.model_of(next(x for x in zoo.NAMES if x.startswith(kind)))
    with pytest.raises(ValueError, match=r"\d of \d layers .* sliding window|no positions left"):
        mmkv.wrap(model, "kvzip", 0.5)
