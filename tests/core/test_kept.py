"""Which tokens are kept, against loops from the papers over the plain model's own tensors.

Of the policies that `test_later_turns` and the tests of their scores do not follow to the end.
"""

import math

import pytest
import torch
from torch import Tensor

import mmkv
from helpers import zoo
from helpers.marks import cases, since
from helpers.masking import held_sets, masked_logits
from helpers.models import IMAGE, make_inputs, scaled_model
from helpers.oracle import depth, generate, prefilled, top, window_scores
from mmkv import adapters
from mmkv.calls import passing
from mmkv.profiles import Profile

N, L, H, G = 80, 2, 2, 2
WINDOW = 6


class Plain:
    """What a model computes of a prompt without mmkv: keys, values, attention."""

    def __init__(self, name: str) -> None:
        self.model, self.inputs = scaled_model(name), make_inputs(name, (N,))
        with torch.no_grad():
            out = self.model(**self.inputs, output_attentions=True, use_cache=True)
        held = out.past_key_values.layers
        self.attention = [a[0].double() for a in out.attentions]  # [Hq, N, N]
        self.keys = [x.keys[0].double() for x in held]  # [H, N, D], rotated
        self.values = [x.values[0].double() for x in held]

    def kept(self, policy: str, budget: float, **options) -> list[list[set[int]]]:
        """By layer and head."""
        cache = prefilled(self.model, self.inputs, policy, budget, **options)
        return [held_sets(cache.kept(i)) for i in range(L)]

    def group(self, layer: int, h: int) -> Tensor:
        """The attention [G, N, N] of a key-value head's queries."""
        return self.attention[layer][h * G : (h + 1) * G]

    def followed(self, policy: str, budget: int, new: int, **options):
        """By step, what is held by layer and head, and the attention [Hq, S] of what was held."""
        with mmkv.wrapped(self.model, policy, budget, **options):
            _, tokens, _, held = generate(self.model, self.inputs, new=new)
        weights: list[list[Tensor]] = []
        masked_logits(self.model, self.inputs, tokens, held, record=weights)
        sets = [[[set(h.tolist()) for h in layer[0]] for layer in step] for step in held]
        return sets, [[a[0, :, 0] for a in step] for step in weights]


@pytest.fixture(scope="module")
def plain():
    return Plain("llama")


HEADS = [(layer, h) for layer in range(L) for h in range(H)]
LAST = set(range(N - WINDOW, N))


def test_knorm_keeps_the_shortest_keys(plain):
    kept = plain.kept("knorm", 20)
    for layer, h in HEADS:
        assert kept[layer][h] == top([-math.hypot(*k) for k in plain.keys[layer][h].tolist()], 20)


def test_keydiff_keeps_the_keys_least_like_their_mean(plain):
    kept = plain.kept("keydiff", 20)
    for layer, h in HEADS:
        unit = [k / k.norm() for k in plain.keys[layer][h]]
        anchor = sum(unit) / N
        assert kept[layer][h] == top([-float(u @ anchor / anchor.norm()) for u in unit], 20)


def test_mixkv_keeps_attended_long_and_dissimilar_tokens(plain):
    kept = plain.kept("mixkv", 24, window=WINDOW)
    for layer, h in HEADS:
        attention = window_scores(plain.group(layer, h), WINDOW, 5, "avg")
        keys = plain.keys[layer][h]
        unit = keys / keys.norm(dim=-1, keepdim=True)
        alike = (unit @ unit.T).triu(1).sum().item() / (N * (N - 1) / 2)

        def scaled(values: list[float], to: list[float] = attention) -> list[float]:
            shifted = [x - min(values) for x in values]
            return [x * sum(to) / sum(shifted) for x in shifted]

        diversity = scaled([-float(u @ unit.mean(0)) for u in unit[:-WINDOW]])
        norms = scaled([float(v.norm()) for v in plain.values[layer][h][:-WINDOW]])
        mixed = [
            alike * d + (1 - alike) * (a + n)
            for d, a, n in zip(diversity, attention, norms, strict=True)
        ]
        assert kept[layer][h] == top(mixed, 24 - WINDOW) | LAST


