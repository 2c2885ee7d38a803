"""Scores against loops that read like the papers, row by row and without padding."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.memory import Outputs
from helpers.models import left_padded
from helpers.oracle import naive_attention, pool
from mmkv import tensors as tiling
from mmkv.scores import accumulated_attention, recency, window_attention
from mmkv.sizes.squeeze import residual_similarity

LAYOUTS = [(4, 4), (6, 2), (3, 1)]  # (Hq, H): one head each, grouped, one for all
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WINDOW: dict[str, Any] = {"window": 4, "kernel_size": 5, "pooling": "avg"}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Twice the usual spread, so that attention is far from uniform.
    return (2 * torch.randn(*shape, generator=generator)).to(dtype)


def naive(query: Tensor, key: Tensor, *, window=None, weights=None, log_weights=None, **options):
    """SnapKV (`window`: size, kernel, pooling) or H2O of a row without padding: `[H, n]`."""
    Hq, (H, N, _) = query.shape[0], key.shape
    n = N - (window[0] if window else 0)
    result = torch.zeros(H, n, dtype=torch.float64)
    for head in range(Hq):
        at = head // (Hq // H)
        own = {**options, "log_weights": None if log_weights is None else log_weights[at]}
        attention = naive_attention(query[head], key[at], **own)
        paid = attention.sum(0)
        if window:
            weights = weights or [1.0] * window[0]
            mean = torch.tensor(weights, dtype=torch.float64) @ attention[-window[0] :, :n]
            paid = torch.tensor(pool((mean / sum(weights)).tolist(), *window[1:]))
        result[at] += paid / (Hq // H)
    return result


def holes_mask(N: int, seed: int) -> Tensor:
    """Causal with holes, and some tokens ahead; one query sees nothing: `[N, N]`."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(N, N, generator=g) < torch.ones(N, N).tril() * 0.6 + 0.1
    mask[N - 2] = False
    return mask


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(2, 24),
    queries=st.integers(1, 24),
    padding=st.lists(st.integers(0, 24), min_size=2, max_size=2),
    layout=st.sampled_from(LAYOUTS),
    block=st.integers(1, 15),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    scale=st.sampled_from([None, 0.7]),
    masked=st.booleans(),
    grouped=st.booleans(),
    window=st.tuples(st.integers(1, 6), st.sampled_from([(5, "avg"), (7, "max"), (1, None)])),
    weighted=st.booleans(),
    garbage=st.sampled_from([0.0, math.nan, math.inf, 6e4]),
    dtype=st.sampled_from(DTYPES),
    autocast=st.booleans(),
    tile=st.sampled_from([1, 2**30]),
    seed=st.integers(0, 2**16),
)
def test_scores_equal_the_loops(
    N, queries, padding, layout, block, softcap, scale, masked, grouped, window, weighted, garbage,
    dtype, autocast, tile, seed,
) :  # fmt: skip
    """Queries of a prompt's last chunk, padding that holds anything, masks that hide anything."""
    (Hq, H), Q, D = layout, min(queries, N), 4
    size = min(window[0], Q, N - 1)
    # As models hand them over: transposed views of [B, N, heads, D].
    query = random(2, Q, Hq, D, seed=seed, dtype=dtype).transpose(1, 2)
    key = random(2, N, H, D, seed=seed + 1, dtype=dtype).transpose(1, 2)
    mask = torch.stack([holes_mask(N, seed + b)[-Q:] for b in range(2)]) if masked else None
    log_weights = random(2, H, N, seed=seed + 2) if grouped else None
    weights = random(size, seed=seed + 3).abs() if weighted else None
    padding = [min(p, N) for p in padding]
    valid = left_padded(N, tuple(padding))
    query.masked_fill_(~valid[:, None, -Q:, None], garbage)
    key.masked_fill_(~valid[:, None, :, None], garbage)
    before = query.clone(), key.clone(), valid.clone()
    options: dict[str, Any] = {"softcap": softcap, "valid": valid, "scale": scale}
    options["log_weights"] = log_weights
    options["mask"] = None if mask is None else mask[:, None]
    kernel_size, pooling = window[1]
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", enabled=autocast):
        patch.setattr(tiling, "_CPU_TILE_PER_THREAD", tile)
        got = accumulated_attention(query, key, block=block, **options)
        more = {"window": size, "kernel_size": kernel_size, "pooling": pooling, "weights": weights}
        seen = window_attention(query, key, **more, **options)
        assert torch.is_autocast_enabled("cpu") == autocast
    assert got.dtype == seen.dtype == torch.float32
    assert seen.shape == (2, H, N - size)
    for now, then in zip((query, key, valid), before, strict=True):
        torch.testing.assert_close(now, then, atol=0, rtol=0, equal_nan=True)
    for b, p in enumerate(padding):
        q, k = query[b, :, max(0, p - (N - Q)) :], key[b, :, p:]
        own: dict[str, Any] = {"softcap": softcap, "scale": scale or D**-0.5}
        own["mask"] = None if mask is None else mask[b, max(0, p - (N - Q)) :, p:]
        own["log_weights"] = None if log_weights is None else log_weights[b, :, p:]
        want = naive(q, k, **own).float()
        torch.testing.assert_close(got[b, :, p:], want, atol=1e-5, rtol=1e-4)
        assert not got[b, :, :p].any()
        assert not seen[b, :, : min(p, N - size)].any()
        if p < N - size:
            own["weights"] = None if weights is None else weights.tolist()
            want = naive(q, k, window=(size, kernel_size, pooling), **own).float()
            torch.testing.assert_close(seen[b, :, p:], want, atol=1e-6, rtol=1e-4)


