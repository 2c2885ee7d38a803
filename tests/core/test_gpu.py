"""On a real card: replayed steps equal steps for every policy, and a failed capture leaves nothing.

Skipped, with a reason, where there is none. What a CPU can tell of the same code is in
`test_graph.py`, `test_device.py` and `test_capturing.py`.
"""

import logging

import pytest
import torch

import mmkv
from helpers.masking import generate, same_run
from helpers.models import make_inputs, make_model
from helpers.oracle import REPLAYED, ROWS, options_of, short
from mmkv.attach.graph import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

NEW = 40


def here(name: str, rows: str, device: str = "cuda:0"):
    """A model and inputs on the device."""
    inputs = {k: v.to(device) for k, v in make_inputs(name, ROWS[rows]).items()}
    return make_model(name).to(device), inputs


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
    model, inputs = here("llama", rows)
    same_run(*both(model, inputs, variant.policy, variant.budget, **options_of(variant)), 2e-3)
    assert captures, "nothing was captured"


@pytest.mark.parametrize("policy", ["prefixkv", "snapkv", "h2o"])
def test_a_prompt_in_chunks(policy, captures):
    model, inputs = here("llama", "padded")
    same_run(*both(model, inputs, policy, 0.4, prefill_chunk_size=16, **short(policy)), 2e-3)
    assert captures


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second CUDA device")
def test_a_second_device_while_the_first_is_current(captures):
    model, inputs = here("llama", "padded", "cuda:1")
    assert torch.cuda.current_device() == 0
    same_run(*both(model, inputs, "prefixkv", 0.4), 2e-3)
    assert captures[0].index == 1


def test_a_capture_that_fails_leaves_nothing(monkeypatch, caplog):
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
