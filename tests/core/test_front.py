"""What a caller hands in: models inside others, numbers, names, and policies of other packages."""

import copy
import os
import re
import subprocess
import sys
import textwrap
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import mmkv
from helpers import commands
from helpers.marks import cases
from helpers.masking import generate
from helpers.models import make_inputs, make_model
from mmkv import budgets
from mmkv.wrapping import is_wrapped

INPUTS = make_inputs("llama", (60, 40))


def answer(model: Any) -> tuple[torch.Tensor, Any]:
    """Logits [6, B, V] of six greedy steps, and the cache."""
    logits, _, cache = generate(model, INPUTS, new=6)
    return logits, cache


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def adapted(model: nn.Module, kind: str = "LoraConfig", **options: Any) -> Any:
    """Inside PEFT's own class, which itself asks transformers for a name that is deprecated."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config).eval()


AROUND = {
    "compiled": compiled,
    "lora": lambda x: adapted(x, init_lora_weights=True),
    "both": lambda x: compiled(adapted(x, init_lora_weights=True)),
}
warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@warns
@cases("around", AROUND, "both")
def test_a_model_is_found_inside_another(text_model, around):
    with mmkv.wrapped(make_model("llama"), "h2o", 0.3) as plain:
        expected, cache = answer(plain)
    full, _ = answer(text_model)
    outer = AROUND[around](text_model)
    assert not is_wrapped(outer)
    assert mmkv.wrap(outer, "h2o", 0.3) is outer
    assert is_wrapped(outer)
    assert is_wrapped(text_model)
    logits, found = answer(outer)
    # Another instance of the model: where weights lie in memory shows in the last digit.
    torch.testing.assert_close(logits, expected)
    assert torch.equal(found.kept(1), cache.kept(1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is wrapped already .*'h2o'"):
        mmkv.wrap(text_model, "snapkv", 0.3)
    assert mmkv.unwrap(outer) is outer
    assert not is_wrapped(text_model)
    torch.testing.assert_close(answer(outer)[0], full)
    # From the inside too.
    mmkv.wrap(text_model, "h2o", 0.3)
    assert is_wrapped(outer)
    assert mmkv.unwrap(text_model) is text_model
    assert not is_wrapped(outer)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not wrapped"):
        mmkv.unwrap(outer)


def test_block_may_unwrap_its_model_and_wrap_it_anew(text_model):
    def unwrap_and_fail():
        with mmkv.wrapped(text_model, "h2o", 0.3):
            raise KeyError(type(mmkv.unwrap(text_model)).__name__)

    with pytest.raises(KeyError, match="LlamaForCausalLM"):
        unwrap_and_fail()
    with mmkv.wrapped(text_model, "h2o", 0.3):
        mmkv.wrap(mmkv.unwrap(text_model), "snapkv", 0.3)
    assert is_wrapped(text_model)


@warns
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LoraConfig", {"init_lora_weights": False}),
        ("PromptTuningConfig", {"num_virtual_tokens": 7}),
        pytest.param(
            *("PromptEncoderConfig", {"num_virtual_tokens": 7, "encoder_hidden_size": 16}),
            marks=pytest.mark.slow,
        ),
        ("PrefixTuningConfig", {"num_virtual_tokens": 7}),
    ],
)
def test_adapters_of_peft(kind, options):
    torch.manual_seed(1)
    model = adapted(make_model("llama"), kind, **options)
    if kind == "PrefixTuningConfig":  # it has a cache of its own
        with pytest.raises(ValueError, match=r"PeftModelForCausalLM with prefix tuning.*LoRA"):
            mmkv.wrap(model, "h2o", 0.3)
        assert not is_wrapped(model)
        return
    plain, own = answer(model)
    seen = 60 + 5 + options.get("num_virtual_tokens", 0)
    if own.get_seq_length() != seen:
        pytest.skip("this PEFT does not know this transformers' cache, and prompts at each step")
    with mmkv.wrapped(model, "h2o", 1.0):
        full, _ = answer(model)
    torch.testing.assert_close(full, plain, atol=1e-4, rtol=0)
    with mmkv.wrapped(model, "h2o", 0.3):
        logits, cache = answer(model)
        if "num_virtual_tokens" in options:
            with pytest.raises(ValueError, match=r"trained prompt of P\w+ .*model.generate"):
                mmkv.read(model, INPUTS)
    assert cache.report().kept_fraction < 0.4
    assert cache.get_seq_length() == seen
    assert not torch.allclose(logits, plain, atol=1e-2)
    assert torch.equal(answer(model)[0], plain)


@warns
def test_rows_with_adapters_of_their_own():
    """A score that reads the output projection is refused; each row of another is as alone."""
    options = {"target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}
    model = adapted(make_model("llama"), **options)
    rows = INPUTS | {"adapter_names": ["default", "__base__"], "max_new_tokens": 3}
    with (
        mmkv.wrapped(model, "condense", 0.3, least=0),
        pytest.raises(ValueError, match=r"adapter_names: .*score='window'"),
    ):
        model.generate(**rows)
    with mmkv.wrapped(model, "snapkv", 0.3, window=8):
        both = model.generate(**rows)
        for i, name in enumerate(rows["adapter_names"]):
            row = {k: x[i : i + 1] for k, x in INPUTS.items()} | {"adapter_names": [name]}
            assert torch.equal(model.generate(**row, max_new_tokens=3)[0], both[i])


@warns
def test_an_adapter_around_the_attention_module():
    model = adapted(make_model("llama"), "AdaptionPromptConfig", adapter_len=4, adapter_layers=2)
    with mmkv.wrapped(make_model("llama"), "condense", 0.3, least=0) as plain:
        expected, _ = answer(plain)
    with mmkv.wrapped(model, "condense", 0.3, least=0):  # its gates start at zero
        torch.testing.assert_close(answer(model)[0], expected)


@torch.no_grad()
def test_a_data_parallel_model(text_model, monkeypatch):
    # No accelerator, also where another test has registered one that pretends to be.
    parallel = sys.modules[nn.DataParallel.__module__]
    monkeypatch.setattr(parallel, "_get_available_device_type", lambda: None)
    with mmkv.wrapped(make_model("llama"), "h2o", 0.3) as plain:
        expected = plain(**INPUTS, use_cache=True)
    outer = nn.DataParallel(text_model)
    assert mmkv.wrap(outer, "h2o", 0.3) is outer
    found = outer(**INPUTS, use_cache=True)
    torch.testing.assert_close(found.logits, expected.logits)
    assert torch.equal(found.past_key_values.kept(1), expected.past_key_values.kept(1))
    mmkv.unwrap(outer)
    outer.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"DataParallel over 2 devices.*model\.module"):
        mmkv.wrap(outer, "h2o", 0.3)


@torch.no_grad()
def test_a_distributed_model(text_model):
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        outer = nn.parallel.DistributedDataParallel(text_model)
        mmkv.wrap(outer, "h2o", 0.3)
        cache = outer(**INPUTS, use_cache=True).past_key_values
        assert cache.report().kept_fraction < 0.4
        assert is_wrapped(mmkv.unwrap(outer)) is is_wrapped(text_model) is False
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_compiled_model_is_as_fast_as_it_was(when):
    """What a cache keeps, no graph foresees: the decoder is not compiled, piece by piece."""
    model, graphs = make_model("llama"), []
    ids = INPUTS["input_ids"][:1]

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def steps(called):
        out, found = called(input_ids=ids, use_cache=True), []
        for _ in range(4):
            found.append(out.logits[:, -1])
            new, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            out = called(input_ids=new, past_key_values=cache, use_cache=True)
        return torch.cat(found), out.past_key_values

    with mmkv.wrapped(model, "local", 0.3):
        expected, cache = steps(model)
    outer = torch.compile(model, backend=backend)
    with mmkv.wrapped(outer if when == "before" else model, "local", 0.3):
        found, compiled_cache = steps(outer)
    torch.testing.assert_close(found, expected)
    assert torch.equal(compiled_cache.kept(0), cache.kept(0))
    assert compiled_cache.report().kept_fraction < 0.4
    assert len(graphs) <= 2, "one for a prompt's logits, one for a step's"


def test_a_notebook_shows_one_line(capsys):
    """By IPython's protocol for an object that displays itself."""
    model = mmkv.wrap(make_model("llama"), "local", 0.3)
    copy.deepcopy(model)._ipython_display_()
    said = "LlamaForCausalLM, wrapped: policy='local', budget=0.3; print(model) shows its modules\n"
    assert capsys.readouterr().out == said
    assert not hasattr(mmkv.unwrap(model), "_ipython_display_")


