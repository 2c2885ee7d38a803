"""A budget in bytes: what it buys, and what is really held."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import mmkv
from helpers import zoo
from helpers.configs import CONFIGS
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import depth, generate
from mmkv.memory import EIGHT_BITS_FROM, EIGHT_BITS_FROM_DROPPING, Memory, allot

D, L, H = 64, 2, 2
POLICIES = ("condense", "snapkv", "prefixkv", "adakv", "h2o", "streaming")


def tiny(dtype=torch.float32, layers=L):
    """A model whose heads are as wide as a real one's, with room for 4,000 tokens."""
    config = CONFIGS["LlamaForCausalLM"]()
    config.num_hidden_layers = layers
    config.head_dim, config.max_position_embeddings = D, 4096
    return zoo.build("LlamaForCausalLM", config, "sdpa").to(dtype)


def prefilled(model, lengths):
    with torch.no_grad():
        return model(**make_inputs("llama", lengths), use_cache=True).past_key_values


def full_bytes(model, length):
    """Of the model's own cache, by its shapes."""
    return 2 * model.config.num_hidden_layers * H * length * D * model.dtype.itemsize


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ("6%", 0.06),
        (" 6.25 % ", 0.0625),
        ("16x", 1 / 16),
        ("1.5X", 1 / 1.5),
        ("1/16", 1 / 16),
        ("0.06", 0.06),
        (1, 1.0),
        (Fraction(1, 16), 1 / 16),
        (Decimal("0.5"), 0.5),
        (np.float32(0.25), 0.25),
    ],
)
def test_a_share_is_a_number_or_a_text(given, share):
    assert Memory.of(given) == pytest.approx(share)


@pytest.mark.parametrize(
    "given",
    [
        0,
        2,
        -0.5,
        True,
        None,
        float("nan"),
        "nan",
        "0x",
        "0.5x",
        "infx",
        "ab",
        "",
        "x",
        "120%",
        "1/0",
        "1/",
    ],
)
def test_invalid_share_raises(given):
    with pytest.raises(
        ValueError, match=r"memory=.*expected a share .* such as 1/16, '6%' or '16x'"
    ):
        Memory.of(given)


def test_share_of_16_bits_sets_tokens_and_type():
    """A pair of 128 numbers has 256 bytes, 132 in 8 bits and 68 in 4: two groups of 64 with a
    step each. A position of 4 bytes is beside it. The first token's pair, its slot number and the
    mean come once."""

    def bought(share, **options):
        return allot(Memory(share), itemsize=2, head_dim=64, **options)

    once = 4 * 64 + 256 + 8
    assert (bought(1).kv_dtype, bought(1).budget()) == (None, 1.0)
    for share in (0.99, 0.55, (136 + once / 4000) / 256):
        assert (bought(share).kv_dtype, bought(share).budget()) == ("int8", 1.0)
    for share in (0.51, 0.4, EIGHT_BITS_FROM_DROPPING):
        found = bought(share)
        assert found.kv_dtype == "int8"
        assert found.budget(4000) == pytest.approx((share * 256 - once / 4000) / 136)
    for least, run in ((EIGHT_BITS_FROM_DROPPING, 0), (EIGHT_BITS_FROM, 512)):
        found = [bought(share, run=run).kv_dtype for share in (least, least - 1e-9)]
        assert found == ["int8", "int4"]
    for share in (0.2, 0.1):
        assert bought(share).budget(4000) == pytest.approx((share * 256 - once / 4000) / 72)
    # A position, a score and a bias. Groups: for each token seen also a code that tells the leaders
    # of a run apart. 0.33 of 512 tokens are 171 leaders, to be counted forwards and backwards.
    grouped = bought(0.1, run=512, beside=8)
    assert grouped.budget(4000) == pytest.approx((25.6 - 9 / 8 - once / 4000) / 76)
    grouped = bought(0.02, run=512, beside=8)  # 34 leaders
    assert grouped.budget(40_000) == pytest.approx((5.12 - 7 / 8 - once / 40_000) / 76)


def test_a_share_without_room_for_a_token_raises():
    with pytest.raises(ValueError, match=r"memory=0.001 is too little for one of 4,000 tokens"):
        mmkv.wrap(tiny(), memory="1000x")


def test_a_share_is_of_the_models_own_type():
    """float32 has twice the bytes, so half of the share buys the same."""
    for share in (0.6, 0.4, 0.1):
        wide = allot(Memory(share / 2), itemsize=4, head_dim=128)
        narrow = allot(Memory(share), itemsize=2, head_dim=128)
        assert wide.kv_dtype == narrow.kv_dtype
        assert wide.budget() == pytest.approx(narrow.budget(), rel=5e-3)


