"""DefensiveKV's score against loops, and the sets that its two policies keep."""

import math
from dataclasses import replace

import pytest
import torch

import mmkv
from helpers.models import make_inputs, make_model
from helpers.oracle import naive_attention, pool, prefilled, top
from mmkv.layer_inputs import LayerInputs
from mmkv.policies.defensive import DefensiveAttention

HQ, H, G, D, HIDDEN = 4, 2, 2, 8, 12
WINDOW, KERNEL = 4, 5


def random_layer(N: int, padding: tuple[int, ...], sharp: float = 2.0, **more) -> LayerInputs:
    """What padding holds is no number."""
    g, B = torch.Generator().manual_seed(N), len(padding)
    valid = torch.stack([torch.arange(N) >= pad for pad in padding])
    tensors = [torch.randn(B, h, N, D, generator=g) for h in (HQ, H, H)]
    query, key, value = (x.masked_fill(~valid[:, None, :, None], math.nan) for x in tensors)
    weight = torch.randn(HQ, HIDDEN, D, generator=g)
    given = {"query": sharp * query, "key": key, "value": value, "valid": valid}
    return LayerInputs(**given, weight=lambda: weight, **more)


def alone(layer: LayerInputs, b: int) -> list[dict]:
    """Each head of one row without its padding."""
    real, weight = layer.valid[b], layer.weight().detach()
    heads = []
    for h in range(H):
        mine = slice(h * G, (h + 1) * G)
        heads.append(
            {
                "query": layer.query[b, mine][:, real[-layer.query.shape[2] :]].double(),
                "key": layer.key[b, h, real].double(),
                "value": layer.value[b, h, real].double(),
                "weight": weight[mine].double(),
            }
        )
    return heads


def window_attention(head: dict, window: int) -> list[list[list[float]]]:
    """[G][window][N - window]."""
    key, M = head["key"], len(head["key"]) - window
    observing = [query[-window:] for query in head["query"]]
    return [naive_attention(x, key, scale=key.shape[1] ** -0.5)[:, :M].tolist() for x in observing]


def naive(heads: list[dict], window: int, kernel: int, size: int | None, *, apart: bool = False):
    """The score of one row's heads, one token after the other; `apart`: they hold different ones.

    [H][N], 0 for the window.
    """
    norms, means, scores, biases = [], [], [], []
    for head in heads:
        M = len(head["key"]) - window
        attention = window_attention(head, window)
        norms.append(
            [
                sum(float((w @ head["value"][j]).abs().sum()) for w in head["weight"]) / G
                for j in range(M)
            ]
        )
        means.append([sum(row[j] for rows in attention for row in rows) / G / window
                      for j in range(M)])  # fmt: skip
        biases.append(sum(means[-1][max(0, M - window) :]))
        worst = [0.0] * M
        for rows in attention:
            for row in rows:
                near = pool(row, kernel, "avg")
                again = sum(row) / sum(near)
                worst = [max(a, b * again) for a, b in zip(worst, near, strict=True)]
        scores.append([max(s, sum(worst) / M) for s in worst])
    bias = sum(biases) / H
    for h, mine in enumerate(scores):
        for j in range(len(mine)):
            total = sum(x[j] for x in norms) if not apart else sum(sum(x) / len(x) for x in norms)
            mine[j] *= norms[h][j] / total
    best = max(map(max, scores))
    for mine, mean in zip(scores, means, strict=True):
        order, reached, count = sorted(range(len(mine)), key=lambda j: -mean[j]), 0.0, 0
        for j in order:
            reached += mean[j] / sum(mean)
            if reached >= 0.9 - bias:
                break
            count += 1
        if size is not None:
            count = min(count, max(0, size - window))
        for j in order[:count]:
            mine[j] = best
    return [mine + [0.0] * window for mine in scores]


@pytest.mark.parametrize("size", [None, 9, 2])
@pytest.mark.parametrize("sharp", [0.5, 2.0, 8.0])
def test_the_score_is_the_worst_case_by_output_norms(size, sharp, monkeypatch) -> None:
    monkeypatch.setattr("mmkv.scores.values.tile", lambda device: 3 * 2 * H * HIDDEN)
    N, padding = 24, (0, 5, 13)
    layer = random_layer(N, padding, sharp)
    if size is not None:
        layer = replace(layer, size=torch.tensor([float(size)] * 3))
    found = DefensiveAttention(window=WINDOW, kernel_size=KERNEL)(layer)
    for b, pad in enumerate(padding):
        want = torch.tensor(naive(alone(layer, b), WINDOW, KERNEL, size)).float()
        torch.testing.assert_close(found[b, :, pad:], want, atol=1e-5, rtol=1e-4)
        assert not found[b, :, :pad].any()


def test_heads_with_different_tokens_are_rows() -> None:
    """... each with its own padding; of a layer together are its norms, its bias and its best."""
    N, padding = 20, (0, 3)
    layer = random_layer(N, padding, 1.5, size=torch.tensor([30.0, 6.0]))
    valid = layer.valid[:, None].expand(-1, H, -1).clone()
    gone = {(0, 0): [2, 5, 6], (0, 1): [9], (1, 0): [4], (1, 1): []}
    for (b, h), tokens in gone.items():
        valid[b, h, tokens] = False
    image = torch.zeros_like(valid)
    rows = layer.heads_as_rows(valid, image)
    found = DefensiveAttention(window=WINDOW, kernel_size=1)(rows)
    for b in range(2):
        heads = alone(layer, b)
        for h, head in enumerate(heads):
            here = valid[b, h, padding[b] :]
            head["key"], head["value"] = head["key"][here], head["value"][here]
        want = naive(heads, WINDOW, 1, (30, 6)[b], apart=True)
        for h in range(H):
            got = found[b * H + h, 0, valid[b, h]]
            torch.testing.assert_close(got, torch.tensor(want[h]).float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("policy", ["defensive", "layer-defensive"])
def test_the_best_of_the_layer_or_of_the_model_stay(policy) -> None:
    """Of a model's own queries, keys, values and projections."""
    N, L, size = 60, 2, 16
    model, inputs = make_model("llama"), make_inputs("llama", (N,))
    seen: dict[int, LayerInputs] = {}
    chosen = mmkv.get_policy(policy, window=WINDOW)
    score = type(chosen.score)

    class Watched(score):
        def __call__(self, layer):
            seen[layer.layer_idx] = layer
            return super().__call__(layer)

    watched = replace(chosen, score=Watched(**chosen.score.options()))
    cache = prefilled(model, inputs, watched, size)
    assert all(float(x.size) == size for x in seen.values())
    scores = [naive(alone(seen[i], 0), WINDOW, KERNEL, size) for i in range(L)]
    for layers in [range(L)] if policy == "layer-defensive" else [[i] for i in range(L)]:
        heads = [(i, h) for i in layers for h in range(H)]
        ranked = sorted(
            ((round(-s, 7), j, at) for at in heads for j, s in
             enumerate(scores[at[0]][at[1]][: N - WINDOW])),
        )  # fmt: skip
        owners = [at for *_, at in ranked[: len(heads) * (size - WINDOW)]]
        for i, h in heads:
            kept = set(cache.kept(i)[0, h].tolist()) - {-1}
            best = top([round(s, 7) for s in scores[i][h][: N - WINDOW]], owners.count((i, h)))
            assert kept == best | set(range(N - WINDOW, N))
