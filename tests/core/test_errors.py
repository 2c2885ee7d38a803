"""What cannot be honoured is refused: the message names the value and the remedy."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import DynamicCache, MistralConfig
from transformers import MistralForCausalLM as Mistral

import mmkv
from helpers.marks import slow_except
from helpers.models import make_inputs, make_model, row_of
from helpers.oracle import USUAL, generate, short


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"policy": "snap", "budget": 0.2},
            r"unknown policy 'snap'. Did you mean 'snapkv'.*prefixkv",
        ),
        ({"policy": "snapkv", "budget": 0.2, "windw": 3}, r"'windw'. Did you mean 'window'"),
        ({"policy": "streaming", "budget": 0.2, "window": 3}, r"'window' has no effect"),
        ({"policy": "full", "window": 3}, r"'window' has no effect"),
        ({"policy": "snapkv", "budget": 0.2, "pooling": "min"}, r"pooling='min'.*avg"),
        ({"policy": "snapkv", "budget": 0.2, "window": 0}, r"window=0"),
        ({"policy": "snapkv", "budget": 0.2, "decode": "fixed"}, r"decode='fixed'"),
        ({"policy": "local", "budget": 0.2, "heads": "adaptive"}, r"heads='adaptive'"),
        ({"policy": "local", "budget": 0.2, "layers": "prefix"}, r"layers='prefix'"),
        ({"policy": "prefixkv", "budget": 0.2, "heads": "adaptive"}, r"average_heads"),
        ({"policy": "adakv", "budget": 0.2, "alpha": 1.5}, r"alpha=1.5"),
        ({"policy": "xkv", "budget": 0.2, "retention": 0.5}, r"budget=0.2 and retention=0.5"),
        ({"policy": "snapkv"}, r"needs a budget"),
        ({"policy": "snapkv", "budget": 0.0}, r"budget=0.0.*\(0, 1\]"),
        ({"policy": "h2o", "budget": 0.2, "protect": "instruction"}, r"no image tokens"),
    ],
)
def test_wrap_refuses(text_model, call, message):
    before = sorted(vars(text_model))
    with pytest.raises(ValueError, match=message):
        mmkv.wrap(text_model, **call)
    assert sorted(vars(text_model)) == before
    assert text_model.config._attn_implementation == "sdpa"


def test_unsupported_models_are_named():
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*LlavaForConditionalGeneration"):
        mmkv.wrap(
            GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10)), "h2o", 0.5
        )
    sliding = MistralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=20, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"sliding_window=8"):
        mmkv.wrap(Mistral(sliding), "h2o", 0.5)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("snapkv", {"window": 30}),
        ("streaming", {"sinks": 30}),
        ("xkv", {"window": 20, "sinks": 10}),
        ("prefixkv", {"sinks": 30}),
    ],
)
def test_an_int_budget_below_what_is_always_kept_says_both_numbers(text_model, policy, options):
    before = sorted(vars(text_model))
    with pytest.raises(ValueError, match=r"budget=29 is below the 30 .*window=\d+, sinks=\d+"):
        mmkv.wrap(text_model, policy, 29, **options)
    assert sorted(vars(text_model)) == before
    with mmkv.wrapped(text_model, policy, 30, **options), torch.no_grad():
        cache = text_model(**make_inputs("llama", (100,)), use_cache=True).past_key_values
    assert [int((cache.kept(i)[0, 0] >= 0).sum()) for i in range(3)] == [30, 30, 30]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cache_implementation": "static"}, r"cache_implementation='static'.*unwrap"),
        ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded'"),
        ({"cache_implementation": "quantized"}, r"cache_implementation='quantized'"),
        ({"cache_implementation": "paged"}, r"continuous batching.*unwrap"),
        ({"prompt_lookup_num_tokens": 3}, r"assisted decoding"),
        ({"assistant_early_exit": 1}, r"assisted decoding"),
        ({"assistant_model": make_model("llama")}, r"assisted decoding"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha=0.6 asks for contrastive.*unwrap"),
        ({"dola_layers": "low", "trust_remote_code": True}, r"dola_layers='low' asks for"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, r"num_beam_groups=2"),
        ({"num_beams": 4, "force_words_ids": [[[5]]]}, r"force_words_ids=\[\[\[5\]\]\] asks for"),
        ({"past_key_values": DynamicCache()}, r"past_key_values is a DynamicCache"),
    ],
)
def test_generate_refuses_what_it_cannot_honour(text_model, kwargs, message):
    inputs = make_inputs("llama", (40,))
    with mmkv.wrapped(text_model, "h2o", 0.5):
        with pytest.raises(ValueError, match=message):
            text_model.generate(**inputs, max_new_tokens=3, **kwargs)
        generate(text_model, inputs, new=3)  # and goes on working


def test_the_cache_refuses_what_it_cannot_do(text_model):
    with mmkv.wrapped(text_model, "h2o", 0.5):
        *_, cache, _ = generate(text_model, make_inputs("llama", (40,)), new=2)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cropped"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="offloaded"):
        cache.offload(0)
    with pytest.raises(ValueError, match="nothing is kept yet"):
        type(cache)(text_model.config, cache.plan).kept(0)


def test_bad_batches_are_refused(text_model):
    inputs = make_inputs("llama", (40, 30))
    right = {**inputs, "attention_mask": inputs["attention_mask"].flip(-1)}
    empty = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    empty["attention_mask"][1, :-1] = 0
    empty["attention_mask"][1, -1] = 0
    with mmkv.wrapped(text_model, "h2o", 0.5), torch.no_grad():
        with pytest.raises(ValueError, match="pad on the left"):
            text_model(**right, use_cache=True)
        with pytest.raises(ValueError, match=r"ends in padding|padding alone"):
            text_model(**empty, use_cache=True)
        with pytest.raises(ValueError, match="inference"):
            text_model.train()(**inputs, use_cache=True)
        text_model.eval()
        cache = text_model(**inputs, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="3 tokens at once"):
            text_model(input_ids=inputs["input_ids"][:, :3], past_key_values=cache)


@pytest.mark.parametrize("policy", slow_except(mmkv.list_policies(), *USUAL))
def test_a_prompt_shorter_than_the_budget_loses_nothing(text_model, policy):
    inputs = make_inputs("llama", (10,))
    plain, *_ = generate(text_model, inputs, new=4)
    with mmkv.wrapped(text_model, policy, 64):
        logits, _, cache, _ = generate(text_model, inputs, new=4)
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=0)
    assert (
        "nothing is evicted" if policy == "full" else "row 0 lost nothing"
    ) in cache.report().notes[0]


@pytest.mark.parametrize("policy", slow_except(mmkv.list_policies(), *USUAL))
def test_a_one_token_prompt(text_model, policy):
    inputs = make_inputs("llama", (1,))
    plain, *_ = generate(text_model, inputs, new=3)
    chosen = mmkv.get_policy(policy)
    with mmkv.wrapped(text_model, policy, max(1, chosen.window_size + chosen.sinks)):
        logits, *_ = generate(text_model, inputs, new=3)
    # The first decode step attends to the prompt and to itself at any budget.
    torch.testing.assert_close(logits[:2], plain[:2], atol=1e-4, rtol=0)


class TestProfiles:
    def samples(self):
        return [make_inputs("llama", (n,), seed=n) for n in (60, 80, 100)]

    @pytest.mark.parametrize("policy", ["prefixkv", "xkv", "squeeze"])
    def test_calibrate_save_load_use(self, text_model, policy, tmp_path):
        profile = mmkv.calibrate(text_model, self.samples(), policy, 0.4, **short(policy))
        assert profile.samples == 3
        assert profile.budget == pytest.approx(0.4, abs=0.01)
        profile.save(tmp_path / "p.json")
        assert mmkv.Profile.load(tmp_path / "p.json") == profile
        inputs = make_inputs("llama", (200,))
        with (
            mmkv.wrapped(text_model, policy, profile=tmp_path / "p.json", **short(policy)),
            torch.no_grad(),
        ):
            cache = text_model(**inputs, use_cache=True).past_key_values
        sizes = [int((cache.kept(i)[0, 0] >= 0).sum()) for i in range(3)]
        assert sum(sizes) == round(profile.budget * 3 * 200)
        for n, f in zip(sizes, profile.fractions, strict=True):
            assert abs(n - f * 200) <= 1

    def test_layer_sizes_are_of_no_use_where_heads_share_the_model(self, text_model):
        profile = mmkv.calibrate(text_model, self.samples()[:1], "prefixkv", 0.4)
        with pytest.raises(ValueError, match=r"gives layer sizes, and heads='global' finds them"):
            mmkv.wrap(text_model, "snapkv", profile=profile, heads="global")

    def test_one_sample_is_its_own_profile(self, text_model):
        """Calibrated on a prompt, the offline sizes are that prompt's online ones."""
        inputs = make_inputs("llama", (90,))
        profile = mmkv.calibrate(text_model, [inputs], "prefixkv", 0.3)
        kept = []
        for given in ({"budget": 0.3}, {"profile": profile}):
            with mmkv.wrapped(text_model, "prefixkv", **given), torch.no_grad():
                cache = text_model(**inputs, use_cache=True).past_key_values
            kept.append([cache.kept(i) for i in range(3)])
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))

    def test_rows_of_a_batch_are_samples_without_their_padding(self, text_model):
        """A padded row counts by its own length, as it does alone."""
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

    def test_the_authors_files_are_read(self, text_model, tmp_path):
        """A JSON list of the fraction removed per layer."""
        (tmp_path / "p.json").write_text("[0.5, 0.9, 0.7]")
        profile = mmkv.Profile.load(tmp_path / "p.json")
        assert profile.fractions == pytest.approx((0.5, 0.1, 0.3))
        with mmkv.wrapped(text_model, "prefixkv", profile=profile), torch.no_grad():
            cache = text_model(**make_inputs("llama", (100,)), use_cache=True).past_key_values
        assert [int((cache.kept(i)[0, 0] >= 0).sum()) for i in range(3)] == [50, 10, 30]

    def test_the_published_files_are_read(self):
        from pathlib import Path

        folder = Path(__file__).parents[3] / "shared/data/prefixkv-profiles"
        if not folder.is_dir():
            pytest.skip(f"the authors' profiles are not at {folder}")
        files = sorted(folder.glob("*.json"))
        assert files
        for file in files:
            profile = mmkv.Profile.load(file)
            assert len(profile.fractions) == (40 if "13b" in file.name else 32)
            assert profile.budget == pytest.approx(1 - float(file.stem.rsplit("_", 1)[1]), abs=0.01)


