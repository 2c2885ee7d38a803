"""Triton kernels against their twins in plain torch, and the twins against loops.

Without a GPU the kernels run in Triton's interpreter (see conftest.py), so sizes are small. The
interpreter takes what the compiler may refuse: `test_kernels_compile` compiles them.
"""

import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.marks import slow_except
from mmkv import kernels, scores
from mmkv.kernels import twins

HEAD_DIMS = [32, 64, 80, 96, 128, 256]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned() -> Any:
    """Uninitialised memory is NaN, so that what was not written, or not to be read, shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    # Twice the usual spread, so that attention is far from uniform.
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


# --- twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_row_lse_twin_is_a_loop(softcap: float | None) -> None:
    query, key = random(2, 4, 9, 8), random(2, 2, 13, 8, seed=1)
    valid = torch.ones(2, 13, dtype=torch.bool)
    valid[1, :6] = valid[0, 7] = False
    got = twins.row_lse(query, key, scale=0.4, softcap=softcap, valid=valid)
    for b, head, i in torch.cartesian_prod(*map(torch.arange, (2, 4, 9))).tolist():
        token = 13 - 9 + i
        seen = [j for j in range(token + 1) if valid[b, j] and valid[b, token]]
        logits = 0.4 * key[b, head // 2, seen].double() @ query[b, head, i].double()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        torch.testing.assert_close(
            got[b, head, i].double(), logits.logsumexp(0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("padding", [(0, 0), (0, 11)])
def test_column_sums_twin_is_accumulated_attention(
    padding: tuple[int, int], softcap: float | None
) -> None:
    query, key = random(2, 6, 20, 8), random(2, 2, 31, 8, seed=1)
    valid = torch.stack([torch.arange(31) >= pad for pad in padding])
    options: dict[str, Any] = {"scale": 0.4, "softcap": softcap, "valid": valid}
    got = twins.column_sums(query, key, twins.row_lse(query, key, **options), **options)
    want = scores.accumulated_attention(query, key, **options)
    torch.testing.assert_close(got, want)


# --- column sums ---------------------------------------------------------------------------------


def check_columns(
    device: torch.device,
    query: Tensor,
    key: Tensor,
    valid: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compare the two kernels with their twins; return the column sums."""
    if valid is not None:
        (valid,) = on(device, valid)
    options: dict[str, Any] = {"scale": 0.2, "softcap": softcap, "valid": valid}
    lse = kernels.row_lse(query, key, **options)
    want = twins.row_lse(query, key, **options)
    torch.testing.assert_close(lse, want, rtol=1e-4, atol=1e-4)
    sums = kernels.column_sums(query, key, lse, **options)
    assert sums.dtype == torch.float32
    want = twins.column_sums(query, key, want, **options)
    torch.testing.assert_close(sums, want, rtol=1e-3, atol=1e-4)
    return sums


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", slow_except(HEAD_DIMS, 96))
def test_columns_for_head_dims(device: torch.device, D: int, dtype: torch.dtype) -> None:
    query, key = random(1, 2, 45, D, dtype=dtype), random(1, 1, 45, D, dtype=dtype, seed=1)
    check_columns(device, *on(device, query, key))


@pytest.mark.parametrize("padding", slow_except([None, (37, 0), (5, 44)], (5, 44)))
@pytest.mark.parametrize(("Hq", "H"), slow_except([(2, 2), (7, 1), (4, 2)], (4, 2), several=True))
@pytest.mark.parametrize(
    ("Q", "N"), slow_except([(40, 40), (1, 45), (33, 64)], (33, 64), several=True)
)
def test_columns_for_shapes(
    device: torch.device, Q: int, N: int, Hq: int, H: int, padding: tuple[int, int] | None
) -> None:
    query, key = on(device, random(2, Hq, Q, 32), random(2, H, N, 32, seed=1))
    valid = None
    if padding is not None:
        valid = torch.stack([torch.arange(N) >= min(pad, N - 1) for pad in padding])
    sums = check_columns(device, query, key, valid)
    queries = torch.full((2,), Q) if valid is None else valid[:, N - Q :].sum(1)
    torch.testing.assert_close(sums.sum(-1).cpu(), queries[:, None].expand(2, H).float())