@cases(
    "policy, dtype",
    [(x, (torch.float32, torch.bfloat16)[i % 2]) for i, x in enumerate(POLICIES)],
    "snapkv",
)
def test_bytes_held_after_a_prompt_are_within_the_share(policy, dtype):
    """And nearly all of it is used, where heads have no sizes that are known too late."""
    model = tiny(dtype)
    for memory, lengths in (("4x", (1500,)), ("16x", (2500,)), ("16x", (1200, 1150))):
        with mmkv.wrapped(model, policy, memory=memory, least=0):
            cache = prefilled(model, lengths)
        full = len(lengths) * full_bytes(model, max(lengths))  # padding included
        used = cache.nbytes / (Memory.of(memory) * full)
        assert used <= 1
        assert used > (0.85 if policy == "adakv" else 0.94), memory


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["condense", "snapkv"])
def test_heads_of_different_sizes_leave_room_for_their_empty_slots(policy):
    model, scores = tiny(torch.bfloat16), ((0.9, 0.1), (0.4, 0.0))
    profile = mmkv.Profile(retrieval=scores)
    options = {"heads": "retrieval"} if policy == "snapkv" else {}
    for memory in ("3x", "32x"):
        share = Memory.of(memory)
        with mmkv.wrapped(model, policy, memory=memory, profile=profile, least=0, **options):
            cache = prefilled(model, (4000,))
        assert cache.report().layers[0].kept[0][0] > 1.1 * cache.report().layers[0].kept[0][1]
        assert 0.95 < cache.nbytes / (share * full_bytes(model, 4000)) <= 1, memory


def test_full_share_is_plain_cache_and_full_policy_changes_type_only():
    model = tiny(torch.bfloat16)
    plain = prefilled(model, (300,))
    for policy in ("condense", "full"):
        with mmkv.wrapped(model, policy, memory=1):
            cache = prefilled(model, (300,))
        assert cache.report().kv_dtype is None
        positions = 300 * L * H * 4
        assert cache.nbytes == full_bytes(model, 300) + positions
        ((keys, values),) = cache.compressed[1].keeping().stored.read()
        assert torch.equal(keys, plain.layers[1].keys.flatten(0, 1))
        assert torch.equal(values, plain.layers[1].values.flatten(0, 1))
    for memory, kv_dtype in (("60%", "int8"), ("50%", "int4"), ("30%", "int4")):
        with mmkv.wrapped(model, "full", memory=memory):
            report = prefilled(model, (300,)).report()
        assert (report.kv_dtype, report.kept_fraction) == (kv_dtype, 1.0)
    with pytest.raises(ValueError, match=r"memory=0.2 is too little .* need 29.0% in 4 bits"):
        mmkv.wrap(model, "full", memory=0.2)
    assert not mmkv.is_wrapped(model)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"budget": 0.2}, "budget=0.2"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8'"),
        ({"budget": 40, "kv_dtype": "int8"}, "kv_dtype='int8'"),
    ],
)
def test_memory_with_budget_or_dtype_raises(text_model, options, named):
    with pytest.raises(
        ValueError, match=f"{named} is given beside it: take memory alone, or budget"
    ):
        mmkv.wrap(text_model, memory="6%", **options)


def test_memory_with_retention_or_profile_raises(text_model):
    with pytest.raises(ValueError, match=r"memory=0.06 and retention=0.9 both decide"):
        mmkv.wrap(text_model, "xkv", memory="6%", retention=0.9)
    profile = mmkv.Profile((0.3,) * L, budget=0.3)
    with pytest.raises(ValueError, match=r"memory=0.06 and profile=.* both decide"):
        mmkv.wrap(text_model, "prefixkv", memory="6%", profile=profile)
    assert not mmkv.is_wrapped(text_model)


@pytest.mark.slow
def test_report_gives_bytes_and_notes_the_floor():
    model = tiny(torch.bfloat16)
    with mmkv.wrapped(model, "condense", memory="16x"):
        assert model._mmkv.plan.describe() == "policy='condense', memory=0.0625"
        with pytest.raises(ValueError, match=r"memory=0.0625\)"):
            mmkv.wrap(model, "condense", memory="16x")
        short, long = (prefilled(model, (n,)).report() for n in (100, 4000))
        replied = generate(model, make_inputs("llama", (100,)), new=3)[2].report()
    held, full = long.nbytes / 2**20, full_bytes(model, 4000) / 2**20
    title = f"condense, memory 6.25%: {held:.1f} of {full:.1f} MiB (6.2%), "
    assert str(long).startswith(title)
    assert "in int4" in str(long).splitlines()[0]
    (note,) = [x for x in short.notes if "least" in x]
    assert note.startswith("row 0: least=64 keeps 64 of 100 tokens, more than memory 6.25%")
    assert not [x for x in long.notes if "least" in x]
    counted = "the bytes include slots in the model's type for the newest generated tokens"
    assert counted in replied.notes
    assert counted not in short.notes


