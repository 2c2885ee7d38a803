"""A hook of a wrapped model that runs another one, or the same, inside a pass."""

import gc
import weakref

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.models import make_inputs, make_model, row_of
from helpers.oracle import generate
from mmkv.cache.forward_pass import current

TURN = {"policy": "snapkv", "budget": 0.4, "window": 6}


def in_decoder(model):
    return model.get_decoder().layers[1].register_forward_hook


def in_tower(model):
    return model.model.vision_tower.register_forward_hook


def before_all(model):
    return model.register_forward_pre_hook


def after_all(model):
    return model.lm_head.register_forward_hook


PLACES = in_decoder, in_tower, before_all, after_all


@cases(
    "place, policy",
    [
        *zip(PLACES, ("snapkv", "prefixkv", "kvzip", "lookm"), strict=True),
        *zip(PLACES, ("prefixkv", "xkv", "snapkv", "kvzip"), strict=True),
    ],
    *((in_tower, "prefixkv"), (before_all, "kvzip")),
)
def test_a_hook_may_run_another_wrapped_model(place, policy):
    """It is asked in each pass, and neither of them notices the other."""
    model, other = make_model("llava-llama"), make_model("llama")
    inputs, asked, options = make_inputs("llava-llama", (60, 40)), make_inputs("llama", (30,)), {}
    if policy in ("snapkv", "xkv"):
        options["window"] = 6
    found = []

    def ask(*args):
        found.append(generate(other, asked, new=3)[0])

    with mmkv.wrapped(model, policy, 0.4, **options), mmkv.wrapped(other, **TURN):
        expected, alone = generate(model, inputs, new=5), generate(other, asked, new=3)[0]
        with place(model)(ask):
            got = generate(model, inputs, new=5)
    assert found
    assert all(torch.equal(x, alone) for x in found)
    assert torch.equal(got[0], expected[0])
    for mine, wanted in zip(got[3], expected[3], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, wanted, strict=True))
    assert current.get() is None


@cases("how", ["generate", "decoder", "an error"], "decoder", "an error")
def test_a_hook_may_run_the_same_model(how):
    model, inputs, asked = make_model("llama"), make_inputs("llama", (60, 40)), [0]

    def ask(module, args, output):
        if asked[0] % 2:
            return
        asked[0] += 1
        given = row_of(inputs, 1)
        if how == "generate":
            generate(model, given, new=2)
        elif how == "decoder":
            model.get_decoder()(**given, use_cache=True)
        else:
            with pytest.raises(ValueError, match="padding alone"):
                model(**{**given, "attention_mask": 0 * given["attention_mask"]}, use_cache=True)
        asked[0] += 1

    with mmkv.wrapped(model, **TURN):
        expected = generate(model, inputs, new=4)[0]
        with in_decoder(model)(ask):
            assert torch.equal(generate(model, inputs, new=4)[0], expected)
    assert asked[0] == 8
    assert current.get() is None


@pytest.mark.parametrize("place", [in_decoder, in_tower])
def test_an_interrupted_call_leaves_nothing_behind(place):
    """torch runs no hook after KeyboardInterrupt."""
    model, inputs = make_model("llava-llama"), make_inputs("llava-llama", (60,))

    def stop(*args):
        raise KeyboardInterrupt

    with mmkv.wrapped(model, **TURN):
        expected = generate(model, inputs, new=3)[0]
        for _ in range(2):
            with place(model)(stop), pytest.raises(KeyboardInterrupt):
                generate(model, inputs, new=3)
        assert torch.equal(generate(model, inputs, new=3)[0], expected)
        assert current.get() is None


def test_an_interrupted_call_does_not_keep_the_model():
    model, inputs = make_model("llama"), make_inputs("llama", (60,))
    found = weakref.ref(model)

    def stop(*args):
        raise KeyboardInterrupt

    mmkv.wrap(model, **TURN)
    hook = model.lm_head.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        generate(model, inputs, new=3)
    hook.remove()
    del model, hook
    gc.collect()
    assert found() is None
    current.set(None)


def test_a_decoder_called_directly_leaves_nothing_behind(models):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, **TURN), torch.no_grad():
        model.get_decoder()(**inputs, use_cache=True)
        assert current.get() is None
        model.get_decoder()(**inputs, use_cache=False)
        assert current.get() is None
