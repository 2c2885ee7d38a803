"""Groups in the cache: what must hold exactly, beside the oracles that run for every policy."""

import copy
from itertools import chain

import pytest
import torch
from transformers.models.llama import modeling_llama

import mmkv
from helpers.models import make_inputs, make_model, next_turn
from helpers.oracle import NEW, ROWS, generate, prefilled
from mmkv.cache import selection
from mmkv.cache.config import CacheConfig, TokenMasks
from mmkv.cache.prompt_kv import PromptKV
from mmkv.scores import observers
from mmkv.scores.observers import Observers, observer_scores, output_root


def slots_of(cache, layer: int, b: int, h: int) -> tuple[set[int], list[list[int]]]:
    """The tokens one head keeps as they are, and those of each of its groups."""
    weights, member = cache.groups(layer)
    kept = {p for p in cache.kept(layer)[b, h].tolist() if p >= 0}
    groups = [(member[b, h] == g).nonzero()[:, 0].tolist() for g in range(weights.shape[-1])]
    assert [len(g) for g in groups] == weights[b, h].tolist()
    return kept, [g for g in groups if g]


def test_equal_pairs_lose_nothing(models):
    """Where all pairs of a group are equal, it reads as they did: logits of the full cache."""
    model = make_model("llama")
    with torch.no_grad():  # one key and one value for all tokens, whatever they are
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
            layer.self_attn.v_proj.weight.zero_()
            layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.arange(32.0) / 10)
    inputs = make_inputs("llama", ROWS["padded"])
    expected, tokens, _, _ = generate(model, inputs)
    with mmkv.wrapped(model, "condense", 0.1, least=0, exact=0.0):
        logits, got, cache, _ = generate(model, inputs)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(got, tokens)
    # A head's new tokens weigh one each, and what stands for the prompt as much as it did.
    weights = cache.layers[0].dense().weights
    assert weights.sum(-1)[0].tolist() == [90 + NEW - 1] * 2


def test_report_counts_single_tokens_and_groups(models):
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    cache = prefilled(model, inputs, "condense", 0.3, least=0)
    report = cache.report()
    for i, layer in enumerate(report.layers):
        weights, _ = cache.groups(i)
        assert layer.groups == pytest.approx((weights > 0).sum().item() / 3 / 2)
        exact = (cache.kept(i) >= 0).sum(-1).float().mean().item()
        assert layer.mean_kept == pytest.approx(exact + layer.groups)
    assert "groups" in report.__rich__().columns
    with mmkv.wrapped(model, "snapkv", 0.3, window=4), torch.no_grad():
        report = model(**inputs).past_key_values.report()
    assert report.layers[0].groups is None
    assert "groups" not in report.__rich__().columns


def test_later_turn_groups_kept_pairs(models):
    """Sums are kept: a token stays in a group or joins one, and none is lost."""
    model, inputs = models("llama"), make_inputs("llama", (90,))
    with mmkv.wrapped(model, "condense", 0.2, least=0), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        before = [slots_of(cache, i, 0, 0) for i in range(len(cache.layers))]
        cache.expect()
        model(input_ids=torch.arange(10, 60)[None], past_key_values=cache)
    for i, (_, old) in enumerate(before):
        kept, groups = slots_of(cache, i, 0, 0)
        assert sorted([*kept, *chain(*groups)]) == list(range(140))
        for g in old:  # a group is one pair: its tokens cannot part
            assert any(set(g) <= set(new) for new in groups)


def test_mask_hiding_grouped_token_raises(models):
    model, inputs = models("llama"), make_inputs("llama", (90,))
    with mmkv.wrapped(model, "condense", 0.2, least=0), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        grouped = next(iter(slots_of(cache, 0, 0, 0)[1]))[0]
        mask = torch.ones(1, 91, dtype=torch.long)
        mask[0, grouped] = 0
        step = {"input_ids": torch.tensor([[7]]), "attention_mask": mask}
        with pytest.raises(ValueError, match=rf"hides token {grouped} of row 0, which was merged"):
            model(**step, past_key_values=cache)
        cache.expect()
        with pytest.raises(ValueError, match=rf"hides token {grouped} of row 0, which was merged"):
            model(**step, past_key_values=cache)
        mask[0, grouped], mask[0, 89] = 1, 0  # one that is kept alone may be hidden
        model(**step, past_key_values=cache)


