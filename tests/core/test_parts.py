"""Parts: named, routed, listed, and added by other packages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mmkv
from helpers.masking import masked_logits
from helpers.models import make_inputs, make_model
from helpers.oracle import generate
from mmkv.parts import KINDS, Score, register_part
from mmkv.policy import Policy
from mmkv.registry import list_parts, option_types
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.scores.window import WindowAttention
from mmkv.sizes.heads import AdaptiveHeads
from mmkv.sizes.retention import PooledLayers


class TestRouting:
    def test_flat_options_go_to_the_part_that_has_them(self):
        policy = mmkv.get_policy("xkv", heads="adaptive", window=16, alpha=0.3, retention=0.9)
        assert policy.score == WindowAttention(window=16, pooling="avg")
        assert policy.heads == AdaptiveHeads(alpha=0.3)
        assert policy.layers == PooledLayers(allocation="mini-prefill", retention=0.9)

    def test_a_part_may_be_given_as_a_value(self):
        policy = mmkv.get_policy("snapkv", score=AccumulatedAttention(average_heads=True))
        assert policy.score == AccumulatedAttention(average_heads=True)
        assert mmkv.get_policy("snapkv", score=WindowAttention(window=4)).score.window == 4

    def test_naming_the_part_it_has_changes_nothing(self):
        assert mmkv.get_policy("pyramidkv", score="window") == mmkv.get_policy("pyramidkv")

    def test_another_part_keeps_the_options_that_both_have(self):
        assert mmkv.get_policy("prefixkv", score="window").score.average_heads
        assert not mmkv.get_policy("h2o", decode="grow", score="window").score.average_heads

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"alpha": 0.3}, r"'alpha' has no effect on policy 'xkv'.*heads='uniform'"),
            ({"windows": 3}, r"unknown option of policy 'xkv' 'windows'. Did you mean 'window'"),
            ({"heads": "adaptive", "alpha": 2.0}, r"alpha=2.0: expected a number in \[0, 1\]"),
            ({"score": "windy"}, r"score='windy': expected one of .*'window'"),
            (
                {"heads": WindowAttention()},
                r"heads=WindowAttention.*: expected one of .*Heads part",
            ),
            ({"heads": "global"}, r"layers='pooled' nothing to decide: use layers='uniform'"),
            (
                {"heads": "global", "layers": "uniform", "average_heads": True},
                r"heads='global' compares heads .*average_heads=True",
            ),
            ({"decode": "fixed"}, r"decode='fixed' drops .*score='window' has neither"),
            ({"layers": "sparsity"}, r"layers='sparsity' looks .*score='window'"),
            ({"decode": "least"}, r"decode='least' drops .*use average_heads=True"),
            ({"decode": "least", "score": "observers"}, r"newest query.*score='observers'"),
            (
                {"decode": "least", "average_heads": True, "merge": "groups"},
                r"decode='least' needs .*merge='groups'",
            ),
        ],
    )
    def test_what_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            mmkv.get_policy("xkv", **options)

    def test_the_base_of_squeeze_settles_its_score_and_decoding(self):
        policy = mmkv.get_policy("squeeze", base="streaming", sinks=2)
        assert (policy.score.name, policy.sinks, policy.recent) == ("recency", 2, 0.0)
        with pytest.raises(ValueError, match=r"'score' has no effect on policy 'squeeze'"):
            mmkv.get_policy("squeeze", score="window")

    def test_policies_are_values(self):
        one, other = mmkv.get_policy("xkv", window=16), mmkv.get_policy("xkv", window=16)
        assert one == other
        assert hash(one) == hash(other)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.score.window = 3


class TestListing:
    def test_every_kind_lists_its_parts(self):
        for kind in KINDS:
            parts = list_parts(kind)
            assert parts
            assert all(name == cls.name and cls.kind == kind for name, cls in parts.items())
        with pytest.raises(ValueError, match=r"kind of part 'scores'. Did you mean 'score'"):
            list_parts("scores")

    def test_every_option_of_every_part_can_be_given(self):
        known = option_types(Policy)
        for kind in KINDS:
            for name, cls in list_parts(kind).items():
                assert set(cls().options()) <= set(known), name

    def test_names_are_taken_once(self):
        class Other(Score):
            pass

        with pytest.raises(ValueError, match=r"score part 'window' is taken by .*WindowAttention"):
            register_part("window")(Other)
        with pytest.raises(TypeError, match=r"inherits from none of Score, Layers"):
            register_part("x")(int)


@pytest.fixture
def acme(monkeypatch):
    """The package, for the length of a test."""
    from mmkv import parts, registry

    mmkv.list_policies()  # now all others are known
    kept = dict(parts.registered), dict(registry._policies)
    from helpers import acme

    for cls in (acme.ValueNorm, acme.PlainKeys, acme.HeadProfile):
        register_part(cls.name)(cls)
    mmkv.register_policy("acme")(acme.Acme)
    yield acme
    for known, before in zip((parts.registered, registry._policies), kept, strict=True):
        known.clear()
        known.update(before)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("acme", {}),
        ("snapkv", {"score": "plain-keys"}),
        ("snapkv", {"heads": "profile", "first": 0.4, "window": 6}),
        ("prefixkv", {"score": "value-norm", "window": 5}),
    ],
)
def test_parts_of_others_pass_the_oracle(acme, policy, options):
    """Eviction equals masking, the budget is spent, and batch equals singles."""
    model, lengths = make_model("llama"), (60, 33)
    inputs = make_inputs("llama", lengths)
    with mmkv.wrapped(model, policy, 0.4, **options):
        logits, tokens, cache, held = generate(model, inputs, new=4)
    expected = masked_logits(model, inputs, tokens, held)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)
    for b, n in enumerate(lengths):
        kept = sum(float((x[b] >= 0).sum(-1).float().mean()) for x in held[0])
        assert kept == round(0.4 * 3 * n)
    if options.get("heads") == "profile" or policy == "acme":
        counts = (cache.kept(0)[0] >= 0).sum(-1)
        assert counts[0] != counts[1]


def test_options_of_a_policy_go_with_the_parts_that_are_asked_for():
    """reposition=True does not go with condense's own groups, but with another merging."""
    policy = mmkv.get_policy("condense", merge="position", reposition=True)
    assert (policy.merge.name, policy.reposition) == ("position", True)
