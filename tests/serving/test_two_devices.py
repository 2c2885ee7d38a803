"""An engine over a model that is spread over two devices (`device_map`)."""

from dataclasses import replace

import pytest
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

import mmkv
from helpers.models import make_inputs, make_model
from helpers.oracle import Variant, options_of
from helpers.pretending import CPU, DEVICE, Devices, move
from mmkv.serving import Engine, Sampling
from mmkv.serving.worker import Worker

SEEDED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=7)
VARIANTS = [
    Variant("condense", (("decode", "rounds"), ("every", 4), ("latest", 3))),
    Variant("adakv", (("layers", "squeeze"),)),
    Variant("prefixkv", (("distance", 4),)),
]


@pytest.fixture
def spread(monkeypatch):
    """A model whose later layers are on another device, and an engine's thread that knows it."""
    loop = Worker._loop

    def with_devices(worker):
        with Devices():
            loop(worker)

    monkeypatch.setattr(Worker, "_loop", with_devices)
    with Devices():
        model = make_model("llava-llama")
        decoder = model.get_decoder()
        for module, device in (
            (decoder.layers[0], CPU),
            *((layer, move(layer) and DEVICE) for layer in decoder.layers[1:]),
            (decoder.norm, CPU),
        ):
            # What accelerate's dispatch does for a device_map.
            skipped = model._skip_keys_device_placement
            hook = AlignDevicesHook(device, place_submodules=False, skip_keys=skipped)
            add_hook_to_module(module, hook)
        assert {p.device for p in model.parameters()} == {CPU, DEVICE}
        yield model


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_replies_are_those_of_one_device(models, spread, variant):
    """Prompts in chunks, several in a batch, drawn and greedy, with and without a shared prefix."""
    lengths = (90, 41, 66)
    asked = [make_inputs("llava-llama", (n,), seed=n) for n in lengths]
    prefix, rest = make_inputs("llama", (50,), seed=1), make_inputs("llama", (9,), seed=2)
    said = []
    for model in (models("llava-llama"), spread):
        with (
            mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)),
            Engine(model, prefill_chunk=16, cache_memory=10**6) as engine,
        ):
            replies = [
                engine.submit(inputs=x, max_new_tokens=9, sampling=SEEDED if i == 1 else Sampling())
                for i, x in enumerate(asked)
            ]
            replies += [
                engine.submit(inputs=rest, prefix=prefix, max_new_tokens=5) for _ in range(2)
            ]
            # A row's bytes depend on which others it meets in a block, and so on time.
            said.append([(x.result(20)[0], replace(x.usage, cache_bytes=0)) for x in replies])
            assert engine.stats().cache_bytes == engine.stats().reserved_bytes
    assert said[1] == said[0]
