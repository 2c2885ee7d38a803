"""What values and unlike keys add to attention, against loops over heads, queries and tokens."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mmkv
from helpers.marks import cases
from helpers.models import random
from helpers.oracle import naive_attention, pool
from mmkv.cache.selection import importance
from mmkv.layer_inputs import LayerInputs
from mmkv.scores import accumulated_attention, window_attention
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.scores.values import residuals
from mmkv.scores.window import WindowAttention

B, H, G, N, D, DV, HIDDEN, WINDOW = 3, 2, 3, 18, 8, 5, 7, 4
PADDING = (0, 5, 13)


def inputs(*, Q: int = N, softcap: float | None = None, masked: bool = False) -> LayerInputs:
    """Rows of a left-padded batch; what padding holds is no number."""
    valid = torch.stack([torch.arange(N) >= p for p in PADDING])
    absent = ~valid[:, None, :, None]
    mask = None
    if masked:  # causal with holes, and some tokens ahead
        seen = torch.rand(B, 1, Q, N, generator=torch.Generator().manual_seed(9))
        mask = seen < torch.ones(N, N).tril()[-Q:] * 0.7 + 0.15
        mask[..., -1] = True  # padding, too, sees a token
    return LayerInputs(
        query=(2 * random(B, H * G, Q, D)).masked_fill(absent[:, :, N - Q :], math.nan),
        key=random(B, H, N, D, seed=1).masked_fill(absent, math.nan),
        value=(random(B, H, N, DV, seed=2) + 3).masked_fill(absent, math.nan),
        valid=valid,
        scale=0.5,
        softcap=softcap,
        mask=mask,
        log_weights=random(B, H, N, seed=3).abs(),
        weight=lambda: random(H * G, HIDDEN, DV, seed=4),
    )


def attention_of(layer: LayerInputs, b: int, head: int, i: int) -> dict[int, float]:
    """What query `i` of a row pays to each token that it sees."""
    Q, h = layer.query.shape[2], head // G
    mask = torch.ones(Q, N).tril(N - Q) > 0 if layer.mask is None else layer.mask[b, 0]
    mask = (mask & layer.valid[b])[i : i + 1]
    (paid,) = naive_attention(
        layer.query[b, head, i : i + 1],
        layer.key[b, h],
        scale=0.5,
        softcap=layer.softcap,
        mask=mask,
        log_weights=layer.log_weights[b, h],
    )
    return {j: float(paid[j]) for j in mask[0].nonzero()[:, 0].tolist()}


def read(paid: dict[int, float], value: Tensor) -> Tensor:
    return sum((p * value[j] for j, p in paid.items()), torch.zeros(DV, dtype=torch.float64))


def naive_residuals(layer: LayerInputs, last: int, weights: list[float] | None = None) -> Tensor:
    """`[B, H, G, N]`, by its meaning: attention without the token is shared out anew."""
    Q, result = layer.query.shape[2], torch.zeros(B, H, G, N)
    for b in range(B):
        for head in range(H * G):
            value = layer.value[b, head // G].double()
            for i in range(Q - last, Q):
                if not layer.valid[b, N - Q + i]:
                    continue
                paid = attention_of(layer, b, head, i)
                whole = read(paid, value)
                for j, p in paid.items():
                    rest = {t: x / (1 - p) for t, x in paid.items() if t != j}
                    if not rest:
                        continue
                    lost = float((read(rest, value) - whole).norm()) ** 2
                    # The formula that the paper states.
                    stated = (p / (1 - p)) ** 2 * float((value[j] - whole).norm()) ** 2
                    assert lost == pytest.approx(stated, rel=1e-6)
                    weight = 1 if weights is None else weights[i - (Q - last)]
                    result[b, head // G, head % G, j] += weight * lost
    return result


@cases("softcap", [None, 1.5], 1.5)
@cases("masked", [False, True], True)
@pytest.mark.parametrize(("Q", "last"), [(N, WINDOW), (7, 7)])
def test_residuals_equal_the_loop(Q: int, last: int, masked: bool, softcap: float | None):
    layer = inputs(Q=Q, softcap=softcap, masked=masked)
    found = residuals(layer, last)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, naive_residuals(layer, last), atol=1e-6, rtol=1e-4)


def test_nearly_all_attention_on_one_token_keeps_precision():
    """1 - p is below float32's last digit: what the token gives is as large as its value."""
    query, key = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    query[..., 0], key[0, 0, 1, 0] = 10.0, 4.0
    value = torch.tensor([[1.0], [5.0], [3.0]])[None, None]
    layer = LayerInputs(query=query, key=key, value=value, valid=torch.ones(1, 3).bool(), scale=1.0)
    found = residuals(layer, 1)[0, 0, 0]  # without it, the other two share all attention
    assert float(found[1]) == pytest.approx((5.0 - 2.0) ** 2)
    assert float(found[0]) == pytest.approx((math.exp(-40) * 4) ** 2, rel=1e-3)


