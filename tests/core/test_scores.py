"""Scores against loops that read like the papers, row by row and without padding."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mmkv
from helpers.memory import LargestOutput
from mmkv.scores import accumulated_attention, recency, window_attention
from mmkv.scores import attention as tiling
from mmkv.sizes.squeeze import residual_similarity

LAYOUTS = [(4, 4), (6, 2), (3, 1)]  # (Hq, H): one head each, grouped, one for all
PADDINGS = [(0, 0, 0), (0, 5, 11)]  # padding tokens left of each row
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WINDOW: dict[str, Any] = {"window": 4, "kernel_size": 5, "pooling": "avg"}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Twice the usual spread, so that attention is far from uniform.
    return (2 * torch.randn(*shape, generator=generator)).to(dtype)


def left_padded(N: int, padding: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.arange(N) >= pad for pad in padding])


def naive_attention(
    query: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention `[Q, N]` of one head's last `Q` tokens, in float64, one query after the other.

    A query sees itself and what is before it, or what `mask` `[Q, N]` says.
    """
    Q, N = len(query), len(key)
    attention = torch.zeros(Q, N, dtype=torch.float64)
    for i in range(Q):
        seen = [j for j in range(N) if (j <= N - Q + i if mask is None else mask[i, j])]
        logits = [scale * float(key[j].double() @ query[i].double()) for j in seen]
        if softcap is not None:
            logits = [softcap * math.tanh(x / softcap) for x in logits]
        total = sum(math.exp(x) for x in logits)
        for j, x in zip(seen, logits, strict=True):
            attention[i, j] = math.exp(x) / total
    return attention


def pool(values: list[float], kernel_size: int, pooling: str | None) -> list[float]:
    if pooling is None:
        return values
    half = kernel_size // 2
    pooled: list[float] = []
    for j in range(len(values)):
        inside = values[max(0, j - half) : j + half + 1]
        pooled.append(sum(inside) / kernel_size if pooling == "avg" else max(inside))
    return pooled


