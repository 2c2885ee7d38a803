"""A prompt's attention before it is compressed: vLLM's kernel next to a loop."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

from vllm.platforms import current_platform

from mmkv.vllm.causal import causal


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    current_platform.import_kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 72])  # the kernel has no heads of 72
@pytest.mark.parametrize(("n", "end"), [(77, 77), (1, 40), (45, 130)])
def test_last_tokens_see_all_before_them(
    n: int, end: int, head_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(n, 2, 3, head_size, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, end, head_size, generator=generator).to(dtype)
    found = causal(query, keys, values, 0.2)
    assert found.dtype == dtype
    expected = torch.empty(query.shape)
    for i in range(n):
        for h in range(2):
            seen = slice(0, end - n + i + 1)
            weights = (query[i, h].float() @ keys[h, seen].float().T * 0.2).softmax(-1)
            expected[i, h] = weights @ values[h, seen].float()
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=atol)
