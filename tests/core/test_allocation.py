"""Allocators against loops that read like the papers, and against exhaustive search."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.marks import cases
from helpers.sizes import of_row
from mmkv.policies.pyramidinfer import geometric
from mmkv.sizes import adaptive_heads, fit, pooled, prefix, pyramid, squeeze, uniform

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**20)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Importances as attention makes them: a few large entries, many small ones, no ties."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).exp()


def splits(parts: int, total: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways of splitting `total` into `parts` numbers from 0 to `most`."""
    for split in itertools.product(range(most + 1), repeat=parts):
        if sum(split) == total:
            yield split


def naive_retention(layer: list[float], size: int) -> float:
    return sum(sorted(layer, reverse=True)[:size]) / sum(layer)


def retention(layers: list[list[float]], sizes: Any) -> list[float]:
    return [naive_retention(layer, size) for layer, size in zip(layers, sizes, strict=True)]


def naive_prefix(importance: list[list[float]], total: int) -> list[int]:
    """PrefixKV's binary search for one `p`, then the rest where retention is lowest."""

    def sizes(p: float) -> list[int]:
        return [
            next(o for o in range(len(layer) + 1) if naive_retention(layer, o) >= p - 1e-15)
            for layer in importance
        ]

    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(sizes(p)) <= total else (low, p)
    result = sizes(low)
    while sum(result) < total:
        open_layers = [i for i, layer in enumerate(importance) if result[i] < len(layer)]
        lowest = min(open_layers, key=lambda i: naive_retention(importance[i], result[i]))
        result[lowest] += 1
    return result


def naive_pooled(importance: list[list[float]], total: int) -> list[int]:
    """XKV's algorithm 1: one token at a time, to the layer whose next entry adds most."""
    shares = [sorted((w / sum(layer) for w in layer), reverse=True) for layer in importance]
    sizes = [0] * len(shares)
    for _ in range(total):
        open_layers = [i for i, layer in enumerate(shares) if sizes[i] < len(layer)]
        best = max(open_layers, key=lambda i: shares[i][sizes[i]])
        sizes[best] += 1
    return sizes


def naive_adaptive_heads(scores: list[list[float]], per_head: int, alpha: float) -> list[int]:
    """Ada-KV's algorithm 2 for one row."""
    H = len(scores)
    everything = [(score, h) for h, head in enumerate(scores) for score in head]
    winners = sorted(everything, reverse=True)[: H * per_head]
    reals = [
        (1 - alpha) * sum(winner == h for _, winner in winners) + alpha * per_head for h in range(H)
    ]
    sizes = [math.floor(real + 1e-9) for real in reals]
    while sum(sizes) < H * per_head:
        sizes[max(range(H), key=lambda h: round(reals[h] - sizes[h], 9))] += 1
    return sizes


def highest_of_three_clusters(values: list[float]) -> set[int]:
    """The exact 3-means of scalars: clusters are intervals, so try every pair of cuts."""
    order = sorted(range(len(values)), key=lambda layer: values[layer])

    def spread(group: list[int]) -> float:
        mean = sum(values[layer] for layer in group) / len(group)
        return sum((values[layer] - mean) ** 2 for layer in group)

    cuts = itertools.combinations(range(1, len(values)), 2)
    _, high = min(
        cuts,
        key=lambda cut: (
            spread(order[: cut[0]]) + spread(order[cut[0] : cut[1]]) + spread(order[cut[1] :])
        ),
    )
    return set(order[high:])


# fit


@quick
@given(
    st.lists(st.floats(-1, 6).map(lambda wish: round(wish, 2)), min_size=3, max_size=3),
    st.integers(0, 12),
    st.integers(0, 1),
)
def test_fit_is_closest_to_clipped_sizes(wishes: list[float], total: int, floor: int) -> None:
    most = 4
    if not 3 * floor <= total:
        return

    def change(sizes: Any) -> float:
        return sum(
            (size - min(max(wish, floor), most)) ** 2
            for size, wish in zip(sizes, wishes, strict=True)
        )

    best = min(change(split) for split in splits(3, total, most) if min(split) >= floor)
    got = fit(wishes, total, floor=floor, max_size=most)
    assert change(got) == pytest.approx(best, abs=1e-9)


def test_fit_breaks_ties_by_larger_size_then_first_layer() -> None:
    assert fit([2.5, 2.5, 2.5, 2.5], 10, max_size=9) == [3, 3, 2, 2]
    assert fit([0, 0, 1], 4, floor=1, max_size=2) == [1, 1, 2]
    assert fit([math.inf, 1, -math.inf], 11, max_size=10) == [10, 1, 0]


