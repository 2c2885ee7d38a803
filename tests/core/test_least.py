"""`least`: tokens a head that stay however small a share the budget is."""

import logging

import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.masking import pairs_of
from helpers.models import make_inputs, next_turn
from helpers.oracle import depth, generate, short
from helpers.profiles import profile_of
from mmkv.cache import selection
from mmkv.eval.harness.arguments import harness_arguments
from mmkv.eval.speed.bench import Setting, make_rows
from mmkv.eval.variants import parse_variants
from mmkv.registry import exact_share

SAID = "mmkv.cache.config"  # what logs shortfalls
L, H = 2, 2
LEAST = 40
ROWS = (96, 61, 33)  # far above the floor's share, below it, and below the floor


def totals(layers):
    """Pairs of each row over all layers, per head."""
    return [
        sum(float(pairs_of(x)[b].float().mean()) for x in layers) for b in range(len(layers[0]))
    ]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("pyramidkv", {}),
        ("adakv", {}),
        ("prefixkv", {"distance": 3}),
        ("xkv", {"retention": 0.05}),
        ("squeeze", {}),
    ],
)
def test_the_floor_is_split_as_the_policy_splits(models, policy, options):
    """Each row keeps what a budget of 40 tokens would keep; that oracles hold is tested there."""
    model, inputs = models("llama", depth(policy)), make_inputs("llama", ROWS)
    options = {**short(policy), **options}
    budget = None if "retention" in options else 0.2
    with mmkv.wrapped(model, policy, budget, **options | {"least": LEAST}):
        *_, held = generate(model, inputs, new=1)
    assert totals(held[0]) == [len(held[0]) * min(LEAST, n) for n in ROWS]
    same = options | {"least": 0} | ({"retention": None} if "retention" in options else {})
    with mmkv.wrapped(model, policy, LEAST, **same):
        *_, wanted = generate(model, inputs, new=1)
    assert all(map(torch.equal, held[0], wanted[0]))


@cases("measured", [False, True], True)
def test_short_prompt_equals_unwrapped_model(models, monkeypatch, measured):
    """Condense's own default: 64 tokens are kept whole, without a score; of 65 one is gone.

    With head sizes measured too: there is nothing to split then.
    """
    model, scored = models("llama"), []
    importance = selection.importance
    monkeypatch.setattr(selection, "importance", lambda *x: scored.append(x) or importance(*x))
    for n, gone in ((1, 0), (64, 0), (65, 1)):
        inputs = make_inputs("llama", (n,))
        plain, words, *_ = generate(model, inputs)
        profile = profile_of(model) if measured else None
        with mmkv.wrapped(model, budget=0.1, profile=profile):
            logits, tokens, cache, held = generate(model, inputs)
        assert totals(held[0]) == [L * (n - gone)]
        assert bool(scored) == bool(gone)
        if not gone:
            torch.testing.assert_close(logits, plain, atol=1e-5, rtol=0)
            assert torch.equal(tokens, words)
            assert cache.report().kept_fraction == 1


@cases("name, options", [("snapkv", {"window": 6}), ("h2o", {}), ("condense", {})], "h2o")
def test_the_floor_is_on_all_tokens_seen(models, name, options):
    """In a later turn, and after each chunk, as much as of one prompt of that length."""
    model, first = models("llama"), make_inputs("llama", (30, 45))
    more = {**options, "least": LEAST}
    with mmkv.wrapped(model, name, 0.2, **more):
        _, words, cache, held = generate(model, first, new=5)
        assert totals(held[0]) == [L * 30, L * 40]
        second = next_turn(first, torch.cat([first["input_ids"], words], 1), image=False, new=20)
        _, words, _, held = generate(model, second, new=5, past_key_values=cache)
        assert totals(held[0]) == [L * 40, L * 40]
        assert [x["input_ids"].shape[1] for x in (first, second)] == [45, 70]
        third = next_turn(second, torch.cat([second["input_ids"], words], 1), False, new=175)
        *_, held = generate(model, third, new=2, past_key_values=cache)
        # All that is left of 40 pairs and 180 new tokens competes for a fifth of all seen.
        assert totals(held[0]) == [L * 47, L * 50]
    with mmkv.wrapped(model, name, 0.2, evict_chunks=True, **more):
        sizes = []
        with model.register_forward_hook(
            lambda *args: sizes.append([x.counts().float().mean() for x in states(args[-1])])
        ):
            generate(model, make_inputs("llama", (260,)), new=1, prefill_chunk_size=20)
    wanted = [max(min(LEAST, n), round(0.2 * L * n) / L) for n in range(20, 261, 20)]
    assert [sum(x) / L for x in sizes] == pytest.approx(wanted)


