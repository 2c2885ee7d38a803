"""GPUs by their data sheets."""

from typing import NamedTuple


class Card(NamedTuple):
    """A GPU by its data sheet: bytes, bytes a second, dense 16-bit operations a second."""

    memory: float
    bandwidth: float
    flops: float


CARDS = {
    "h200": Card(141e9, 4.8e12, 989e12),
    "h100": Card(80e9, 3.35e12, 989e12),
    "a100": Card(80e9, 2.04e12, 312e12),
    "a100-40": Card(40e9, 1.56e12, 312e12),
    "l40s": Card(48e9, 0.864e12, 362e12),
    "a6000": Card(48e9, 0.768e12, 155e12),
    "rtx4090": Card(24e9, 1.008e12, 165e12),
}
