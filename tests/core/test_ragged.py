"""Decoding from one flat store of all rows, as on a GPU: the same as from rectangles.

What attends here is the kernels' twin in plain torch, which `test_decode_kernel.py` compares with
the kernels; in a few tests it is the kernels, in Triton's interpreter.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmkv
from helpers.launches import Launches
from helpers.marks import slow_except
from helpers.models import make_inputs
from helpers.oracle import DECODING, POSTPONED, ROWS, VARIANTS, Variant, options_of, short
from helpers.pretend_cuda import install
from helpers.reference import generate
from mmkv import kernels
from mmkv.attach import graph
from mmkv.cache import evict, ragged_rows
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.ragged_rows import RaggedRows
from mmkv.kernels import twins
from mmkv.parts import slots

NEW = 20
# What turns keys anew in each step stays in rectangles.
FLAT = [v for v in [*VARIANTS, *POSTPONED] if ("reposition", True) not in v.options]
DECODE = [v for v in DECODING if v in FLAT]


@pytest.fixture
def flat(monkeypatch):
    """Caches keep their pairs as on a GPU; called with a function, let it attend."""

    def use(attend):
        stand_in = SimpleNamespace(decode_attention=attend)
        monkeypatch.setattr(ragged_rows, "kernels", stand_in)
        monkeypatch.setattr(evict, "kernels", SimpleNamespace(wanted=lambda *tensors: True))

    return use


def both(model, inputs, variant, flat, attend=twins.decode_attention, new=NEW, **more):
    """Logits, tokens and cache, from rectangles and from a flat store."""
    found, options = [], {"graph": False, **options_of(variant)}
    for use in (None, attend):
        if use is not None:
            flat(use)
        with mmkv.wrapped(model, variant.policy, variant.budget, **options):
            found.append(generate(model, inputs, new=new, **more))
    blocks = [b for x in found[1][2].compressed for b in x.blocks]
    assert all(isinstance(b, RaggedRows) for b in blocks)
    return found


def same(plain, found):
    torch.testing.assert_close(found[0], plain[0], atol=1e-4, rtol=0)
    assert torch.equal(found[1], plain[1])
    for i in range(len(plain[2].layers)):
        assert torch.equal(found[2].kept(i), plain[2].kept(i))


@pytest.mark.parametrize("rows", slow_except(ROWS, "padded"))
@pytest.mark.parametrize("variant", slow_except(FLAT, "adakv", "h2o", "condense"), ids=str)
def test_the_same_as_from_rectangles(models, flat, variant, rows):
    same(*both(models("llama"), make_inputs("llama", ROWS[rows]), variant, flat))


@pytest.mark.slow
@pytest.mark.parametrize("variant", DECODE, ids=str)
def test_beams(models, flat, variant):
    inputs = make_inputs("llama", ROWS["padded"])
    same(*both(models("llama"), inputs, variant, flat, num_beams=2))


@pytest.mark.parametrize("policy", slow_except(["adakv", "h2o", "prefixkv", "tova"], "h2o"))
def test_turns_masks_and_several_tokens_at_once(models, flat, policy):
    """What the kernel does not do goes by way of a rectangle, and back."""
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    found = []
    for use in (False, True):
        if use:
            flat(twins.decode_attention)
        with mmkv.wrapped(model, policy, 0.5, graph=False, **short(policy)), torch.no_grad():
            _, tokens, cache = generate(model, inputs, new=6)
            out: list[torch.Tensor] = []
            step = tokens[:, -1:]
            mask = torch.ones(3, cache.get_seq_length() + 1, dtype=torch.long)
            mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
            mask[0, 40:50] = 0
            masked = copy.deepcopy(cache)
            for _ in range(3):
                out.append(
                    model(input_ids=step, attention_mask=mask, past_key_values=masked).logits
                )
                mask = torch.cat([mask, mask[:, -1:]], dim=1)
            if policy == "adakv":
                several = copy.deepcopy(cache)
                out.append(model(input_ids=tokens[:, :5], past_key_values=several).logits)
                out.append(model(input_ids=step, past_key_values=several).logits)
            ids = torch.cat([inputs["input_ids"], tokens, tokens.flip(1)], dim=1)
            mask = torch.ones_like(ids)
            mask[:, : inputs["input_ids"].shape[1]] = inputs["attention_mask"]
            turn = {"input_ids": ids, "attention_mask": mask}
            logits, *_ = generate(model, turn, new=6, past_key_values=cache)
            found.append([*out, logits])
    for plain, got in zip(*found, strict=True):
        torch.testing.assert_close(got, plain, atol=1e-4, rtol=0)


def test_gradients_go_by_way_of_a_rectangle(models, flat):
    """The kernel has none; the cache is refused gradients as ever, after its attention."""
    model, inputs = models("llama"), make_inputs("llama", (40,))
    flat(twins.decode_attention)
    with mmkv.wrapped(model, "snapkv", 0.5, graph=False, **short("snapkv")):
        _, tokens, cache = generate(model, inputs, new=4)
        twin = copy.deepcopy(cache)
        with torch.no_grad():
            plain = model(input_ids=tokens[:, -1:], past_key_values=cache).logits
        got = model(input_ids=tokens[:, -1:], past_key_values=twin).logits
    torch.testing.assert_close(got.detach(), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", slow_except(DECODE, "h2o"), ids=str)
def test_replayed(models, flat, monkeypatch, variant):
    """Steps replayed with the slots of later ones, and captured anew where those run out."""
    monkeypatch.setattr(graph, "_capturable", lambda device: True)
    monkeypatch.setattr(graph, "AHEAD", 9)
    monkeypatch.setattr(graph, "LEAST_AHEAD", 8)
    monkeypatch.setattr(slots, "AHEAD", 8)  # so that tables are filled anew during a run
    graphs = install(monkeypatch, torch.device("cpu")).graphs
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    options = options_of(variant)
    with mmkv.wrapped(model, variant.policy, variant.budget, graph=False, **options):
        plain = generate(model, inputs, new=NEW)
    flat(twins.decode_attention)
    with mmkv.wrapped(model, variant.policy, variant.budget, **options):
        found = generate(model, inputs, new=NEW)
    assert len(graphs) >= 1
    same(plain, found)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "captures"), [("h2o", 1), ("streaming", 1), ("adakv", 3)])
def test_a_bounded_cache_is_captured_once(models, flat, monkeypatch, policy, captures):
    """Only where it grows does its memory move."""
    monkeypatch.setattr(graph, "_capturable", lambda device: True)
    monkeypatch.setattr(graph, "AHEAD", 16)
    monkeypatch.setattr(graph, "LEAST_AHEAD", 8)
    graphs = install(monkeypatch, torch.device("cpu")).graphs
    flat(twins.decode_attention)
    with mmkv.wrapped(models("llama"), policy, 0.3, **short(policy)):
        generate(models("llama"), make_inputs("llama", (90, 41)), new=70)
    assert len(graphs) == captures


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adakv", "prefixkv", "h2o", "tova", "condense"])
def test_by_the_kernels(models, flat, policy):
    if not kernels.available(torch.device("cpu")):
        pytest.skip("Triton's interpreter is off: tests/core/test_gpu.py runs the kernels on a GPU")
    inputs, variant = make_inputs("llama", (60, 37)), Variant(policy)
    same(*both(models("llama"), inputs, variant, flat, kernels.decode_attention, new=7))


@pytest.mark.parametrize("variant", slow_except(DECODE, "condense"), ids=str)
@pytest.mark.parametrize("replays", [False, True])
def test_at_most_four_launches_a_layer_and_step(models, flat, monkeypatch, variant, replays):
    """Counted in `attend`: torch's operations, and the kernels that `decode_attention` starts."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from mmkv.kernels import decode

    started: list[Any] = []
    counted: list[list[str]] = []

    def start(kernel, grid):
        return lambda *args, **options: started.append(kernel)

    def attends(*args, **options):
        decode.decode_attention(*args, **options)  # launches nothing here
        with mode.paused():
            return twins.decode_attention(*args, **options)

    mode = Launches()
    attend = CompressedCache.attend

    def seen(self, layer_idx, query, *args, **options):
        if self.expects_prompt:
            return attend(self, layer_idx, query, *args, **options)
        mode.names, before = [], len(started)
        with mode:
            out = attend(self, layer_idx, query, *args, **options)
        counted.append([*mode.names, *(str(x) for x in started[before:])])
        return out

    if replays:
        monkeypatch.setattr(graph, "_capturable", lambda device: True)
        install(monkeypatch, torch.device("cpu"))
    flat(attends)
    monkeypatch.setattr(decode, "launch", start)
    monkeypatch.setattr(CompressedCache, "attend", seen)
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    options = {"graph": replays, **options_of(variant)}
    with mmkv.wrapped(model, variant.policy, variant.budget, **options):
        generate(model, inputs, new=NEW)
    layers = len(model.model.layers)
    assert len(counted) >= 2 * layers
    # The first layer of a step is told the step and the position, once for the model; now and then
    # a step makes room, or sends slots.
    usual = [len(x) for i, x in enumerate(counted[layers:]) if i % layers]
    assert sorted(usual)[int(0.8 * len(usual))] <= 4, counted[-1]