def states(output):
    return [x.keeping() for x in output.past_key_values.compressed]


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, 20])  # 20: of the shorter row more than its share
def test_ratio_counts_where_it_exceeds_the_floor(models, sinks):
    """PrefixKV drops one token a step, down to 40 or to two fifths of all tokens seen."""
    model, inputs = models("llama"), make_inputs("llama", (60, 30))
    options = {"layers": "uniform", "distance": 0, "least": LEAST, "sinks": sinks}
    with mmkv.wrapped(model, "prefixkv", 0.4, **options):
        *_, held = generate(model, inputs, new=100)
    for t, layers in enumerate(held):
        for b, n in enumerate((60 + t, 30 + t)):
            # Tokens are dropped after the step that is one too many.
            want = min(n, max(LEAST, round(0.4 * n)))
            assert {int(x) for layer in layers for x in pairs_of(layer)[b]} == {want}, (t, b)


def test_learned_and_measured_layers_keep_their_proportions(models):
    """XKV's mean sizes of earlier requests and a profile's fractions, of the floor's total."""
    model, inputs = models("llama"), make_inputs("llama", (60,))
    fractions = (0.3, 0.1)
    with mmkv.wrapped(
        model, "snapkv", profile=mmkv.Profile(fractions, budget=0.2), window=4, least=30
    ):
        cache = generate(model, inputs, new=1)[2]
        assert [x.keeping().sizes for x in cache.compressed] == [[45], [15]]
    sampled = {"allocation": "sampled", "samples": 1, "window": 4, "least": LEAST}
    with mmkv.wrapped(model, "xkv", 0.1, **sampled):
        sizes = []
        for n in (96, 60):
            cache = generate(model, make_inputs("llama", (n,)), new=1)[2]
            sizes.append([x.keeping().sizes[0] for x in cache.compressed])
        assert list(map(sum, sizes)) == [L * LEAST, L * LEAST]
        assert cache.plan.learned is not None
        assert sizes[1] == pytest.approx(sizes[0], abs=1)


def notes_of(model, lengths, budget, **options):
    with mmkv.wrapped(model, "snapkv", budget, **options), torch.no_grad():
        return model(**make_inputs("llama", lengths)).past_key_values.report().notes


def test_report_notes_where_floor_decides(models, caplog):
    model = models("llama")
    with caplog.at_level(logging.WARNING, logger=SAID):
        found = notes_of(model, (180, 33, 350), 0.2, window=32, least=64)
    assert found == [
        "row 0: least=64 keeps 64 of 180 tokens, more than budget 0.2; least=0 switches this off",
        "row 1: all 33 prompt tokens are kept (window 32, least=64, budget 0.2)",
    ]
    assert not [x for x in caplog.records if x.name == SAID]
    with mmkv.wrapped(model, "xkv", window=8, least=64, retention=0.01), torch.no_grad():
        (note,) = model(**make_inputs("llama", (90,))).past_key_values.report().notes
    assert note.startswith("row 0: least=64 keeps 64 of 90 tokens, more than retention 0.01")
    assert notes_of(model, (90,), 20, window=8, least=64) == []
    assert notes_of(model, (90,), 0.9, window=8, least=64) == []


def test_evaluations_set_least_to_0():
    assert exact_share("condense") == {"least": 0}
    assert exact_share("snapkv") == exact_share("full") == {}
    names = ["condense", "condense:least=8", "snapkv"]
    assert [x.options.get("least") for x in parse_variants(names)] == [0, 8, None]
    assert [x.recorded.get("least") for x in parse_variants(names)] == [0, 8, None]
    (asked,) = parse_variants(["condense"], {"least": 64})
    assert asked.options == {"least": 64}
    assert harness_arguments("condense", 0.2, {})[1] == {"least": 0}
    assert harness_arguments("condense", 0.2, {"least": "9"})[1] == {"least": 9}
    setting = Setting("toy", 64, 4, 1, tuple(names), (0.2,))
    rows = {x.label: x.options for x in make_rows(setting, kvpress=False)}
    assert rows["condense 0.2"] == {"least": 0}
    assert rows["condense:least=8 0.2"] == {"least": 8}
    assert rows["snapkv 0.2"] == {}