def test_values_far_from_zero_keep_precision():
    """Only differences of values count."""
    layer = inputs()
    far = dataclasses.replace(layer, value=layer.value + 1000)
    torch.testing.assert_close(residuals(far, N), residuals(layer, N), atol=1e-3, rtol=1e-2)


def norm_of(layer: LayerInputs, b: int, h: int, j: int, kind: str) -> float:
    """||v||_1, or the mean of ||W_O v||_1 over the group."""
    v = layer.value[b, h, j]
    if kind == "norm":
        return float(v.abs().sum())
    weight = layer.weight()
    return sum(float((weight[h * G + g] @ v).abs().sum()) for g in range(G)) / G


@cases(
    "part, value",
    itertools.product(["window", "accumulated"], ["norm", "output", "residual"]),
    *(("window", "norm"), ("window", "residual"), ("accumulated", "output")),
)
def test_value_option_equals_formula(part: str, value: Any):
    layer = inputs()
    if part == "window":
        options: dict[str, Any] = {"window": WINDOW, "kernel_size": 3, "pooling": "max"}
        score = WindowAttention(value=value, **options)
        attention = window_attention(layer.query, layer.key, **options, **layer.attention)
        n, extra = N - WINDOW, 1e-4
        lost = naive_residuals(layer, WINDOW)
    else:
        score = AccumulatedAttention(value=value)
        attention = accumulated_attention(layer.query, layer.key, **layer.attention)
        n, extra = N, 0.0
        lost = naive_residuals(layer, N)
    found, want = score(layer), torch.zeros(B, H, N)
    for b in range(B):
        for h in range(H):
            for j in range(n):
                if not layer.valid[b, j]:
                    continue
                if value == "norm":
                    want[b, h, j] = attention[b, h, j] * norm_of(layer, b, h, j, value)
                elif value == "output":
                    want[b, h, j] = (attention[b, h, j] + extra) * norm_of(layer, b, h, j, value)
            if value == "residual":
                rows = [lost[b, h, g, :n].tolist() for g in range(G)]
                if part == "window":
                    rows = [pool(row, 3, "max") for row in rows]
                mean = torch.tensor(rows).mean(0)
                want[b, h, :n] = mean.masked_fill(~layer.valid[b, :n], 0.0)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)
    policy = mmkv.Policy(score=dataclasses.replace(score, average_heads=True))
    averaged = importance(policy, layer, [score.window] * B)
    torch.testing.assert_close(averaged, want.mean(1, keepdim=True), atol=1e-5, rtol=1e-4)
    held = layer.valid[:, None].expand(-1, H, -1)
    apart = score(layer.heads_as_rows(held, ~held))  # as in a later turn
    torch.testing.assert_close(apart.view(B, H, N), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [6, 2 * WINDOW + 3, 2 * WINDOW + 8, 60])
def test_critical_fills_half_of_the_budget_by_attention(size: int):
    """The kept set is CriticalKV's: half by attention, the window counted, the rest by outputs."""
    options: dict[str, Any] = {"window": WINDOW, "kernel_size": 3, "pooling": "max"}
    layer = dataclasses.replace(inputs(), size=torch.full((B,), float(size)))
    found = WindowAttention(value="critical", **options)(layer)
    attention = window_attention(layer.query, layer.key, **options, **layer.attention)
    for b in range(B):
        front = [j for j in range(N - WINDOW) if layer.valid[b, j]]
        for h in range(H):
            by_attention = sorted(front, key=lambda j: -float(attention[b, h, j]))
            kept = by_attention[: max(0, size // 2 - WINDOW)]
            rest = [j for j in front if j not in kept]
            rest.sort(
                key=lambda j: -float((attention[b, h, j] + 1e-4) * norm_of(layer, b, h, j, ""))
            )
            kept += rest[: max(0, size - WINDOW - len(kept))]
            best = sorted(front, key=lambda j: -float(found[b, h, j]))[: len(kept)]
            assert set(best) == set(kept)
    whole = dataclasses.replace(layer, size=None)
    plain = WindowAttention(value="output", **options)(whole)
    assert torch.equal(WindowAttention(value="critical", **options)(whole), plain)


def test_scores_of_no_or_one_candidate_are_finite():
    layer = inputs()
    for value in ("output", "residual"):
        found = WindowAttention(window=N - 1, value=value, diversity=True)(layer)
        assert found.isfinite().all()
        assert not found[2].any()
