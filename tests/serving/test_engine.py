"""The engine: every reply is the one that `generate` gives alone, whatever else runs."""

from __future__ import annotations

import pytest
import torch

import mmkv
from helpers.models import make_inputs
from mmkv.serving import Engine, Sampling

SEEDED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=7)


def alone(model, inputs, new, sampling=None):
    options = {"do_sample": False}
    if sampling is not None:
        torch.manual_seed(sampling.seed)
        options = {"do_sample": True, "temperature": sampling.temperature}
        options |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
    out = model.generate(**inputs, **options, max_new_tokens=new)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "llava-llama"])
def test_every_reply_is_the_one_that_generate_gives_alone(models, name):
    model = models(name)
    with mmkv.wrapped(model, "snapkv", 0.4, window=6, kernel_size=3):
        asked = [make_inputs(name, (n,), seed=n) for n in (50, 96, 33, 71)]
        wanted = [alone(model, x, 12) for x in asked]
        seeded = alone(model, asked[1], 12, SEEDED)
        with Engine(model, prefill_chunk=16) as engine:
            replies = [engine.submit(inputs=x, max_new_tokens=12) for x in asked]
            drawn = engine.submit(inputs=asked[1], sampling=SEEDED, max_new_tokens=12)
            assert [x.result(60)[0] for x in replies] == wanted
            assert drawn.result(60)[0] == seeded
            assert engine.stats().cache_bytes == 0