@pytest.mark.parametrize("dtype", slow_except(DTYPES, torch.float32))
@pytest.mark.parametrize("softcap", slow_except([0.5, 5.0, 50.0], 5.0))
def test_columns_with_a_softcap(device: torch.device, softcap: float, dtype: torch.dtype) -> None:
    query, key = random(2, 4, 40, 32, dtype=dtype), random(2, 2, 50, 32, dtype=dtype, seed=1)
    query[0] *= 100  # logits in the thousands: the cap's ends
    valid = torch.arange(50) >= torch.tensor([[0], [21]])
    query, key = on(device, query, key)
    with_cap = check_columns(device, query, key, valid, softcap)
    assert (with_cap - check_columns(device, query, key, valid)).abs().max() > 0.1


@pytest.mark.slow
def test_columns_do_not_see_what_padding_holds(device: torch.device) -> None:
    query, key = on(device, random(2, 4, 40, 32), random(2, 2, 50, 32, seed=1))
    valid = torch.arange(50) >= torch.tensor([[0], [21]])
    valid[0, 30:35] = False  # no padding that a tokenizer makes, yet none to read
    want = check_columns(device, query, key, valid)
    pads = ~valid.to(device)[:, None, :, None]
    for dirt in (torch.nan, torch.inf):
        got = check_columns(
            device,
            query.masked_fill(pads[:, :, 10:], dirt),
            key.masked_fill(pads, dirt),
            valid,
        )
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_columns_of_strided_tensors(device: torch.device) -> None:
    # As a projection leaves them: [B, N, heads, D], inside something larger.
    query, key = on(device, random(2, 40, 9, 48), random(2, 50, 9, 48, seed=1))
    query, key = query[:, 3:, 1:3, :32].transpose(1, 2), key[:, :, 2:3, 16:].transpose(1, 2)
    got = check_columns(device, query, key)
    same = check_columns(device, query.contiguous(), key.contiguous())
    torch.testing.assert_close(got, same, rtol=1e-5, atol=1e-6)
    check_columns(device, query.mT.contiguous().mT, key)  # rows that are not contiguous


@pytest.mark.slow
def test_columns_are_the_same_each_time(device: torch.device) -> None:
    query, key = on(device, random(1, 4, 90, 32), random(1, 2, 90, 32, seed=1))
    torch.testing.assert_close(
        check_columns(device, query, key), check_columns(device, query, key), rtol=0, atol=0
    )


