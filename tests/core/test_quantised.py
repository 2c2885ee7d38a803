"""Kept pairs in 8 and 4 bits: which are exact, what codes say, and evicting is masking among that.

Models and inputs are float64, so that two ways of computing a number agree on its code.
"""

import copy
import gc
import io

import numpy as np
import pytest
import rich
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmkv
from helpers.few_bits import Row, fake_quantise, rotated_by, window_of
from helpers.marks import cases
from helpers.masking import Feed, masked_logits
from helpers.models import IMAGE, PAD, VOCAB, continued, make_inputs, make_model, next_turn
from helpers.oracle import Variant, generate, options_of, short
from mmkv.cache import codes, products, quantize
from mmkv.cache.forward_pass import AttentionCall
from mmkv.cache.kernels import attend
from mmkv.cache.layer import KeptKV
from mmkv.cache.packed import packed, unpacked
from mmkv.cache.padded_blocks import PaddedBlock, Step
from mmkv.cache.quantize import QuantizedKV
from mmkv.decode.slots import GrowingSlots
from mmkv.memory import BITS

NEW = 16  # in a short window, the oldest tokens are written as codes at 12 and at 16
ROWS = (56, 29, 41)
# What few bits meet: each kind of block, schedule of slots, head sizes, merge and way to read once.
GROUPS = Variant("condense")  # merged pairs with weights, and a sink
DROPS = Variant("h2o", (("heads", "adaptive"), ("sinks", 2)))  # by attention, in several blocks
VARIANTS = [
    GROUPS,
    DROPS,
    Variant("full"),  # nothing is evicted
    Variant("snapkv", (), 44),  # one block, in which a row shorter than the budget is whole
    Variant("kvzip"),  # head sizes by all layers, so several blocks; the prompt is read twice
    Variant("streaming"),  # slots in a ring, and four exact first tokens
    Variant("prefixkv", (("merge", "position"),)),  # layer sizes; slots grow by a ratio; means
]


def exact(inputs):
    return {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}


def closeness(policy):
    """How far logits may be apart.

    The attention weights of H2O are float32: a number of a later token that lies halfway between
    two codes may get either, and is then off by one code.
    """
    weighed = policy.decode.name == "fixed" and policy.score.turn_reduction == "sum"
    return 1e-2 if weighed else 1e-4


@pytest.fixture
def short_window():
    """The window is full after 12 tokens, not after 48."""
    with window_of(8, 4):
        yield


@pytest.fixture(scope="module")
def doubles():
    made = {name: make_model(name).double() for name in ("llama", "llava-llama")}
    return made.__getitem__


def agrees(model, inputs, variant, kv_dtype, new=NEW):
    options = options_of(variant)
    policy = mmkv.get_policy(variant.policy, **options)
    with mmkv.wrapped(model, variant.policy, variant.budget, kv_dtype=kv_dtype, **options):
        logits, tokens, cache, held = generate(model, inputs, new=new)
    how = {"merge": policy.merge}
    bits = {"bits": BITS[kv_dtype], "n_first": max(1, policy.sinks)}
    expected = masked_logits(model, inputs, tokens, held, **bits, **how)
    torch.testing.assert_close(logits.double(), expected, atol=closeness(policy), rtol=0)
    unquantised = masked_logits(model, inputs, tokens[:, :9], held, **how)
    assert (logits[1:9] - unquantised[1:]).abs().max() > 1e-2, "the oracle saw nothing"
    return cache


@pytest.mark.slow
@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    [(x, "int4") for x in VARIANTS] + [(x, "int8") for x in (GROUPS, DROPS)],
    ids=str,
)
def test_eviction_equals_masking(doubles, variant, kv_dtype):
    """What is kept is read as its code says, from the first step on; the rest is masked.

    No number of these rows lies halfway between two codes.
    """
    inputs = exact(make_inputs("llava-llama", (57, 30, 42), seed=1))
    agrees(doubles("llava-llama"), inputs, variant, kv_dtype)


@pytest.mark.slow
def test_a_full_window_equals_masking(doubles):
    """Of the usual size: after 48 generated tokens."""
    agrees(doubles("llama"), make_inputs("llama", (30,)), GROUPS, "int4", new=52)