def test_sparsemm_gives_visual_heads_more_tokens(plain):
    """A head of the budget's mean b keeps rho * b, and its visual score's share of all the rest."""
    visual = ((0.4, 0.15), (0.1, 0.35))
    shape = adapters.shape(plain.model.config)
    profile = Profile(visual=visual, policy="sparsemm", model=shape)
    kept = plain.kept("sparsemm", 26, window=WINDOW, rho=0.1, profile=profile)
    for layer, h in HEADS:
        wanted = 2 + 18 * L * H * visual[layer][h]
        size = len(kept[layer][h]) - WINDOW
        assert abs(size - wanted) < 1
        scores = window_scores(plain.group(layer, h), WINDOW, 7, "max")
        assert kept[layer][h] == top(scores, size) | LAST


def test_vlcache_keeps_tokens_read_by_text_after_picture():
    plain = Plain("llava-llama")
    kept = plain.kept("vlcache", 24)
    last = (plain.inputs["input_ids"][0] == IMAGE).nonzero()[-1].item()
    for layer, h in HEADS:
        size = len(kept[layer][h])
        recent = int(0.1 * size)
        paid = plain.attention[layer][h * G : (h + 1) * G, last + 1 :].sum((0, 1)).tolist()
        best = top(paid[: N - recent], size - recent)
        assert kept[layer][h] == best | set(range(N - recent, N))