def test_columns_of_nothing(device: torch.device) -> None:
    query, key = on(device, random(2, 4, 0, 32), random(2, 2, 5, 32))
    lse = kernels.row_lse(query, key, scale=1.0)
    assert lse.shape == (2, 4, 0)
    assert kernels.column_sums(query, key, lse, scale=1.0).tolist() == torch.zeros(2, 2, 5).tolist()
    lse = kernels.row_lse(query[:0], key[:0], scale=1.0)
    assert kernels.column_sums(query[:0], key[:0], lse, scale=1.0).shape == (0, 2, 5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("padding", [None, (0, 23)])
def test_accumulated_attention_is_the_same_through_kernels(
    device: torch.device,
    padding: tuple[int, int] | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtype = torch.bfloat16
    query, key = on(device, random(2, 6, 40, 64, dtype=dtype), random(2, 2, 60, 64, dtype=dtype))
    valid = None
    if padding is not None:
        valid = torch.stack([torch.arange(60) >= pad for pad in padding]).to(device)
    monkeypatch.setattr(kernels, "DEVICES", ())
    options: dict[str, Any] = {"softcap": softcap, "valid": valid}
    want = scores.accumulated_attention(query, key, **options)

    calls: list[str] = []
    column_sums = kernels.column_sums
    monkeypatch.setattr(
        kernels,
        "column_sums",
        lambda *args, **kwargs: calls.append("kernel") or column_sums(*args, **kwargs),
        raising=False,
    )
    monkeypatch.setattr(kernels, "DEVICES", ("cpu", "cuda"))
    got = scores.accumulated_attention(query, key, **options)
    assert calls == ["kernel"]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)

    # With a mask of its own a query may see later keys, which the kernels do not.
    mask = torch.ones(2, 1, 40, 60, dtype=torch.bool, device=device)
    got = scores.accumulated_attention(query, key, mask=mask, **options)
    monkeypatch.setattr(kernels, "DEVICES", ())
    want = scores.accumulated_attention(query, key, mask=mask, **options)
    assert calls == ["kernel"]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("softcap", "pads", "weighted", "pooling"),
    slow_except(
        [(None, None, False, "avg"), (2.0, (0, 31), True, "max"), (None, (0, 23), True, None)],
        (2.0, (0, 31), True, "max"),
        several=True,
    ),
)
def test_window_attention_reads_16_bit_keys_as_they_are(
    device: torch.device,
    softcap: float | None,
    pads: tuple[int, int] | None,
    weighted: bool,
    pooling: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    N, window, dtype = 36, 8, torch.bfloat16  # a row of 5 tokens has padding in its window
    query, key = on(device, random(2, 4, 20, 16, dtype=dtype), random(2, 2, N, 16, dtype=dtype))
    valid = None
    if pads is not None:
        valid = torch.stack([torch.arange(N) >= pad for pad in pads]).to(device)
        key = key.masked_fill(~valid[:, None, :, None], torch.nan)
    weights = torch.arange(float(window)) if weighted else None  # the first query's is 0
    options: dict[str, Any] = {"softcap": softcap, "valid": valid, "weights": weights}
    options |= {"window": window, "kernel_size": 3, "pooling": pooling}
    monkeypatch.setattr(kernels, "DEVICES", ())
    want = scores.window_attention(query, key, **options)

    monkeypatch.setattr(kernels, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(scores, "window_rows", None)  # which copies the keys to float32
    got = scores.window_attention(query, key, **options)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


# --- errors, availability, compilation -----------------------------------------------------------

Q4, K4 = torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "message"),
    [
        ("row_lse", (Q4[0], K4), {}, r"query must be \[B, Hq, Q, D\]"),
        ("row_lse", (Q4, K4[:, :, :2]), {}, "Q <= N"),
        ("row_lse", (Q4, K4.half()), {}, "one dtype"),
        ("row_lse", (Q4.double(), K4.double()), {}, "one dtype"),
        ("row_lse", (Q4.repeat(1, 1, 1, 9), K4.repeat(1, 1, 1, 9)), {}, "at most 256"),
        ("row_lse", (Q4, K4), {"valid": torch.ones(1, 3)}, r"valid must be a bool \[B, N\]"),
        ("row_lse", (Q4, K4), {"softcap": 0.0}, "softcap must be above 0, got 0.0"),
        ("column_sums", (Q4, K4, torch.zeros(1, 2, 4)), {}, "lse must be float32"),
    ],
)
def test_what_does_not_fit_is_refused(
    function: str, arguments: tuple[Tensor, ...], options: dict[str, Any], message: str
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ValueError, match=message):
        getattr(kernels, function)(*arguments, scale=1.0, **options)


