"""Parts: named, routed, listed, and added by other packages."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import mmkv
from helpers.masking import masked_logits
from helpers.models import make_inputs, make_model
from helpers.oracle import generate, prefilled
from mmkv.decode.victims import HeavyHitterSlots, LeastAttended
from mmkv.parts import KINDS, Decode, Heads, Layers, Merge, Protect, Score, register_part
from mmkv.policy import Policy
from mmkv.registry import list_parts, option_types
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.scores.window import WindowAttention
from mmkv.sizes.heads import AdaptiveHeads
from mmkv.sizes.retention import PooledLayers


def test_flat_options_go_to_the_part_that_has_them():
    policy = mmkv.get_policy("xkv", heads="adaptive", window=16, alpha=0.3, retention=0.9)
    assert policy.score == WindowAttention(window=16, pooling="avg")
    assert policy.heads == AdaptiveHeads(alpha=0.3)
    assert policy.layers == PooledLayers(allocation="mini-prefill", retention=0.9)
    policy = mmkv.get_policy("squeeze", base="streaming", sinks=2)
    assert (policy.score.name, policy.sinks, policy.recent) == ("recency", 2, 0.0)


def test_a_part_may_be_given_as_a_value_or_by_name():
    policy = mmkv.get_policy("snapkv", score=AccumulatedAttention(average_heads=True))
    assert policy.score == AccumulatedAttention(average_heads=True)
    assert mmkv.get_policy("pyramidkv", score="window") == mmkv.get_policy("pyramidkv")
    # Another part keeps the options that both have.
    assert mmkv.get_policy("prefixkv", score="window").score.average_heads
    assert not mmkv.get_policy("h2o", decode="grow", score="window").score.average_heads


def test_policies_are_values():
    one, other = mmkv.get_policy("xkv", window=16), mmkv.get_policy("xkv", window=16)
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.score.window = 3


def test_every_kind_lists_its_parts_whose_options_can_be_given():
    known = option_types(Policy)
    for kind in KINDS:
        found = list_parts(kind)
        assert found
        assert all(name == cls.name and cls.kind == kind for name, cls in found.items())
        assert all(set(cls().options()) <= set(known) for cls in found.values())
    with pytest.raises(ValueError, match=r"kind of part 'scores'. Did you mean 'score'"):
        list_parts("scores")


@dataclass(frozen=True, kw_only=True)
class FirstHead(Heads):
    """The first head takes this share of a layer's size; the others are equal."""

    first: float = 0.5

    def __call__(self, scores, totals, *, layer_idx):
        H, sizes = scores.shape[1], []
        offered = (scores > -torch.inf).any(1).sum(-1).tolist()
        for total, C in zip(totals.tolist(), offered, strict=True):
            lead = min(round(self.first * total), C)
            rest = [min((total - lead + i) // (H - 1), C) for i in range(H - 1)]
            sizes.append([total - sum(rest), *rest])
        return torch.tensor(sizes)


@pytest.fixture
def others(registering):
    """The part, registered for the length of a test."""
    register_part("first-head")(FirstHead)


def test_head_sizes_of_others_pass_the_oracle(others):
    model, lengths = make_model("llama"), (60, 33)
    options = {"heads": "first-head", "first": 0.4, "window": 6}
    inputs = make_inputs("llama", lengths)
    with mmkv.wrapped(model, "snapkv", 0.4, **options):
        logits, tokens, cache, held = generate(model, inputs, new=4)
    expected = masked_logits(model, inputs, tokens, held)
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)
    for b, n in enumerate(lengths):
        kept = sum(float((x[b] >= 0).sum(-1).float().mean()) for x in held[0])
        assert kept == round(0.4 * model.config.num_hidden_layers * n)
    counts = (cache.kept(0)[0] >= 0).sum(-1)
    assert counts[0] != counts[1]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"needs": "score"}, r"needs='score': expected one of \['', 'scores', "),
        ({"learns": "5"}, "learns='5': expected a whole number"),
    ],
)
def test_wrong_attributes_of_a_custom_part_raise(attributes, message):
    part = type("Mine", (Layers,), attributes)
    with pytest.raises(ValueError, match=message):
        part()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: type("Mine", (Policy,), {"sinks": 8, "__annotations__": {"sinks": int}}), "sinks"),
        (
            lambda: dataclass(frozen=True, kw_only=True)(type("Mine", (Policy,), {"sinks": 8})),
            "sinks",
        ),
        (lambda: type("Mine", (WindowAttention,), {"pooling": "avg"}), "pooling"),
        (lambda: type("Mine", (Score,), {"power": 1, "__annotations__": {"power": int}}), "power"),
    ],
    ids=["policy", "annotation", "part", "new option"],
)
def test_options_that_are_no_fields_are_refused(registering, make, name):
    """They would silently have the base class's value."""
    cls = make()
    register = mmkv.register_policy if issubclass(cls, Policy) else register_part
    with pytest.raises(TypeError, match=rf"Mine\.{name} is no field, .*: decorate the class with"):
        register("mine")(cls)


@dataclass(frozen=True, kw_only=True)
class Several(Score):
    """Options of types that are not checked, or of several."""

    weights: tuple[float, ...] = (1.0,)
    names: float | str = "a"


