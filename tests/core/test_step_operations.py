"""What a decode step does of a layer: few operations."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import mmkv
from mmkv.cache.forward_pass import AttentionCall
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import Step, block_of
from mmkv.cache.plain import PlainKV
from mmkv.decode.slots import GrowingSlots, Ring
from mmkv.sizes.profiled import HeadTable

LENGTHS, HEAD_DIM = (40, 20, 10), 8


class Operations(TorchDispatchMode):
    """Counts what computes or copies: no views, and nothing that only makes room."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = any(x.alias_info is not None for x in func._schema.returns)
        makes_room = "empty" in func.name() or func.name() == "aten::_unsafe_view"
        if (not aliases or func._schema.is_mutable) and not makes_room:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def kept(schedule, weighed):
    """A layer's six rows in three blocks with room for four tokens."""
    blocks, parts = [], []
    for i, n in enumerate(LENGTHS):
        shape = (2, n + 4)
        pair, positions = torch.zeros(*shape, HEAD_DIM), torch.zeros(shape, dtype=torch.int32)
        weights = torch.zeros(shape) if weighed else None
        parts.append(PlainKV.of(pair, pair.clone()))
        rows = np.array([2 * i, 2 * i + 1])
        blocks.append(block_of(rows, positions, schedule(n), pair.dtype, None, weights, n))
    return KeptKV(blocks, PlainKV.joined(parts), 1, 6, [20])


def growing(n):
    return GrowingSlots(counts=np.array([n, n]))


def ring(n):
    counts = np.array([n, n])
    return Ring(counts=counts, protected=np.array([0, 0]), capacity=counts)


@pytest.mark.parametrize(
    ("schedule", "weighed", "most"),
    # Of a block: one copy of pairs, and attention; then two that join pairs, and what was found. A
    # slot that is taken again has another position, and weighs one token again: three more.
    [(growing, True, 8), (growing, False, 8), (ring, True, 17)],
    ids=["groups", "growing", "ring"],
)
def test_step_runs_few_operations(schedule, weighed, most):
    """Of the second of two steps: what is made once is made by the first."""
    layer, pair = kept(schedule, weighed), torch.zeros(1, 6, 1, HEAD_DIM)
    call = AttentionCall(torch.zeros(1, 12, 1, HEAD_DIM), pair, pair, None, 1.0, None, 0)
    layer.attend(call, Step(50, 1, 1.0))
    with Operations() as operations:
        out = layer.attend(call, Step(51, 1, 1.0))
    assert out.shape == (1, 1, 12, HEAD_DIM)
    found = operations.found
    assert sum("scaled_dot_product" in name for name in found) == len(LENGTHS)
    assert len(found) <= most, found


def model_of(n_layers):
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=n_layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=100,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def step_operations(n_layers, policy, weights=None):
    """How many operations the second step of a model takes, and the blocks of each layer."""
    model, ids = model_of(n_layers), torch.arange(400)[None] % 90
    with torch.no_grad():
        if policy is None:
            cache = model(ids).past_key_values
        else:
            mmkv.wrap(model, policy, 0.2, **({"heads": "uniform"} if policy == "condense" else {}))
            if weights is not None:
                table = HeadTable((weights,) * n_layers, tuple(range(n_layers)), sizes_layers=True)
                model._mmkv.plan = dataclasses.replace(model._mmkv.plan, table=table)
            cache = model(ids).past_key_values
        for _ in range(2):
            with Operations() as operations:
                model(input_ids=ids[:, :1], past_key_values=cache)
    blocks = [] if policy is None else [len(x.state.blocks) for x in cache.compressed]
    return len(operations.found), blocks


def test_a_layer_of_one_block_takes_no_more_operations_than_transformers_own():
    """A layer and its share of nothing else: what a model of two takes more than one of one."""
    counts = []
    for policy in (None, "snapkv"):
        (one, _), (two, _) = (step_operations(n, policy) for n in (1, 2))
        counts.append(two - one)
    assert counts[1] <= counts[0]


@pytest.mark.parametrize(
    ("weights", "more"),
    [((0.1, 0.1, 0.3, 0.3, 0.9, 0.9), 5), ((0.1, 0.3, 0.9, 0.1, 0.3, 0.9), 8)],
    ids=["in order", "not in order"],
)
def test_a_layer_of_three_blocks_takes_few_operations_more(weights, more):
    """Three of the eight put rows in the order of blocks, and the outputs back in order."""
    own = [step_operations(n, None)[0] for n in (1, 2)]
    (one, _), (two, blocks) = (step_operations(n, "condense", weights) for n in (1, 2))
    assert blocks == [3, 3]
    assert two - one <= own[1] - own[0] + more
