"""What a decode step does of a layer: few operations."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.cache.forward_pass import AttentionCall
from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import Step, block_of
from mmkv.cache.plain import PlainKV
from mmkv.decode.slots import GrowingSlots, Ring

LENGTHS, HEAD_DIM = (40, 20, 10), 8


class Operations(TorchDispatchMode):
    """Counts what computes or copies: no views, and nothing that only makes room."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = any(x.alias_info is not None for x in func._schema.returns)
        if (not aliases or func._schema.is_mutable) and "empty" not in func.name():
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def kept(schedule, weighed):
    """A layer's six rows in three blocks with room for four tokens."""
    blocks = []
    for i, n in enumerate(LENGTHS):
        shape = (2, n + 4)
        pair, positions = torch.zeros(*shape, HEAD_DIM), torch.zeros(shape, dtype=torch.int32)
        weights = torch.zeros(shape) if weighed else None
        stored, rows = PlainKV(pair, pair.clone()), np.array([2 * i, 2 * i + 1])
        blocks.append(block_of(rows, stored, positions, schedule(n), None, weights, n))
    return KeptKV(blocks, 1, 6, [20])


def growing(n):
    return GrowingSlots(counts=np.array([n, n]))


def ring(n):
    counts = np.array([n, n])
    return Ring(counts=counts, protected=np.array([0, 0]), capacity=counts)


@pytest.mark.parametrize(
    ("schedule", "weighed", "most"),
    # Of a block: two copies of pairs, and attention; then one that joins what they found. A slot
    # that is taken again has another position, and weighs one token again: three more.
    [(growing, True, 10), (growing, False, 10), (ring, True, 19)],
    ids=["groups", "growing", "ring"],
)
def test_few_operations(schedule, weighed, most):
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
