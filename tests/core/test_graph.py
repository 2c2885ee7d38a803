"""Decode steps replayed: the same tokens and logits, and nothing of a step left to the host.

There is no CUDA graph on a CPU. `recording.Recorder` stands in for one: it repeats a step's tensor
operations on the same memory without running its Python, so anything that the step reads on the
host shows as a difference.
"""

import copy
import logging
import threading

import pytest
import torch

import mmkv
from helpers.few_bits import window_of
from helpers.marks import cases, older_than, since
from helpers.masking import generate, same_run
from helpers.models import continued, make_inputs, make_model
from helpers.oracle import DECODING, ROWS, Variant, options_of, short
from helpers.pretend_cuda import install
from helpers.zoo import EVERY_DECODER, NAMES, inputs_of, model_of
from mmkv.attach import graph
from mmkv.cache import kernels, padded_blocks
from mmkv.calls import cache_in
from mmkv.decode import slots

NEW = 20
# Writing and reading codes leaves nothing to the host either.
IN_CODES = [
    Variant(policy, (("kv_dtype", kv_dtype),))
    for policy, kv_dtype in (
        ("prefixkv", "int4"),
        ("snapkv", "int8"),
        ("adakv", "int4"),
        ("streaming", "int8"),
        ("h2o", "int4"),
        ("h2o", "int8"),
    )
]


@pytest.fixture
def on_cpu(monkeypatch):
    """Replay on the CPU; every graph whose capture began."""
    monkeypatch.setattr(graph, "_capturable", lambda device: True)
    monkeypatch.setattr(slots, "AHEAD", 8)  # so that tables are filled anew during a run
    return install(monkeypatch, torch.device("cpu")).graphs


def without_graph(model, variant, inputs, new, **options):
    with mmkv.wrapped(model, variant.policy, variant.budget, graph=False, **options):
        return generate(model, inputs, new=new)


# Every way is replayed by test_device, where a captured step must keep to the device too.
RUNS = [(x, "one") for x in DECODING[::4]]
RUNS += [(x, "padded") for x in (Variant("adakv"), Variant("h2o"), *IN_CODES)]


@cases("variant, rows", RUNS, "h2o", ids=str)
def test_replayed_steps_equal_steps(models, on_cpu, variant, rows):
    model, inputs, options = models("llama"), make_inputs("llama", ROWS[rows]), options_of(variant)
    with window_of(8, 4):  # of exact pairs, full three times
        expected, tokens, plain = without_graph(model, variant, inputs, NEW, **options)
        with mmkv.wrapped(model, variant.policy, variant.budget, **options):
            logits, got, cache = generate(model, inputs, new=NEW)
    assert len(on_cpu) == 1
    atol = 1e-4
    if bits := {"int8": 8, "int4": 4}.get(options.get("kv_dtype")):
        # A number between two codes may fall to either side, as sums are rounded: rarely.
        layers = zip(cache.compressed, plain.compressed, strict=True)
        apart = [x for pair in layers for x in codes(*pair)]
        n, total = sum(int((x != 0).sum()) for x in apart), sum(x.numel() for x in apart)
        assert n <= total / 1000
        assert all(set(x.unique().tolist()) <= {0, 1, 16} for x in apart)
        atol = 0.5 * 2.0**-bits if n else atol
    same_run((logits, got, cache), (expected, tokens, plain), atol)


def test_attention_is_told_whether_a_graph_replays_the_step(models, on_cpu, monkeypatch):
    """On CUDA a kernel of our own then reads the pairs."""
    told = []

    def noted(*args, replayed, **options):
        told.append(replayed)
        return kernels.attend(*args, replayed=replayed, **options)

    monkeypatch.setattr(padded_blocks, "attend", noted)
    model, inputs = models("llama"), make_inputs("llama", ROWS["one"])
    for replays in (False, True):
        told.clear()
        with mmkv.wrapped(model, "snapkv", 0.5, graph=replays, **short("snapkv")):
            generate(model, inputs, new=NEW)
        assert told
        assert set(told) == {replays}


def codes(layer, other):
    """How far codes of two layers' blocks are apart, in the slots that both have."""
    for a, b in zip(*(x.keeping().stored.split() for x in (layer, other)), strict=True):
        mine, theirs = (x.codes.unflatten(1, x.shapes[0]).int() for x in (a, b))
        n = min(mine.shape[2], theirs.shape[2])
        yield (mine[:, :, :n] - theirs[:, :, :n]).abs()