class Pipeline:
    """Stands in for transformers' pipelines."""

    def __init__(self) -> None:
        self.model = make_model("llama")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("llava-hf/llava-1.5-7b-hf", r"loaded model, not the path or name 'llava-hf/.*from_pretr"),
        (None, r"loaded model, not None: .*from_pretrained"),
        (3, r"loaded model, not an int: .*from_pretrained"),
        (LlamaForCausalLM, r"not the class LlamaForCausalLM: .*from_pretrained"),
        (Pipeline(), r"not the Pipeline around it: .*mmkv\.wrap\(x\.model"),
        ((make_model("llama"), "processor"), r"model alone: model, processor = "),
    ],
)
def test_non_model_raises_with_remedy(given, message):
    calls = (lambda x: mmkv.wrap(x, "h2o", 0.3), mmkv.unwrap, is_wrapped)
    for call in calls:
        with pytest.raises(ValueError, match=message) as error:
            call(given)
        assert len(str(error.value)) <= 200  # two lines of 100 characters


@pytest.mark.parametrize("name", ["llama", "llava-llama"])
@torch.no_grad()
def test_config_changes_while_wrapped_take_effect_and_last(name):
    """What is set on the config while the model is wrapped has its effect, and outlasts it."""
    model, inputs = make_model(name), make_inputs(name, (60,))
    decoder, text = model.get_decoder(), model.config.get_text_config()
    mmkv.wrap(model, "h2o", 0.3)
    assert isinstance(decoder.config, type(text))
    assert decoder.config.to_diff_dict() == text.to_diff_dict()
    text.use_cache = False
    assert decoder.config.use_cache is False
    decoder.config.use_cache = True
    assert text.use_cache is True
    model.set_attn_implementation({"vision_config": "eager"})
    assert decoder.config._attn_implementation == "mmkv_sdpa"
    decoder.config._attn_implementation = {"other": "eager"}
    assert text._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert decoder.config._attn_implementation == "mmkv_eager"
    cache = model(**inputs, use_cache=True).past_key_values
    assert cache.report().kept_fraction < 0.4
    type(decoder)(decoder.config)  # another model of the same config
    assert mmkv.unwrap(model).get_decoder().config is text
    assert text._attn_implementation == "eager"