@pytest.mark.parametrize("merge", ["position", "feature"])
def test_mask_hiding_averaged_token_raises(models, merge):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, "local", 0.4, decode="grow", merge=merge):
        _, said, cache, _ = generate(model, inputs, new=3)
        kept = cache.kept(0)[0, 0].tolist()
        assert 11 not in kept
        turn = {"input_ids": torch.cat([inputs["input_ids"], said, said], dim=1)}
        turn["attention_mask"] = torch.ones_like(turn["input_ids"])
        turn["attention_mask"][0, 11] = 0
        with pytest.raises(ValueError, match=r"hides token 11 of row 0, which was merged"):
            generate(model, turn, new=2, past_key_values=cache)
        turn["attention_mask"][0, 11] = 1
        turn["attention_mask"][0, [kept[-1], 61]] = 0  # a kept token and a generated one
        generate(model, turn, new=2, past_key_values=cache)


def test_token_written_over_a_group_weighs_1(models):
    """decode="fixed" drops groups too: what takes their slot weighs one."""
    model, inputs = models("llama"), make_inputs("llama", (90,))
    with mmkv.wrapped(model, "local", 0.2, merge="groups"), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        before = slots_of(cache, 0, 0, 0)[1]
        for word in range(10, 18):
            model(input_ids=torch.tensor([[word]]), past_key_values=cache)
    weights, member = cache.groups(0)
    left = (weights[0, 0] > 0).sum()
    assert 0 < left < len(before)
    assert (member[0, 0] >= 0).sum() == weights[0, 0].sum()
    for layer in cache.layers:
        for block in layer.keeping().blocks:
            held = block.positions >= 90
            assert not block.log_weights[held].any()
            assert held.any()


def test_later_score_gets_group_weights(models):
    """The layer's attention adds the logarithm of a group's weight, so its score does."""
    given = []

    class Recording(Observers):
        def __call__(self, layer):
            given.append(layer.log_weights)
            return super().__call__(layer)

    model, inputs = models("llama"), make_inputs("llama", (90,))
    options = {"score": Recording(), "least": 0}
    with mmkv.wrapped(model, "condense", 0.2, **options), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        held = [layer.dense() for layer in cache.layers]
        cache.expect()
        model(input_ids=torch.arange(10, 40)[None], past_key_values=cache)
    assert given[: len(held)] == [None] * len(held)
    for log_weights, before in zip(given[len(held) :], held, strict=True):
        log_weights, n = log_weights.view(1, 2, -1), before.log_weights.shape[-1]
        assert before.weights.sum(-1).tolist() == [[90.0, 90.0]]
        assert (before.log_weights > 0).sum() > 10
        assert torch.equal(log_weights[..., :n], before.log_weights)
        assert not log_weights[..., n:].any()


def test_observers_are_rotated_past_the_prompt():
    """Each query is turned to the next position: with one key for all, distances alone count."""
    model, inputs = make_model("llama"), make_inputs("llama", (50,))
    seen = []

    class Recording(Observers):
        def __call__(self, layer):
            seen.append(layer)
            return super().__call__(layer)

    prefilled(model, inputs, "condense", 0.5, score=Recording(), least=0)
    layer, rotary = seen[0], model.model.rotary_emb
    attn = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(inputs["input_ids"]))
    raw = attn.q_proj(hidden).view(1, 50, 4, 16).transpose(1, 2)
    cos, sin = rotary(hidden, torch.full((1, 50), 50))
    asked, _ = modeling_llama.apply_rotary_pos_emb(raw, raw, cos, sin)
    weight = attn.o_proj.weight.view(64, 4, 16).transpose(0, 1)
    want = observer_scores(asked, layer.key, layer.value, root=output_root(weight)[None], stride=3)
    got = Observers(stride=3)(layer)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_group_has_the_accumulated_attention_of_its_tokens(models):
    """h2o drops what received least; a head's tokens received one for each query."""
    model, inputs = models("llama"), make_inputs("llama", (90,))
    cache = prefilled(model, inputs, "h2o", 0.2, merge="groups")
    for layer in cache.layers:
        for block in layer.keeping().blocks:
            received = block.scores.masked_fill(block.positions < 0, 0.0).sum(-1)
            torch.testing.assert_close(received, torch.full_like(received, 90.0))


