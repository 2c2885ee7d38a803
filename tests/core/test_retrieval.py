"""Head sizes by the copy probe: what it measures, what follows, and what is kept of it."""

import copy
import logging

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import generate, naive_attention, prefilled
from mmkv import adapters
from mmkv.attach import copy_probe
from mmkv.loading import cache_folder
from mmkv.profiles import Profile
from mmkv.sizes.profiled import HeadTable

L, H = 2, 2
SCORES = ((0.0, 0.02), (0.9, 0.05))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def probed(monkeypatch):
    """The probe finds `SCORES`, and says how often it was asked."""
    asked = []

    def measure(attachment):
        asked.append(attachment)
        return profile_of(attachment.model)

    monkeypatch.setattr(copy_probe, "measure", measure)
    return asked


def profile_of(model, scores=SCORES):
    return Profile(
        policy="condense", model=adapters.shape(model.get_decoder().config), retrieval=scores
    )


def table_of(model):
    return model._mmkv.plan.table


def naive_scores(query, key, n, scale, softcap):
    """Token by token: what the second copy gives to its twin and to the two tokens behind it."""
    H, G, N = key.shape[1], query.shape[1] // key.shape[1], query.shape[2]
    found = []
    for u in range(H):
        heads = [
            naive_attention(query[0, u * G + g], key[0, u], scale=scale, softcap=softcap)
            for g in range(G)
        ]
        means = [sum(float(a[i, i - n : i - n + 3].sum()) for i in range(N - n, N)) for a in heads]
        found.append(max(means) / n)
    return found


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_copy_scores_equal_the_loop(softcap):
    g = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, h, 17, 8, generator=g) * 2 for h in (4, 2))
    found = copy_probe.copy_scores(query, key, 8, scale=0.5, softcap=softcap)
    assert found.tolist() == pytest.approx(naive_scores(query, key, 8, 0.5, softcap), abs=1e-5)


@cases("name", sorted(zoo.CONFIGS), "Gemma3ForCausalLM", "LlavaForConditionalGeneration")
def test_the_probe_changes_nothing(name):
    """On a model of every class, of whose layers those that are compressed are measured."""
    model = zoo.make(name)
    state, dicts = copy.deepcopy(model.state_dict()), [dict(vars(x)) for x in model.modules()]
    random = torch.random.get_rng_state()
    found = mmkv.probe(model)
    assert torch.equal(random, torch.random.get_rng_state())
    assert [dict(vars(x)) for x in model.modules()] == dicts
    assert all(torch.equal(x, state[k]) for k, x in model.state_dict().items())
    assert found == mmkv.probe(model), "random tokens are always the same ones"
    with mmkv.wrapped(model, "snapkv", 0.5, window=4):
        layers = model._mmkv.compressed_layers
        assert found == mmkv.probe(model), "wrapped or not"
    assert len(found.retrieval) == len(layers), "layers that are left alone are not measured"


def test_ordinary_tokens_are_read_twice_behind_the_first(monkeypatch):
    model, given = make_model("llava-llama"), []
    decoder = model.get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda **kw: given.append(kw["input_ids"]) or forward(**kw)
    )
    mmkv.probe(model)
    (ids,) = given
    n = (ids.shape[1] - 1) // 2
    assert torch.equal(ids[0, 1 : n + 1], ids[0, n + 1 :])
    named = {model.config.image_token_id, model.config.text_config.eos_token_id}
    assert not named & set(ids[0, 1:].tolist())


def test_sizes_are_proportional_to_copy_scores(probed):
    """Of a prompt of 300 a share of (score + 0.02), at most all of it, and the total exactly."""
    model, inputs = make_model("llama"), make_inputs("llama", (300,))
    with mmkv.wrapped(model, "snapkv", 0.3, heads="retrieval", window=4, sinks=0):
        out = model(**inputs, use_cache=True)
    counts = [(out.past_key_values.kept(i)[0] >= 0).sum(-1).tolist() for i in range(L)]
    assert sum(map(sum, counts)) == round(0.3 * 300 * L) * H
    free = round(0.3 * 300 * L) * H - 4 * L * H
    flat = [r + 0.02 for layer in SCORES for r in layer]
    # The largest is whole; the others share what is left.
    assert counts[1][0] == 300
    left, each = free - 296, sum(flat) - 0.92
    for layer in range(L):
        for h in range(H):
            if (layer, h) != (1, 0):
                wanted = 4 + min(296, left * (SCORES[layer][h] + 0.02) / each)
                assert abs(counts[layer][h] - wanted) <= 1.5
    assert len(probed) == 1