@pytest.mark.parametrize(
    ("wrap", "options", "why"),
    [
        ({}, {"new": 8}, "max_new_tokens=8"),
        pytest.param({}, {"num_beams": 2}, "num_beams=2", marks=pytest.mark.slow),
        ({}, {"disable_compile": True}, "disable_compile=True"),
        ({"graph": False}, {}, "graph=False"),
        ({"decode": "rounds"}, {}, "decode='rounds': rounds of generated tokens are scored"),
    ],
)
def test_uncapturable_setting_runs_plain_steps(models, on_cpu, caplog, wrap, options, why):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    caplog.set_level(logging.INFO, "mmkv.attach.graph")
    with mmkv.wrapped(model, "snapkv", 0.5, **wrap, **short("snapkv")):
        generate(model, inputs, **{"new": NEW, **options})
    assert not on_cpu
    assert caplog.text.count(why) == 1


@since("5.21")
@cases("policy", ["snapkv", "h2o", "prefixkv"], "snapkv")
def test_a_prompt_in_chunks_is_no_step(models, on_cpu, caplog, policy):
    """`generate` has the runner take a prompt's chunks too, here some of a single token."""
    caplog.set_level(logging.INFO, "mmkv.attach.graph")
    model, inputs = models("llama"), make_inputs("llama", (49,))
    found = []
    for replays in (False, True):
        with mmkv.wrapped(model, policy, 0.4, graph=replays, **short(policy)):
            first, tokens, cache = generate(model, inputs, new=20, prefill_chunk_size=16)
            held = [cache.kept(i) for i in range(len(cache.layers))]
            turn = continued(inputs, tokens, tokens[:, :1])
            options = {"past_key_values": cache, "prefill_chunk_size": 1}
            later, *_ = generate(model, turn, new=20, **options)
            found.append((first, tokens, later, *held))
    assert len(on_cpu) == 2
    assert set(caplog.messages) == {"decoding without a CUDA graph: graph=False"}
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_several_tokens_at_once_are_no_step(models, on_cpu):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    more = {"input_ids": torch.tensor([[5, 6, 7]]), "position_ids": torch.tensor([[79, 80, 81]])}
    with mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")), torch.no_grad():
        _, _, cache = generate(model, inputs, new=20)
        twin = copy.deepcopy(cache)
        expected = model(**more, past_key_values=twin).logits
        got = graph.Runner(model)(**more, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "captures"),
    [("snapkv", 3), ("adakv", 3), ("prefixkv", 2), ("h2o", 1)],
)
def test_more_tokens_than_slots(models, on_cpu, monkeypatch, policy, captures):
    """A graph knows the slots that there were: with more of them, another is captured."""
    monkeypatch.setattr(graph, "AHEAD", 16)
    monkeypatch.setattr(graph, "LEAST_AHEAD", 8)
    model, inputs, variant = models("llama"), make_inputs("llama", (90, 41)), Variant(policy)
    expected, tokens, plain = without_graph(model, variant, inputs, 70, **short(policy))
    calls = []
    counting = model.register_forward_hook(lambda *call: calls.append(call))
    with counting, mmkv.wrapped(model, policy, 0.3, **short(policy)):
        logits, got, cache = generate(model, inputs, new=70)
    assert len(on_cpu) == captures
    # The prompt, the step with which H2O fills up, and before each capture a step that allocates.
    assert len(calls) == 1 + (policy == "h2o") + 2 * captures
    same_run((logits, got, cache), (expected, tokens, plain))


@cases("length", [200, 2000], 200)
@cases("policy", ["snapkv", "adakv", "prefixkv", "h2o"], "adakv")
def test_replays_hold_few_empty_slots(models, on_cpu, policy, length):
    """For an answer that may be long: some 256 at first, and never more than were dropped."""
    model, inputs = models("llama"), make_inputs("llama", (length,))
    L, held, caches = model.config.num_hidden_layers, [], []

    def look(ids, scores):
        cache = caches[0]
        kept = sum(int((cache.kept(i) >= 0).sum()) for i in range(L)) / (L * 2)
        slots = sum(b.positions.numel() for b in cache.blocks) / (L * 2)
        held.append((slots, kept, cache.get_seq_length()))
        return torch.tensor([len(held) == 20])

    noting = model.register_forward_hook(lambda *call: caches.append(call[-1].past_key_values))
    with noting, mmkv.wrapped(model, policy, 0.5, **short(policy)):
        model.generate(**inputs, max_new_tokens=1500, do_sample=False, stopping_criteria=[look])
    assert len(on_cpu) == 1
    for taken, kept, seen in held:
        assert taken <= min(1.04 * kept + 258, seen)