def test_report(models):
    """Counts, bytes and shares by hand; plain data; a table."""
    from rich.console import Console

    model, inputs = models("llama"), make_inputs("llama", (100, 60))
    with mmkv.wrapped(model, "snapkv", 0.4, window=6), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    report = cache.report()
    assert report.layers[0].kept == [[40, 40], [24, 24]]
    assert report.kept_fraction == pytest.approx(0.4)
    assert report.full_nbytes == 3 * 2 * 2 * 100 * 16 * 2 * 4
    assert report.nbytes == sum(x.nbytes for x in report.layers) == cache.nbytes
    assert 0 < report.retained < 1
    assert json.loads(json.dumps(report.to_dict()))["policy"] == "snapkv"
    console = Console(width=100, record=True)
    console.print(report)
    assert "40.0%" in console.export_text()


def test_third_parties_register_policies(text_model):
    from dataclasses import dataclass

    from mmkv import registry
    from mmkv.policy import Score

    class SmallNorm(Score):
        def __call__(self, layer):
            return -layer.key.norm(dim=-1).float()

    @mmkv.register_policy("last-key-norm", aliases=("norm",))
    @dataclass(frozen=True, kw_only=True)
    class KeyNorm(mmkv.Policy):
        """Keep keys of small norm."""

        score: Score = SmallNorm()

    try:
        assert "last-key-norm" in mmkv.list_policies()
        inputs = make_inputs("llama", (50,))
        with mmkv.wrapped(text_model, "norm", 0.3):
            *_, cache, _ = generate(text_model, inputs, new=3)
        assert cache.report().kept_fraction < 0.4
        with pytest.raises(ValueError, match="taken by"):
            mmkv.register_policy("snapkv")(type("Other", (mmkv.Policy,), {}))
        with pytest.raises(TypeError, match="not a subclass"):
            mmkv.register_policy("other")(dict)
    finally:
        registry._policies.pop("last-key-norm")
        registry._aliases.pop("norm")


def test_importing_is_fast():
    """`import mmkv` loads neither torch nor transformers."""
    import subprocess
    import sys

    code = "import mmkv, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_default_transformers_paths_are_untouched():
    """Registering our attention changes no model that is not wrapped."""
    model = make_model("llama")
    ids = torch.tensor([[3, 4, 5]])
    with mmkv.wrapped(make_model("llama"), "h2o", 0.5):
        out = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
    assert type(out.past_key_values) is DynamicCache
