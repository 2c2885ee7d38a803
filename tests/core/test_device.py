"""Every policy on a GPU, as far as a CPU can tell.

`pretending` stands in for the GPU. Numbers must equal the CPU's, no operation may mix devices, a
decode step must not make the host wait, and one that is captured must keep to the device.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.masking import generate, same_run
from helpers.models import continued, make_inputs, make_model
from helpers.oracle import DECODING, READING, REPLAYED, ROWS, Variant, depth, options_of, short
from helpers.pretend_cuda import install
from helpers.pretending import DEVICE, Devices, OnDevice, move
from helpers.profiles import profile_of
from mmkv.attach import graph
from mmkv.decode import slots

NEW, FEW = 12, 5
# Each way to give slots to new tokens, with groups and without.
SLOTS = ("condense", "elastic", "full", "h2o", "local", "prefixkv", "tova")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, as far as a CPU can be one."""
    monkeypatch.setattr(graph, "_capturable", lambda device: device == DEVICE)
    with Devices() as devices:
        yield devices


@pytest.fixture(scope="module")
def there():
    """Models with their weights on the GPU."""
    made = {}

    def get(name, layers=None):
        if (name, layers) not in made:
            made[name, layers] = move(make_model(name, layers=layers))
        return made[name, layers]

    return get


@pytest.fixture(scope="module")
def unwrapped():
    """By model, how often each of its own steps makes the host wait."""
    return {}


@contextmanager
def waits(model, devices):
    """A list that fills with how often each step of one token makes the host wait."""
    found = []

    def before(module, args, kwargs):
        one = kwargs["input_ids"].shape[1] == 1
        devices.counted = Counter() if one else None

    def after(module, args, output):
        if devices.counted is not None:
            found.append(devices.counted)
        devices.counted = None

    counting = model.register_forward_pre_hook(before, with_kwargs=True)
    with counting, model.register_forward_hook(after):
        yield found


def on_gpu(inputs):
    return {k: OnDevice(v) for k, v in inputs.items()}


