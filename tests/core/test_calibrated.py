"""Profiles in a model's folder, policies that give heads one size, and samples of calibration."""

import pytest
import torch

import mmkv
from helpers.models import make_inputs, make_model
from helpers.oracle import generate, short
from helpers.profiles import profile_of
from mmkv import planning
from mmkv.eval.variants import parse_variants
from mmkv.profiles import FILE, Profile
from mmkv.registry import exact_share

L, H = 2, 2


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

    def test_own_profile_is_used_unless_sizes_are_chosen(self, loaded, tmp_path):
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
        assert len({n for h in self.kept(loaded, **snapkv, heads="retrieval") for n in h}) > 2

    def test_missing_unfitting_or_broken_own_profile(self, loaded, tmp_path, monkeypatch):
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
        monkeypatch.setattr(planning, "_logged_policies", set())

    def said(self, caplog, model, policy, budget=0.5, **options):
        caplog.clear()
        mmkv.unwrap(mmkv.wrap(model, policy, budget, **options))
        return [x.getMessage() for x in caplog.records if x.name == planning.__name__]

    def test_warning_is_one_line_once_a_policy(self, caplog, text_model):
        for policy in ("snapkv", "h2o"):
            (line,) = self.said(caplog, text_model, policy)
            assert line.startswith(f"{policy} gives all heads the same size")
            assert "heads='retrieval'" in line
            assert "\n" not in line
            assert not self.said(caplog, text_model, policy, 0.2)
        (line,) = self.said(caplog, text_model, "streaming")
        assert "heads='retrieval'" not in line  # which it refuses
        assert "policy 'condense'" in line
        assert self.said(caplog, text_model, "sparsemm")
        assert not self.said(caplog, text_model, "sparsemm")

    @pytest.mark.parametrize(
        ("policy", "budget", "options", "text"),
        [
            ("snapkv", 1.0, {}, None),
            ("full", None, {}, None),
            ("adakv", 0.5, {}, None),
            ("snapkv", 0.5, {"heads": "global"}, None),
            ("sparsemm", 0.5, {}, "no profile of visual heads"),
        ],
    )
    def test_warning_depends_on_policy(self, caplog, text_model, policy, budget, options, text):
        lines = self.said(caplog, text_model, policy, budget, **options)
        assert len(lines) == (text is not None)
        assert all(text in line for line in lines)

    def test_measured_sizes_give_no_warning(self, caplog, text_model, tmp_path):
        made = profile_of(text_model)
        assert not self.said(caplog, text_model, "snapkv", profile=made)
        layers = Profile((0.4, 0.6), budget=0.5)
        assert not self.said(caplog, text_model, "prefixkv", profile=layers)
        text_model.save_pretrained(tmp_path)
        made.save(tmp_path / FILE)
        loaded = type(text_model).from_pretrained(tmp_path).eval()
        assert not self.said(caplog, loaded, "snapkv")
        (tmp_path / FILE).write_text("{")
        assert not self.said(caplog, loaded, "snapkv")

    def test_compared_policies_give_no_warning(self, caplog, text_model):
        (variant,) = parse_variants(["snapkv"])
        with variant.wrapped(text_model, 0.5):
            pass
        assert not caplog.records
        mmkv.calibrate(text_model, [make_inputs("llama", (60,))], "prefixkv")
        assert not caplog.records
        assert self.said(caplog, text_model, "snapkv"), "it is said again behind them"


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
def test_wrong_samples_raise(models, samples, message):
    with pytest.raises(ValueError, match=message):
        mmkv.calibrate(models("llama"), samples)


def test_a_policy_of_fixed_sizes_raises(models):
    with pytest.raises(ValueError, match="nothing to calibrate"):
        mmkv.calibrate(models("llama"), [make_inputs("llama", (30,))], "condense")
