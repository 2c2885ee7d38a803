"""What a page of the small heads holds: pairs, or codes of compressed pairs in 8 bits.

u are the heads of a page, n the tokens of a block, c the pairs whose codes fit in one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmkv.cache.codes import quantised
from mmkv.memory import group

_TYPE = torch.float16  # of steps, and of weights beside codes


def slot_bytes(pair: int) -> int:
    """Return the bytes of a slot with a pair of so many: the pair and a weight in float32."""
    return pair + 4


def code_bytes(head_size: int) -> int:
    """Return the bytes of a pair in 8 bits: its codes, their steps, and a weight."""
    numbers = 2 * head_size
    return numbers + _TYPE.itemsize * (numbers // group(head_size) + 1)


class Pages(NamedTuple):
    """The parts of a unit's pages, views of vLLM's tensor.

    A page has its pairs where vLLM's pages of other heads have them, and after these the
    logarithms of weights in float32, where the others have padding. So a page of other heads never
    leaves numbers that mean nothing, or NaN, among pairs. Codes fill a page from its start.
    """

    pairs: Tensor  # [blocks, u, n, 2 * D]
    weights: Tensor  # float32 [blocks, u, n], written for compressed pairs only
    content: Tensor  # int8 [blocks, bytes], all of a page, see `Codes`

    @classmethod
    def of(cls, cache: Tensor, head_size: int) -> Pages:
        """View a unit's cache [blocks, u, n, bytes of a pair and its weight]."""
        blocks, u, n, content = cache.shape  # strides inside a page are ours: pages are compact
        flat = cache.as_strided((blocks, u * n * content), (cache.stride(0), 1))
        pairs, weights = flat.tensor_split([u * n * 2 * head_size], 1)
        return cls(
            pairs.unflatten(1, (u, n, 2 * head_size)),
            weights.view(torch.float32).unflatten(1, (u, n)),
            flat.view(torch.int8),
        )


class Codes(NamedTuple):
    """The parts of pages of codes, views of their bytes."""

    codes: Tensor  # int8 [..., u, c, 2 * D]
    steps: Tensor  # float16 [..., u, c, G], of the G groups of a key and of a value
    weights: Tensor  # float16 [..., u, c], logarithms; -inf where there is no pair

    @classmethod
    def of(cls, content: Tensor, heads: int, head_size: int) -> Codes:
        """View the bytes of pages, int8 [..., bytes]."""
        numbers = 2 * head_size
        groups, size = numbers // group(head_size), _TYPE.itemsize
        n = heads * (content.shape[-1] // (heads * code_bytes(head_size)))
        ends = [n * numbers, n * (numbers + size * groups), n * code_bytes(head_size)]
        codes, steps, weights, _ = content.tensor_split(ends, -1)
        return cls(
            codes.unflatten(-1, (heads, -1, numbers)),
            steps.view(_TYPE).unflatten(-1, (heads, -1, groups)),
            weights.view(_TYPE).unflatten(-1, (heads, -1)),
        )

    def read(self, out: Tensor) -> None:
        """Write the pairs for which the codes stand into a tensor [..., u, c, 2 * D]."""
        out.copy_(self.codes)
        out.unflatten(-1, (self.steps.shape[-1], -1)).mul_(self.steps.to(out.dtype)[..., None])


def coded(keys: Tensor, values: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Return pages of codes, int8 [blocks, bytes], of pairs [u, m, D] and weights [u, m].

    `like` [..., bytes] are pages of as many bytes.
    """
    u, _, D = keys.shape
    codes, steps = (
        x.movedim(0, 2).flatten(2) for x in quantised(torch.stack([keys, values], 2), 8)
    )
    c = Codes.of(like, u, D).weights.shape[-1]
    blocks = -(-keys.shape[1] // c)
    pages = like.new_zeros(blocks, like.shape[-1])
    parts = Codes.of(pages, u, D)
    parts.codes.copy_(_in_blocks(codes, blocks, c, 0))
    parts.steps.copy_(_in_blocks(steps, blocks, c, 0))
    parts.weights.copy_(_in_blocks(weights, blocks, c, -torch.inf))
    return pages


def _in_blocks(x: Tensor, blocks: int, c: int, empty: Any) -> Tensor:
    """Cut [u, m, ...] into blocks [blocks, u, c, ...], of which the last may have empty slots."""
    filled = x.new_full((x.shape[0], blocks * c, *x.shape[2:]), empty)
    filled[:, : x.shape[1]] = x
    return filled.unflatten(1, (blocks, c)).transpose(0, 1)