def test_scores_are_raised_to_a_power_if_the_largest_head_cannot_keep_all():
    """The mean of scores and floors is 0.22, so a head of 0.52 keeps all from 0.22 / 0.52 on."""
    scores = ((0.5, 0.0), (0.3, 0.0))
    table = HeadTable(scores, (0, 1), sizes_layers=True, floor=0.02, power=1.5)
    for share, power in ((0.9, 1), (0.4232, 1), (0.42, 1.5), (0.05, 1.5)):
        assert table.weights(share)[0] == pytest.approx([0.5**power + 0.02, 0.02])
        assert table.weights(share)[1] == pytest.approx([0.3**power + 0.02, 0.02])
    plain = HeadTable(scores, (0, 1), sizes_layers=True)
    assert plain.weights(0.05) == scores


def test_scores_are_not_raised_where_retention_sizes_the_layers():
    model, scores = make_model("llama"), ((0.3, 0.02), (0.9, 0.05))
    options = {"retention": 0.5, "heads": "retrieval", "average_heads": False, "window": 4}
    with mmkv.wrapped(model, "xkv", profile=profile_of(model, scores), **options):
        cache = model(**make_inputs("llama", (300,)), use_cache=True).past_key_values
    for layer, of_layer in zip(cache.compressed, scores, strict=True):
        (counts,) = layer.keeping().counts().tolist()
        free, weights = sum(counts) - 2 * 4, [r + 0.02 for r in of_layer]
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - 4 - free * weight / sum(weights)) <= 1.5


def test_heads_of_a_batch_are_sized_as_those_of_its_rows():
    """A budget in tokens is a larger share of the shorter row, where scores are not raised."""
    model, lengths = make_model("llama"), (300, 100)
    options = {"heads": "retrieval", "window": 4, "sinks": 0, "profile": profile_of(model)}
    sizes = []
    for rows in (lengths, lengths[:1], lengths[1:]):
        with mmkv.wrapped(model, "snapkv", 50, **options):
            cache = model(**make_inputs("llama", rows), use_cache=True).past_key_values
        sizes.append(torch.stack([x.keeping().counts() for x in cache.compressed]))
    assert torch.equal(sizes[0], torch.cat(sizes[1:], dim=1))


def test_condense_uses_probe_unless_profile_is_given(probed):
    model = make_model("llama")
    with mmkv.wrapped(model, budget=0.2):
        assert isinstance(table_of(model), HeadTable)
    given = profile_of(model, ((0.5, 0.5), (0.0, 0.0)))
    with mmkv.wrapped(model, budget=0.2, profile=given):
        assert table_of(model).scores[0] == (0.5, 0.5)
    with mmkv.wrapped(model, budget=1.0), mmkv.wrapped(make_model("llama"), "snapkv", 0.5):
        pass
    assert len(probed) == 1, "nothing that keeps everything, and no other policy, is probed"


def test_no_copying_heads_give_equal_sizes():
    model = make_model("llama")
    low = tuple(tuple(x / 10 for x in layer) for layer in SCORES)
    with mmkv.wrapped(model, budget=0.2, profile=profile_of(model, low)):
        assert model._mmkv.plan.equal_heads
    with mmkv.wrapped(model, budget=0.2, profile=profile_of(model, low), copying=0.05):
        assert not model._mmkv.plan.equal_heads


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_probe_result_is_saved_by_weights(probed):
    model = make_model("llama")
    for _ in range(2):
        with mmkv.wrapped(model, budget=0.2):
            assert isinstance(table_of(model), HeadTable)
    assert len(probed) == 1
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    with mmkv.wrapped(model, budget=0.2):
        pass
    assert len(probed) == 2, "other weights"
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with mmkv.wrapped(lora, budget=0.2):
        pass
    assert len(probed) == 3, "an adapter"
    torch.nn.init.ones_(
        lora.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight
    )
    with mmkv.wrapped(lora.merge_and_unload(), budget=0.2):
        pass
    assert len(probed) == 4, "merged"
    model = lora.base_model.model
    for change in (zero_a_head, torch.nn.Module.half, torch.nn.Module.float):
        change(model)
        with mmkv.wrapped(model, budget=0.2):
            pass
    assert len(probed) == 7, "changed in its place"
    (*_, last) = sorted((cache_folder() / "probes").iterdir(), key=lambda x: x.stat().st_mtime)
    last.write_text("{}")
    with mmkv.wrapped(model, budget=0.2):
        pass
    assert len(probed) == 8, "a damaged file is measured again"