def test_without_triton_nothing_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not kernels.available(torch.device("cpu"))
    assert not kernels.available(torch.device("cuda"))
    assert not kernels.takes(Q4, K4)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """One that Triton compiles for, as far as is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_complete", cache(kernels._complete.__wrapped__))
    monkeypatch.delenv("CC", raising=False)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("compiler", [None, "/no/such/cc"])
def test_a_missing_compiler_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, a_gpu: torch.device, compiler: str | None
) -> None:
    if compiler is None:
        monkeypatch.setenv("PATH", "/nowhere")
    else:
        monkeypatch.setenv("CC", compiler)
    assert not kernels.available(a_gpu)
    assert not kernels.available(a_gpu)
    [record] = caplog.records
    assert f"no {compiler or 'gcc or clang'}" in record.getMessage()


def test_what_else_is_missing_on_a_gpu_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, a_gpu: torch.device
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not kernels.available(a_gpu)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not kernels.available(a_gpu)
    assert "this is 7.5" in caplog.text
    assert "not installed" in caplog.text


def test_kernels_are_available_on_the_cpu_in_the_interpreter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.available(torch.device("cpu"))
    assert kernels.takes(Q4, K4)
    assert not kernels.takes(Q4, K4.half())
    assert not kernels.takes(Q4.double())
    assert not kernels.available(torch.device("meta"))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not kernels.available(torch.device("cpu"))


@pytest.mark.slow
def test_importing_kernels_does_not_import_triton() -> None:
    code = "import sys, mmkv.kernels, mmkv.scores; print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mmkv.kernels import columns, columns_device, decode, decode_device, lightest_device
from mmkv.kernels import pointwise_device

CAPABILITY = int(sys.argv[1])

def compiled(kernel, pointers, numbers, constants, num_warps=4, num_stages=3):
    signature = {name: "i32" for name in kernel.arg_names}
    signature |= {name: "constexpr" for name in constants}
    signature |= {name: "*" + dtype for name, dtype in pointers.items()}
    signature |= numbers
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    print(kernel.__name__, made.metadata.shared, len(made.asm["cubin"]))

def halves(*names, **others):
    return {name: "bf16" for name in names} | others

sizes = columns._blocks(80, 2)
warps = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
for kernel in (columns_device.row_lse_kernel, columns_device.column_sums_kernel):
    out = {name: "fp32" for name in ("lse", "sums") if name in kernel.arg_names}
    compiled(
        kernel,
        halves("query", "key", valid="u8", **out),
        {"inner": "fp32", "outer": "fp32"},
        dict(D=80, D_PAD=128, CAPPED=True, PADDED=True, WIDEN=False, **sizes),
        **warps,
    )
floats = dict(parts="fp32", lse="fp32", logits="fp32", log_weights="fp32")
floats |= dict(mass="fp32", whole="fp32")
longs = dict(starts="i64", slots_of="i64", entries="i64", line="i64", places="i64", freed="i64")
ints = dict(lengths="i32", position="i32", positions="i32", protected="i32", recent="i32")
ints |= dict(capacity="i32")

def pointers(kernel, *names):
    known = halves(*names, **floats, **longs, **ints)
    return {name: dtype for name, dtype in known.items() if name in kernel.arg_names}

for kernel, G in ((decode_device.one_head_kernel, 1), (decode_device.group_kernel, 4)):
    sizes = decode._tile(G, 128, 2)
    num_warps = sizes.pop("num_warps")
    constants = dict(D=80, DV=80, D_PAD=128, DV_PAD=128, G_PAD=16)
    constants |= dict(CAPPED=True, WEIGHTED=True, SHARED=True, WEIGHED=True, WIDEN=False)
    compiled(
        kernel,
        pointers(kernel, "query", "key", "value", "keys", "values"),
        {"inner": "fp32", "outer": "fp32"},
        constants | sizes,
        num_warps,
    )
compiled(
    decode_device.join_kernel,
    pointers(decode_device.join_kernel, "out"),
    {},
    dict(DV=80, DV_PAD=128, CHUNKS=64),
    8,
)
for heads in (1, 4):
    compiled(
        lightest_device.lightest_kernel,
        pointers(lightest_device.lightest_kernel),
        {},
        dict(HEADS=heads, BLOCK=1024, ADDS=heads == 1, PLACED=True),
    )
compiled(
    pointwise_device.rms_norm_kernel,
    halves("x", "weight", "out"),
    {"eps": "fp32"},
    dict(D=5120, BLOCK=4096),
    8,
)
compiled(
    pointwise_device.rotate_kernel,
    halves("query", "key", "cos", "sin", "query_out", "key_out"),
    {},
    dict(HALF=40, PAD=64),
    1,
)
compiled(pointwise_device.silu_mul_kernel, halves("gate", "up", "out"), {}, dict(BLOCK=1024))
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile(tmp_path: Any, capability: str) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton does not compile for NVIDIA")
    # A process of its own: in this one the interpreter may have replaced the kernels.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, capability], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 10
    for name, shared, code in lines:
        assert int(shared) <= 99 * 1024, name  # what a program has on every GPU since Ampere
        assert int(code) > 0, name