def test_options_of_other_types_and_in_slots_are_not_refused(registering):
    assert Several(weights=(1.0, 2.0), names=0.5).options()["weights"] == (1.0, 2.0)
    slots = dataclass(frozen=True, kw_only=True, slots=True)
    register_part("mine")(slots(type("Mine", (Score,), {"x": 1, "__annotations__": {"x": int}})))
    with pytest.raises(ValueError, match=r"names=\(1,\): expected a number or a text"):
        Several(names=(1,))


class FirstColumns(Protect):
    def marks(self, valid, is_prompt, image):
        return (torch.arange(valid.shape[1]) < 50).expand_as(valid)


class Numbers(Protect):
    def marks(self, valid, is_prompt, image):
        return valid.int()


def test_marked_padding_does_not_count(models):
    inputs = make_inputs("llama", (60, 20))
    policy = mmkv.get_policy("snapkv", window=4, protect=FirstColumns())
    cache = prefilled(models("llama"), inputs, policy, 0.9)
    assert [sum(x.kept[1]) / len(x.kept[1]) for x in cache.report().layers] == [18] * 2
    policy = mmkv.get_policy("snapkv", window=4, protect=Numbers())
    with pytest.raises(ValueError, match=r"Numbers\.marks: expected a bool tensor .* \(2, 60\)"):
        prefilled(models("llama"), inputs, policy, 0.9)


class OneRow(Layers):
    def __call__(self, rows):
        return [[8.0] * rows.n_layers]


class Scalar(Layers):
    needs = "measure"

    def measure(self, layer):
        return layer.key.mean()

    def __call__(self, rows):
        return [[8.0] * rows.n_layers] * len(rows.totals)


class NoSchedule(Decode):
    def schedule(self, policy, rows):
        return rows.counts


class NoPairs(Merge):
    def __call__(self, prompt_kv, ranking):
        ranking.kept(prompt_kv)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"layers": OneRow()}, r"OneRow returned shape \(1, 2\): .* \(3, 2\)"),
        ({"layers": Scalar()}, r"Scalar\.measure returned \(\): expected a tensor \[B\] = \(3,\)"),
        ({"decode": NoSchedule()}, r"NoSchedule\.schedule returned ndarray: .*SlotSchedule"),
        ({"merge": NoPairs()}, r"NoPairs returned NoneType: expected a mmkv.*ranking.kept"),
    ],
    ids=["layers", "measure", "decode", "merge"],
)
def test_wrong_results_of_a_custom_part_raise(models, part, message):
    policy = mmkv.get_policy("snapkv", window=6, **part)
    with pytest.raises(ValueError, match=message):
        prefilled(models("llama"), make_inputs("llama", (60, 50, 41)), policy, 0.4)


class LeastSinceThePrompt(LeastAttended):
    """Drops the token that generated ones attended to least, whatever the score."""

    def check(self, policy):
        pass

    def schedule(self, policy, rows):
        sizes = {"counts": rows.counts, "protected": rows.protected, "capacity": rows.capacity}
        return HeavyHitterSlots(**sizes, recent=rows.capacity // 8)


def test_a_custom_decode_part_adds_up_attention_with_any_score(models):
    """Other decode parts leave condense's scores in bfloat16; attention adds up in float32."""
    policy = mmkv.get_policy("condense", decode=LeastSinceThePrompt(), least=0)
    with mmkv.wrapped(models("llama"), policy, 0.3):
        cache = generate(models("llama"), make_inputs("llama", (60, 50)), new=6)[2]
    assert all(b.scores.dtype == torch.float32 for b in cache.blocks)


class ThreeEach(Heads):
    def __call__(self, scores, totals, *, layer_idx):
        return torch.full(scores.shape[:2], 3)


class Halves(Heads):
    scope = "model"

    def __call__(self, scores, totals, *, layer_idx):
        return scores[..., 0] * 0.5


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (ThreeEach(), r"ThreeEach returned head sizes \[3, 3\] for row 0: .* a sum of 48"),
        (
            Halves(),
            r"Halves returned torch.float32 .*: expected int64 of shape \[B, H\] = \(1, 4\)",
        ),
    ],
    ids=["sum", "type"],
)
def test_wrong_sizes_of_a_custom_heads_part_raise(part, message):
    policy = mmkv.get_policy("snapkv", heads=part, window=6)
    with pytest.raises(ValueError, match=message):
        prefilled(make_model("llama"), make_inputs("llama", (60,)), policy, 0.5)


@dataclass(frozen=True, kw_only=True)
class EveryTenth(Protect):
    def marks(self, valid, is_prompt, image):
        return valid & (valid.cumsum(-1) % 10 == 0)


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_a_custom_protect_part_needs_no_image_tokens(given):
    model, inputs = make_model("llama"), make_inputs("llama", (60,))
    if given == "inputs_embeds":
        inputs[given] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    policy = mmkv.get_policy("snapkv", protect=EveryTenth(), window=6)
    cache = prefilled(model, inputs, policy, 0.4)
    assert all(set(range(9, 60, 10)) <= set(x.tolist()) for x in cache.kept(1)[0])


def test_a_score_with_a_list_reads_a_prompt_shorter_than_its_window():
    @dataclass(frozen=True, kw_only=True)
    class Listed(WindowAttention):
        names: list[str] | None = None

    model, inputs = make_model("llama"), make_inputs("llama", (20,))
    policy = mmkv.get_policy("snapkv", score=Listed(window=30, names=["a"]))
    given = prefilled(model, inputs, policy, 0.5)
    same = prefilled(model, inputs, "snapkv", 0.5, window=30)
    assert given.kept(0).equal(same.kept(0))
