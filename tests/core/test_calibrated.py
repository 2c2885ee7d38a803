"""Head sizes from cost curves: the curves, the profile, and what a cache keeps by them."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.models import make_inputs, make_model, row_of
from helpers.oracle import generate, prefilled, short
from helpers.profiles import made_up, profile_of
from helpers.sizes import row_sizes
from mmkv import calibration, wrapping
from mmkv.eval.variants import parse_variants
from mmkv.forcing import greedy
from mmkv.parts import Heads, Layers
from mmkv.profiles import FILE, Profile
from mmkv.registry import exact_share
from mmkv.sizes.profiled import Curves, HeadsByCost, LayersByCost

L, H = 3, 2
# Of the classes of models each way to find positions, to scale logits and to skip layers.
CLASSES = [
    *zoo.FEW,
    "Gemma2ForCausalLM",
    "GPTNeoXForCausalLM",
    "FalconForCausalLM",
    "LlavaOnevisionForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Mistral3ForConditionalGeneration:ministral3",
    "Llama4ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
]


def naive_shares(curves: Curves, budget: float, layers) -> list[list[float]]:
    """As it reads: raise the head and level of the largest drop per slot, again and again."""
    levels = curves.levels
    if budget <= levels[0]:
        return [[budget] * H for _ in layers]
    falling = {
        (i, h): [min(curves.costs[i][h][: k + 1]) for k in range(len(levels))]
        for i in layers
        for h in range(H)
    }
    at = dict.fromkeys(falling, 0)
    left = len(at) * (budget - levels[0])
    shares = dict.fromkeys(at, levels[0])
    while left > 1e-12:
        drops = [
            ((c[at[u]] - c[k]) / (levels[k] - levels[at[u]]), k, u)
            for u, c in falling.items()
            for k in range(at[u] + 1, len(levels))
        ]
        drop, k, u = max(drops, default=(0, 0, None))
        if drop <= 0:
            break
        width = min(left, levels[k] - levels[at[u]])
        shares[u], at[u], left = shares[u] + width, k, left - width
    return [[shares[i, h] for h in range(H)] for i in layers]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.floats(0, 1), st.sampled_from([(0, 1, 2), (1,), (0, 2)]))
def test_shares_equal_the_loop(seed, budget, layers):
    curves = made_up(seed)
    got = curves.shares(budget, layers)
    for mine, theirs in zip(got, naive_shares(curves, budget, layers), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
        assert all(0 <= x <= 1 for x in mine)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(1, 400), st.floats(0.001, 1), st.integers(0, 8))
def test_sizes_spend_the_total_exactly(seed, length, budget, floor):
    """Layers, and heads of each, in whole tokens; a head keeps one where there is one to have."""
    curves, floor = made_up(seed), min(floor, length - 1)
    policy = mmkv.Policy(
        layers=LayersByCost(curves), heads=HeadsByCost(curves=curves, layers=(0, 1, 2))
    )
    sizes = row_sizes(policy, budget, n_layers=L, length=length, floor=floor)
    assert sum(sizes) == max(round(budget * L * length), L * floor)
    for i, n in enumerate(sizes):
        spare = n - floor
        if 0 < spare < length - floor:
            scores, totals = torch.zeros(2, H, length - floor), torch.tensor([H * spare, 0])
            split, none = policy.heads(scores, totals, layer_idx=i)
            assert int(split.sum()) == H * spare
            assert 1 <= int(split.min()) <= int(split.max()) <= length - floor
            assert not none.any()


def test_each_head_has_its_own_size(models):
    """To a token or two of rounding, each head of each layer keeps its share of a long prompt."""
    model, profile = models("llama"), profile_of(models("llama"), seed=8)
    options = {"least": 0, "sinks": 0}  # a sink would come on top of each share
    cache = prefilled(
        model, make_inputs("llama", (400,)), "condense", 0.3, profile=profile, **options
    )
    wanted = profile.curves.shares(0.3, range(L))
    assert len({share for layer in wanted for share in layer}) > 2
    for layer, shares in zip(cache.report().layers, wanted, strict=True):
        assert layer.kept[0] == pytest.approx([400 * share for share in shares], abs=2)


def test_heads_of_one_ranking_share_their_layers_size(models):
    """Where all heads of a layer rank tokens alike, a profile sizes layers."""
    model = models("llama")
    cache = prefilled(
        model, make_inputs("llama", (90,)), "streaming", 0.3, profile=profile_of(model)
    )
    kept = [layer.kept[0] for layer in cache.report().layers]
    assert sum(map(sum, kept)) == H * round(0.3 * L * 90)
    assert all(len(set(heads)) == 1 for heads in kept)
    assert len({heads[0] for heads in kept}) > 1


class TestOwnProfile:
    """A model's folder may hold a profile, which a policy without chosen sizes takes."""

    @pytest.fixture
    def loaded(self, tmp_path):
        model = make_model("llama")
        model.save_pretrained(tmp_path)
        profile_of(model).save(tmp_path / FILE)
        return type(model).from_pretrained(tmp_path).eval()

    def kept(self, model, **options):
        exact = exact_share(options.get("policy", "condense"))
        with mmkv.wrapped(model, **{"policy": "condense", "budget": 0.2, **exact, **options}):
            _, _, cache, _ = generate(model, make_inputs("llama", (90,)), new=1)
        return [layer.kept[0] for layer in cache.report().layers]

    def test_it_is_used_unless_sizes_are_chosen(self, loaded, tmp_path):
        found = self.kept(loaded)
        assert found == self.kept(loaded, profile=tmp_path / FILE)
        assert sum(map(sum, found)) == H * round(0.2 * L * 90)
        assert len({n for heads in found for n in heads}) > 2
        equal = self.kept(make_model("llama"))
        assert {n for heads in equal for n in heads} == {18}
        assert self.kept(loaded, heads="uniform") == equal
        assert self.kept(loaded, layers="pyramid") != found
        snapkv = {"policy": "snapkv", **short("snapkv")}
        assert {n for heads in self.kept(loaded, **snapkv) for n in heads} == {18}
        assert len({n for h in self.kept(loaded, **snapkv, heads="calibrated") for n in h}) > 2

    def test_of_no_folder_of_another_shape_or_broken(self, loaded, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert {n for heads in self.kept(make_model("llama")) for n in heads} == {18}
        profile_of(make_model("llama-mha")).save(tmp_path / FILE)
        assert {n for heads in self.kept(loaded) for n in heads} == {18}
        (tmp_path / FILE).write_text("{")
        with pytest.raises(ValueError, match=FILE):
            mmkv.wrap(loaded, "condense", 0.2)
        mmkv.unwrap(mmkv.wrap(loaded, "snapkv", 0.2))


class TestEqualHeads:
    """`wrap` says once that a policy's heads are all of one size, where a model needs others."""

    @pytest.fixture(autouse=True)
    def untold(self, monkeypatch):
        monkeypatch.setattr(wrapping, "_logged_policies", set())

    def said(self, caplog, model, policy, budget=0.5, **options):
        caplog.clear()
        mmkv.unwrap(mmkv.wrap(model, policy, budget, **options))
        return [x.getMessage() for x in caplog.records if x.name == wrapping.__name__]

    def test_once_a_policy_and_one_line(self, caplog, text_model):
        for policy in ("snapkv", "h2o"):
            (line,) = self.said(caplog, text_model, policy)
            assert line.startswith(f"{policy} gives all heads the same size")
            assert "heads='retrieval'" in line
            assert "\n" not in line
            assert not self.said(caplog, text_model, policy, 0.2)
        assert self.said(caplog, text_model, "sparsemm")
        assert not self.said(caplog, text_model, "sparsemm")

    def test_what_a_short_prompt_lacks_once_a_wrap(self, caplog, text_model):
        for _ in range(2):
            caplog.clear()
            with mmkv.wrapped(text_model, "snapkv", 0.2):
                for length, window in ((40, 4), (50, 5), (60, 6)):
                    cache = text_model(**make_inputs("llama", (length,))).past_key_values
                    said = f"too few for window 32; its last {window} observe instead"
                    assert any(note.endswith(said) for note in cache.report().notes)
            assert len([x for x in caplog.messages if "too few for window" in x]) == 1

    @pytest.mark.parametrize(
        ("policy", "budget", "options", "text"),
        [
            ("snapkv", 1.0, {}, None),
            ("full", None, {}, None),
            ("adakv", 0.5, {}, None),
            ("snapkv", 0.5, {"heads": "global"}, None),
            # Without the profile that it would go by
            ("snapkv", 0.5, {"heads": "calibrated"}, "snapkv gives all heads the same size"),
            ("sparsemm", 0.5, {}, "no profile of visual heads"),
        ],
    )
    def test_where_it_is_said(self, caplog, text_model, policy, budget, options, text):
        lines = self.said(caplog, text_model, policy, budget, **options)
        assert len(lines) == (text is not None)
        assert all(text in line for line in lines)

    def test_not_where_sizes_were_measured(self, caplog, text_model, tmp_path):
        made = profile_of(text_model)
        assert not self.said(caplog, text_model, "snapkv", profile=made)
        layers = Profile((0.4, 0.5, 0.6), budget=0.5)
        assert not self.said(caplog, text_model, "prefixkv", profile=layers)
        text_model.save_pretrained(tmp_path)
        made.save(tmp_path / FILE)
        loaded = type(text_model).from_pretrained(tmp_path).eval()
        assert not self.said(caplog, loaded, "snapkv")
        (tmp_path / FILE).write_text("{")
        assert not self.said(caplog, loaded, "snapkv")

    def test_not_where_policies_are_compared(self, caplog, text_model):
        (variant,) = parse_variants(["snapkv"])
        with variant.wrapped(text_model, 0.5):
            pass
        assert not caplog.records
        mmkv.calibrate(text_model, [make_inputs("llama", (60,))], "prefixkv")
        assert not caplog.records
        assert self.said(caplog, text_model, "snapkv"), "it is said again behind them"


@dataclass(frozen=True, kw_only=True)
class OneLayer(Layers):
    """One layer keeps less than all."""

    layer: int
    size: int

    def __call__(self, rows):
        return [
            [self.size if i == self.layer else n for i in range(rows.n_layers)]
            for n in rows.lengths
        ]


@dataclass(frozen=True, kw_only=True)
class OneHead(Heads):
    """One head of it does."""

    layer: int
    head: int
    size: int

    def __call__(self, scores, totals, *, layer_idx):
        assert len(scores) == 1
        return torch.where(torch.arange(scores.shape[1]) == self.head, self.size, scores.shape[2])[
            None
        ]


class TestMeasure:
    """The estimate, on tiny models whose replies are random words."""

    @pytest.fixture(autouse=True)
    def short_replies(self, monkeypatch):
        monkeypatch.setattr(calibration, "_REPLY", 16)

    def samples(self, n=2):
        return [make_inputs("llama", (60 + 10 * i,), seed=i) for i in range(n)]

    @pytest.mark.slow
    def test_it_is_near_the_divergence_measured_by_one_head_at_a_time(self, monkeypatch):
        """Small changes: shrink one head, run the model behind it, compare distributions."""
        model = make_model("llama")
        with torch.no_grad():  # gentle attention: second order is enough; query heads differ
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[:, :48] *= 0.05
                layer.self_attn.o_proj.weight[:, 48:] *= 0.12
        inputs = make_inputs("llama", (120,))
        monkeypatch.setattr(calibration, "_DRAWS", 400)
        got = mmkv.calibrate(model, [inputs], "condense").curves.costs
        reply = model.generate(**inputs, max_new_tokens=16, do_sample=False)[:, 120:-1]

        def log_p():
            with torch.no_grad():
                cache = model(**inputs, use_cache=True).past_key_values
                return model(input_ids=reply, past_key_values=cache).logits.log_softmax(-1)

        full = log_p()
        for i in range(L):
            for h in range(H):
                for level in (0.1, 0.2, 0.4):
                    n = round(level * 120)
                    layers = OneLayer(layer=i, size=(120 * (H - 1) + n) // H)
                    heads = OneHead(layer=i, head=h, size=n - 1)  # beside the sink
                    budget = ((L * H - 1) * 120 + n) / (L * H * 120)
                    with mmkv.wrapped(model, "condense", budget, layers=layers, heads=heads):
                        moved = log_p()
                    want = float((full.exp() * (full - moved)).sum(-1).mean())
                    assert want > 1e-7, "nothing was lost: nothing to compare"
                    k = calibration.LEVELS.index(level)
                    assert got[i][h][k] == pytest.approx(want, rel=0.3)

    @cases("name", CLASSES, zoo.FEW[0])
    def test_the_reply_is_read_again_as_it_was_said(self, monkeypatch, name):
        """Behind the whole prompt, padded or not, each token's likeliest next is the reply's."""
        model = copy.deepcopy(zoo.model_of(name))
        model.generation_config.eos_token_id = None
        never = model.generation_config.suppress_tokens or []
        by_itself = any(x in str(model.config) for x in ("mrope", "llama_4_scaling_beta"))
        inputs, again = zoo.inputs_of(model, "one" if by_itself else "padded"), []
        costs = calibration._Probe.costs

        def record(self, log_p, *rest):
            allowed = log_p.index_fill(-1, torch.tensor(never, dtype=torch.long), -torch.inf)
            again.append(allowed.argmax(-1))
            return costs(self, log_p, *rest)

        monkeypatch.setattr(calibration._Probe, "costs", record)
        monkeypatch.setattr(calibration, "_DRAWS", 4)
        profile = mmkv.calibrate(model, [inputs], "condense")
        assert profile.samples == len(inputs["input_ids"])
        said, _ = greedy(model, inputs, 16)
        assert torch.equal(again[0][:, :-1], said[:, 1:])
        numbers = torch.tensor(profile.curves.costs)
        assert bool((numbers[..., 0] > 0).all())
        assert not numbers[..., -1].any()
        if by_itself:
            with pytest.raises(ValueError, match=r"padded prompts .* one by one"):
                mmkv.calibrate(model, [zoo.inputs_of(model, "padded")], "condense")

    @pytest.mark.slow
    def test_rows_of_a_batch_are_samples(self, monkeypatch):
        """Padding, and what comes behind a reply's end, count for nothing."""
        model, inputs = make_model("llama"), make_inputs("llama", (120, 50))
        monkeypatch.setattr(calibration, "_DRAWS", 300)
        rows = [row_of(inputs, b) for b in range(2)]
        first = model.generate(**rows[0], max_new_tokens=16, do_sample=False)[0, 120:].tolist()
        end = next(x for i, x in enumerate(first) if i > 2 and x not in first[:i])
        model.generation_config.eos_token_id = end  # ends the first reply, not the other
        reply, valid = greedy(model, inputs, 16)
        assert valid.sum(-1).tolist() == [first.index(end), 15]
        assert reply[0, : first.index(end)].tolist() == first[: first.index(end)]
        together = mmkv.calibrate(model, [inputs], "condense")
        alone = mmkv.calibrate(model, rows, "condense")
        assert together.samples == alone.samples == 2
        for x, y in zip(*(sum(p.curves.costs, ()) for p in (together, alone)), strict=True):
            assert x[:6] == pytest.approx(y[:6], rel=0.5)

    @pytest.mark.slow
    def test_half_precision(self):
        """bfloat16 gives nearly what float32 does, small changes too."""
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            model = make_model("llama").to(dtype)
            model.generation_config.max_new_tokens = 16
            # Replies differ by rounding: the same one for both.
            profile = mmkv.calibrate(model, self.samples(1), "condense")
            found.append(torch.tensor(profile.curves.costs)[..., :-1].log().flatten())
        correlation = torch.corrcoef(torch.stack(found))[0, 1]
        assert float(correlation) > 0.9

    @pytest.mark.slow
    def test_it_leaves_nothing_behind(self):
        """Not on the model, nor in the generator of random numbers, whatever mode it runs in."""
        model, before = make_model("llama"), torch.random.get_rng_state()
        found = [mmkv.calibrate(model, self.samples(), "condense")]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                found.append(mmkv.calibrate(model, self.samples(), "condense"))
        assert found[0] == found[1] == found[2]
        assert torch.equal(before, torch.random.get_rng_state())
        assert not mmkv.is_wrapped(model)
        assert all(x.grad is None and x.requires_grad for x in model.parameters())

    def test_frozen_weights_and_a_word_that_can_never_come(self):
        model = make_model("llama").requires_grad_(False)
        bias = torch.zeros(120).index_fill(0, torch.tensor([7]), -torch.inf)
        model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
        assert mmkv.calibrate(model, self.samples(1), "condense").samples == 1

    def test_any_policy_with_calibrated_heads(self):
        options = {"heads": "calibrated", **short("snapkv")}
        profile = mmkv.calibrate(make_model("llama"), self.samples(1), "snapkv", **options)
        assert profile.policy == "snapkv"
        assert profile.curves != mmkv.calibrate(make_model("llama"), self.samples(1), "condense")
        with pytest.raises(ValueError, match="nothing to calibrate"):
            mmkv.calibrate(make_model("llama"), self.samples(1), "snapkv")

    def test_interrupted(self, monkeypatch):
        """Ctrl-C comes out, and the model is as it was."""
        model = make_model("llama")

        def interrupt(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(calibration, "evict", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mmkv.calibrate(model, self.samples(1), "condense")
        assert not mmkv.is_wrapped(model)
        monkeypatch.undo()
        mmkv.unwrap(mmkv.wrap(model, "condense", 0.2))

    @pytest.mark.parametrize("policy", ["condense", "prefixkv"])
    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            (torch.ones(2, 9, dtype=torch.long), "sample 0 is a Tensor, expected a list of"),
            ([make_inputs("llama", (30,)), "text"], "sample 1 is a str"),
            (make_inputs("llama", (30,)), "sample 0 is a str"),
            ([{"ids": 1}], r"sample 0 is a mapping of \['ids'\] without 'input_ids'"),
            ([], "calibrate: no samples"),
        ],
    )
    def test_samples_that_are_none(self, models, policy, samples, message):
        with pytest.raises(ValueError, match=message):
            mmkv.calibrate(models("llama"), samples, policy)

    def test_replies_too_short_to_say_anything(self, monkeypatch):
        monkeypatch.setattr(calibration, "_REPLY", 1)
        with pytest.raises(ValueError, match="no samples with a reply of two tokens"):
            mmkv.calibrate(make_model("llama"), self.samples(), "condense")
