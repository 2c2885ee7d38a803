"""What a cache in 8 or 4 bits says, token by token, as the pages describe it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import Tensor

NEWEST, BULK, GROUP = 32, 16, 64


@contextmanager
def window_of(newest: int, bulk: int) -> Iterator[None]:
    """Another size of the window, here and in the package: a short one is full after few steps."""
    from mmkv.cache import evict, quantize

    sizes = {"NEWEST": newest, "BULK": bulk, "WINDOW": newest + bulk}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(quantize, name, size)
            patch.setitem(globals(), name, size)
        for name in ("NEWEST", "WINDOW"):
            patch.setattr(evict, name, sizes[name])
        yield


@cache
def rotated_by(D: int) -> Tensor:
    """The matrix that keys are multiplied by; only its signs are taken from the package."""
    from mmkv.cache.codes import rotation

    size = max(n for n in (2**i for i in range(12)) if D % n == 0)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard]), torch.cat([hadamard, -hadamard])], 1)
    matrix = torch.block_diag(*[hadamard / math.sqrt(size)] * (D // size))
    at = torch.arange(D)
    signs = rotation(D, D, torch.float64, torch.device("cpu"))[at, at // size * size].sign()
    return signs[:, None] * matrix


def fake_quantise(x: Tensor, bits: int, other: int | None = None) -> Tensor:
    """Each group of the numbers [..., D] of tokens rounded to the nearest of 2 ** bits numbers.

    These are multiples of a step in float16. The group's number farthest from 0 is 2 ** (bits - 1)
    steps, on its side of 0; on the other side there is one multiple less. If what lies beside has
    more numbers, `other`, zeros are added.
    """
    D = x.shape[-1]
    if other is not None and other > D:
        return fake_quantise(torch.cat([x, x.new_zeros(*x.shape[:-1], other - D)], -1), bits)[
            ..., :D
        ]
    size = GROUP if D % GROUP == 0 else D
    return torch.cat([_group(part, bits) for part in x.split(size, dim=-1)], dim=-1)


def _group(x: Tensor, bits: int) -> Tensor:
    farthest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    half = 2 ** (bits - 1)
    step = (farthest / 128).half().to(x.dtype) * (128 / half)
    multiples = (x / step.where(step != 0, 1.0)).round()
    return step * multiples.clamp(1 - half, half)


class Row:
    """What one key-value head of one sequence holds: by position, the pair that is read."""

    def __init__(self, bits: int, n_first: int) -> None:
        self.bits, self.n_first = bits, n_first
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.mean: Tensor | None = None
        self.first: set[int] = set()  # held exactly for as long as they stay
        self.freed: int | None = None  # the token whose slot the next one takes

    def evict(self, pairs: dict[int, tuple[Tensor, Tensor]], start: int) -> None:
        """Hold these pairs: exactly the first ones and those from `start` on, the rest as codes."""
        kept = sorted(pairs)
        self.first, self.freed, self.start = set(kept[: self.n_first]), None, start
        self.pairs = dict(pairs)
        coded = [p for p in kept if p not in self.first and p < start]
        self.write(coded)

    def write(self, tokens: list[int]) -> None:
        """Hold these pairs as codes."""
        if self.mean is None and tokens:  # it is subtracted from later keys too
            self.mean = sum(self.pairs[p][0] for p in tokens) / len(tokens)
        for p in tokens:
            self.pairs[p] = self.as_code(p)

    def as_code(self, p: float) -> tuple[Tensor, Tensor]:
        """The pair of a token as its codes say."""
        (key, value), bits = self.pairs[p], self.bits
        R = rotated_by(len(key)).to(key.dtype)
        turned = fake_quantise((key - self.mean) @ R, bits, len(value))
        return self.mean + turned @ R.T, fake_quantise(value, bits, len(key))

    def add(self, p: int, pair: tuple[Tensor, Tensor]) -> None:
        """A generated token comes; perhaps it is time to write the oldest exact ones as codes."""
        if self.freed in self.first:  # what takes an exact token's slot is exact
            self.first = self.first - {self.freed} | {p}
        n = p - self.start
        if n >= NEWEST + BULK and n % BULK == 0:
            oldest = range(p - NEWEST - BULK, p - NEWEST)
            self.write([x for x in oldest if x in self.pairs and x not in self.first])
        self.pairs[p] = pair

    def drop(self, kept: set[int]) -> None:
        """Only these tokens stay."""
        gone = self.pairs.keys() - kept
        assert len(gone) <= 1
        self.freed = max(gone, default=None)
        for p in gone:
            del self.pairs[p]