def naive_window(
    query: Tensor,
    key: Tensor,
    window: int,
    kernel_size: int,
    pooling: str | None,
    weights: list[float] | None = None,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """SnapKV for one row without padding: `[H, N - window]`."""
    Hq, (H, N, D) = query.shape[0], key.shape
    weights = weights or [1.0] * window
    result = torch.zeros(H, N - window, dtype=torch.float64)
    for head in range(Hq):
        kv_head = head // (Hq // H)
        attention = naive_attention(query[head], key[kv_head], D**-0.5, softcap, mask)[-window:]
        mean = [
            sum(w * float(attention[i, j]) for i, w in enumerate(weights)) / sum(weights)
            for j in range(N - window)
        ]
        result[kv_head] += torch.tensor(pool(mean, kernel_size, pooling)) / (Hq // H)
    return result


def naive_accumulated(
    query: Tensor,
    key: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """H2O for one row without padding: `[H, N]`."""
    Hq, (H, N, _) = query.shape[0], key.shape
    result = torch.zeros(H, N, dtype=torch.float64)
    for head in range(Hq):
        kv_head = head // (Hq // H)
        attention = naive_attention(query[head], key[kv_head], scale, softcap, mask)
        result[kv_head] += attention.sum(0) / (Hq // H)
    return result


def holes_mask(N: int, seed: int) -> Tensor:
    """Causal with holes, and some tokens ahead; one query sees nothing: `[N, N]`."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(N, N, generator=g) < torch.ones(N, N).tril() * 0.6 + 0.1
    mask[N - 2] = False
    return mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("pooling", "kernel_size"), [("avg", 5), ("max", 7), (None, 1)])
def test_window_equals_the_loop_on_each_row_alone(
    layout: tuple[int, int], padding: tuple[int, ...], pooling: Any, kernel_size: int
) -> None:
    (Hq, H), B, N, D, window = layout, 3, 24, 8, 4
    query, key = random(B, Hq, N, D, seed=1), random(B, H, N, D, seed=2)
    got = window_attention(
        query,
        key,
        window=window,
        kernel_size=kernel_size,
        pooling=pooling,
        valid=left_padded(N, padding),
    )
    assert got.shape == (B, H, N - window)
    assert got.dtype == torch.float32
    for b, pad in enumerate(padding):
        alone = naive_window(query[b, :, pad:], key[b, :, pad:], window, kernel_size, pooling)
        torch.testing.assert_close(got[b, :, pad:], alone.float(), atol=1e-6, rtol=1e-5)
        assert not got[b, :, :pad].any()


def test_window_weights_make_a_weighted_mean() -> None:
    query, key = random(1, 4, 20, 8, seed=7), random(1, 2, 20, 8, seed=8)
    weights = [0.0, 0.5, 2.0, 3.5]
    got = window_attention(
        query, key, window=4, kernel_size=3, pooling="max", weights=torch.tensor(weights)
    )
    want = naive_window(query[0], key[0], 4, 3, "max", weights).float()
    torch.testing.assert_close(got[0], want, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(got[0], naive_window(query[0], key[0], 4, 3, "max").float())


def test_scale_multiplies_the_logits() -> None:
    query, key = random(1, 2, 20, 8, seed=9), random(1, 2, 20, 8, seed=10)
    options: dict[str, Any] = {"window": 4, "kernel_size": 1, "pooling": None}
    torch.testing.assert_close(
        window_attention(query, key, scale=0.7, **options),
        window_attention(query * 0.7 * math.sqrt(8), key, **options),
    )
    got = accumulated_attention(query, key, scale=0.7)
    want = naive_accumulated(query[0], key[0], 0.7).float()
    torch.testing.assert_close(got[0], want, atol=1e-5, rtol=1e-5)


def test_a_row_with_nothing_in_front_of_its_window_scores_nothing() -> None:
    # Alone, a row of 3 tokens is an error with a window of 6; in a batch it must not be.
    N, window = 20, 6
    query, key = random(2, 2, N, 8, seed=11), random(2, 2, N, 8, seed=12)
    got = window_attention(
        query, key, window=window, kernel_size=3, pooling="max", valid=left_padded(N, (17, 12))
    )
    assert got.isfinite().all()
    assert not got[0].any()
    want = naive_window(query[1, :, 12:], key[1, :, 12:], window, 3, "max").float()
    torch.testing.assert_close(got[1, :, 12:], want)


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(2, 14),
    queries=st.integers(1, 14),
    padding=st.lists(st.integers(0, 13), min_size=2, max_size=2),
    layout=st.sampled_from(LAYOUTS),
    block=st.integers(1, 15),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    masked=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_mask_padding_and_chunk_equal_the_loops(
    N: int,
    queries: int,
    padding: list[int],
    layout: tuple[int, int],
    block: int,
    softcap: float | None,
    masked: bool,
    seed: int,
) -> None:
    """Queries of a prompt's last chunk, a window inside it, and masks that may hide anything."""
    (Hq, H), Q, D = layout, min(queries, N), 4
    window = min(Q, N - 1)
    query, key = random(2, Hq, Q, D, seed=seed), random(2, H, N, D, seed=seed + 1)
    mask = torch.stack([holes_mask(N, seed + b)[-Q:] for b in range(2)]) if masked else None
    padding = [min(p, N - Q) for p in padding]
    options: dict[str, Any] = {"softcap": softcap, "valid": left_padded(N, tuple(padding))}
    options["mask"] = None if mask is None else mask[:, None]
    got = accumulated_attention(query, key, block=block, **options)
    seen = window_attention(query, key, window=window, kernel_size=1, pooling=None, **options)
    for b, p in enumerate(padding):
        own: dict[str, Any] = {"softcap": softcap, "mask": None if mask is None else mask[b, :, p:]}
        want = naive_accumulated(query[b], key[b, :, p:], D**-0.5, **own)
        torch.testing.assert_close(got[b, :, p:], want.float(), atol=1e-5, rtol=1e-4)
        if p < N - window:
            want = naive_window(query[b], key[b, :, p:], window, 1, None, **own)
            torch.testing.assert_close(seen[b, :, p:], want.float(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_of_log_m_is_m_copies_of_a_key(softcap: float | None) -> None:
    """Keys of an earlier turn stand for several tokens; their score is that of all of these."""
    old, new, D = 6, 9, 8
    counts = torch.tensor([3, 1, 1, 4, 2, 1])
    key = random(2, 2, old + new, D, seed=1)
    of = torch.cat([torch.arange(old).repeat_interleave(counts), torch.arange(old, old + new)])
    bias = torch.cat([counts.log(), torch.zeros(new)]).expand(2, 2, -1)
    query = random(2, 4, new, D, seed=2)
    options: dict[str, Any] = {"scale": 0.6, "softcap": softcap}

    def added(found: Tensor) -> Tensor:
        sums = torch.zeros(2, 2, old + new)
        return sums.index_add_(2, of[: found.shape[2]], found)

    got = accumulated_attention(query, key, bias=bias, **options)
    want = accumulated_attention(query, key[:, :, of], **options)
    torch.testing.assert_close(got, added(want))
    window: dict[str, Any] = {"window": 4, "kernel_size": 1, "pooling": None, **options}
    got = window_attention(query, key, bias=bias, **window)
    want = window_attention(query, key[:, :, of], **window)
    torch.testing.assert_close(got, added(want)[..., :-4])


def test_queries_that_see_nothing_give_nothing() -> None:
    query, key = random(1, 4, 20, 8, seed=1), random(1, 2, 20, 8, seed=2)
    mask = torch.zeros(1, 1, 20, 20, dtype=torch.bool)
    assert not accumulated_attention(query, key, mask=mask, block=7).any()
    assert not window_attention(query, key, mask=mask, **WINDOW).any()
    # A key that only padding could show counts as hidden.
    mask[..., :5] = True
    valid = torch.arange(20)[None] >= 5
    assert not accumulated_attention(query, key, mask=mask, valid=valid).any()
    assert not window_attention(query, key, mask=mask, valid=valid, **WINDOW).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_touch_scores(dtype: torch.dtype) -> None:
    query, key = random(2, 4, 20, 8, dtype=dtype, seed=1), random(2, 2, 20, 8, dtype=dtype, seed=2)
    options: dict[str, Any] = {"valid": left_padded(20, (0, 5)), "softcap": 5.0}
    for score, more in [(window_attention, WINDOW), (accumulated_attention, {"block": 8})]:
        want = score(query, key, **options, **more)
        with torch.autocast("cpu", torch.bfloat16):
            got = score(query, key, **options, **more)
            assert torch.is_autocast_enabled("cpu")
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_is_float32_whatever_the_input(dtype: torch.dtype) -> None:
    query, key = random(1, 4, 20, 8, seed=3, dtype=dtype), random(1, 2, 20, 8, seed=4, dtype=dtype)
    got = accumulated_attention(query, key, block=8)
    want = naive_accumulated(query[0], key[0], 8**-0.5).float()
    torch.testing.assert_close(got[0], want, atol=1e-5, rtol=1e-5)
    got = window_attention(query, key, window=5, kernel_size=3, pooling="avg")
    want = naive_window(query[0], key[0], 5, 3, "avg").float()
    torch.testing.assert_close(got[0], want, atol=1e-6, rtol=1e-5)


def test_accumulated_equals_the_full_softmax_and_makes_no_square_matrix() -> None:
    Hq, H, N, D, block = 4, 2, 2048, 32, 128
    query, key = random(1, Hq, N, D, seed=5), random(1, H, N, D, seed=6)
    with LargestOutput() as square:
        logits = query @ key.repeat_interleave(Hq // H, dim=1).mT * D**-0.5
        future = torch.ones(N, N, dtype=torch.bool).triu(1)
        columns = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2)
    mask = ~future[None, None]
    for options in ({}, {"mask": mask}):
        with LargestOutput() as blockwise:
            got = accumulated_attention(query, key, block=block, **options)
        want = columns.view(1, H, Hq // H, N).mean(2)
        assert float((got - want).abs().max()) < 1e-4
        assert square.numel >= N * N  # the recorder sees what must not be there
        assert blockwise.numel <= Hq * block * N < N * N


@pytest.mark.parametrize("tile", [1, 2**30])
def test_accumulated_does_not_depend_on_how_many_heads_run_together(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = random(3, 6, 40, 8, seed=7), random(3, 2, 40, 8, seed=8)
    valid = left_padded(40, (0, 9, 40))
    mask = torch.stack([holes_mask(40, b) for b in range(3)])[:, None]
    want = [accumulated_attention(query, key, valid=valid, mask=m, block=16) for m in (None, mask)]
    monkeypatch.setattr(tiling, "_CPU_TILE_PER_THREAD", tile)
    got = [accumulated_attention(query, key, valid=valid, mask=m, block=16) for m in (None, mask)]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_padding_holds_is_never_read(
    garbage: float, masked: bool, softcap: float | None
) -> None:
    N, padding = 20, (0, 6, 20)
    query, key = random(3, 4, N, 8, seed=9), random(3, 2, N, 8, seed=10)
    valid = left_padded(N, padding)
    dirty_query = query.masked_fill(~valid[:, None, :, None], garbage)
    dirty_key = key.masked_fill(~valid[:, None, :, None], garbage)
    mask = torch.ones(3, 1, N, N, dtype=torch.bool) if masked else None
    options: dict[str, Any] = {"valid": valid, "mask": mask, "softcap": softcap}
    for clean, dirty in [
        (
            window_attention(query, key, **options, **WINDOW),
            window_attention(dirty_query, dirty_key, **options, **WINDOW),
        ),
        (
            accumulated_attention(query, key, **options, block=8),
            accumulated_attention(dirty_query, dirty_key, **options, block=8),
        ),
    ]:
        assert dirty.isfinite().all()
        assert not dirty[2].any()  # all of this row is padding
        torch.testing.assert_close(dirty, clean)


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
    want = naive_accumulated(q, k, 8**-0.5).float()
    torch.testing.assert_close(got[0][:, valid[0]], want, atol=1e-5, rtol=1e-5)
    assert not got[0][:, ~valid[0]].any()

    got = window_attention(
        dirty_query, dirty_key, window=window, kernel_size=1, pooling=None, valid=valid
    )
    front = valid[0, :-window]
    want = naive_window(q, k, window - 2, 1, None).float()
    torch.testing.assert_close(got[0][:, front], want, atol=1e-6, rtol=1e-5)
    assert not got[0][:, ~front].any()


def test_inputs_stay_as_they_are_and_may_be_strided() -> None:
    # Models hand over transposed views of [B, N, heads, D].
    query, key = random(2, 20, 4, 8, seed=11), random(2, 20, 2, 8, seed=12)
    valid = left_padded(20, (0, 5))
    before = query.clone(), key.clone(), valid.clone()
    options: dict[str, Any] = {"window": 4, "kernel_size": 5, "pooling": "avg", "valid": valid}
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    torch.testing.assert_close(
        window_attention(q, k, **options),
        window_attention(q.contiguous(), k.contiguous(), **options),
    )
    torch.testing.assert_close(
        accumulated_attention(q, k, valid=valid, block=8),
        accumulated_attention(q.contiguous(), k.contiguous(), valid=valid, block=8),
    )
    for now, then in zip((query, key, valid), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_scores() -> None:
    query, key = random(2, 6, 300, 16, seed=13), random(2, 2, 300, 16, seed=14)
    valid = left_padded(300, (0, 70))
    options: dict[str, Any] = {"window": 8, "kernel_size": 7, "pooling": "max"}
    for name, kwargs in [("window_attention", options), ("accumulated_attention", {"block": 64})]:
        score = getattr(mmkv.scores, name)
        here = score(query, key, valid=valid, **kwargs)
        there = score(query.cuda(), key.cuda(), valid=valid.cuda(), **kwargs)
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)


def test_recency_is_the_place_in_the_prompt() -> None:
    valid = torch.tensor([[True] * 4, [False, False, True, True]])
    got = recency(valid)
    assert got.dtype == torch.float32
    assert got.shape == (2, 1, 4)
    for b in range(2):
        for j in range(4):
            assert float(got[b, 0, j]) == (j if valid[b, j] else 0)


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
    torch.testing.assert_close(residual_similarity(before, after)[0], got[0])


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        ((2, 4, 20, 8), (2, 3, 20, 8), r"multiple .*\(2, 4, 20, 8\).*\(2, 3, 20, 8\)"),
        ((2, 4, 20, 8), (2, 2, 20, 16), r"head_dim.*\(2, 4, 20, 8\).*\(2, 2, 20, 16\)"),
        ((2, 4, 20, 8), (1, 2, 20, 8), r"batch.*\(2, 4, 20, 8\).*\(1, 2, 20, 8\)"),
        ((4, 20, 8), (2, 2, 20, 8), r"\[B, Hq, N, D\].*\(4, 20, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_shown(
    query: tuple[int, ...], key: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        window_attention(random(*query), random(*key), **WINDOW)
    with pytest.raises(ValueError, match=message):
        accumulated_attention(random(*query), random(*key))


@pytest.mark.parametrize("valid", [torch.ones(2, 19).bool(), torch.ones(2, 20)])
def test_validity_must_be_a_bool_per_token(valid: Tensor) -> None:
    query, key = random(2, 4, 20, 8), random(2, 2, 20, 8)
    with pytest.raises(ValueError, match=r"\(2, 20\), got torch\.\w+ \(2, "):
        window_attention(query, key, valid=valid, **WINDOW)
    with pytest.raises(ValueError, match=r"\(2, 20\), got torch\.\w+ \(2, "):
        accumulated_attention(query, key, valid=valid)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 20, 19).bool(),
        torch.ones(2, 1, 19, 20).bool(),
        torch.ones(2, 4, 20, 20).bool(),
        torch.ones(2, 20, 20).bool(),
        torch.ones(2, 1, 20, 20),
    ],
)
def test_a_mask_must_be_a_bool_per_query_and_key(mask: Tensor) -> None:
    query, key = random(2, 4, 20, 8), random(2, 2, 20, 8)
    with pytest.raises(ValueError, match=r"mask .*\(2, 1, 20, 20\), got torch\.\w+ \(2, "):
        window_attention(query, key, mask=mask, **WINDOW)
    with pytest.raises(ValueError, match=r"mask .*\(2, 1, 20, 20\), got torch\.\w+ \(2, "):
        accumulated_attention(query, key, mask=mask)


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan])
def test_a_softcap_must_be_positive(softcap: float) -> None:
    query, key = random(1, 2, 20, 8), random(1, 2, 20, 8)
    with pytest.raises(ValueError, match=f"softcap .*got {softcap}"):
        window_attention(query, key, softcap=softcap, **WINDOW)
    with pytest.raises(ValueError, match=f"softcap .*got {softcap}"):
        accumulated_attention(query, key, softcap=softcap)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 20}, "20 tokens.* window of 20"),
        ({"window": 33}, "20 tokens.* window of 33"),
        ({"window": 0}, "window .*got 0"),
        ({"kernel_size": 4}, "odd number, got 4"),
        ({"kernel_size": -1}, "odd number, got -1"),
        ({"pooling": "mean"}, "pooling .*'mean'"),
        ({"weights": torch.ones(3)}, r"\(4,\), got \(3,\)"),
        ({"weights": torch.tensor([1.0, -1, 1, 1])}, "not negative.*-1"),
        ({"weights": torch.zeros(4)}, "not all 0"),
        ({"weights": torch.tensor([1.0, math.nan, 1, 1])}, "finite.*nan"),
    ],
)
def test_window_options_out_of_range_are_shown(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_attention(random(2, 4, 20, 8), random(2, 2, 20, 8), **(WINDOW | changed))


def test_queries_must_cover_what_the_score_sums_over() -> None:
    query, key = random(1, 2, 20, 8), random(1, 2, 20, 8)
    with pytest.raises(ValueError, match=r"window = 4 .*\(1, 2, 3, 8\)"):
        window_attention(query[:, :, -3:], key, **WINDOW)
    with pytest.raises(ValueError, match=r"\(1, 2, 20, 8\) and \(1, 2, 10, 8\)"):
        accumulated_attention(query, key[:, :, :10])
    with pytest.raises(ValueError, match=r"block .*got 0"):
        accumulated_attention(query, key, block=0)


def test_recency_checks_its_shape() -> None:
    with pytest.raises(ValueError, match=r"\[B, N\].*float32 \(2, 4\)"):
        recency(torch.ones(2, 4))
