"""What `mmkv plan` bounds, against caches that were made and figures that were published."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mmkv
from helpers import zoo
from helpers.commands import complaint, run
from helpers.marks import cases, since
from helpers.models import make_inputs, make_model
from mmkv import adapters
from mmkv.cache.allotment import empty_slots
from mmkv.cache.config import CacheConfig
from mmkv.eval.speed.cards import CARDS
from mmkv.eval.speed.models import SHAPES, make
from mmkv.eval.speed.plan import Load, Sizes, held, plan
from mmkv.loading import models
from mmkv.memory import Memory
from mmkv.planning import make_plan

LOAD = Load(batch=4, prompt=3072, new=33)


@pytest.fixture(scope="module")
def small():
    return Sizes.of(make(SHAPES["llama-120m-random"], "meta", "float32"))


def of(sizes, policy, budget=0.2, load=LOAD, card="h100", **options):
    kv_dtype = options.pop("kv_dtype", None)
    config = CacheConfig(mmkv.get_policy(policy, **options), budget, kv_dtype=kv_dtype)
    return plan(sizes, load, CARDS[card], config)


@cases(
    "policy, name, kv_dtype",
    [
        *((policy, "llama", None) for policy in ("full", "snapkv", "prefixkv", "h2o", "condense")),
        ("condense", "llava-llama", None),
        ("snapkv", "llama", "int4"),
        ("condense", "llama", "int4"),
    ],
    *(("prefixkv", "llama", None), ("condense", "llama", "int4")),
)
def test_planned_bytes_equal_real_cache(policy, name, kv_dtype):
    """But for spare slots, and what groups are told by."""
    model = make_model(name)
    inputs = make_inputs(name, (60, 60))
    with mmkv.wrapped(model, policy, 0.3, kv_dtype=kv_dtype):
        out = model.generate(
            **inputs, max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True
        )
    sizes, load = Sizes.of(make_model(name).to("meta")), Load(batch=2, prompt=60, new=19)
    config = CacheConfig(mmkv.get_policy(policy), 0.3, kv_dtype=kv_dtype)
    bound = plan(sizes, load, CARDS["h100"], config).cache_bytes
    slot = 2 * (4 if kv_dtype is None else 1) * sum(layer.pair for layer in sizes.layers)
    assert bound - slot <= out.past_key_values.nbytes <= bound + 80 * slot


@pytest.mark.parametrize(
    ("size", "kv_dtype", "decode"),
    [
        (
            Memory(1 / 8),
            None,
            "grow",
        ),  # condense waits for the copy probe, with room for empty slots
        (0.2, "int4", "grow"),  # groups' weights and members
        (0.2, "int4", "rounds"),  # queries for the next round
    ],
)
def test_planned_bytes_include_all_that_condense_holds(size, kv_dtype, decode):
    model, (prompt, new) = make_model("llama"), (600, 100)
    policy, empty = mmkv.get_policy("condense", decode=decode), make_model("llama").to("meta")
    config, _ = make_plan(empty, adapters.find(empty), policy, size, kv_dtype=kv_dtype)
    given = {"memory": size} if kv_dtype is None else {"budget": size, "kv_dtype": kv_dtype}
    with mmkv.wrapped(model, policy, **given), torch.no_grad():
        cache = model(**make_inputs("llama", (prompt,))).past_key_values
        held_bytes = [cache.nbytes]
        for _ in range(new):
            model(input_ids=torch.tensor([[9]]), past_key_values=cache)
        held_bytes.append(cache.nbytes)
    sizes = Sizes.of(empty)
    loads = (Load(1, prompt, generated) for generated in (0, new))
    bounds = [plan(sizes, load, CARDS["h100"], config).cache_bytes for load in loads]
    assert held_bytes[0] == pytest.approx(bounds[0], rel=0.03)
    assert bounds[1] <= held_bytes[1] * 1.01 <= 1.1 * bounds[1]  # free slots come on top


def test_heads_of_a_profile_share_blocks(tmp_path, capsys, monkeypatch):
    """What is padded counts: the slots of a real cache, which keeps what was asked for."""
    model, batch, prompt = make_model("llama"), 2, 300
    scores = ((0.5, 0.6), (1.0, 0.0))
    profile = mmkv.Profile(retrieval=scores)
    with mmkv.wrapped(model, "condense", 0.3, profile=profile) as wrapped:
        config = wrapped._mmkv.plan
        out = wrapped.generate(
            **make_inputs("llama", (prompt, prompt)), max_new_tokens=1, return_dict_in_generate=True
        )
    blocks = [block for layer in out.past_key_values.layers for block in layer.state.blocks]
    assert len(blocks) == 3
    assert out.past_key_values.report().kept_fraction == pytest.approx(0.3, abs=0.01)
    kept = sum(int((block.positions >= 0).sum()) for block in blocks)
    wide = sum(len(x.positions) * int((x.positions >= 0).sum(-1).max()) for x in blocks)
    empty = empty_slots(config, prompt)
    assert empty == pytest.approx((wide - kept) / (len(scores) * 2 * batch))
    assert empty > 0
    profile = mmkv.Profile(retrieval=(tuple(i / 31 for i in range(32)), (0.5,) * 32))
    profile.save(tmp_path / "profile.json")
    monkeypatch.setenv("COLUMNS", "200")
    shown = list[str]()
    for more in ([], ["--profile", tmp_path / "profile.json"]):
        words = ("plan", "llama-7b-2-layers-random", "--batch", 64, "--prompt", 2048)
        out, _, code = run(capsys, *words, "--budget", 0.2, *more)
        assert code == 0
        shown += re.findall(r"condense 0.2 +\S +([\d.]+)", out)
    plain, padded = map(float, shown)
    assert plain < padded < 1.15 * plain


def test_a_plan_of_equal_heads_logs_no_notice(capsys, monkeypatch, caplog):
    monkeypatch.setattr("mmkv.planning._logged_policies", set())
    for size in (["--budget", 0.2], ["--memory", "16x"]):
        words = ("plan", "llama-7b-2-layers-random", "--policy", "snapkv", *size)
        assert run(capsys, *words)[1:] == ("", 0)
    assert not caplog.records


def test_plan_refuses_retention(capsys):
    words = ("plan", "llama-7b-2-layers-random", "--policy", "xkv", "--option", "retention=0.9")
    assert "plan a budget without retention" in complaint(capsys, *words)


def test_plan_takes_the_budget_of_a_profile(tmp_path, capsys):
    path = tmp_path / "profile.json"
    mmkv.Profile(fractions=(0.5, 0.1), budget=0.3).save(path)
    words = ("plan", "llama-7b-2-layers-random", "--policy", "prefixkv", "--profile", path)
    out, _, code = run(capsys, *words)
    assert (code, "prefixkv 0.3" in out) == (0, True)


@pytest.mark.slow
def test_default_prompt_fits_the_model(capsys):
    models.find("smollm2")  # converted once, as other tests need it: else each command reads all
    for words, tokens in (
        (("smollm2",), "4,096 + 256"),
        (("smollm2", "--new", 6000), "2,192 + 6,000"),
    ):
        out, err, code = run(capsys, "plan", *words)
        assert (code, err, tokens in out) == (0, "", True)
    assert "beyond the 8,192 positions" in run(capsys, "plan", "smollm2", "--prompt", 9000)[1]


@cases(
    "name, budget, options",
    [
        ("snapkv", 0.2, {"decode": "rounds", "every": 16, "latest": 8}),
        ("snapkv", 30, {"decode": "rounds", "every": 8, "latest": 40}),
        ("snapkv", 0.4, {"decode": "ratio", "distance": 40}),
        ("prefixkv", 0.4, {}),
        ("full", 0.2, {}),
        # A floor under the share, and one above the prompt.
        ("condense", 0.2, {"least": 40, "decode": "rounds"}),
        ("condense", 20, {}),
        ("h2o", 0.2, {"least": 64}),
    ],
    "prefixkv",
)
def test_planned_tokens_equal_real_cache_after_each_step(name, budget, options):
    """Tokens of a layer, per head."""
    policy = mmkv.get_policy(name, **options, **({"window": 8} if name == "snapkv" else {}))
    model, sizes = make_model("llama", layers=3), []  # with a mean size that `held` is close to
    with mmkv.wrapped(model, policy, budget), torch.no_grad():
        cache = model(**make_inputs("llama", (60,))).past_key_values
        for _ in range(100):
            model(input_ids=torch.tensor([[9]]), past_key_values=cache)
            blocks = [x.held for layer in cache.compressed for x in layer.keeping().blocks]
            sizes.append(sum(int((x >= 0).sum()) for x in blocks) / sum(map(len, blocks)))
    wanted = [held(CacheConfig(policy, budget), 60, n, n_layers=3) for n in range(1, 101)]
    assert sizes == pytest.approx(wanted, abs=0.5)  # each row's size is rounded


def test_budget_invalid_for_wrap_raises(capsys):
    words = ("plan", "llama-7b-2-layers-random", "--policy", "snapkv", "--budget", 10)
    assert "budget=10 is below the 32 tokens that 'snapkv'" in complaint(capsys, *words)


@pytest.mark.slow
def test_paper_batches_fit():
    """Mistral-7B on A100s of 40 GB, 512 + 1,024 tokens (SqueezeAttention, table 3)."""
    mistral = "llama", (4096, 14336, 32, 32, 8, 32000, 32768)
    sizes = Sizes.of(make(mistral, "meta", "bfloat16"))
    loads = {n: Load(batch=n, prompt=512, new=1024) for n in (64, 128)}
    for load in loads.values():
        assert 64 < of(sizes, "full", load=load, card="a100-40").largest_batch < 128
    assert of(sizes, "squeeze", load=loads[128], card="a100-40").largest_batch >= 128


def test_times_follow_the_card(small):
    one = of(small, "full", load=Load(batch=1, prompt=8, new=1))
    assert one.token_s == pytest.approx(small.read(1) / 3.35e12, rel=0.01)
    # 2 operations a weight and token, and 4 a pair of query and key.
    pairs = 12 * 12 * 64 * 3072**2 / 2
    wanted = 4 * (2 * (small.body * 3072 + small.head) / 4 + 4 * pairs) / 989e12
    assert of(small, "full").prefill_s == pytest.approx(wanted)
    observed = of(small, "snapkv", window=32).prefill_s - wanted
    assert observed == pytest.approx(4 * 2 * 32 * 3072 * 12 * 12 * 64 / 989e12)
    assert of(small, "h2o").prefill_s > of(small, "condense").prefill_s > wanted


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        pytest.param("OPTForCausalLM", marks=since("5.18")),
        "MixtralForCausalLM",
        pytest.param("Glm4vMoeForConditionalGeneration", marks=pytest.mark.slow),
        pytest.param("Gemma4ForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_prefill_arithmetic_is_at_most_counted(name):
    """But for norms and half of attention's pairs; the head reads the last token alone."""
    model, card = zoo.make(name, "eager"), CARDS["h100"]._replace(bandwidth=1e30)
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.full((2, 16), 9), logits_to_keep=1)
    sizes = Sizes.of(zoo.make(name).to("meta"))
    bound = plan(sizes, Load(2, 16, 1), card, CacheConfig(mmkv.get_policy("full"), 1.0))
    assert 0.95 < bound.prefill_s * card.flops / counter.get_total_flops() < 1


