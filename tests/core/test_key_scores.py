"""Scores by keys and values against loops over heads and tokens, row by row without padding."""

import math

import pytest
import torch
from torch import Tensor

import mmkv
from helpers.models import left_padded, random
from mmkv.layer_inputs import LayerInputs
from mmkv.policies.keydiff import KeyDifference
from mmkv.policies.lagkv import LagRelative
from mmkv.policies.random import Noise

PADDING = (0, 5, 11)  # padding tokens left of each row


def spoiled(x: Tensor, valid: Tensor) -> Tensor:
    """With padding that holds no numbers."""
    return x.masked_fill(~valid[:, None, :, None], math.nan)


def inputs_of(key: Tensor, valid: Tensor | None = None, value: Tensor | None = None, **more):
    valid = torch.ones(len(key), key.shape[2]).bool() if valid is None else valid
    value = key if value is None else value
    return LayerInputs(query=key, key=key, value=value, valid=valid, **more)


def test_overflowed_key_keeps_order_of_others():
    key = random(1, 1, 9, 4)
    key[0, 0, 3] = math.inf
    rest = KeyDifference()(inputs_of(key))[0, 0, torch.arange(9) != 3]
    assert rest.isfinite().all()
    others = KeyDifference()(inputs_of(key[:, :, torch.arange(9) != 3]))[0, 0]
    assert rest.argsort().tolist() == others.argsort().tolist()


def naive_lag_relative(key: Tensor, value: Tensor, lag: int, skip: int) -> Tensor:
    """`[H, N]` of one row, block after block."""
    H, N = key.shape[:2]
    result = torch.zeros(H, N)
    for h in range(H):
        for j in range(N):
            result[h, j] = 2 if j < skip else 1 + (j + 1) / N
        start = skip
        while start + 2 * lag <= N:
            mean = [0.0] * lag
            for x in (key[h].double(), value[h].double()):
                mine, ref = x[start : start + lag], x[start + lag : start + 2 * lag]
                exponents = []
                for token in mine:
                    scaled = []
                    for c in range(x.shape[1]):
                        low, high = float(ref[:, c].min()), float(ref[:, c].max())
                        scaled.append((float(token[c]) - low) / (high - low) if high > low else 0)
                    middle = sum(scaled) / len(scaled)
                    squares = sum((s - middle) ** 2 for s in scaled)
                    exponents.append(math.exp(math.sqrt(squares / (len(scaled) - 1))))
                mean = [m + e / sum(exponents) / 2 for m, e in zip(mean, exponents, strict=True)]
            for j in range(lag):
                result[h, start + j] = sum(m < mean[j] for m in mean) / lag
            start += lag
    return result


@pytest.mark.parametrize(
    ("N", "lag", "skip"), [(40, 6, 4), (27, 4, 0), (23, 5, 2), (16, 6, 4), (3, 2, 9), (24, 6, 1)]
)
def test_lag_relative_equals_the_loop_on_each_row_alone(N: int, lag: int, skip: int):
    """Rows of a batch have blocks, and as many of them, as they have alone."""
    key, value = random(3, 2, N, 6), random(3, 2, N, 4, seed=1)
    key[..., 3] = 0.5  # a channel that never differs has no scale
    valid = torch.stack([torch.arange(N) >= min(p, N - 1) for p in PADDING])
    layer = inputs_of(spoiled(key, valid), valid, spoiled(value, valid))
    found = LagRelative(lag=lag, skip=skip)(layer)
    assert found.dtype == torch.float32
    for b, pad in enumerate(PADDING):
        p = min(pad, N - 1)
        alone = naive_lag_relative(key[b, :, p:], value[b, :, p:], lag, skip)
        torch.testing.assert_close(found[b, :, p:], alone)
        assert not found[b, :, :p].any()


def test_noise_of_row_equals_row_alone():
    score, valid = Noise(seed=3), left_padded(40, PADDING)
    layer = inputs_of(torch.zeros(3, 4, 40, 1), valid, layer_idx=2)
    before = torch.random.get_rng_state()
    found = score(layer)
    for b, p in enumerate(PADDING):
        alone = score(inputs_of(torch.zeros(1, 4, 40 - p, 1), layer_idx=2))
        assert torch.equal(found[b, :, p:], alone[0])
        assert not found[b, :, :p].any()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_noise_is_uniform_and_depends_on_seed_layer_and_head():
    key = torch.zeros(1, 2, 4096, 1)
    drawn = [
        Noise(seed=seed)(inputs_of(key, layer_idx=layer))[0, h]
        for seed in (0, 1)
        for layer in (0, 1)
        for h in (0, 1)
    ]
    drawn.append(Noise()(inputs_of(key[:, :, :4095]))[0, 0])  # another length
    for x in drawn:
        assert ((x > 0) & (x < 1)).all()
        # Each of 16 bins has 256 +- 16 entries.
        assert (torch.histc(x, 16, 0, 1) - 256).abs().max() < 80
        lag = torch.corrcoef(torch.stack([x[1:], x[:-1]]))[0, 1]
        assert abs(float(lag)) < 0.08
    drawn = torch.stack([x[:4095] for x in drawn])
    apart = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert apart.abs().max() < 0.08


@pytest.mark.parametrize("policy", ["knorm", "random", "keydiff", "lagkv"])
def test_heads_as_rows_score_as_heads(policy):
    """In a later turn: a row for each head."""
    key, query = random(2, 3, 12, 8), random(2, 6, 12, 8, seed=1)
    valid = torch.arange(12) >= torch.tensor([0, 4])[:, None]
    layer = LayerInputs(query=query, key=key, value=key, valid=valid, layer_idx=1)
    options = {"lag": 3, "skip": 1} if policy == "lagkv" else {}
    score = mmkv.get_policy(policy, **options).score
    held = valid[:, None].expand(-1, 3, -1)
    apart = score(layer.heads_as_rows(held, ~held))
    torch.testing.assert_close(apart.view(2, 3, 12), score(layer))
