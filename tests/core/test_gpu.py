"""On a real card: replayed steps equal steps for every policy, and a failed capture leaves nothing.

Skipped, with a reason, where there is none. What a CPU can tell of the same code is in
`test_graph.py`, `test_device.py` and `test_capturing.py`.
"""

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import mmkv
from helpers.codes import coded_block
from helpers.masking import generate, same_run
from helpers.models import make_inputs, make_model
from helpers.oracle import REPLAYED, ROWS, depth, options_of, short
from mmkv.attach.graph import capture
from mmkv.cache.kernels import attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

NEW = 40


def here(name: str, rows: str, device: str = "cuda:0", layers: int | None = None):
    """A model and inputs on the device."""
    inputs = {k: v.to(device) for k, v in make_inputs(name, ROWS[rows]).items()}
    return make_model(name, layers=layers).to(device), inputs


def both(model, inputs, policy, budget, **options):
    """Logits, tokens and cache of replayed steps and of plain ones."""
    found = []
    for graph in (True, False):
        more = {k: options[k] for k in ("prefill_chunk_size",) if k in options}
        own = {k: v for k, v in options.items() if k not in more}
        with mmkv.wrapped(model, policy, budget, graph=graph, **own):
            found.append(generate(model, inputs, new=NEW, **more))
    return found


@pytest.fixture
def captures(monkeypatch):
    """How many steps were captured."""
    from mmkv.attach import graph

    calls = []

    def counted(step, device):
        calls.append(device)
        return capture(step, device)

    monkeypatch.setattr(graph, "capture", counted)
    return calls


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("variant", REPLAYED, ids=str)
def test_replayed_steps_equal_steps(variant, rows, captures):
    model, inputs = here("llama", rows, layers=depth(variant.policy))
    same_run(*both(model, inputs, variant.policy, variant.budget, **options_of(variant)), 2e-3)
    assert captures, "nothing was captured"


@pytest.mark.parametrize("policy", ["prefixkv", "snapkv", "h2o"])
def test_replayed_steps_after_a_chunked_prompt_equal_steps(policy, captures):
    model, inputs = here("llama", "padded")
    same_run(*both(model, inputs, policy, 0.4, prefill_chunk_size=16, **short(policy)), 2e-3)
    assert captures


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second CUDA device")
def test_a_second_device_while_the_first_is_current(captures):
    model, inputs = here("llama", "padded", "cuda:1")
    assert torch.cuda.current_device() == 0
    same_run(*both(model, inputs, "prefixkv", 0.4), 2e-3)
    assert captures[0].index == 1


def test_failed_capture_leaves_nothing(monkeypatch, caplog):
    """The steps go on as usual, and the next capture works."""
    from mmkv.attach import graph

    def waits(step, device):
        return capture(lambda: step().logits.sum().item(), device)

    model, inputs = here("llama", "padded")
    expected = both(model, inputs, "snapkv", 0.4, **short("snapkv"))[1]
    caplog.set_level(logging.WARNING, graph.__name__)
    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patched, mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")):
        patched.setattr(graph, "capture", waits)
        same_run(generate(model, inputs, new=NEW), expected, 2e-3)
    assert "without a CUDA graph" in caplog.text
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    same_run(*both(model, inputs, "snapkv", 0.4, **short("snapkv")), 2e-3)