@cases("dtype", [torch.float64, torch.bfloat16], torch.bfloat16)
@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("variant", [GROUPS, DROPS], ids=str)
def test_large_and_small_blocks_give_the_same_logits(variant, kv_dtype, dtype, monkeypatch):
    """Small blocks become floats, large ones stay codes; rows are padded, empty slots masked."""
    model = make_model("llama").to(dtype)
    inputs, options = make_inputs("llama", (57, 30, 42)), options_of(variant)
    with mmkv.wrapped(model, variant.policy, variant.budget, kv_dtype=kv_dtype, **options):
        expected = generate(model, inputs, new=4)[0]
        monkeypatch.setattr(quantize, "_FEW", 0)
        logits = generate(model, inputs, new=4)[0]
    off = {torch.float64: 1e-9, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(logits, expected, atol=off, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options", "rounds"),
    [
        ("snapkv", {"decode": "rounds", "every": 4, "latest": 1}, range(5, NEW, 4)),
        ("adakv", {"decode": "rounds", "every": 10, "latest": 0}, [10]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_window")
def test_the_newest_stay_exact_where_generated_tokens_are_evicted(doubles, policy, options, rounds):
    """A round leaves the newest 8 in a short window."""
    model, inputs = doubles("llama"), exact(make_inputs("llama", (96,)))
    options = {**short(policy), **options}
    with mmkv.wrapped(model, policy, 60, kv_dtype="int4", **options):
        logits, tokens, cache, held = generate(model, inputs, new=NEW)
    assert cache.compressed[0].keeping().stored.start == 96 + max(0, rounds[-1] - 8)
    expected = masked_logits(model, inputs, tokens, held, bits=4, rounds=rounds)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)


@cases("kv_dtype", BITS, "int4")
@cases("policy", ["prefixkv", "streaming", "adakv", "xkv"], "prefixkv")
def test_turns_equal_masking(doubles, policy, kv_dtype):
    """A new turn reads what the last one kept; what was in codes has the same codes again."""
    model, inputs = doubles("llava-llama"), exact(make_inputs("llava-llama", ROWS))
    with mmkv.wrapped(model, policy, 0.3, kv_dtype=kv_dtype, **short(policy)):
        options = {"new": 5, "suppress_tokens": [IMAGE]}
        first, words, cache, held = generate(model, inputs, **options)
        second = next_turn(inputs, torch.cat([inputs["input_ids"], words], 1), image=True)
        second = exact(second)
        aside = copy.deepcopy(cache)
        more, answer, _, kept = generate(model, second, **options, past_key_values=cache)
        again, *_ = generate(model, second, **options, past_key_values=aside)
    assert torch.equal(again, more), "a copy of the cache goes on as the cache does"
    start = inputs["input_ids"].shape[1] + words.shape[1] - 1
    feeds = [{"input_ids": words[:, t : t + 1]} for t in range(words.shape[1] - 1)]
    turn = {"pixel_values": second["pixel_values"], "input_ids": second["input_ids"][:, start:]}
    feeds += [turn, *({"input_ids": answer[:, t : t + 1]} for t in range(answer.shape[1] - 1))]
    n_first = max(1, mmkv.get_policy(policy).sinks)
    bits = {"bits": BITS[kv_dtype], "n_first": n_first}
    expected = masked_logits(model, inputs, feeds, held + kept, **bits)
    torch.testing.assert_close(torch.cat([first, more]).double(), expected, atol=1e-4, rtol=0)


@cases("kv_dtype", BITS, "int4")
def test_several_tokens_at_once_and_more_than_expected(doubles, kv_dtype):
    """Slots are added when none is left; tokens fed together see what they see one by one."""
    model, inputs = doubles("llama"), make_inputs("llama", (30,))
    new = torch.randint(4, 100, (1, 70), generator=torch.Generator().manual_seed(1))
    with mmkv.wrapped(model, "snapkv", 0.5, kv_dtype=kv_dtype, **short("snapkv")), torch.no_grad():
        together = model(**inputs, use_cache=True).past_key_values
        apart = copy.deepcopy(together)
        pieces = [model(input_ids=x, past_key_values=together).logits for x in new.split(65, 1)]
        alone = [model(input_ids=t, past_key_values=apart).logits for t in new.split(1, dim=1)]
    logits, expected = torch.cat(pieces, dim=1), torch.cat(alone, dim=1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    a, b = (x.compressed[0].keeping() for x in (together, apart))
    assert torch.equal(a.blocks[0].positions[:, :85], b.blocks[0].positions[:, :85])
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(a.dense(), name), getattr(b.dense(), name))
    mine, theirs = (x.stored.exact_slots.sort().values for x in (a, b))
    assert mine.equal(theirs)


@cases("policy, kv_dtype", [("adakv", "int8"), ("condense", "int4")], ("adakv", "int8"))
@pytest.mark.usefixtures("short_window")
def test_autocast_does_not_round_codes(policy, kv_dtype, monkeypatch, tmp_path):
    """Prompt, steps and a saved context: keys and values are in 16 bits there, products are not."""
    model, inputs, attend = make_model("llama"), make_inputs("llama", (96, 57)), KeptKV.attend

    def same_without_autocast(kept, call, step, masked=None):
        aside = copy.deepcopy(kept)
        out = attend(kept, call, step, masked)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(attend(aside, call, step, masked), out)
        return out

    monkeypatch.setattr(KeptKV, "attend", same_without_autocast)
    with (
        mmkv.wrapped(model, policy, 0.4, kv_dtype=kv_dtype, **short(policy)),
        torch.autocast("cpu", torch.bfloat16),
    ):
        *_, cache, _ = generate(model, inputs, new=NEW)
        context = mmkv.read(model, inputs)
        context.save(tmp_path / "context")
        mmkv.load_context(tmp_path / "context", model)
        found = [layer.state.stored.read() for layer in cache.compressed]
    for layer, blocks in zip(cache.compressed, found, strict=True):
        stored = layer.state.stored
        assert (stored.dtype, stored.mean.dtype) == (torch.bfloat16, torch.float32)
        for pairs, expected in zip(blocks, stored.read(), strict=True):
            assert all(map(torch.equal, pairs, expected))


@cases("kv_dtype, bits_each", [("int8", 8.25), ("int4", 4.25)], ("int4", 4.25))
def test_bytes_fall_with_bits(kv_dtype, bits_each):
    """8 or 4 bits a number, 16 a group of 64, positions, exact pairs, their slots and the mean."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).bfloat16().eval()
    inputs = make_inputs("llama", (300,))
    rows, D, sinks = 2 * 2, 128, 4  # layers times heads
    for new in (1, 4):
        gc.collect()
        known = [x for x in gc.get_objects() if type(x) is torch.Tensor]  # ids are not reused
        before = {id(x) for x in known}
        with mmkv.wrapped(model, "streaming", 100, kv_dtype=kv_dtype):
            *_, cache, _ = generate(model, inputs, new=new)
        exact = sinks + (48 if new > 1 else 0)  # the first generated token opens the window
        slots = 100 + (new > 1)  # one for the generated token that is read
        coded = rows * slots * (2 * D * bits_each / 8 + 4)
        assert cache.nbytes == coded + rows * (exact * (2 * D * 2 + 8) + D * 4)
        report = cache.report()
        assert report.nbytes == sum(x.nbytes for x in report.layers) == cache.nbytes
        assert report.full_nbytes == 2 * 2 * 2 * (300 + new - 1) * D * 2
        gc.collect()
        alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before]
        held = [x for x in alive if x.ndim >= 3 and x.dtype != torch.int64]
        slots = rows * exact * 8  # int64
        storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in held)}
        positions = sum(b.nbytes for b in cache.blocks)
        assert sum(storages.values()) == cache.nbytes - slots - positions


@cases("kv_dtype", BITS, "int4")
@cases("policy", ["prefixkv", "adakv", "full"], "adakv")
def test_reported_error_equals_loop(doubles, policy, kv_dtype):
    """|x - as read| / |x| of each row's kept keys and values, averaged over rows and layers."""
    model, inputs = doubles("llama"), make_inputs("llama", ROWS)
    with torch.no_grad():
        places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        whole = model(**inputs, position_ids=places, use_cache=True).past_key_values
    with mmkv.wrapped(model, policy, 0.3, kv_dtype=kv_dtype, **short(policy)):
        *_, cache, held = generate(model, inputs, new=12)
    report = cache.report()
    assert report.kv_dtype == kv_dtype
    for i, layer in enumerate(report.layers):
        keys, values = whole.layers[i].keys, whole.layers[i].values
        per_row = {"key_error": [], "value_error": []}
        for b, heads in enumerate(held[0][i]):
            pairs = []
            for h, kept in enumerate(heads):
                row = Row(BITS[kv_dtype], 1)
                exact = {p: (keys[b, h, p], values[b, h, p]) for p in kept.tolist() if p >= 0}
                row.evict(exact, 1000)
                pairs += [(exact[p], row.pairs[p]) for p in exact]
            for n, name in enumerate(per_row):
                exact, read = (torch.stack([x[i][n] for x in pairs]) for i in (0, 1))
                per_row[name].append(float((exact - read).norm() / exact.norm()))
        for name, errors in per_row.items():
            assert getattr(layer, name) == pytest.approx(sum(errors) / len(ROWS), rel=1e-4)
    for name in ("key_error", "value_error"):
        mean = sum(getattr(x, name) for x in report.layers) / len(report.layers)
        assert getattr(report, name) == pytest.approx(mean)
        assert report.to_dict()["layers"][0][name] == getattr(report.layers[0], name)
        assert 1e-3 < mean < (0.01 if kv_dtype == "int8" else 0.1)
    table = io.StringIO()
    rich.print(report, file=table)
    assert f"kept in {kv_dtype}" in " ".join(table.getvalue().split())
    assert f"{report.key_error:.2%}, {report.value_error:.2%}" in table.getvalue()


def some_pairs(D, Dv, dtype=torch.float32):
    """Ordinary pairs; from slot 1 on some that are hard: level, zero, tiny, narrow, wide."""
    g = torch.Generator().manual_seed(D)
    keys, values = (torch.randn(4, 30, n, generator=g) for n in (D, Dv))
    for x in (keys, values):
        x[:, 1], x[:, 2] = 5.0, 0.0
        x[:, 3] *= 1e-6
        x[:, 4] = 30 + x[:, 4] * 1e-4
        x[:, 5] *= 1e4
    return keys.to(dtype), values.to(dtype)


def stored(pairs, kv_dtype, **options):
    """These pairs in few bits, the first slot and slot 7 exactly."""
    filled = torch.ones(pairs[0].shape[:2], dtype=torch.bool)
    exact = torch.tensor([[0, 7]]).expand(len(filled), -1)
    how = {"start": 30, "opened": False, "reuses": False, "bits": BITS[kv_dtype], **options}
    return QuantizedKV.of(*pairs, filled, exact, **how)


WIDTHS = [(16, 16), (15, 15), (64, 64), (80, 80), (96, 64), (128, 128), (192, 128)]


@cases("D, Dv", WIDTHS, (15, 15), (96, 64))
@pytest.mark.parametrize("kv_dtype", BITS)
def test_pairs_are_read_as_defined(kv_dtype, D, Dv):
    pairs = some_pairs(D, Dv, torch.float64)
    (read,) = stored(pairs, kv_dtype).read()
    for r in range(4):
        row = Row(BITS[kv_dtype], 0)
        row.pairs = {s: tuple(x[r, s] for x in pairs) for s in range(30)}
        coded = [s for s in range(30) if s not in (0, 7)]
        row.mean = torch.stack([row.pairs[s][0] for s in coded]).mean(0)
        for s in range(30):
            expected = row.as_code(s) if s in coded else row.pairs[s]
            for x, wanted in zip(read, expected, strict=True):
                torch.testing.assert_close(x[r, s], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_quantising_read_pairs_again_gives_the_same_codes(kv_dtype):
    """So a later turn, which stores the kept pairs again, loses nothing more.

    Not tested on slots 0 and 7, which are exact, and 3, whose steps are near float16's smallest.
    """
    held = stored(some_pairs(128, 128, torch.float64), kv_dtype)
    again = stored(held.read()[0], kv_dtype, mean=held.mean)
    coded = [s for s in range(30) if s not in (0, 3, 7)]
    for name in ("codes", "steps"):
        mine, theirs = (getattr(x, name).unflatten(1, (4, 30)) for x in (held, again))
        assert torch.equal(mine[:, :, coded], theirs[:, :, coded])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", BITS)
def test_types_of_fewer_bits_lose_little_more(kv_dtype, dtype):
    pairs = [x[:, 6:] for x in some_pairs(64, 64, dtype)]
    pairs[0] += torch.linspace(-40, 40, 64, dtype=dtype)  # a large common part, as biases make
    (read,) = stored(pairs, kv_dtype).read()
    (wider,) = stored([x.double() for x in pairs], kv_dtype).read()
    for x, got, best in zip(pairs, read, wider, strict=True):
        assert got.dtype == dtype
        off, least = ((y.double() - x.double()).norm() for y in (got, best))
        assert off <= 1.05 * least + torch.finfo(dtype).eps * x.double().norm()


@pytest.mark.parametrize("kv_dtype", BITS)
def test_a_large_common_part_of_keys_costs_nothing(kv_dtype):
    """The biases of Qwen2.5's projections give keys a mean far larger than their spread."""
    keys, values = (x[:, 6:] for x in some_pairs(64, 64, torch.float64))
    bias = torch.zeros(64, dtype=torch.float64)
    bias[[3, 40, 41]] = torch.tensor([200.0, -80.0, 50.0], dtype=torch.float64)
    plain, biased = (stored((x, values), kv_dtype).read()[0][0] for x in (keys, keys + bias))
    off, without = (float(x.norm()) for x in (biased - keys - bias, plain - keys))
    assert off == pytest.approx(without, rel=1e-6)
    one_group = fake_quantise(keys + bias, BITS[kv_dtype]) - keys - bias
    # In 4 bits all numbers beside the bias become 0.
    assert float(one_group.norm()) > {"int8": 20, "int4": 10}[kv_dtype] * without


@cases("lengths", [(1,), (3, 1)], (3, 1))
@pytest.mark.parametrize("policy", ["full", "streaming"])
@pytest.mark.usefixtures("short_window")
def test_keys_of_rows_without_codes_get_their_mean_from_the_first_codes(doubles, lengths, policy):
    """Where all that a prompt keeps is exact, these are generated tokens, or those of a turn.

    No number of these rows lies halfway between two codes.
    """
    model, inputs = doubles("llama"), make_inputs("llama", lengths, seed=3)
    n_first = max(1, mmkv.get_policy(policy).sinks)
    with mmkv.wrapped(model, policy, 1.0, kv_dtype="int4"):
        logits, tokens, _, held = generate(model, inputs, new=18)
        cache = generate(model, inputs, new=1)[2]
        assert (mean_of(cache) == 0).all(-1).any()
        more = continued(inputs, make_inputs("llama", (60,) * len(lengths))["input_ids"])
        cache = generate(model, more, new=1, past_key_values=cache)[2]
        assert (mean_of(cache) != 0).any(-1).all()
    expected = masked_logits(model, inputs, tokens, held, bits=4, n_first=n_first)
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize(
    ("policy", "budget", "prompt", "reply"),
    [
        ("full", None, [7], [9, 8, PAD]),
        ("streaming", 1.0, [7], [9, 8, PAD]),
        ("h2o", 1.0, [7], [9, 8, PAD]),
        ("full", None, [7, PAD, PAD], []),  # all keys of codes are 0
        ("full", None, [7], [PAD] * 8),
        ("streaming", 1.0, [PAD, 7, PAD], []),  # in places of first tokens
        ("streaming", 100, [7, 8, 9], [PAD]),  # in such a place later
    ],
)
def test_keys_of_padding_tokens_stay_zeros(doubles, policy, budget, prompt, reply):
    """The padding token's embedding is 0, and so are its key and value in the first layer."""
    model, ids = doubles("llama"), torch.tensor([prompt])
    words = torch.randint(4, VOCAB, (1, NEW + 1), generator=torch.Generator().manual_seed(4))
    words[0, : len(reply)] = torch.tensor(reply)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    feed = [Feed(words, len(prompt))]
    with mmkv.wrapped(model, policy, budget, kv_dtype="int8"):
        *_, cache, _ = generate(model, inputs, logits_processor=feed, new=NEW + 1)
    tokens = torch.cat([ids[0], words[0, :-1]])
    (block,) = cache.blocks[:1]
    zeros = (tokens == PAD).nonzero()[:, 0]
    slots = (block.positions[:, :, None] == zeros).any(-1)
    keys = cache.compressed[0].keeping().dense().keys
    for row in range(len(slots)):
        read = keys.flatten(0, 1)[row][: slots.shape[1]][slots[row]]
        assert len(read) == len(zeros)
        assert read.abs().max() < 0.02
    assert (mean_of(cache) != 0).any()


def mean_of(cache):
    """What the first layer subtracts from keys, [R, 1, N]."""
    return cache.compressed[0].keeping().stored.mean


@pytest.mark.parametrize(("D", "Dv"), WIDTHS)
@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attention_on_codes_equals_attention_on_read_pairs(kv_dtype, D, Dv, softcap, monkeypatch):
    """Each group with a range of its own, the mean in the logits if they are bounded; by slots."""
    pairs = [x[:, 6:] for x in some_pairs(D, Dv, torch.float64)]
    pairs[0] += 3.0
    held, g = stored(pairs, kv_dtype), torch.Generator().manual_seed(1)
    ((keys, values),) = held.read()
    query = torch.randn(4, 3, D, generator=g, dtype=torch.float64)
    options = {"scale": 0.2, "softcap": softcap}
    expected = attend(query, keys, values, None, **options)
    turned, whole = query @ held.rotation, softcap is not None
    (as_floats,) = held.pairs([24], whole=whole)
    assert all(isinstance(x, torch.Tensor) for x in as_floats)
    torch.testing.assert_close(attend(turned, *as_floats, None, **options), expected)
    monkeypatch.setattr(quantize, "_FEW", 0)
    for piece in (products._CPU_PIECE, 1, 4 * max(D, Dv) * 7):  # all slots at once, one, and seven
        monkeypatch.setattr(products, "_CPU_PIECE", piece)
        (pairs,) = held.pairs([24], whole=whole)
        assert all(isinstance(x, products.Coded) for x in pairs)
        torch.testing.assert_close(attend(turned, *pairs, None, **options), expected)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kv_dtype", BITS)
def test_step_attends_to_read_pairs(kv_dtype, softcap):
    """Keys have a common part, which a bound of the logits sees."""
    pairs = [x[:, 6:] for x in some_pairs(16, 16, torch.float64)]
    held = stored([x + 3.0 for x in pairs], kv_dtype, start=24).fitted([32])
    positions = torch.arange(32).expand(4, -1).masked_fill(torch.arange(32) >= 24, -1)
    schedule = GrowingSlots(counts=np.full(4, 24))
    block = PaddedBlock(np.arange(4), positions.int(), schedule, torch.float64)
    layer, g = KeptKV([block], held, 2, 2, [24, 24]), torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(2, n, 1, 16, generator=g, dtype=torch.float64) for n in (4, 2, 2)
    )
    options = {"scale": 0.2, "softcap": softcap}
    call = AttentionCall(query, key, value, None, **options, layer_idx=0)
    out = layer.attend(call, Step(24, 1, **options))
    keys, values = (x[:, :25] for x in held.read()[0])
    assert float(keys[:, :24].mean()) == pytest.approx(3.0, abs=0.2)
    torch.testing.assert_close(keys[:, 24].view(2, 2, 16), key[:, :, 0])
    expected = attend(query.view(4, 2, 16), keys, values, None, **options)
    torch.testing.assert_close(out.transpose(1, 2).reshape(4, 2, 16), expected)


@pytest.mark.parametrize("D", [1, 15, 16, 80, 96, 128])
def test_the_rotation_is_orthonormal_and_spreads_one_channel(D):
    matrix = codes.rotation(D, D, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(D, dtype=torch.float64))
    size = D & -D
    assert (matrix != 0).sum() == D * size
    torch.testing.assert_close(matrix.abs().max(), torch.tensor(size**-0.5, dtype=torch.float64))
    torch.testing.assert_close(matrix, rotated_by(D))


@pytest.mark.parametrize("kv_dtype", BITS)
def test_selected_rows_take_codes_and_window_along(kv_dtype):
    held, rows = stored(some_pairs(16, 16), kv_dtype), torch.tensor([2, 0, 2])
    for chosen, whole in zip(held.select([rows]).read()[0], held.read()[0], strict=True):
        assert torch.equal(chosen, whole[rows])


@pytest.mark.parametrize("kv_dtype", BITS)
def test_unused_places_of_the_window_change_no_pair(kv_dtype):
    """They hold zeros and an exact pair's slot; pairs may be added in any order."""
    held = stored(some_pairs(16, 16), kv_dtype)
    (expected,) = held.read()
    held.make_room(30)
    assert held.opened
    for _ in range(2):
        assert all(map(torch.equal, held.read()[0], expected))
        held.exact, held.exact_slots = held.exact.flip(1), held.exact_slots.flip(1)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_exact_pairs_of_a_file_are_read_whatever_their_codes(doubles, kv_dtype):
    """Their steps are 0, so their codes count nothing."""
    model, inputs = doubles("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, "streaming", 30, kv_dtype=kv_dtype), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    kept = cache.compressed[0].keeping()
    tensors, written = packed(kept), kept.dense()
    tensors["codes"][tensors["positions"] < 4] = 127
    read = unpacked(cache.plan, cache.masks, tensors).dense()
    assert torch.equal(read.keys, written.keys)
    assert torch.equal(read.values, written.values)


@cases("kv_dtype", BITS, "int4")
def test_the_newest_are_exact_and_older_ones_written_as_codes(kv_dtype):
    """At least 32 and at most 48; a token that takes a slot replaces what is held of the last."""
    pairs = some_pairs(64, 64, torch.float64)
    held, g = stored(pairs, kv_dtype, reuses=True).fitted([150]), torch.Generator().manual_seed(2)
    new = [torch.randn(4, 120, 64, generator=g, dtype=torch.float64) for _ in range(2)]
    slots = [30 + t if t % 3 else 29 for t in range(120)]  # each third one takes the same slot
    for t, slot in enumerate(slots):
        key, value = (x[:, t : t + 1] for x in new)
        held.write(held.new(key @ held.rotation, value), [slot], 30 + t)
        (read,) = held.read()
        for back in range(t + 1):
            if slots[t - back] in slots[t - back + 1 : t + 1]:
                continue  # replaced since
            off = max(
                (x[:, slots[t - back]] - y[:, t - back]).abs().max()
                for x, y in zip(read, new, strict=True)
            )
            exact = t < 48 or back < 32 + (t - 48) % 16 + 1
            assert (off < 1e-9) == exact, (t, back)
        assert (read[0][:, 0] - pairs[0][:, 0]).abs().max() < 1e-9


@pytest.mark.parametrize("kv_dtype", BITS)
def test_joined_blocks_hold_what_each_holds_alone(kv_dtype):
    """Tokens take empty slots of one block, and of the other a slot that is in use."""
    blocks = [stored([x[:n] for x in some_pairs(64, 64)], kv_dtype, reuses=n < 4) for n in (4, 3)]
    joined, g = QuantizedKV.joined(blocks).fitted([100, 30]), torch.Generator().manual_seed(4)
    alone = [x.fitted([n]) for x, n in zip(blocks, (100, 30), strict=True)]
    for t in range(60):
        key, value = torch.randn(2, 7, 1, 64, generator=g)
        slots = [30 + t, 20 + t % 3]
        parts = zip(alone, key.split([4, 3]), value.split([4, 3]), slots, strict=True)
        for part, k, v, slot in parts:
            part.write(part.new(k, v), [slot], 30 + t)
        joined.write(joined.new(key, value), slots, 30 + t)
    for mine, theirs in zip(joined.read(), (x.read()[0] for x in alone), strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_errors_name_the_value_and_change_nothing(text_model):
    before = text_model.config._attn_implementation
    with pytest.raises(ValueError, match="kv_dtype='int3': expected 'int8' or 'int4', or None"):
        mmkv.wrap(text_model, "snapkv", 0.3, kv_dtype="int3")
    assert not hasattr(text_model, "_mmkv")
    assert text_model.config._attn_implementation == before