def test_accumulated_equals_the_full_softmax_and_makes_no_square_matrix() -> None:
    Hq, H, N, D, block = 4, 2, 2048, 32, 128
    query, key = random(1, Hq, N, D, seed=5), random(1, H, N, D, seed=6)
    with Outputs() as square:
        logits = query @ key.repeat_interleave(Hq // H, dim=1).mT * D**-0.5
        future = torch.ones(N, N, dtype=torch.bool).triu(1)
        columns = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2)
    mask = ~future[None, None]
    for options in ({}, {"mask": mask}):
        with Outputs() as blockwise:
            got = accumulated_attention(query, key, block=block, **options)
        want = columns.view(1, H, Hq // H, N).mean(2)
        assert float((got - want).abs().max()) < 1e-4
        assert square.numel >= N * N  # the recorder sees what must not be there
        assert blockwise.numel <= Hq * block * N < N * N


def test_padding_may_be_anywhere() -> None:
    # Attention knows no places but order: holes must act as if their tokens were cut out.
    N, window = 24, 6
    valid = torch.ones(1, N, dtype=torch.bool)
    valid[0, [0, 1, 5, 9, 10, 19, 23]] = False  # two of them in the window
    query, key = random(1, 4, N, 8, seed=15), random(1, 2, N, 8, seed=16)
    dirty_query = query.masked_fill(~valid[:, None, :, None], math.nan)
    dirty_key = key.masked_fill(~valid[:, None, :, None], math.nan)
    q, k = query[0][:, valid[0]], key[0][:, valid[0]]

    got = accumulated_attention(dirty_query, dirty_key, valid=valid, block=8)
    want = naive(q, k, scale=8**-0.5).float()
    torch.testing.assert_close(got[0][:, valid[0]], want, atol=1e-5, rtol=1e-5)
    assert not got[0][:, ~valid[0]].any()

    got = window_attention(
        dirty_query, dirty_key, window=window, kernel_size=1, pooling=None, valid=valid
    )
    front = valid[0, :-window]
    want = naive(q, k, window=(window - 2, 1, None), scale=8**-0.5).float()
    torch.testing.assert_close(got[0][:, front], want, atol=1e-6, rtol=1e-5)
    assert not got[0][:, ~front].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_similarity_equals_the_loop_over_real_tokens(dtype: torch.dtype) -> None:
    before, after = random(3, 6, 8, seed=1, dtype=dtype), random(3, 6, 8, seed=2, dtype=dtype)
    padding = (0, 2, 6)
    valid = left_padded(6, padding)
    dirty = after.masked_fill(~valid[..., None], math.nan)
    got = residual_similarity(before, dirty, valid)
    assert got.dtype == torch.float32
    for b, pad in enumerate(padding):
        cosines: list[float] = []
        for j in range(pad, 6):
            x, y = before[b, j].double(), after[b, j].double()
            cosines.append(float(x @ y / (x.norm() * y.norm())))
        want = sum(cosines) / len(cosines) if cosines else 0.0
        assert float(got[b]) == pytest.approx(want, abs=1e-6)


QUERY, KEY = random(2, 4, 20, 8), random(2, 2, 20, 8)
BOTH: dict[str, Any] = {"query": QUERY, "key": KEY}
MASK = torch.ones(2, 1, 20, 20).bool()
MASKS = (MASK[..., 1:], MASK[:, :, 1:], MASK.expand(2, 4, -1, -1), MASK[:, 0], MASK.int())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": random(2, 3, 20, 8)}, r"multiple .*\(2, 4, 20, 8\).*\(2, 3, 20, 8\)"),
        ({"key": random(2, 2, 20, 16)}, r"head_dim.*\(2, 4, 20, 8\).*\(2, 2, 20, 16\)"),
        ({"key": KEY[:1]}, r"batch.*\(2, 4, 20, 8\).*\(1, 2, 20, 8\)"),
        ({"query": QUERY[0]}, r"\[B, Hq, N, D\].*\(4, 20, 8\)"),
        ({"valid": torch.ones(2, 19).bool()}, r"\(2, 20\), got torch\.\w+ \(2, "),
        *(({"mask": x}, r"mask .*\(2, 1, 20, 20\), got torch\.\w+ \(2, ") for x in MASKS),
        *(({"softcap": x}, f"softcap .*got {x}") for x in (0.0, -1.0, math.nan)),
        ({"window": 20}, "20 tokens.* window of 20"),
        ({"window": 0}, "window .*got 0"),
        ({"kernel_size": 4}, "odd number, got 4"),
        ({"pooling": "mean"}, "pooling .*'mean'"),
        ({"weights": torch.ones(3)}, r"\(4,\), got \(3,\)"),
        ({"weights": torch.tensor([1.0, -1, 1, 1])}, "not negative.*-1"),
        ({"weights": torch.zeros(4)}, "not all 0"),
        ({"weights": torch.tensor([1.0, math.nan, 1, 1])}, "finite.*nan"),
        ({"query": QUERY[:, :, -3:]}, r"window = 4 .*\(2, 4, 3, 8\)"),
        ({"block": 0}, r"block .*got 0"),
        ({"key": KEY[:, :, :10], "block": 9}, r"\(2, 4, 20, 8\) and \(2, 2, 10, 8\)"),
    ],
)
def test_invalid_arguments_raise(changed: dict[str, Any], message: str) -> None:
    windows = {*WINDOW, "weights"} & set(changed)
    if "block" not in changed:
        with pytest.raises(ValueError, match=message):
            window_attention(**BOTH | WINDOW | changed)
    if not windows and "window" not in message:
        with pytest.raises(ValueError, match=message):
            accumulated_attention(**BOTH | changed)


def test_recency_checks_its_shape() -> None:
    with pytest.raises(ValueError, match=r"\[B, N\].*float32 \(2, 4\)"):
        recency(torch.ones(2, 4))
