"""Global defaults of torch change nothing: neither the type nor the device of new tensors."""

from functools import partial

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.models import make_inputs
from helpers.oracle import READING, depth, generate, options_of


def replies(model, inputs, variant):
    """Logits, and the positions that each layer keeps, of a prompt and some steps."""
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        logits, _, cache, _ = generate(model, inputs, new=5)
        kept = [cache.kept(i) for i in range(len(cache.layers))]
    return logits, kept


@pytest.fixture
def restored():
    """Sets both defaults back after a test."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "set_default",
    [
        partial(torch.set_default_dtype, torch.bfloat16),
        partial(torch.set_default_device, "meta"),
    ],
    ids=["type", "device"],
)
@cases("variant", READING, "condense", ids=str)
def test_defaults_change_nothing(models, set_default, variant):
    model = models("llama", depth(variant.policy))
    inputs = make_inputs("llama", (90, 41))
    logits, kept = replies(model, inputs, variant)
    set_default()
    found, positions = replies(model, inputs, variant)
    assert torch.equal(found, logits)
    assert all(torch.equal(x, y) for x, y in zip(positions, kept, strict=True))
