"""Attention by torch's variable-length kernel: arguments by its fake, sums by a loop."""

import pytest
import torch

import mmkv
from helpers.masking import generate
from helpers.models import make_inputs
from helpers.oracle import ROWS
from mmkv.cache import varlen

kernel = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has none")


def looped(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, seqused_k, **options):
    """What the kernel computes, sequence by sequence."""
    assert options == {"enable_gqa": True, "num_splits": 1}
    assert max_q == 1
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    out = []
    for i in range(len(cu_seq_q) - 1):
        assert cu_seq_q[i + 1] - cu_seq_q[i] == 1
        first, n = int(cu_seq_k[i]), int(seqused_k[i])
        assert n <= int(cu_seq_k[i + 1]) - first <= max_k
        k, v = key[first : first + n, 0], value[first : first + n, 0]
        out.append((scale * query[i] @ k.T).softmax(-1) @ v)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_kernel_takes_its_arguments(dtype, biased):
    query = torch.empty(6, 4, 64, dtype=dtype, device="meta")
    pairs = torch.empty(6, 50, 64, dtype=dtype, device="meta")
    used = torch.empty(6, dtype=torch.int32, device="meta")
    bias = torch.empty(6, 1, 50, dtype=dtype, device="meta") if biased else None
    out = varlen.varlen_attend(query, pairs, pairs, used, bias, 0.125)
    assert (out.shape, out.dtype) == (query.shape, dtype)


@pytest.mark.parametrize("policy", ["adakv", "condense", "streaming", "prefixkv"])
def test_steps_by_the_kernel_are_those_of_padded_blocks(models, monkeypatch, policy):
    """Rows of other lengths, slots that are free, weights of groups."""
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    found = []
    for enabled in (False, True):
        monkeypatch.setattr(varlen, "ENABLED", enabled)
        monkeypatch.setattr(varlen, "applies", lambda query: True)
        monkeypatch.setattr(kernel, "varlen_attn", looped)
        with mmkv.wrapped(model, policy, 0.4):
            found.append(generate(model, inputs, new=12))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-4, rtol=0)
    assert torch.equal(found[1][1], found[0][1])


def test_it_is_off():
    assert not varlen.ENABLED
    assert not varlen.applies(torch.ones(2, 1, 64, dtype=torch.bfloat16))
