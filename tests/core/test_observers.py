"""Observer scores against loops that read like their definition, row by row without padding."""

import math

import pytest
import torch
from torch import Tensor

from helpers.marks import cases
from helpers.models import left_padded
from mmkv import tensors as tiling
from mmkv.scores.observers import observer_scores, output_root

LAYOUTS = [(4, 4), (6, 2), (3, 1)]  # (Hq, H)
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # More than the usual spread, so that attention is far from uniform.
    return (1.5 * torch.randn(*shape, generator=generator)).to(dtype)


def root_of(weight: Tensor, heads: int) -> Tensor:
    return output_root(weight.unflatten(1, (heads, -1)).transpose(0, 1))[None]


def naive(query, key, value, weight, *, run, scale, softcap=None, log_weights=None, stride=1):
    """One row without padding: query [Hq, Q, D], key, value [H, N, D], weight [hidden, Hq * Dv].

    Every `stride`-th query of a run observes; with fewer queries than keys the last `run` of them,
    every `stride`-th counted from the end.
    """
    (Hq, Q, _), (H, N) = query.shape, key.shape[:2]
    Dv = value.shape[-1]
    runs = math.ceil(N / run)
    scores = torch.zeros(H, N, dtype=torch.float64)
    for r in range(runs):
        tokens = range(r * N // runs, (r + 1) * N // runs)
        for g in range(Hq):
            h = g // (Hq // H)
            W = torch.eye(Dv) if weight is None else weight[:, g * Dv : (g + 1) * Dv]
            k, v = (x[h, tokens].double() for x in (key, value))
            behind = range(Q - 1, max(0, Q - run) - 1, -stride)
            for i in tokens[::stride] if Q == N else behind:
                logits = scale * (k @ query[g, i].double())
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if log_weights is not None:
                    logits = logits + log_weights[h, tokens]
                o = logits.softmax(0) @ v
                for at, j in enumerate(tokens):
                    others = [n for n in range(len(tokens)) if n != at]
                    without = logits[others].softmax(0) @ v[others] if others else o
                    lost = (W.double() @ (o - without)).norm()
                    scores[h, j] = max(float(scores[h, j]), float(lost))
    return scores


@pytest.mark.parametrize("stride", [1, 3])
@cases("layout", LAYOUTS, (6, 2))
@cases("dtype", DTYPES, torch.float32)
def test_scores_of_padded_rows_equal_the_loop(layout, dtype, stride):
    (Hq, H), B, N, D, Dv, padding = layout, 3, 26, 8, 6, (0, 5, 17)
    query, key = random(B, Hq, N, D, seed=1, dtype=dtype), random(B, H, N, D, seed=2, dtype=dtype)
    value, weight = random(B, H, N, Dv, seed=3, dtype=dtype), random(10, Hq * Dv, seed=4)
    got = observer_scores(
        query,
        key,
        value,
        root=root_of(weight, Hq),
        run=8,
        stride=stride,
        valid=left_padded(N, padding),
    )
    assert got.dtype == torch.float32
    for b, pad in enumerate(padding):
        rows = [x[b, :, pad:] for x in (query, key, value)]
        want = naive(*rows, weight, run=8, stride=stride, scale=D**-0.5).float()
        torch.testing.assert_close(got[b, :, pad:], want, rtol=2e-4, atol=1e-4)
        assert not got[b, :, :pad].any()


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("padding", [0, 3])
def test_earlier_tokens_are_observed_by_last_queries(padding: int, stride: int) -> None:
    old, new, run = 21, 13, 8
    key, value = (random(1, 2, padding + old + new, 8, seed=seed) for seed in (1, 2))
    query, log_weights = random(1, 4, new, 8, seed=3), random(1, 2, padding + old + new, seed=4)
    valid = left_padded(padding + old + new, (padding,))
    options = {"run": run, "stride": stride, "scale": 8**-0.5}
    got = observer_scores(query, key, value, valid=valid, log_weights=log_weights, **options)
    k, v, w = (x[0, :, padding:] for x in (key, value, log_weights))
    before = naive(query[0], k[:, :old], v[:, :old], None, log_weights=w[:, :old], **options)
    after = naive(query[0], k[:, old:], v[:, old:], None, log_weights=w[:, old:], **options)
    want = torch.cat([before, after], dim=1).float()
    torch.testing.assert_close(got[0, :, padding:], want, rtol=2e-4, atol=1e-4)


@cases("whole, spread", [(4, [0, 11]), (3, [0]), (1, []), (2, [0])], (4, [0, 11]), (1, []))
def test_whole_queries_observe_the_whole_prompt(whole: int, spread: list[int], monkeypatch) -> None:
    """Half of them the last ones, others evenly before; scaled by head, the larger counts."""
    monkeypatch.setattr(tiling, "_CPU_TILE_PER_THREAD", 3 * 4 * 24 * 2)
    N, padding, run = 24, (0, 2, 17), 8
    query, key, value = (random(3, heads, N, 8, seed=heads) for heads in (4, 2, 2))
    log_weights, valid = random(3, 2, N, seed=5), left_padded(N, padding)
    options = {"run": run, "scale": 0.7, "softcap": 4.0}
    more = {"valid": valid, "log_weights": log_weights}
    got = observer_scores(query, key, value, whole=whole, **more, **options)
    for b, pad in enumerate(padding):
        q, k, v, w = (x[b, :, pad:] for x in (query, key, value, log_weights))
        n, last = N - pad, -(-whole // 2)
        alone = options | {"run": n, "stride": n}
        near = naive(q, k, v, None, log_weights=w, **options)
        places = [n - 1 - i for i in range(last)]
        others = whole - last
        places += [j * (n - last) // others for j in range(others)]
        if b == 0:
            assert places[last:] == spread
        observers = [q[:, [i]].expand(-1, n, -1) for i in places]
        far = [naive(x, k, v, None, log_weights=w, **alone) for x in observers]
        far = torch.stack(far).amax(0)
        want = torch.maximum(near, far * near.sum(-1, keepdim=True) / far.sum(-1, keepdim=True))
        want = (want if n > run else near).float()
        torch.testing.assert_close(got[b, :, pad:], want, rtol=3e-4, atol=1e-4)
        assert not got[b, :, :pad].any()


def test_padding_may_hold_any_values() -> None:
    N = 40
    valid = torch.ones(2, N, dtype=torch.bool)
    valid[0, [0, 1, 9, 10, 33, 39]] = False
    valid[1] = False
    query, key, value = (random(2, heads, N, 8, seed=heads + 9) for heads in (4, 2, 2))
    dirty = [
        x.masked_fill(~valid[:, None, :, None], garbage)
        for x, garbage in ((query, math.nan), (key, math.inf), (value, math.nan))
    ]
    got = observer_scores(dirty[0], dirty[1], dirty[2], run=8, valid=valid)
    alone = [x[:1, :, valid[0]] for x in (query, key, value)]
    want = observer_scores(alone[0], alone[1], alone[2], run=8)
    torch.testing.assert_close(got[:1, :, valid[0]], want)
    assert not got[0, :, ~valid[0]].any()
    assert not got[1].any()


def test_single_token_and_equal_values_score_0() -> None:
    query, key, value = (random(1, 2, 9, 4, seed=seed) for seed in (1, 2, 3))
    assert not observer_scores(query, key, value, run=1).any()
    same = value[:, :, :1].expand(-1, -1, 9, -1)
    assert float(observer_scores(query, key, same, run=4).max()) < 1e-5


@pytest.mark.parametrize("logit", [3.0, 8.0, 15.0, 60.0])
def test_token_with_nearly_all_attention_keeps_precision(logit: float) -> None:
    query = torch.ones(1, 1, 6, 2)
    key, value = random(1, 1, 6, 2, seed=1), random(1, 1, 6, 3, seed=2)
    key[0, 0, 4] = logit
    got = observer_scores(query, key, value, scale=0.5)
    want = naive(query[0], key[0], value[0], None, run=128, scale=0.5).float()
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)