def test_a_batch_keeps_what_its_rows_keep_alone():
    model = tiny()
    with mmkv.wrapped(model, "snapkv", memory="10%", window=8):
        both = prefilled(model, (900, 300))
        alone = [prefilled(model, (n,)).report() for n in (900, 300)]
    counts = [x.kept for x in both.report().layers]
    assert counts == [
        [a.kept[0], b.kept[0]] for a, b in zip(alone[0].layers, alone[1].layers, strict=True)
    ]


def test_an_unready_model_leaves_room_for_any_heads():
    """Sizes of heads are known only after the copy probe, which needs a model in eval mode."""
    model = make_model("llama")
    model.train()
    with mmkv.wrapped(model, "condense", memory="8x"):
        waiting = model._mmkv.plan
        prefilled(model.eval(), (20,))
        settled = model._mmkv.plan
    assert waiting.waits_for_probe
    assert not settled.waits_for_probe
    assert waiting.allotment.empty_share > settled.allotment.empty_share
    assert waiting.budget < settled.budget


def test_default_without_size_is_an_eighth_of_the_bytes():
    model = tiny()
    with mmkv.wrapped(model):
        named = prefilled(model, (2000,)).report()
    with mmkv.wrapped(model, memory=1 / 8):
        assert prefilled(model, (2000,)).report().to_dict() == named.to_dict()
    assert named.nbytes <= full_bytes(model, 2000) / 8
    with mmkv.wrapped(model, profile=mmkv.probe(model)):  # which says nothing of sizes
        assert prefilled(model, (2000,)).report().to_dict() == named.to_dict()
    with mmkv.wrapped(model, "full"):
        assert prefilled(model, (40,)).report().nbytes >= full_bytes(model, 40)


@cases(
    "policy, memory",
    # All of float32 fits into 45 % in 8 bits, of bfloat16 it does not.
    [("condense", "8x"), ("condense", "45%"), ("squeeze", "45%")],
    "condense",
)
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
def test_memory_follows_a_cast_after_wrap(policy, memory, types, tmp_path):
    before, after = (getattr(torch, x) for x in types)
    model = tiny(before, depth(policy) or L)
    with mmkv.wrapped(model, policy, memory=memory):
        earlier = prefilled(model, (600,))
        found = prefilled(model.to(after), (600,))
        mmkv.read(model, make_inputs("llama", (90,))).save(tmp_path / "context")
        with pytest.raises(ValueError, match=r"wrapped with .* now, with other options or cast to"):
            model(input_ids=torch.tensor([[5]]), past_key_values=earlier)
    with mmkv.wrapped(model, policy, memory=memory):
        expected = prefilled(model, (600,))
    assert found.report().to_dict() == expected.report().to_dict()
    assert found.nbytes <= Memory.of(memory) * full_bytes(model, 600)
    with mmkv.wrapped(model.to(before), policy, memory=memory):
        model.to(after)
        mmkv.load_context(tmp_path / "context", model)


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
def test_memory_counts_in_the_decoders_type(types, tmp_path):
    tower, decoder = (getattr(torch, x) for x in types)
    model = make_model("llava-llama").to(decoder)
    model.model.vision_tower.to(tower)
    inputs = make_inputs("llama", (600,))
    with mmkv.wrapped(model, memory="4x", least=0), torch.no_grad():
        report = model(**inputs, use_cache=True).past_key_values.report()
        assert 0.22 < report.nbytes / report.full_nbytes <= 0.25
        context = mmkv.read(model, inputs)
        context.save(tmp_path / "context")
        assert mmkv.load_context(tmp_path / "context", model).nbytes <= context.nbytes


def test_a_row_may_begin_in_a_later_chunk():
    model, inputs = tiny(), make_inputs("llama", (300, 40))
    options = {"max_new_tokens": 1, "return_dict_in_generate": True}
    with mmkv.wrapped(model, memory="8x", least=0):
        outs = [model.generate(**inputs, prefill_chunk_size=n, **options) for n in (None, 100)]
    whole, chunked = (x.past_key_values.report() for x in outs)
    assert [x.kept for x in chunked.layers] == [x.kept for x in whole.layers]
    with mmkv.wrapped(model, memory="8x", least=0, evict_chunks=True):
        assert mmkv.read(model, inputs, prefill_chunk_size=100).cache.lengths == [300, 40]


@pytest.mark.parametrize("size", [{"memory": 1 / 32}, {"budget": 0.01}], ids=str)
def test_the_smallest_budget_keeps_a_token_of_each_head(size):
    model = tiny(torch.bfloat16)
    with mmkv.wrapped(model, "h2o", **size):
        report = prefilled(model, (40, 33)).report()
    assert [x.kept for x in report.layers] == [[[1] * H] * 2] * L