# Formulas over depth


@quick
@given(st.integers(1, 80), st.integers(0, 5000), st.data())
def test_every_formula_spends_its_total_and_never_grows_with_depth(n_layers, max_size, data):
    total = data.draw(st.integers(0, n_layers * max_size))
    beta = data.draw(st.floats(1, 1000))
    decay = data.draw(st.floats(0.01, 1))
    for sizes in (
        uniform(n_layers, total, max_size=max_size),
        pyramid(n_layers, total, beta=beta, max_size=max_size),
        geometric(n_layers, total, decay=decay, max_size=max_size),
    ):
        assert len(sizes) == n_layers
        assert sum(sizes) == total
        assert all(type(size) is int and 0 <= size <= max_size for size in sizes)
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("decay", "max_size"), [(0.95, 10**6), (0.7, 10**6), (0.8, 700), (1, 300)])
def test_geometric_is_a_capped_series_scaled_to_the_total(decay: float, max_size: int) -> None:
    n_layers, total = 16, 16 * 300

    def series(scale: float) -> list[float]:
        return [min(max_size, scale * decay**layer) for layer in range(n_layers)]

    low, high = 0.0, 1e9
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if sum(series(scale)) <= total else (low, scale)
    sizes = geometric(n_layers, total, decay=decay, max_size=max_size)
    for size, wanted in zip(sizes, series(low), strict=True):
        assert abs(size - wanted) < 1


# squeeze


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("p", [0.35, 0.3])
def test_squeeze_cuts_the_cluster_of_the_highest_similarity(seed: int, p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    n_layers, mean = 16, 100
    centres = torch.tensor([0.2, 0.6, 0.9])[torch.randint(3, (n_layers,), generator=generator)]
    similarity = centres + 0.05 * torch.randn(n_layers, generator=generator)
    cut = highest_of_three_clusters(similarity.tolist())
    total = n_layers * mean
    rest = (total - len(cut) * p * mean) / (n_layers - len(cut))
    sizes = squeeze(similarity, total, p=p, max_size=10**6)
    assert sum(sizes) == total
    for layer, size in enumerate(sizes):
        assert abs(size - (p * mean if layer in cut else rest)) < 1
    assert sizes == squeeze(similarity.tolist(), total, p=p, max_size=10**6)


@pytest.mark.parametrize("similarity", [[0.5] * 6, [0.1, 0.9, 0.1, 0.9, 0.9, 0.1], [0.3], [0.1, 1]])
def test_squeeze_is_uniform_without_three_distinct_values(similarity: list[float]) -> None:
    n_layers = len(similarity)
    total = 10 * n_layers + n_layers // 2
    sizes = squeeze(torch.tensor(similarity), total, max_size=50)
    assert sizes == uniform(n_layers, total, max_size=50)


# prefix and pooled


@cases("seed", range(3), 0)
def test_prefix_equals_bisection_and_pooled_equals_the_greedy_loop(seed: int) -> None:
    importance = random(5, 12, seed=seed)
    for total in range(0, 61, 3):
        assert of_row(prefix, importance, total) == naive_prefix(importance.tolist(), total)
        assert of_row(pooled, importance, total) == naive_pooled(importance.tolist(), total)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", [1e-6, 0.3, 0.75, 0.99, 1.0])
def test_pooled_reaches_a_retention_with_the_fewest_tokens(seed: int, target: float) -> None:
    n_layers, n = 3, 5
    importance = random(n_layers, n, seed=seed)
    layers = importance.tolist()
    sizes = of_row(pooled, importance, retention=target)
    assert sum(retention(layers, sizes)) / n_layers >= target - 1e-9
    for split in splits(n_layers, sum(sizes) - 1, n):
        assert sum(retention(layers, split)) / n_layers < target - 1e-9


@pytest.mark.parametrize("n", [7, 10, 49, 60])
def test_pooled_retention_is_not_misled_by_rounding(n: int) -> None:
    # k of n equal entries are k / n, also where their sum in float64 is a little less.
    importance = torch.full((1, n), 0.1)
    for k in range(1, n + 1):
        assert of_row(pooled, importance, retention=k / n) == [k]


DEGENERATE = [
    ("zeros count as uniform", [0, 0, 0, 0], [1, 1, 1, 1]),
    ("nan counts as 0", [3, math.nan, 1, 5], [3, 0, 1, 5]),
    ("only nan counts as uniform", [math.nan] * 4, [1, 1, 1, 1]),
    ("inf counts as the largest", [math.inf, 2, 1, 5], [5, 2, 1, 5]),
    ("inf among zeros", [math.inf, 0, 0, math.inf], [1, 0, 0, 1]),
    ("only inf counts as uniform", [math.inf] * 4, [1, 1, 1, 1]),
    ("sums that overflow", [1.5e308, 1.5e308, 0, 1.5e308], [1, 1, 0, 1]),
    ("sums that underflow", [5e-324, 0, 5e-324, 0], [1, 0, 1, 0]),
]


@pytest.mark.parametrize(
    ("given_layer", "meant_layer"),
    [case[1:] for case in DEGENERATE],
    ids=[case[0] for case in DEGENERATE],
)
def test_degenerate_layers_are_as_documented(given_layer, meant_layer):
    others = [[4.0, 3, 2, 1], [1.0, 9, 1, 0.5]]
    got = torch.tensor([given_layer, *others], dtype=torch.float64)
    meant = torch.tensor([meant_layer, *others], dtype=torch.float64)
    for total in range(13):
        for allocate in (prefix, pooled):
            sizes = of_row(allocate, got, total)
            assert sum(sizes) == total
            assert sizes == of_row(allocate, meant, total)
    found, want = (of_row(pooled, x, retention=0.8) for x in (got, meant))
    assert found == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_importances_of_any_type_are_counted_exactly(dtype: torch.dtype) -> None:
    importance = (10 * random(3, 8)).clamp(max=1000).round().to(dtype)
    before = importance.clone()
    for allocate in (prefix, pooled):
        assert of_row(allocate, importance, 11) == of_row(allocate, importance.double(), 11)
    assert torch.equal(importance, before)


# adaptive_heads


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("H", [1, 3, 8])
def test_adaptive_heads_equals_the_loop_row_by_row(alpha: float, H: int) -> None:
    scores = random(4, H, 20, seed=H)
    for per_head in (0, 1, 7, 20):
        got = adaptive_heads(scores, torch.full((4,), H * per_head), alpha=alpha)
        for b, row in enumerate(scores.tolist()):
            assert got[b].tolist() == naive_adaptive_heads(row, per_head, alpha)


@quick
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 12),
    st.floats(0, 1),
    seeds,
    st.booleans(),
    st.data(),
)
def test_adaptive_heads_spends_each_rows_budget_within_bounds(B, H, N, alpha, seed, ties, data):
    total = data.draw(st.integers(0, H * N))
    scores = random(B, H, N, seed=seed).float()
    if ties:
        scores = scores.clamp(max=2).floor()
    sizes = adaptive_heads(scores, torch.full((B,), total), alpha=alpha)
    assert sizes.dtype == torch.long
    assert sizes.shape == (B, H)
    assert (sizes.sum(-1) == total).all()
    assert (sizes >= 0).all()
    assert (sizes <= N).all()
    # The even share is a promise, up to the rounding.
    assert (sizes >= math.floor(alpha * total / H - 1e-9)).all()


