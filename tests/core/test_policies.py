"""What each policy keeps, against loops that read like the papers.

The oracles show that what `kept` says is what attention sees; here, that it is the right set.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mmkv
from helpers.masking import masked_logits
from helpers.models import make_inputs, make_model
from helpers.oracle import generate, top

N, L, H, G = 80, 3, 2, 2


@pytest.fixture(scope="module")
def eager():
    """With a scale of its own in each layer, as Gemma's differ from `D ** -0.5`."""
    model = make_model("llama", "eager")
    for layer, scale in zip(model.model.layers, (0.5, 0.1, 0.9), strict=True):
        layer.self_attn.scaling = scale
    return model


@pytest.fixture(scope="module")
def prompt():
    return make_inputs("llama", (N,))


@pytest.fixture(scope="module")
def attention(eager, prompt):
    """Softmax attention of every layer, [L][Hq, N, N]."""
    with torch.no_grad():
        out = eager(**prompt, output_attentions=True, use_cache=False)
    return [a[0].double() for a in out.attentions]


def kept_after_prefill(model, prompt, policy, budget, **options):
    with mmkv.wrapped(model, policy, budget, **options), torch.no_grad():
        cache = model(**prompt, use_cache=True).past_key_values
    return [[set(head[head >= 0].tolist()) for head in cache.kept(layer)[0]] for layer in range(L)]


def layer_scores(a):
    per_head = [accumulated_scores(a, h) for h in range(H)]
    return [sum(x) / H for x in zip(*per_head, strict=True)]


def accumulated_scores(a, h):
    return [
        sum(a[h * G + g, q, j].item() for g in range(G) for q in range(j, N)) / G for j in range(N)
    ]


def test_prefixkv_keeps_equal_shares_of_importance(eager, prompt, attention):
    """Sizes from the smallest common retention; in each layer the same tokens for all heads."""
    kept = kept_after_prefill(eager, prompt, "prefixkv", 0.4)
    total, shares = round(0.4 * L * N), []
    for layer in range(L):
        assert kept[layer][0] == kept[layer][1]
        scores = layer_scores(attention[layer])
        assert kept[layer][0] == top(scores, len(kept[layer][0]))
        ordered = sorted(scores, reverse=True)
        n = len(kept[layer][0])
        shares.append([sum(ordered[:n]) / sum(ordered), ordered[n] / sum(ordered)])
    assert sum(len(layer[0]) for layer in kept) == total
    # No token can be moved to the worst layer from another one without making that one worst.
    worst = min(share for share, _ in shares)
    for layer, (share, _) in enumerate(shares):
        if share > worst:
            ordered = sorted(layer_scores(attention[layer]), reverse=True)
            n = len(kept[layer][0])
            assert sum(ordered[: n - 1]) / sum(ordered) <= worst + 1e-6


@pytest.mark.parametrize(("policy", "sinks"), [("local", 0), ("streaming", 4)])
def test_decoding_drops_the_oldest(eager, prompt, policy, sinks):
    with mmkv.wrapped(eager, policy, 20):
        *_, held = generate(eager, prompt, new=60)
    for t, step in enumerate(held):
        for layer in step:
            wanted = [*range(sinks), *range(N + t - 20 + sinks, N + t)]
            assert all(head.tolist() == wanted for head in layer[0])


def test_h2o_decoding_drops_the_lightest(eager, prompt):
    """Accumulated over prompt and steps, as the masked full cache attends."""
    new, n = 40, 20
    with mmkv.wrapped(eager, "h2o", n):
        _, tokens, _, held = generate(eager, prompt, new=new)
    weights: list[list[torch.Tensor]] = []
    masked_logits(eager, prompt, tokens, held, record=weights)
    with torch.no_grad():
        first = eager(**prompt, output_attentions=True, use_cache=False).attentions
    for layer in range(L):
        for h in range(H):
            group = slice(h * G, (h + 1) * G)
            mass = first[layer][0, group].sum(1).mean(0).tolist()
            alive = set(held[0][layer][0, h].tolist())
            for t in range(new - 1):
                alive.add(N + t)
                mass.append(0.0)
                for j, w in enumerate(weights[t][layer][0, group, 0].mean(0).tolist()):
                    mass[j] += w
                recent = range(N + t - n // 2 + 1, N + t + 1)
                victim = min((j for j in alive if j not in recent), key=lambda j: mass[j])
                alive.remove(victim)
                assert set(held[t + 1][layer][0, h].tolist()) == alive


@pytest.mark.parametrize("window", [1, 6])
def test_tova_drops_what_the_newest_query_attends_to_least(eager, prompt, window):
    """... over all heads of a layer, in the prompt's eviction and in every step."""
    new, n = 30, 20
    with mmkv.wrapped(eager, "tova", n, window=window):
        _, tokens, _, held = generate(eager, prompt, new=new)
    weights: list[list[torch.Tensor]] = []
    masked_logits(eager, prompt, tokens, held, record=weights)
    with torch.no_grad():
        first = eager(**prompt, output_attentions=True, use_cache=False).attentions
    for layer in range(L):
        paid = first[layer][0].mean(0)[-window:].mean(0)
        paid[-window:] = torch.inf
        alive = set(paid.topk(n).indices.tolist())
        assert set(held[0][layer][0, 0].tolist()) == alive
        for t in range(new - 1):
            seen = weights[t][layer][0, :, 0].mean(0)
            found = set(held[t + 1][layer][0, 0].tolist())
            (victim,) = alive - found  # a token that attends to all alike leaves the choice open
            assert seen[victim].item() == pytest.approx(min(seen[list(alive)]).item(), abs=1e-7)
            alive = alive - {victim} | {N + t}
            for h in range(H):
                assert set(held[t + 1][layer][0, h].tolist()) == alive


@pytest.mark.parametrize("length", [19, 20, 21])
@pytest.mark.parametrize("policy", ["h2o", "local", "snapkv"])
def test_an_int_budget_is_met_to_the_token(eager, policy, length):
    """A prompt of one token more than the budget loses the one that weighs least, and no more."""
    short = make_inputs("llama", (length,))
    options = {"window": 4, "pooling": None} if policy == "snapkv" else {}
    with torch.no_grad():
        attentions = eager(**short, output_attentions=True, use_cache=False).attentions
    with mmkv.wrapped(eager, policy, 20, **options):
        *_, held = generate(eager, short, new=6)
    for layer, a in enumerate(attentions):
        received = a[0].unflatten(0, (H, G)).mean(1)  # [H, N, N]
        for h in range(H):
            weight, recent = {
                "h2o": (received[h].sum(0), 10),
                "local": (torch.arange(length), 0),
                "snapkv": (received[h, -4:].mean(0), 4),
            }[policy]
            gone = {int(weight[: length - recent].argmin())} if length > 20 else set()
            assert held[0][layer][0, h].tolist() == sorted(set(range(length)) - gone)
        if policy != "snapkv":  # constant from here on
            sizes = [len(step[layer][0, 0]) for step in held]
            assert sizes == [min(length + t, 20) for t in range(6)]


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("window", "wide", "window='wide': expected a whole number"),
        ("window", 8.5, "window=8.5: expected a whole number"),
        ("sinks", True, "sinks=True: expected a whole number"),
        ("recent", "half", "recent='half': expected a number"),
        ("average_heads", 1, "average_heads=1: expected True or False"),
    ],
)
def test_a_value_of_another_type_is_refused(option, value, expected):
    with pytest.raises(ValueError, match=expected):
        mmkv.get_policy("snapkv", **{option: value})
    assert mmkv.get_policy("snapkv", window=np.int64(8), recent=1).score.window == 8