@cases("budget", [20, 44, 75], 44)
def test_lookm_adds_the_largest_score_to_those_of_text(budget):
    """As the paper writes it: A[text] += max(A), then the best and the most recent, half each."""
    plain, late, images = Plain("llava-llama"), set(range(N - budget // 2, N)), set[int]()
    text, kept = plain.inputs["input_ids"][0] != IMAGE, plain.kept("lookm", budget)
    for layer, h in HEADS:
        scores = plain.group(layer, h).sum((0, 1))
        scores = (scores + scores.max() * text).tolist()
        heavy = [-1.0 if j in late else s for j, s in enumerate(scores)]
        wanted = top(heavy, budget - len(late)) | late
        assert kept[layer][h] == wanted
        images |= {j for j in wanted - late if not text[j]}
    assert bool(images) == (budget == 75), "the budget does not tell text from images"


def test_h2o_decoding_drops_the_least_attended(plain):
    """Accumulated over prompt and steps, as the masked full cache attends."""
    n = 20
    held, weights = plain.followed("h2o", n, 40)
    for layer, h in HEADS:
        mass = plain.group(layer, h).sum(1).mean(0).tolist()
        alive = held[0][layer][h]
        for t, attention in enumerate(weights):
            alive = alive | {N + t}
            mass.append(0.0)
            for j, w in enumerate(attention[layer][h * G : (h + 1) * G].mean(0).tolist()):
                mass[j] += w
            older = [j for j in alive if j <= N + t - n // 2]
            alive = alive - {min(older, key=mass.__getitem__)}
            assert held[t + 1][layer][h] == alive


@cases("window", [1, 6], 6)
def test_tova_drops_what_the_newest_query_attends_to_least(plain, window):
    """... over all heads of a layer, in the prompt's eviction and in every step."""
    held, weights = plain.followed("tova", 20, 30, window=window)
    for layer in range(L):
        paid = plain.attention[layer].mean(0)[-window:].mean(0)
        paid[-window:] = torch.inf
        alive = set(paid.topk(20).indices.tolist())
        assert held[0][layer] == [alive] * H
        for t, attention in enumerate(weights):
            seen = attention[layer].mean(0)
            # A token that attends to all alike leaves the choice open.
            (victim,) = alive - held[t + 1][layer][0]
            assert seen[victim].item() == pytest.approx(min(seen[list(alive)]).item(), abs=1e-7)
            alive = alive - {victim} | {N + t}
            assert held[t + 1][layer] == [alive] * H


@pytest.mark.parametrize("last", [1, 3, WINDOW])
def test_queries_of_earlier_chunks_observe_with_a_short_last_one(plain, last):
    """Also where no chunk has a mask."""
    whole = plain.kept("snapkv", 20, window=WINDOW)
    with mmkv.wrapped(plain.model, "snapkv", 20, window=WINDOW), torch.no_grad():
        cache = plain.model(**plain.inputs, use_cache=True).past_key_values
        cache.reset()
        cache.expect(until=N)
        for part in plain.inputs["input_ids"].split([N - last - 1, 1, last], dim=1):
            plain.model(input_ids=part, past_key_values=cache)
    for layer, h in HEADS:
        assert set(cache.kept(layer)[0, h].tolist()) == whole[layer][h]


@since("5.18")
def test_bidirectional_pictures_are_read_in_chunks():
    """Gemma 3: the last queries of a chunk saw tokens behind them, and observe as they did."""
    model = zoo.model_of("Gemma3ForConditionalGeneration")
    inputs = zoo.prompt(model, (27,), pictures=1)  # of which 3 to 18 are the picture's
    parts = [{"attention_mask": inputs["attention_mask"][:, :n]} for n in (19, 27)]
    for part, at in zip(parts, (slice(0, 19), slice(19, 27)), strict=True):
        part |= {k: inputs[k][:, at] for k in ("input_ids", "token_type_ids")}
    parts[0]["pixel_values"] = inputs["pixel_values"]
    with mmkv.wrapped(model, "snapkv", 16, window=12, kernel_size=3), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        layers = list(cache.ordinal)
        whole = [(cache.kept(i), cache.layers[i].state.retained) for i in layers]
        cache.reset()
        cache.expect(until=27)
        for part in parts:
            model(**part, **passing(model, cache))
    for i, (kept, share) in zip(layers, whole, strict=True):
        assert torch.equal(cache.kept(i), kept)
        torch.testing.assert_close(cache.layers[i].state.retained, share)


def test_rows_after_first_chunks_keep_their_sizes():
    """SqueezeAttention: of padding alone there is no similarity, and it weighs nothing."""
    model, inputs = scaled_model("llama", depth("squeeze")), make_inputs("llama", (90, 20))
    with mmkv.wrapped(model, "squeeze", 0.3, least=0):
        sizes = [
            [x.kept for x in mmkv.read(model, inputs, prefill_chunk_size=n).report().layers]
            for n in (None, 25)
        ]
    assert sizes[0] == sizes[1]
    assert any(x != sizes[0][0] for x in sizes[0]), "layers of one size: the test saw nothing"


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("snapkv", {"window": WINDOW}),
        ("snapkv", {"window": WINDOW, "merge": "groups"}),
        ("adakv", {"window": WINDOW}),
        ("h2o", {}),
        ("h2o", {"sinks": 3}),
    ],
)
def test_reported_share_counts_competing_tokens(plain, policy, options):
    """Of the importance of tokens that could go, over the heads of a layer."""
    cache = prefilled(plain.model, plain.inputs, policy, 24, **options)
    for layer, found in enumerate(cache.report().layers):
        kept = total = 0.0
        for h in range(H):
            scores = plain.group(layer, h).sum((0, 1)).tolist()
            if policy != "h2o":
                scores = window_scores(plain.group(layer, h), WINDOW, 7, "max")
            competing = range(options.get("sinks", 0), len(scores))
            total += sum(scores[j] for j in competing)
            kept += sum(scores[j] for j in set(competing) & set(cache.kept(layer)[0, h].tolist()))
        assert found.retained == pytest.approx(kept / total, rel=1e-4)
    # Of nothing that competes, all is retained.
    cache = prefilled(plain.model, make_inputs("llama", (60, 5)), "h2o", 0.5, sinks=9)
    assert all(float(x.state.retained[1]) == 1 > float(x.state.retained[0]) for x in cache.layers)