def test_a_copy_of_a_wrapped_model_has_its_own_config(text_model):
    mmkv.wrap(text_model, "h2o", 0.3)
    twin = copy.deepcopy(text_model)
    twin.config.use_cache = False
    assert twin.model.config.use_cache is False
    assert text_model.model.config.use_cache is True
    assert twin.model.config is twin.model.layers[0].self_attn.config
    assert mmkv.unwrap(twin).model.config is twin.config
    assert text_model.model.config._attn_implementation == "mmkv_sdpa"
    assert copy.copy(text_model.model.config)._attn_implementation == "sdpa"


def test_decoder_of_wrapped_model_raises(text_model):
    other = LlamaForCausalLM(text_model.config)
    other.model = text_model.model
    mmkv.wrap(text_model, "h2o", 0.3)
    with pytest.raises(ValueError, match=r"decoder of this LlamaForCausalLM is wrapped already"):
        mmkv.wrap(other, "h2o", 0.3)


class TestPoliciesOfOtherPackages:
    """Distributions in a folder of their own, and a fresh interpreter that finds them."""

    GOOD = """
        from dataclasses import dataclass
        import mmkv
        from mmkv.scores.window import WindowAttention

        @dataclass(frozen=True, kw_only=True)
        class Mine(mmkv.Policy):
            score: mmkv.policy.Score = WindowAttention(window=8)
        """

    @pytest.fixture
    def install(self, tmp_path):
        def add(distribution: str, entries: str, place: str = "", **modules: str) -> None:
            info = tmp_path / place / f"{distribution}-1.2.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.2\n")
            (info / "entry_points.txt").write_text(f"[mmkv.policies]\n{entries}\n")
            for name, code in modules.items():
                (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))

        return add

    @pytest.fixture
    def run(self, tmp_path):
        def python(code: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", textwrap.dedent(code)],
                env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'later'}"},
                capture_output=True,
                text=True,
            )

        return python

    # By the end of the package's name: its code, and why it is skipped.
    BROKEN: ClassVar = {
        "dict": ("Mine = dict", r"TypeError: acme_dict:Mine is not a subclass of mmkv\.Policy"),
        "exit": ("raise SystemExit('out')", r"SystemExit: out"),
        "half": (
            GOOD + "mmkv.register_policy('other')(Mine); 1 / 0",
            r"ZeroDivisionError: division by zero",
        ),
        "import": (
            "import no_such_module",
            r"ModuleNotFoundError: No module named 'no_such_module'",
        ),
        "nothing": ("", r"AttributeError: .*Mine"),
    }

    @pytest.mark.slow
    def test_broken_plugins_raise_when_requested(self, install, run):
        for kind, (code, _) in self.BROKEN.items():
            entry, module = f"mine-{kind} = acme_{kind}:Mine", {f"acme_{kind}": code}
            install(f"{kind}-policies", entry, **module)
        done = run(
            f"""
            import mmkv
            kinds = {[*self.BROKEN]}
            assert "snapkv" in mmkv.list_policies()
            assert not {{*(f"mine-{{x}}" for x in kinds), "other"}} & set(mmkv.list_policies())
            for kind in kinds * 2:
                try:
                    mmkv.get_policy(f"Mine-{{kind}}")
                except ValueError as error:
                    print(error, "because", type(error.__cause__).__name__)
            """
        )
        said, n = done.stdout.splitlines(), len(self.BROKEN)
        assert said[:n] == said[n:]
        lines = zip(sorted(done.stderr.splitlines()), said[:n], strict=True)
        for (kind, (_, why)), (skipped, refused) in zip(self.BROKEN.items(), lines, strict=True):
            named = rf"policy 'mine-{kind}' of {kind}-policies 1\.2"
            assert re.fullmatch(f"{named} is skipped: {why}.*", skipped)
            cause = why.partition(":")[0]
            assert re.match(rf"{named} could not be loaded: {why}.* because {cause}$", refused)

    @pytest.mark.slow
    def test_two_distributions_with_one_name(self, install, run):
        """The first in the alphabet, wherever they are installed."""
        install("b-two", "mine = two:Mine", two=self.GOOD.replace("8", "9"))
        install("a-one", "Mine = one:Mine", place="later", one=self.GOOD)
        done = run("import mmkv; print(mmkv.get_policy('mine').score.window)")
        assert done.stdout == "8\n"
        assert "'mine' of b-two 1.2 is skipped: ValueError" in done.stderr
        assert "'mine' is taken by one.Mine" in done.stderr

    @pytest.mark.slow
    def test_plugin_may_list_policies_while_loading(self, install, run):
        """With two names, and registered by itself."""
        code = self.GOOD + "assert 'h2o' in mmkv.list_policies()\n"
        code = code.replace("@dataclass", "@mmkv.register_policy('mine')\n        @dataclass")
        install("acme", "mine = code:Mine\nacme-mine = code:Mine", code=textwrap.dedent(code))
        done = run(
            "import mmkv; p = mmkv.get_policy('acme_mine'); print(p.score.window, p.name); "
            "print('mine' in mmkv.list_policies(), 'acme-mine' in mmkv.list_policies())"
        )
        assert (done.stdout, done.stderr) == ("8 mine\nTrue False\n", "")