@pytest.mark.parametrize(("size", "newest"), [(15, 1), (16, 2), (25, 3), (60, 4)])
def test_newest_tokens_take_at_most_an_eighth_of_the_slots(size: int, newest: int) -> None:
    policy = mmkv.get_policy("condense", newest=4)
    N = 100
    positions = torch.arange(N).view(1, 1, N)
    valid = torch.ones(1, N, dtype=torch.bool)
    plan = CacheConfig(policy, size)
    prompt = TokenMasks.of(plan, valid, n_layers=1)
    must = int(prompt.pinned.sum())
    scores = torch.linspace(1, 0, N).view(1, 1, N)
    kv = PromptKV(scores, scores, positions, scores)
    ranking = selection.ranked(plan, kv, prompt, [size])
    counts = ranking.counts[:3]
    rank, counts = policy.merge._with_newest_pinned(ranking.rank, counts)
    room = min(newest, size - must)
    expected = prompt.pinned[0].clone()
    free = (~expected).nonzero()[:, 0].tolist()
    expected[free[len(free) - room :]] = True
    assert torch.equal(rank[0, 0].isinf(), expected)
    assert counts[:, 0, 0].tolist() == [size, int(expected.sum()), N]


def test_a_token_keeps_the_largest_score_of_all_turns(models, monkeypatch):
    """What an earlier turn's observers would miss most stays, though no later one asks for it."""
    model, inputs = models("llama"), make_inputs("llama", (60,))
    found: dict[int, list[torch.Tensor]] = {i: [] for i in range(model.config.num_hidden_layers)}
    importance = selection.importance

    def recorded(policy, layer, *rows):
        scores = importance(policy, layer, *rows)
        found[layer.layer_idx].append(scores.reshape(1, 2, -1).clone())
        return scores

    monkeypatch.setattr(selection, "importance", recorded)
    options = {"score": "observers", "chunk": 20}
    with mmkv.wrapped(model, "snapkv", 0.5, **options):
        _, words, cache, held = generate(model, inputs, new=2)
        more = next_turn(inputs, torch.cat([inputs["input_ids"], words], 1), False, new=12)
        *_, kept = generate(model, more, new=1, past_key_values=cache)
    for layer in found:
        first, second = found[layer]
        place = torch.cat([held[1][layer], torch.arange(61, 74).expand(1, 2, 13)], -1)
        known = first.gather(-1, held[1][layer].clamp(max=59))
        known[..., held[1][layer][0, 0] >= 60] = 0  # generated since
        best = second.clone()
        best[..., : known.shape[-1]] = torch.maximum(best[..., : known.shape[-1]], known)
        n = kept[0][layer].shape[-1]
        want = place.gather(-1, best.topk(n, dim=-1).indices).sort(-1).values
        assert torch.equal(kept[0][layer], want)


def test_root_of_the_output_projection_is_computed_once_until_it_changes(monkeypatch):
    """A new prompt takes the root of the last one, but not that of other weights."""
    model, inputs, calls = make_model("llama"), make_inputs("llama", (90,)), []
    root = observers.output_root
    monkeypatch.setattr(observers, "output_root", lambda x: calls.append(x) or root(x))
    linear = model.model.layers[0].self_attn.o_proj
    changes = [
        lambda: linear.weight.mul_(torch.linspace(0, 4, 64)),
        lambda: linear.weight.data.mul_(torch.linspace(4, 0, 64)),  # as PEFT merges an adapter
        lambda: setattr(linear, "weight", torch.nn.Parameter(linear.weight.flip(0, 1))),
    ]
    with torch.no_grad(), mmkv.wrapped(model, "condense", 0.2, least=0):
        model(**inputs)
        n_layers = len(calls)
        model(**inputs)
        assert len(calls) == n_layers == model.config.num_hidden_layers
        for change in changes:
            change()
            del calls[:]
            got = model(**inputs).past_key_values.kept(0)
            assert len(calls) == 1
            fresh = copy.deepcopy(model)  # of its weights nothing is computed yet
            assert torch.equal(got, fresh(**inputs).past_key_values.kept(0))
            assert len(calls) == 1 + n_layers