def test_waiting_step_is_not_captured(models, monkeypatch, caplog):
    """Found before a capture has to fail."""
    monkeypatch.setattr(graph, "_capturable", lambda device: True)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    cuda = install(monkeypatch, torch.device("cpu"))
    model, inputs = make_model("llama"), make_inputs("llama", (60,))
    _, tokens, _ = without_graph(model, Variant("snapkv"), inputs, 20, **short("snapkv"))

    def reads(module, args, output):
        if cuda.sync_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    model.model.layers[1].mlp.register_forward_hook(reads)
    with mmkv.wrapped(model, "snapkv", 0.3, **short("snapkv")):
        _, got, _ = generate(model, inputs, new=20)
    assert not cuda.graphs
    assert cuda.sync_mode == 0
    assert "without a CUDA graph: called a synchronizing" in caplog.text
    assert torch.equal(got, tokens)


@cases("policy", ["snapkv", "h2o", "prefixkv"], "snapkv")
@cases("where", ["warm-up", "capture"], "capture")
def test_step_failing_to_capture_runs_and_is_logged(on_cpu, caplog, policy, where):
    """The failed attempt leaves nothing behind: the run equals one that never tried."""
    model, inputs = make_model("llama"), make_inputs("llama", (90, 41))
    variant = Variant(policy)
    expected, tokens, plain = without_graph(model, variant, inputs, 24, **short(policy))
    calls = []

    def breaks(module, args, output):
        calls.append(output.shape[1])
        # The prefill, with H2O a plain step, the warm-up, the capture.
        if len(calls) == {"warm-up": 2, "capture": 3}[where] + (policy == "h2o"):
            raise RuntimeError("operation not permitted when stream is capturing")

    model.model.layers[1].mlp.register_forward_hook(breaks)
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        logits, got, cache = generate(model, inputs, new=24)
    assert "without a CUDA graph: operation not permitted" in caplog.text
    same_run((logits, got, cache), (expected, tokens, plain))


def test_model_counting_on_host_is_not_replayed(on_cpu, caplog):
    """A number that the host reads would be frozen in the graph: it is noticed, and logged."""
    model, inputs = make_model("llama"), make_inputs("llama", (90,))
    _, tokens, _ = without_graph(model, Variant("snapkv"), inputs, 24, **short("snapkv"))
    caplog.set_level(logging.INFO, "mmkv.attach.graph")
    inner = model.model.forward

    def counts(*args, **kwargs):
        cache_in(kwargs).get_seq_length()
        return inner(*args, **kwargs)

    model.model.forward = counts
    with mmkv.wrapped(model, "snapkv", 0.3, **short("snapkv")):
        _, got, _ = generate(model, inputs, new=24)
    assert torch.equal(got, tokens)
    assert "asks the cache" in caplog.text


# Why the steps of these classes are not replayed; all others must be.
SLIDING = "some layers have a sliding window or linear attention"
COUNTS = "asks the cache for the number of tokens"
_SLIDING = (
    "Gemma2",
    "Gemma3",
    "Gemma4",
    "Llama4",
    "PaliGemmaForConditionalGeneration:2",
    "Qwen3_5",
)
NOT_CAPTURED = {name: SLIDING for name in NAMES if name.startswith(_SLIDING)}
NOT_CAPTURED |= {name: COUNTS for name in NAMES if name.startswith(("OPT", "Falcon"))}
if older_than("5.23"):  # a mark for each token seen, in each step
    longer = "the argument mm_token_type_ids changed"
    NOT_CAPTURED |= {
        name: longer
        for name in NAMES
        if name.startswith(("Glm4v", "Qwen2VL", "Qwen2_5", "Qwen3VL"))
    }


@cases("name", EVERY_DECODER, "Qwen2_5_VLForConditionalGeneration")
def test_every_class_of_model(on_cpu, caplog, monkeypatch, name):
    """Padded prompts, with pictures where the class sees them: replayed, or logged why not."""
    monkeypatch.setattr(graph, "LEAST_STEPS", 9)
    model = model_of(name)
    inputs = inputs_of(model, "padded")
    caplog.set_level(logging.INFO, "mmkv.attach.graph")
    with mmkv.wrapped(model, "prefixkv", 0.4, graph=False, **short("prefixkv")):
        expected, tokens, _ = generate(model, inputs, new=9)
    with mmkv.wrapped(model, "prefixkv", 0.4, **short("prefixkv")):
        logits, got, _ = generate(model, inputs, new=9)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
    assert torch.equal(got, tokens)
    assert len(on_cpu) == (name not in NOT_CAPTURED)
    assert NOT_CAPTURED.get(name, "") in caplog.text
