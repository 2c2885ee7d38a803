"""Expected attention against a loop over heads, with rotations as matrices."""

import math

import pytest
import torch
from torch import Tensor

from helpers.models import random
from mmkv.layer_inputs import LayerInputs, Rotary, rotate
from mmkv.policies.expected import ExpectedAttention

B, H, G, N, D, R = 3, 2, 3, 22, 8, 6  # the last two dimensions of a head are not turned
PADDING = (0, 5, 19)  # the last row has fewer tokens than are skipped
FREQUENCIES = torch.tensor([0.9, 0.31, 0.07])


def rotary_of(places: Tensor) -> Rotary:
    angle = places[..., None].float() * FREQUENCIES.repeat(2)
    return Rotary(angle.cos(), angle.sin(), FREQUENCIES)


def rotation(place: float) -> Tensor:
    """The matrix that turns i together with i + R / 2."""
    found = torch.eye(D, dtype=torch.float64)
    for i, f in enumerate(FREQUENCIES.tolist()):
        j, c, s = i + R // 2, math.cos(place * f), math.sin(place * f)
        found[i, i], found[i, j], found[j, i], found[j, j] = c, -s, s, c
    return found


def naive(query, key, value, ahead, *, skip, epsilon, scale, log_weights) -> Tensor:
    """`[H, N]` of one row without padding; `query` before rotary embedding, of the last tokens."""
    Q, n = query.shape[1], key.shape[1]
    turned = sum(rotation(p) for p in ahead) / len(ahead)
    result = torch.zeros(H, n)
    for h in range(H):
        paid = [0.0] * n
        for g in range(h * G, (h + 1) * G):
            asked = [query[g, i].double() for i in range(Q) if n - Q + i >= skip]
            mean = sum(asked) / len(asked)
            spread = sum(torch.outer(q - mean, q - mean) for q in asked) / len(asked)
            logits = []
            for j in range(skip, n):
                k = key[h, j].double()
                exponent = scale * k @ turned @ mean
                exponent += scale**2 * k @ turned @ spread @ turned.T @ k / 2
                logits.append(float(exponent + log_weights[h, j]))
            total = sum(math.exp(x) for x in logits)
            for j, x in enumerate(logits, skip):
                paid[j] += math.exp(x) / total / G
        for j in range(skip, n):
            result[h, j] = (paid[j] + epsilon) * float(value[h, j].norm())
        result[h, :skip] = result[h].max()
    return result


@pytest.mark.parametrize("Q", [N, 7])
def test_expected_attention_equals_the_loop_on_each_row_alone(Q: int):
    """A prompt, and a later turn, of which only the new tokens have queries."""
    skip, epsilon, scale, positions = 4, 0.05, 0.6, 5
    valid = torch.stack([torch.arange(N) >= p for p in PADDING])
    places = (valid.cumsum(-1) - 1).clamp(min=0)
    plain, key = random(B, H * G, Q, D) + 0.3, random(B, H, N, D, seed=1)
    value, log_weights = random(B, H, N, 5, seed=2), random(B, H, N, seed=3).abs()
    rotary = rotary_of(places[:, -Q:])
    absent = ~valid[:, None, :, None]
    layer = LayerInputs(
        query=rotate(plain, rotary.cos, rotary.sin).masked_fill(absent[:, :, -Q:], math.nan),
        key=key.masked_fill(absent, math.nan),
        value=value.masked_fill(absent, math.nan),
        valid=valid,
        scale=scale,
        log_weights=log_weights,
        rotary=rotary,
    )
    score = ExpectedAttention(positions=positions, skip=skip, epsilon=epsilon)
    found = score(layer)
    assert found.dtype == torch.float32
    for b, p in enumerate(PADDING):
        assert not found[b, :, :p].any()
        last = N - p - 1
        if last < skip:
            assert found[b].isfinite().all()
            continue
        alone = naive(
            plain[b][:, max(0, p - (N - Q)) :],
            key[b, :, p:],
            value[b, :, p:],
            [last + 1 + i for i in range(positions)],
            skip=skip,
            epsilon=epsilon,
            scale=scale,
            log_weights=log_weights[b, :, p:],
        )
        torch.testing.assert_close(found[b, :, p:], alone, atol=1e-5, rtol=1e-4)
    held = valid[:, None].expand(-1, H, -1)
    apart = score(layer.heads_as_rows(held, ~held))
    torch.testing.assert_close(apart.view(B, H, N), found)
