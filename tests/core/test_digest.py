"""A model is told apart by every bit of its weights, on any device and however they are held."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.marks import cases
from mmkv import digest

CONFIG = SimpleNamespace(rope_parameters=None)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64, torch.bool]


def holding(**tensors):
    model = nn.Module()
    for name, x in tensors.items():
        model.register_buffer(name, x)
    return model


def hashed(x):
    return digest.of_model(holding(x=x), CONFIG)


@cases("dtype", TYPES, torch.bfloat16, torch.bool, ids=str)
def test_weights_of_every_length_differ_in_each_number(dtype):
    for n in (1, 3, 7, 64, 130):
        x = torch.zeros(n, dtype=dtype)
        found = {hashed(x)}
        for i in range(n):
            one = x.clone()
            one[i] = 1
            found.add(hashed(one))
        assert len(found) == n + 1


@cases("n", [576 * 576, 2**16 * 129 + 5], 576 * 576)
def test_weights_with_columns_negated_zeroed_or_exchanged_differ(n):
    """Signs are the highest bits: a sum without mixing would lose a change of two of them."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    found = {hashed(x)}
    for column in (1, 64, 575):
        for change in (torch.neg, torch.zeros_like, lambda y: y.roll(2)):
            other = x.clone()
            other[column::576] = change(other[column::576])
            found.add(hashed(other))
    pair = x.clone()
    pair[[1, 3]] = -pair[[1, 3]]
    rows = x.clone()
    rows[: 2**17] = x[: 2**17].roll(2**16)
    found |= {hashed(y) for y in (pair, rows, -x)}
    assert len(found) == 13


def test_weights_held_in_another_layout_are_the_same():
    x = torch.randn(48, 31)
    behind = torch.cat([torch.zeros(1), x.flatten()])[1:].view(48, 31)  # starts at byte 4
    assert len({hashed(y) for y in (x, x.T.contiguous().T, behind, x.clone())}) == 1
    assert len({hashed(y) for y in (x, x.T, x.view(31, 48), x.half().float())}) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.data.mul_(2),
        lambda x: x.data[:, 9:18].zero_(),
        lambda x: x.numpy().fill(3),
        lambda x: setattr(x, "data", torch.ones(63, 63)),
    ],
)
def test_weights_written_to_after_they_were_hashed_are_hashed_again(change):
    model = holding(x=torch.randn(63, 63), y=torch.randn(5))
    before = digest.of_model(model, CONFIG)
    assert digest.of_model(model, CONFIG) == before
    change(model.x)
    after = digest.of_model(model, CONFIG)
    assert after != before
    assert after == digest.of_model(copy.deepcopy(model), CONFIG)


def test_unchanged_weights_are_hashed_once(monkeypatch):
    model, words = holding(x=torch.randn(63, 63), y=torch.randn(5)), []
    once = digest._hash
    monkeypatch.setattr(digest, "_hash", lambda x: words.append(len(x)) or once(x))
    digest.of_model(model, CONFIG)
    assert len(words) == 2
    model.y.zero_()
    for _ in range(3):
        digest.of_model(model, CONFIG)
    assert words[2:] == [3]


def test_weights_made_of_parts_differ_in_each_part():
    class Codes(torch.Tensor):
        """As torchao holds weights in few bits."""

        @staticmethod
        def __new__(cls, codes, scale):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            assert "detach" in str(func)
            return args[0]

    codes, scale = torch.arange(12, dtype=torch.uint8), torch.ones(3)
    model = nn.Module()
    found = set()
    for parts in ((codes, scale), (codes + 1, scale), (codes, scale + 1)):
        model.x = nn.Parameter(Codes(*parts), requires_grad=False)
        found.add(digest.of_model(model, CONFIG))
    assert len(found) == 3


def test_weights_made_in_inference_mode_are_hashed():
    with torch.inference_mode():
        x = torch.ones(64)
    assert hashed(x) == hashed(torch.ones(64))


def test_weights_on_meta_cannot_be_hashed():
    with pytest.raises(NotImplementedError):
        hashed(torch.ones(3, device="meta"))