def test_the_stand_in_refuses_what_a_gpu_refuses(gpu):
    here, away = torch.ones(3), OnDevice(torch.ones(3))
    assert (away * 2 + here.sum()).device == DEVICE
    with pytest.raises(RuntimeError, match="one device"):
        here + away
    with pytest.raises((RuntimeError, TypeError)):
        away.numpy()
    gpu.counted = Counter()
    here.to(DEVICE, non_blocking=True)
    assert not gpu.counted
    for wait in (away.sum().item, lambda: away[away > 0], away.cpu, lambda: here.to(DEVICE)):
        before = gpu.counted.total()
        wait()
        assert gpu.counted.total() > before
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="captured"):
        here.to(DEVICE, non_blocking=True)
    gpu.capturing = False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kv_dtype"), [("condense", None), ("condense", "int4"), ("h2o", "int8")]
)
def test_a_context_is_read_saved_and_asked_there(models, there, gpu, policy, kv_dtype, tmp_path):
    """What comes from the host goes to the model, whose weights have the same hash anywhere."""
    inputs, question = (make_inputs("llama", (n, n // 2), seed=n) for n in (40, 8))
    options = {"kv_dtype": kv_dtype, **short(policy)}
    with mmkv.wrapped(models("llama"), policy, 0.4, **options):
        here = mmkv.read(models("llama"), inputs)
        wanted = here.ask(question, max_new_tokens=FEW).tolist()
    with mmkv.wrapped(model := there("llama"), policy, 0.4, graph=False, **options):
        context = mmkv.read(model, inputs)
        assert context.weights == here.weights
        context.save(tmp_path / "read")
        for one in (context, mmkv.load_context(tmp_path / "read", model)):
            assert one.ask(question, max_new_tokens=FEW).tolist() == wanted


PICTURES = [Variant("prefixkv", (("protect", "instruction"),), 0.85), Variant("xkv")]


@cases(
    "variant, name",
    [(v, "llama") for v in READING] + [(v, "llava-llama") for v in PICTURES],
    (Variant("adakv"), "llama"),
    ids=str,
)
def test_every_policy_runs_on_one_device_and_decodes_without_waiting(
    models, there, gpu, unwrapped, variant, name
):
    inputs, layers = make_inputs(name, ROWS["padded"]), depth(variant.policy)
    model = models(name, layers)
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        expected, tokens, plain = generate(model, inputs, new=FEW)
    model = there(name, layers)
    if (name, layers) not in unwrapped:
        with waits(model, gpu) as unwrapped[name, layers]:
            generate(model, on_gpu(inputs), new=FEW)
    alone = unwrapped[name, layers]
    options = {"graph": False, **options_of(variant)}
    with waits(model, gpu) as found, mmkv.wrapped(model, variant.policy, variant.budget, **options):
        logits, got, cache = generate(model, on_gpu(inputs), new=FEW)
    same_run((logits, got, cache), (expected, tokens, plain))
    assert len(found) == len(alone) == FEW - 1
    if variant in REPLAYED:  # a round is evicted as a prompt is
        assert sum(found, Counter()) - sum(alone, Counter()) == Counter()


CODED = Variant("snapkv", (("kv_dtype", "int4"),))


@cases("variant", [*READING, CODED], Variant("prefixkv"), CODED, ids=str)
def test_prompt_waits_for_host_only_where_heads_differ(there, gpu, variant):
    """`allowed` counts the waits for masks, a second pass, sizes, and bits of a group's number."""
    inputs = on_gpu(make_inputs("llama", ROWS["padded"]))
    model = there("llama", depth(variant.policy))
    L = model.config.num_hidden_layers

    def waited():
        gpu.counted = Counter()
        with torch.no_grad():
            cache = model(**inputs).past_key_values
        found, gpu.counted = gpu.counted, None
        return found, cache

    alone, _ = waited()
    options = {"graph": False, **options_of(variant)}
    if variant.policy == "condense" and not variant.options:  # with sizes of their own
        options["profile"] = profile_of(model)
    with mmkv.wrapped(model, variant.policy, variant.budget, **options):
        found, cache = waited()
    policy = cache.plan.policy
    allowed = 3 + bool(policy.layers.needs)
    second_pass = policy.layers.needs == "mini-prefill" or policy.score.repeats
    allowed += 3 * second_pass
    allowed += 3 * (policy.heads.scope == "model")
    allowed += L * (policy.heads.scope == "layer")
    allowed += L * (policy.merge is not None and policy.merge.weighted)
    if policy.layers.needs == "measure":  # how long the text behind a picture is, for two parts
        allowed += 2 * L
    more = found - alone
    assert more.total() <= allowed, more


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [v for v in DECODING if v.policy in SLOTS and v.budget == 0.3], ids=str
)
def test_replayed_steps_pass_nothing_between_host_and_device(
    models, there, gpu, monkeypatch, variant
):
    """A capture refuses every transfer; the steps around it make the host wait for none."""
    inputs, options = make_inputs("llama", ROWS["padded"]), options_of(variant)
    with mmkv.wrapped(models("llama"), variant.policy, variant.budget, **options):
        expected, tokens, plain = generate(models("llama"), inputs, new=NEW)
    found = []

    def counted(self, **given):
        gpu.counted = Counter()
        try:
            return call(self, **given)
        finally:
            found.append(gpu.counted)
            gpu.counted = None

    call = graph.Runner.__call__
    cuda = install(monkeypatch, DEVICE)
    monkeypatch.setattr(graph.Runner, "__call__", counted)
    monkeypatch.setattr(graph, "LEAST_STEPS", NEW)
    monkeypatch.setattr(slots, "AHEAD", 4)  # so that tables are filled anew during a run
    model = there("llama")
    with mmkv.wrapped(model, variant.policy, variant.budget, **options):
        logits, got, cache = generate(model, on_gpu(inputs), new=NEW)
    assert len(cuda.graphs) == 1
    same_run((logits, got, cache), (expected, tokens, plain))
    assert len(found) == NEW - 1
    assert sum(found[-6:], Counter()) == Counter()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["snapkv", "adakv", "h2o", "streaming", "elastic"])
def test_beams_and_turns_stay_on_the_device(models, there, gpu, policy):
    inputs = make_inputs("llama", ROWS["padded"])
    found = []
    for model, given in ((models("llama"), inputs), (there("llama"), on_gpu(inputs))):
        with mmkv.wrapped(model, policy, 0.5, graph=False, **short(policy)):
            logits, tokens, cache = generate(model, given, new=5, num_beams=2)
            found.append((logits.cpu(), tokens.cpu()))
            _, tokens, cache = generate(model, given, new=5)
            turn = continued(given, tokens, tokens.flip(1))
            logits, tokens, cache = generate(model, turn, new=5, past_key_values=cache)
            found.append((logits.cpu(), tokens.cpu()))
    for (expected, tokens), (logits, got) in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert torch.equal(got, tokens)
