"""On a real card: replayed steps equal steps for every policy, and a failed capture leaves nothing.

Skipped, with a reason, where there is none. What a CPU can tell of the same code is in
`test_graph.py`, `test_device.py` and `test_capturing.py`; the kernels' own tests, in
`test_kernels.py`, run compiled on a card.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch

import mmkv
from helpers.models import VOCAB, make_inputs, make_model
from helpers.oracle import REPLAYED, ROWS, options_of, short
from helpers.ragged import a_step, twice
from helpers.reference import generate
from mmkv import kernels, scores
from mmkv.attach.capturing import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

NEW = 40


def here(name: str, rows: str, device: str = "cuda:0"):
    """A model and inputs on the device."""
    inputs = {k: v.to(device) for k, v in make_inputs(name, ROWS[rows]).items()}
    return make_model(name).to(device), inputs


def both(model, inputs, policy, budget, **options):
    """Logits, tokens and cache of plain steps and of replayed ones."""
    found = []
    for graph in (False, True):
        more = {k: options[k] for k in ("prefill_chunk_size",) if k in options}
        own = {k: v for k, v in options.items() if k not in more}
        with mmkv.wrapped(model, policy, budget, graph=graph, **own):
            found.append(generate(model, inputs, new=NEW, **more))
    return found


def same(plain, replayed) -> None:
    torch.testing.assert_close(replayed[0], plain[0], atol=2e-3, rtol=0)
    assert torch.equal(replayed[1], plain[1])
    for i in range(len(plain[2].layers)):
        assert torch.equal(replayed[2].kept(i), plain[2].kept(i))


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
    model, inputs = here("llama", rows)
    same(*both(model, inputs, variant.policy, variant.budget, **options_of(variant)))
    assert captures, "nothing was captured"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "llava-llama"])
def test_fused_steps_equal_plain_ones(monkeypatch, captures, name, dtype):
    """All tokens but one are suppressed, so rounding cannot change which is generated."""
    from mmkv.attach import fusing, graph

    model, inputs = here(name, "padded")
    model, ran = model.to(dtype), []
    own = kernels.rotate
    monkeypatch.setattr(
        kernels, "rotate", lambda *args: ran.append("rotate") or own(*args), raising=False
    )
    others = [i for i in range(VOCAB) if i != 50]
    found = []
    for fused in (nullcontext, fusing.fused):
        monkeypatch.setattr(graph, "fused", fused)
        assert not ran
        with mmkv.wrapped(model, "streaming", 0.4, **short("streaming")):
            found.append(generate(model, inputs, new=NEW, suppress_tokens=others)[0])
    assert len(captures) == 2
    assert ran
    torch.testing.assert_close(found[1], found[0], atol=2e-1, rtol=5e-2)


@pytest.mark.parametrize("policy", ["prefixkv", "snapkv", "h2o"])
def test_a_prompt_in_chunks(policy, captures):
    model, inputs = here("llama", "padded")
    same(*both(model, inputs, policy, 0.4, prefill_chunk_size=16, **short(policy)))
    assert captures


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second CUDA device")
def test_a_second_device_while_the_first_is_current(captures):
    model, inputs = here("llama", "padded", "cuda:1")
    assert torch.cuda.current_device() == 0
    same(*both(model, inputs, "prefixkv", 0.4))
    assert captures[0].index == 1


def test_a_capture_that_fails_leaves_nothing(monkeypatch, caplog):
    """The steps go on as usual, and the next capture works."""
    from mmkv.attach import graph

    def waits(step, device):
        return capture(lambda: step().logits.sum().item(), device)

    model, inputs = here("llama", "padded")
    expected = both(model, inputs, "snapkv", 0.4, **short("snapkv"))[0]
    caplog.set_level(logging.WARNING, graph.__name__)
    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patched, mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")):
        patched.setattr(graph, "capture", waits)
        same(expected, generate(model, inputs, new=NEW))
    assert "without a CUDA graph" in caplog.text
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    same(*both(model, inputs, "snapkv", 0.4, **short("snapkv")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulated_attention_by_kernels_equals_plain_torch(dtype, monkeypatch):
    g = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, 700, 64, generator=g).to("cuda", dtype)
    key = torch.randn(2, 2, 700, 64, generator=g).to("cuda", dtype)
    valid = torch.ones(2, 700, dtype=torch.bool, device="cuda")
    valid[1, :90] = False
    assert kernels.wanted(query, key)
    found = scores.accumulated_attention(query, key, valid=valid)
    monkeypatch.setattr(kernels, "wanted", lambda *tensors: False)
    plain = scores.accumulated_attention(query, key, valid=valid)
    torch.testing.assert_close(found, plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("lightest", [None, {"recent": [4] * 6}], ids=["", "dropping"])
def test_decode_attention_equals_its_twin(lightest):
    from mmkv.kernels import twins

    lengths, own = [900, 1, 513, 64, 65, 300], [900, 1, 7, 64, 0, 299]
    given = a_step(lengths, own, D=64, dtype=torch.bfloat16, weighted=True, lightest=lightest)
    mine, other = twice(given, torch.device("cuda"))
    for _ in range(2):  # the second replaces what the first has left
        found = kernels.decode_attention(**mine, scale=0.125)
        plain = twins.decode_attention(**other, scale=0.125)
        torch.testing.assert_close(found.float(), plain.float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(mine["store"].lengths, other["store"].lengths)
    torch.testing.assert_close(mine["store"].keys, other["store"].keys, equal_nan=True)
    if lightest:
        torch.testing.assert_close(mine["store"].mass, other["store"].mass, equal_nan=True)
        assert torch.equal(mine["lightest"].freed, other["lightest"].freed)