def zero_a_head(model):
    model.model.layers[1].self_attn.o_proj.weight.data[:, 16:32] = 0.0


def test_unwritable_folder_is_no_error(probed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMKV_CACHE", str(tmp_path / "file"))
    with mmkv.wrapped(make_model("llama"), budget=0.2) as model:
        assert isinstance(table_of(model), HeadTable)


@pytest.mark.parametrize("later", ["weights", "eval", "attention"])
def test_the_probe_waits_until_the_model_can_run(probed, later):
    model = make_model("llama")
    if later == "weights":
        state = model.state_dict()
        with torch.device("meta"):
            model = type(model)(model.config)
        mmkv.wrap(model.eval(), budget=0.2)
        assert not probed
        model.load_state_dict(state, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    else:
        mmkv.wrap(model.train(), budget=0.2)
        assert not probed
        model.eval()
    inputs = make_inputs("llama", (300,))
    if later == "attention":
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(ValueError, match="changed to 'flex_attention'"):
            generate(model, inputs, new=2)
        model.config._attn_implementation = "sdpa"
    *_, cache, _ = generate(model, inputs, new=2)
    assert len(probed) == 1
    counts = (cache.kept(1)[0] >= 0).sum(-1)
    assert counts[0] > 2 * counts[1]


@pytest.mark.parametrize("hooks", [1, 2])
def test_offloaded_weights_are_probed(hooks):
    model = accelerate.cpu_offload(make_model("llama"), execution_device="cpu")
    if hooks == 2:
        add_hook_to_module(model.get_input_embeddings(), ModelHook(), append=True)
    with mmkv.wrapped(model, budget=0.2):
        assert not model._mmkv.plan.waits_for_probe


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: setattr(model.config, "max_position_embeddings", 30),
            "reads 16 random tokens twice, and this model has 30 positions",
        ),
        (lambda model: setattr(model, "_tp_size", 2), "each of 2 processes has its own heads"),
        (
            lambda model: model.model.layers[1].self_attn.q_proj.weight.data.fill_(torch.inf),
            "overflows in torch.float32",
        ),
    ],
    ids=["too small", "spread", "overflow"],
)
def test_impossible_probe_gives_equal_heads_and_a_warning(caplog, change, said):
    change(model := make_model("llama"))
    with caplog.at_level(logging.WARNING), mmkv.wrapped(model, budget=0.2):
        assert model._mmkv.plan.equal_heads
    assert said in caplog.text
    with pytest.raises(ValueError, match=r"30 positions|each of 2 processes|overflows"):
        mmkv.probe(model)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_failed_probe_leaves_model_unchanged(monkeypatch, error):
    model = make_model("llama")
    before = [dict(vars(x)) for x in model.modules()]

    def fail(attachment):
        raise error("out of memory")

    monkeypatch.setattr(copy_probe, "measure", fail)
    with pytest.raises(error, match="out of memory"):
        mmkv.wrap(model, budget=0.2)
    assert not mmkv.is_wrapped(model)
    assert [dict(vars(x)) for x in model.modules()] == before


def test_layers_of_a_policy_stay_and_heads_are_split(probed):
    """PyramidKV's layers: their sizes are the paper's, each split by copy scores."""
    model, inputs = make_model("llama"), make_inputs("llama", (300,))
    sizes = []
    for heads in ("uniform", "retrieval"):
        cache = prefilled(model, inputs, "pyramidkv", 0.3, heads=heads)
        counts = [(cache.kept(i)[0] >= 0).sum(-1).tolist() for i in range(L)]
        sizes.append([sum(x) for x in counts])
    assert sizes[0] == sizes[1]
    assert counts[1][0] > counts[1][1]


@pytest.mark.parametrize("policy", ["h2o", "lookm"])
def test_unequal_heads_with_a_share_of_recent_tokens_keep_the_budget(policy):
    """A head can get no more tokens than compete for it: what it cannot use goes to the others."""
    model, lengths = make_model("llama"), (200, 120)
    options = {"heads": "retrieval", "profile": profile_of(model)}
    cache = prefilled(model, make_inputs("llama", lengths), policy, 0.7, **options)
    counts = torch.stack([x.keeping().counts() for x in cache.compressed])  # [L, B, H]
    assert (counts != counts[0, 0, 0]).any()
    assert counts.sum((0, 2)).tolist() == [round(0.7 * n * L) * H for n in lengths]