def test_step_reads_only_used_experts():
    sizes = Sizes.of(zoo.make("MixtralForCausalLM").to("meta"))
    always = sizes.body + sizes.head
    # Each token passes two of four experts.
    experts = [(sizes.read(n) - always) / sizes.experts for n in (1, 2, 64)]
    assert experts == pytest.approx([0.5, 0.75, 1])


def test_fewer_bits_and_one_layer_at_a_time(small):
    float32, int4 = of(small, "snapkv"), of(small, "snapkv", kv_dtype="int4")
    assert int4.cache_bytes < float32.cache_bytes * 0.25
    every, one = of(small, "prefixkv"), of(small, "prefixkv", allocation="mini-prefill")
    assert every.peak_bytes > of(small, "snapkv").peak_bytes
    assert one.peak_bytes < every.peak_bytes
    assert of(small, "kvzip").peak_bytes == pytest.approx(every.peak_bytes)


@pytest.mark.slow
def test_plan_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for model in ("llava-1.5-7b-random", "smollm2-vision"):
        shown, _, code = run(capsys, "plan", model, "--batch", 2, "--policy", "snapkv")
        assert code == 0
        assert "full cache" in shown
        assert "int4" in shown
    whole = run(capsys, "plan", "smollm2-vision", "--policy", "full", "--budget", "0.2")[0]
    assert "│ full       │" in whole  # a policy that keeps everything has no size
    for wrong in (["--gpu", "abacus"], ["--dtype", "int1"], ["--budget", "x"]):
        assert run(capsys, "plan", "llama-8b-random", *wrong)[2] == 2
    assert run(capsys, "plan", "no/such-folder-here")[2] != 0
    assert torch.get_default_device().type == "cpu"
    monkeypatch.setenv("COLUMNS", "200")
    assert ", ".join(CARDS) in run(capsys, "plan", "--help")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("OPTForCausalLM", "FalconForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM"),
        *("Llama4ForCausalLM", "Qwen3_5ForCausalLM", "Gemma4ForConditionalGeneration"),
    ],
)
def test_plain_cache_bytes_are_exact_on_each_kind_of_layer(name):
    """What a plain cache holds after a prompt, layers with windows included."""
    model = zoo.model_of(name)
    inputs = zoo.inputs_of(model, "one")
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    of_layers = [getattr(layer, x, None) for layer in cache.layers for x in ("keys", "values")]
    held = [x for x in of_layers if x is not None]
    bound = plan(
        Sizes.of(zoo.make(name).to("meta")),
        Load(batch=1, prompt=inputs["input_ids"].shape[1], new=0),
        CARDS["h100"],
        CacheConfig(mmkv.get_policy("full"), 1.0),
    )
    assert bound.cache_bytes == pytest.approx(sum(4 * x.numel() for x in held), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "said"), [(4096, ""), (5000, "beyond the 4,096 positions")])
def test_tokens_beyond_model_length_are_noted(capsys, prompt, said):
    words = ("plan", "llava-1.5-7b-random", "--prompt", prompt - 256, "--new", 256)
    _, told, code = run(capsys, *words)
    assert (code, bool(told)) == (0, bool(said))
    assert said in told
