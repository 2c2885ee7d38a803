"""Codes of pairs in the bytes of pages, for head sizes and layouts that no tiny model has."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

from mmkv.vllm.pages import Codes, Pages, code_bytes, coded, slot_bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("D", [40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "block"), [(1, 16), (2, 32), (8, 128)])
def test_codes_are_read_as_they_were_written(
    dtype: torch.dtype, D: int, heads: int, block: int
) -> None:
    g = torch.Generator().manual_seed(0)
    slot = 2 * D + 4 // dtype.itemsize
    page = heads * block * slot
    shared = torch.zeros(5, 2 * page, dtype=dtype)  # with the pages of another layer
    strides = 2 * page, block * slot, slot, 1
    pages = Pages.of(shared.as_strided((5, heads, block, slot), strides, page), D)
    fit = block * slot_bytes(2 * D * dtype.itemsize) // code_bytes(D)
    n, at = 2 * fit - 3, torch.tensor([3, 1])
    keys, values = torch.randn(2, heads, n, D, generator=g) * torch.tensor(3.0)
    weights = torch.rand(heads, n, generator=g) * 5
    pages.content[at] = coded(keys, values, weights, pages.content)
    codes = Codes.of(pages.content[at], heads, D)
    read = torch.empty(2, heads, fit, 2 * D, dtype=dtype)
    codes.read(read)
    found = read.transpose(0, 1).flatten(1, 2)[:, :n].float()
    given = torch.cat([keys, values], -1)
    largest = given.unflatten(-1, (codes.steps.shape[-1], -1)).abs().amax(-1, keepdim=True)
    error = (found - given).unflatten(-1, (codes.steps.shape[-1], -1)).abs()
    assert bool((error <= largest * (1 / 128 + 1e-3 + 2 * torch.finfo(dtype).eps)).all())
    written = codes.weights.transpose(0, 1).flatten(1, 2)
    assert torch.allclose(written[:, :n].float(), weights, atol=0.002)
    assert bool((written[:, n:] == -torch.inf).all())
    assert not shared[:, :page].any()