def attention_inputs(dtype, head_dim, group, *, bias, rows=6, slots=200):
    """Random queries, keys and values of blocks, and a bias with empty slots or None."""
    g = torch.Generator("cuda").manual_seed(head_dim + group)
    shapes = [(rows, group, head_dim), (rows, slots, head_dim), (rows, slots, head_dim)]
    qkv = [torch.randn(s, device="cuda", generator=g).to(dtype) for s in shapes]
    if not bias:
        return qkv, None
    weights = torch.randn(rows, 1, slots, device="cuda", generator=g).to(dtype)
    weights[:, :, -slots // 4 :] = -torch.inf
    return qkv, weights


@pytest.mark.parametrize("replayed", [False, True], ids=["plain step", "replayed step"])
@pytest.mark.parametrize("bias", [False, True], ids=["all slots", "bias"])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_of_a_block_equals_float64(dtype, head_dim, group, bias, replayed):
    (q, k, v), weights = attention_inputs(dtype, head_dim, group, bias=bias)
    logits = q.double() @ k.double().mT * head_dim**-0.5
    expected = (logits if weights is None else logits + weights.double()).softmax(-1) @ v.double()
    options = {"scale": head_dim**-0.5, "softcap": None, "replayed": replayed}
    got = attend(q, k, v, weights, **options).double()
    error = ((got - expected).norm() / expected.norm()).item()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("bias", [False, True], ids=["all slots", "bias"])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_to_codes_equals_that_to_the_pairs_they_stand_for(
    dtype, bits, head_dim, group, bias
):
    stored = coded_block(3, 200, head_dim, head_dim, bits=bits, device="cuda", dtype=dtype)
    ((keys, values),) = stored.pairs([197], whole=False)
    query = torch.randn(3, group, head_dim, device="cuda", dtype=dtype)
    weights = torch.randn(3, 1, 200, device="cuda", dtype=dtype)[..., :197] if bias else None
    rotated = query.to(stored.rotation.dtype) @ stored.rotation
    scale = head_dim**-0.5
    got = attend(rotated, keys, values, weights, scale, softcap=None).double()
    ((key, value),) = stored.read()
    logits = query.double() @ key[:, :197].double().mT * scale
    expected = (logits if weights is None else logits + weights).softmax(-1) @ value[
        :, :197
    ].double()
    error = ((got - expected).norm() / expected.norm()).item()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("bias", [False, True], ids=["all slots", "bias"])
def test_attention_of_a_block_runs_named_kernels_alone(bias):
    """The default choice on Hopper is cuDNN, which plans a kernel for each number of slots."""
    qkv, weights = attention_inputs(torch.bfloat16, 128, 1, bias=bias)
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        attend(*qkv, weights, scale=1.0, softcap=None)
        torch.cuda.synchronize()
    names = " ".join(e.key for e in events.key_averages()).lower()
    assert "cudnn" not in names
    assert ("flash" in names) != bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("policy", ["full", "snapkv", "condense", "h2o", "prefixkv"])
def test_replayed_steps_in_16_bits_are_as_near_to_float32_as_plain_ones(
    policy, kv_dtype, dtype, captures
):
    """Over the first steps, before a rounding makes another token the likeliest."""
    model, inputs = here("llama", "padded")
    options = {"kv_dtype": kv_dtype, **({} if policy == "full" else short(policy))}
    budget = None if policy == "full" else 0.5
    expected = both(model, inputs, policy, budget, **options)[1][0][:4]
    (replayed, *_), (plain, *_) = both(model.to(dtype), inputs, policy, budget, **options)
    errors = [(x[:4].float() - expected).norm().item() for x in (replayed, plain)]
    assert errors[0] <= 2 * errors[1] + 1e-3
    assert captures, "nothing was captured"


@pytest.mark.parametrize("policy", ["full", "snapkv", "condense", "h2o"])
def test_steps_do_not_make_the_host_wait(policy):
    model, inputs = here("llama", "padded")
    options = {} if policy == "full" else short(policy)
    with mmkv.wrapped(model, policy, None if policy == "full" else 0.5, graph=False, **options):
        with torch.no_grad():
            out = model(**inputs, use_cache=True)
        cache, n = out.past_key_values, inputs["input_ids"].shape[1]
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        for step in range(4):
            place = torch.full_like(token, n + step)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                with torch.no_grad():
                    model(input_ids=token, past_key_values=cache, position_ids=place)
            finally:
                torch.cuda.set_sync_debug_mode("default")
