"""Profiles of layer sizes: measured, saved, and read from the authors' files."""

from pathlib import Path

import pytest
import torch

import mmkv
from helpers.models import make_inputs, row_of
from helpers.oracle import depth, prefilled, short


class TestProfiles:
    def samples(self):
        return [make_inputs("llama", (n,), seed=n) for n in (60, 80, 100)]

    @pytest.mark.parametrize("policy", ["prefixkv", "xkv", "squeeze"])
    def test_calibrate_save_load_use(self, models, policy, tmp_path):
        model = models("llama", depth(policy))
        L = model.config.num_hidden_layers
        profile = mmkv.calibrate(model, self.samples(), policy, 0.4, **short(policy))
        assert profile.samples == 3
        assert profile.budget == pytest.approx(0.4, abs=0.01)
        profile.save(tmp_path / "p.json")
        assert mmkv.Profile.load(tmp_path / "p.json") == profile
        inputs = make_inputs("llama", (200,))
        given = {"profile": tmp_path / "p.json", **short(policy)}
        cache = prefilled(model, inputs, policy, **given)
        sizes = [int((cache.kept(i)[0, 0] >= 0).sum()) for i in range(L)]
        assert sum(sizes) == round(profile.budget * L * 200)
        for n, f in zip(sizes, profile.fractions, strict=True):
            assert abs(n - f * 200) <= 1

    def test_one_sample_is_its_own_profile(self, text_model):
        """Calibrated on a prompt, the offline sizes are that prompt's online ones."""
        inputs = make_inputs("llama", (90,))
        profile = mmkv.calibrate(text_model, [inputs], "prefixkv", 0.3)
        kept = []
        for given in ({"budget": 0.3}, {"profile": profile}):
            cache = prefilled(text_model, inputs, "prefixkv", **given)
            kept.append([cache.kept(i) for i in range(len(cache.layers))])
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))

    def test_rows_of_a_batch_are_samples_without_their_padding(self, text_model):
        inputs = make_inputs("llama", (120, 50, 33))
        together = mmkv.calibrate(text_model, [inputs], "prefixkv", 0.4)
        rows = [row_of(inputs, b) for b in range(3)]
        alone = mmkv.calibrate(text_model, rows, "prefixkv", 0.4)
        assert together.samples == alone.samples == 3
        assert together.fractions == pytest.approx(alone.fractions)
        single = [mmkv.calibrate(text_model, [row], "prefixkv", 0.4).fractions for row in rows]
        mean = [sum(layer) / 3 for layer in zip(*single, strict=True)]
        assert together.fractions == pytest.approx(mean)
        assert together.budget == pytest.approx(0.4, abs=0.01)

    def test_budgets_are_fractions_also_as_text(self, text_model):
        sample = make_inputs("llama", (60,))
        found = mmkv.calibrate(text_model, [sample], "prefixkv", "40%")
        assert found == mmkv.calibrate(text_model, [sample], "prefixkv", 0.4)
        with pytest.raises(ValueError, match="budget=40: a profile keeps a fraction"):
            mmkv.calibrate(text_model, [sample], "prefixkv", 40)

    def test_the_authors_files_are_read(self, text_model, tmp_path):
        """A JSON list of the fraction removed per layer."""
        (tmp_path / "p.json").write_text("[0.5, 0.9]")
        profile = mmkv.Profile.load(tmp_path / "p.json")
        assert profile.fractions == pytest.approx((0.5, 0.1))
        cache = prefilled(text_model, make_inputs("llama", (100,)), "prefixkv", profile=profile)
        assert [int((cache.kept(i)[0, 0] >= 0).sum()) for i in range(2)] == [50, 10]

    def test_the_published_files_are_read(self):
        folder = Path(__file__).parents[3] / "shared/data/prefixkv-profiles"
        if not folder.is_dir():
            pytest.skip(f"the authors' profiles are not at {folder}")
        files = sorted(folder.glob("*.json"))
        assert files
        for file in files:
            profile = mmkv.Profile.load(file)
            assert len(profile.fractions) == (40 if "13b" in file.name else 32)
            assert profile.budget == pytest.approx(1 - float(file.stem.rsplit("_", 1)[1]), abs=0.01)
