"""Our kernel's attention is that of torch's operations, here in Triton's interpreter on a CPU.

On a GPU `test_gpu.py` runs the kernel itself.
"""

import pytest
import torch

import mmkv
from helpers.codes import coded_block
from helpers.models import make_inputs
from mmkv.cache import kernels, padded_blocks, quantize

pytest.importorskip("triton", reason="there is no Triton")


@pytest.fixture(scope="module")
def kernel():
    """The kernel, interpreted, for a model in float32."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu.py runs the kernel on this machine's GPU")
    from mmkv.cache.triton_attention import attend

    return attend


def bias_of(rows: int, slots: int, dtype: torch.dtype | None) -> torch.Tensor | None:
    """A bias with empty slots at the end of the first row; None without a type."""
    if dtype is None:
        return None
    bias = torch.randn(rows, 1, slots).to(dtype)
    bias[0, :, -20:] = -torch.inf
    return bias


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """They differ by no more than roundings of float32."""
    assert got.shape == expected.shape
    assert (got - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("queries", "bias"), [(1, None), (1, torch.bfloat16), (7, torch.float32)], ids=str
)
@pytest.mark.parametrize("sizes", [(128, 128), (80, 80), (24, 16), (192, 128)], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_to_codes_equals_that_of_products(kernel, bits, sizes, queries, bias):
    stored = coded_block(3, 150, *sizes, bits=bits)
    ((keys, values),) = stored._coded([147], whole=False)
    query, weights = torch.randn(3, queries, max(sizes)), bias_of(3, 147, bias)
    logits = keys.products(query * 0.3)
    expected = values.weighted_sums((logits if weights is None else logits + weights).softmax(-1))
    same(kernel(query, keys, values, weights, 0.3), expected)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("sizes", [(64, 64), (40, 24)], ids=str)
def test_attention_to_pairs_equals_that_of_torch(kernel, sizes, queries):
    """Views of longer tensors, as a block's slots in use are."""
    keys, values = (torch.randn(3, 150, size)[:, :147] for size in sizes)
    query, weights = torch.randn(3, queries, sizes[0]), bias_of(3, 147, torch.float32)
    expected = kernels.attend(query, keys, values, weights, scale=0.3, softcap=None)
    same(kernel(query, keys, values, weights, 0.3), expected)


@pytest.mark.parametrize(
    ("policy", "lengths", "new", "short", "options"),
    [
        ("condense", (30, 56), 12, False, {"budget": 0.3, "kv_dtype": "int4"}),
        ("streaming", (5, 30), 20, False, {"budget": 12, "kv_dtype": "int8"}),
        # Rows of fewer tokens than the policy has sinks: the kernel does not take them.
        ("snapkv", (2,), 12, True, {"budget": 64, "sinks": 4, "kv_dtype": "int4"}),
        ("condense", (2, 40), 12, True, {"budget": 32, "sinks": 4, "kv_dtype": "int8"}),
    ],
    ids=str,
)
def test_attention_in_steps_of_a_model_equals_that_of_products(
    models, kernel, monkeypatch, policy, lengths, new, short, options
):
    """The kernel's attention is that of the products, in some of the calls."""
    calls = []

    def compared(query, keys, values, visible, scale, softcap, *, replayed):
        expected = kernels.attend(query, keys, values, visible, scale, softcap)
        calls.append(keys.short)
        if len(calls) % 19 == 0 and not keys.short:
            same(kernel(query, keys, values, visible, scale), expected)
        return expected

    monkeypatch.setattr(padded_blocks, "attend", compared)
    monkeypatch.setattr(quantize, "_FEW", 0)  # as codes, though they are few
    model, inputs = models("llama"), make_inputs("llama", lengths)
    with mmkv.wrapped(model, policy, **options):
        model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    assert len(calls) > 19
    assert set(calls) == {short}


def test_which_calls_the_kernel_takes(monkeypatch):
    """Those of a model in 16 bits, with a bias for all queries alike or none, and no gradient."""
    monkeypatch.setattr(kernels, "_kernel", lambda device: "kernel")

    def takes(query, keys, bias, *, replayed=True):
        return kernels._kernel_for(query, keys, bias, replayed=replayed) == "kernel"

    query, keys = torch.randn(3, 4, 64), torch.randn(3, 50, 64).bfloat16()
    alike = torch.zeros(3, 1, 50)
    assert takes(query, keys, alike)
    assert takes(query, keys, None)
    assert not takes(query, keys, alike, replayed=False)
    assert not takes(query, keys.float(), alike)
    assert not takes(query, keys, alike > 0)
    assert not takes(query, keys, alike.expand(-1, 4, -1))
    assert not takes(torch.randn(3, 65, 64), keys, alike)
    assert not takes(torch.randn(3, 4, 288), keys, alike)
    assert not takes(torch.randn(3, 33, 136), keys, alike)
    assert not takes(torch.randn(3, 4, 64, requires_grad=True), keys, alike)
    for dtype in (torch.float16, torch.float32):
        ((codes, _),) = coded_block(3, 150, 64, 64, bits=4, dtype=dtype)._coded([150], whole=False)
        codes = codes._replace(exact=codes.exact.to(dtype))
        assert takes(query, codes, None, replayed=False) == (dtype == torch.float16)


@pytest.mark.parametrize(
    "error", [None, RuntimeError("no C compiler"), Exception("no ptxas")], ids=str
)
def test_without_a_working_triton_torch_attends(kernel, monkeypatch, caplog, error):
    from mmkv.cache import triton_attention

    def tried(device):
        if error is not None:
            raise error

    monkeypatch.setattr(triton_attention, "try_triton", tried)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = kernels._kernel.__wrapped__(torch.device("cuda"))
    assert found is (triton_attention.attend if error is None else None)
    assert (str(error) in caplog.text) == (error is not None)


def test_number_of_parts_of_a_row_does_not_change_its_attention(kernel, monkeypatch):
    from mmkv.cache import triton_attention

    stored = coded_block(2, 300, 64, 64, bits=4)
    ((keys, values),) = stored._coded([300], whole=False)
    query, weights, found = torch.randn(2, 1, 64), bias_of(2, 300, torch.float32), []
    for programs in (1, 6, 1000):
        monkeypatch.setattr(triton_attention, "PROGRAMS", programs)
        found.append(kernel(query, keys, values, weights, 0.3))
    same(found[1], found[0])
    same(found[2], found[0])