def test_adaptive_heads_takes_nan_as_nothing_and_inf_as_most() -> None:
    scores = torch.tensor([[[math.inf, 1, 1], [math.nan, 2, 2], [3, 3, 0]]])
    # The six largest: inf; 2, 2; 3, 3; and one of the ones.
    assert adaptive_heads(scores, torch.tensor([6]), alpha=0.0).tolist() == [[2, 2, 2]]
    assert adaptive_heads(scores, torch.tensor([3]), alpha=0.0).tolist() == [[1, 0, 2]]


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit([1, 1], 3, floor=2, max_size=9), r"3 tokens .* 4 "),
        (lambda: fit([1, 1], 19, max_size=9), r"19 tokens .* 18 "),
        (lambda: fit([1, math.nan], 2, max_size=9), r"nan"),
        (lambda: fit([], 0, max_size=9), r"at least one layer"),
        (lambda: fit([1], 1, floor=-1, max_size=9), r"floor .*-1"),
        (lambda: pyramid(4, 20, beta=0.5, max_size=10), r"beta .*0\.5"),
        (lambda: geometric(4, 20, decay=1.1, max_size=10), r"decay .*1\.1"),
        (lambda: squeeze([0.1, 0.5, 0.9], 9, p=0, max_size=10), r"p .*got 0"),
        (lambda: squeeze([0.1, math.nan, 0.9], 9, max_size=10), r"nan"),
        (lambda: of_row(prefix, -torch.ones(4, 10), 2), r"negative, got -1"),
        (lambda: of_row(pooled, -torch.ones(4, 10), 2), r"negative, got -1"),
    ],
)
def test_invalid_arguments_raise(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
