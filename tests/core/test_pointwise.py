"""Norms, rotary embeddings and activations by kernels: against twins, and twins against models.

Without a GPU the kernels run in Triton's interpreter; `test_kernels.py` compiles them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama

from mmkv import kernels
from mmkv.kernels import twins

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Two roundings: sums are added up in another order.
TWO_ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def same(got: Any, want: Any) -> None:
    """Equal to rounding, and all but a few of 16 bits exactly: what is rounded when is the same."""
    for x, y in zip(got, want, strict=True):
        y = y.to(x.device)
        # The interpreter cuts bits of bfloat16 off where a GPU rounds.
        cuts = x.dtype == torch.bfloat16 and x.device.type == "cpu"
        torch.testing.assert_close(x, y, rtol=TWO_ULP[x.dtype], atol=0.1 if cuts else 2e-6)
        if x.dtype != torch.float32 and not cuts:
            assert (x == y).float().mean() > 0.98


def angles(rows: int, tokens: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, unlike in both halves: a kernel may not take one for the other."""
    turns = random(rows, tokens, D, seed=9)
    return turns.cos().to(dtype), turns.sin().to(dtype)


# --- twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_twins_are_what_llama_computes(dtype: torch.dtype) -> None:
    norm = llama.LlamaRMSNorm(48, eps=1e-3).to(dtype)
    norm.weight.data = random(48, dtype=dtype, seed=1)
    x = random(2, 3, 48, dtype=dtype)
    q, k = random(2, 4, 3, 16, dtype=dtype), random(2, 2, 3, 16, dtype=dtype, seed=1)
    cos, sin = angles(2, 3, 16, dtype)
    with torch.no_grad():
        want = [norm(x), *llama.apply_rotary_pos_emb(q, k, cos, sin), nn.SiLU()(x) * x.flip(0)]
    found = [twins.rms_norm(x, norm.weight, 1e-3), *twins.rotate(q, k, cos, sin)]
    for got, wanted in zip([*found, twins.silu_mul(x, x.flip(0))], want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 37, 128, 4099])  # the last takes two blocks
def test_rms_norm(device: torch.device, D: int, dtype: torch.dtype) -> None:
    x, weight = random(2, 3, D, dtype=dtype), random(D, dtype=dtype, seed=1)
    x[0, 1] *= 1e-3  # where eps counts
    got = kernels.rms_norm(x.to(device), weight.to(device), 1e-5)
    same([got], [twins.rms_norm(x, weight, 1e-5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "D"), [(2, 16), (1, 80), (2, 6)])
def test_rotate(device: torch.device, rows: int, D: int, dtype: torch.dtype) -> None:
    query = random(2, 3, 5, D, dtype=dtype).transpose(1, 2)  # [2, 5, 3, D], as projections leave it
    key = random(2, 3, 2, 2 * D, dtype=dtype, seed=1)[..., D:].transpose(1, 2)
    given = [query, key, *angles(rows, 3, D, dtype)]
    same(kernels.rotate(*(x.to(device) for x in given)), twins.rotate(*given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(device: torch.device, dtype: torch.dtype) -> None:
    gate, up = random(3, 433, dtype=dtype), random(3, 433, dtype=dtype, seed=1)
    gate[0, :4] = torch.tensor([-1000.0, 1000.0, 0.0, -90.0])
    same([kernels.silu_mul(gate.to(device), up.to(device))], [twins.silu_mul(gate, up)])


def test_strided_rows(device: torch.device) -> None:
    wide = random(6, 2, 70).to(device)
    x, y, every = wide[::2, :, 3:40], wide[1::2, :, 3:40], wide[..., ::2]
    weight = random(74, seed=1).to(device)[::2]
    same([kernels.rms_norm(x, weight, 1e-5)], [twins.rms_norm(x, weight, 1e-5)])
    same([kernels.rms_norm(every, weight[:35], 1e-5)], [twins.rms_norm(every, weight[:35], 1e-5)])
    same([kernels.silu_mul(x, y)], [twins.silu_mul(x, y)])
    turns = angles(1, 2, 37, torch.float32)
    given = [
        every[:, None, :, :34],
        wide[:, None, :, 3:37],
        *(z[..., 3:].to(device) for z in turns),
    ]
    same(kernels.rotate(*given), twins.rotate(*given))


def test_nothing(device: torch.device) -> None:
    none = random(0, 4, 16).to(device)
    assert kernels.rms_norm(none, none.new_ones(16), 1e-5).shape == (0, 4, 16)
    assert kernels.silu_mul(none, none).shape == (0, 4, 16)
    q, k = kernels.rotate(none[None], none[None], none.new_ones(1, 4, 16), none.new_ones(1, 4, 16))
    assert (q.shape, k.shape) == ((1, 0, 4, 16), (1, 0, 4, 16))


X, Q = torch.zeros(2, 3, 8), torch.zeros(2, 4, 3, 8)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("rms_norm", (X, X[0, 0, :7], 1e-5), r"x must be \[..., D\] and weight \[D\], got"),
        ("rms_norm", (X, X[0, 0].half(), 1e-5), "one dtype"),
        ("rms_norm", (X.double(), X[0, 0].double(), 1e-5), "one dtype"),
        ("rotate", (Q, Q[:1], X, X), r"key must be|key \[B, H, N, D\]"),
        ("rotate", (Q, Q, X, X[:1]), r"cos and sin \[B, N, D\]"),
        ("rotate", (Q[..., :7], Q[..., :7], X[..., :7], X[..., :7]), "with D even"),
        ("rotate", (X, Q, X, X), r"query must be \[B, Hq, N, D\]"),
        ("silu_mul", (X, X[:1]), r"one shape, got \(2, 3, 8\) and \(1, 3, 8\)"),
        ("silu_mul", (X, X.half()), "one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(function: str, arguments: Any, message: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ValueError, match=message):
        getattr(kernels, function)(*arguments)
