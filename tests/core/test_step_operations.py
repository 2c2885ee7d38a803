"""What a decode step does of a layer: few operations, none of which the host waits for."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.cache.layer import KeptKV
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.parts.slots import GrowingSlots, Ring

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


def kept(schedule, weighed, device):
    """A layer's six rows in three blocks with room for four tokens, on a device without data."""
    blocks = []
    for i, n in enumerate(LENGTHS):
        shape = (2, n + 4)
        pair = torch.zeros(*shape, HEAD_DIM, device=device)
        positions = torch.zeros(shape, dtype=torch.int32, device=device)
        weights = torch.zeros(shape, device=device) if weighed else None
        rows = np.array([2 * i, 2 * i + 1])
        stored = pair, pair.clone(), positions, None
        blocks.append(PaddedBlock(rows, *stored, schedule(n), log_weights=weights))
        blocks[-1].set_bias(n)
    return KeptKV(blocks, 1, 6, [20])


def growing(n):
    return GrowingSlots(counts=np.array([n, n]))


def ring(n):
    counts = np.array([n, n])
    return Ring(counts=counts, protected=np.array([0, 0]), capacity=counts)


def step(layer, device):
    """Two steps, and the operations of the second: what is made once is made by the first."""
    query = torch.zeros(1, 12, 1, HEAD_DIM, device=device)
    pair = torch.zeros(1, 6, 1, HEAD_DIM, device=device)
    how = {"scale": 1.0, "softcap": None}
    layer.attend(query, pair, pair, 51, **how)
    with Operations() as operations:
        out = layer.attend(query, pair, pair, 52, **how)
    assert out.shape == (1, 1, 12, HEAD_DIM)
    return operations.found


CASES = pytest.mark.parametrize(
    ("schedule", "weighed", "most"),
    # Of a block: two copies of pairs, and attention; then one that joins what they found. A slot
    # that is taken again has another position, and weighs one token again: three more.
    [(growing, True, 10), (growing, False, 10), (ring, True, 19)],
    ids=["groups", "growing", "ring"],
)


@CASES
def test_few_operations(schedule, weighed, most):
    found = step(kept(schedule, weighed, "cpu"), "cpu")
    assert sum("scaled_dot_product" in name for name in found) == len(LENGTHS)
    assert len(found) <= most, found


@CASES
def test_the_host_waits_for_nothing(schedule, weighed, most):
    """On a device without data: there, reading a value is an error."""
    assert step(kept(schedule, weighed, "meta"), "meta")