def test_names_in_any_case():
    for canonical, names in (
        ("adakv", ("AdaKV", "Ada-KV", "ADA_SNAPKV")),
        ("ada-pyramidkv", ("ada_pyramidkv", "Ada-PyramidKV")),
        ("streaming", ("StreamingLLM",)),
    ):
        assert {mmkv.get_policy(name).name for name in names} == {canonical}


def same(found, meant):
    assert (found, type(found)) == (meant, type(meant))


class TestBudgets:
    def test_budget_accepts_types_of_numbers(self):
        for given in (0.2, np.float16(0.2), np.float32(0.2), Decimal("0.2")):
            same(budgets.number(given), 0.2)
        for given in (1.0, Fraction(1), Decimal(1)):
            same(budgets.number(given), 1.0)
        for given in (40, np.int64(40)):
            same(budgets.number(given), 40)
        same(budgets.number(1), 1)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (True, r"budget=True: expected a float in \(0, 1\], a text such as '20%', or an int"),
            ("much", r"budget 'much': expected a fraction such as 0.2 or 20%, or a number"),
            ("120%", "budget=120%: a share must be above 0"),
            ([0.2], r"budget=\[0.2\]: expected a float"),
            (0, "budget=0: must be above 0"),
            (np.int64(-3), "budget=-3: must be above 0"),
            (1.5, r"budget=1.5: a share must be above 0 and up to 1\.0"),
            (float("nan"), "budget=nan: a share"),
            (float("inf"), "budget=inf: a share"),
            (np.float32(40), r"budget=40.0: a share.*use an int for a number of tokens"),
            (Fraction(3, 2), "budget=3/2: a share"),
            (Decimal("NaN"), "budget=NaN: a share"),
        ],
    )
    def test_invalid_budgets_raise(self, given, message, text_model):
        with pytest.raises(ValueError, match=message):
            budgets.number(given)
        for policy in ("h2o", "full"):
            with pytest.raises(ValueError, match=message):
                mmkv.wrap(text_model, policy, given)

    def test_parse_accepts_texts(self):
        for text in ("0.2", "20%", " 20 % ", "1/5"):
            same(budgets.parse(text), 0.2)
        for text, meant in (("28.7%", 0.287), ("100%", 1.0), ("1.0", 1.0), ("1", 1), ("200", 200)):
            same(budgets.parse(text), meant)
        for text in ("much", "", "x%", "1/", "1/0"):
            with pytest.raises(ValueError, match=f"budget '{text}': expected a fraction such as"):
                budgets.parse(text)
        for text, value in (
            ("-5", -5),
            ("1.5", 1.5),
            ("150%", "150%"),
            ("0%", "0%"),
            ("nan", "nan"),
        ):
            with pytest.raises(ValueError, match=f"budget={value}:"):
                budgets.parse(text)

    def test_parse_list_refuses_duplicates(self):
        assert list(map(repr, budgets.parse_list("10%, 0.25,128,1,1.0"))) == [
            "0.1", "0.25", "128", "1", "1.0",
        ]  # fmt: skip
        for text, again in (("0.1,10%", "10%"), ("1,2,1", "1")):
            with pytest.raises(ValueError, match=f"budget {again} is named twice"):
                budgets.parse_list(text)
        with pytest.raises(ValueError, match="budget '': expected"):
            budgets.parse_list("0.1,")

    def test_one_token_is_not_everything(self):
        assert "one token" in budgets.note(1)
        assert [budgets.note(b) for b in (1.0, 2, 0.2, None)] == [""] * 4
        assert [budgets.named(b) for b in (1, 1.0, 0.2, 200)] == ["1", "1.0", "0.2", "200"]

    @pytest.mark.parametrize(
        "command",
        [
            ("bench", "--budgets", "1,1.0", "--policies", "local", "--out", "."),
            ("eval", "none", "--budgets", "1"),
            ("plot", "--budget", "1", "--suite", "none"),
        ],
    )
    def test_commands_warn_of_one_token_budget(self, command, capsys):
        said = commands.run(capsys, *command)[1]
        assert "mmkv: a budget of 1 is one token per layer and head; 1.0 or 100% keeps" in said
        assert "twice" not in said

    def test_a_profile_keeps_a_fraction(self, capsys):
        said = commands.run(capsys, "calibrate", "--budget", 40)[1]
        assert "--budget 40: a profile keeps a fraction" in said
