"""Kept pairs in 8 and 4 bits: their codes are hqq's, and evicting is masking among what they say.

Models and inputs are float64, so that two ways of computing a number agree on its code.
"""

import copy
import gc
import io

import pytest
import rich
import torch
from hqq.core.quantize import Quantizer
from transformers import LlamaConfig, LlamaForCausalLM

import mmkv
from helpers.marks import cases
from helpers.masking import fake_quantise, masked_logits
from helpers.models import IMAGE, make_inputs, make_model, next_turn
from helpers.oracle import Variant, generate, options_of, short
from mmkv.cache import quantize
from mmkv.cache.quantize import BITS, QuantizedKV

NEW = 10
ROWS = (56, 29, 41)
COMPOSED = [
    Variant("prefixkv", (("merge", "position"),)),
    Variant("streaming", (("reposition", True),)),
    Variant("h2o", (("heads", "adaptive"), ("sinks", 2))),
    Variant("snapkv", (), 44),
]
VARIANTS = [Variant(name) for name in mmkv.list_policies()] + COMPOSED


def exact(inputs):
    return {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}


def closeness(policy):
    """How far logits may be apart.

    The attention weights of H2O and keys turned to new positions are float32: a number of a later
    token that lies halfway between two codes may get either, and is then off by one code.
    """
    weighed = policy.decode.name == "fixed" and policy.score.turn_reduction == "sum"
    return 1e-2 if weighed or policy.reposition else 1e-4


@pytest.fixture(scope="module")
def doubles():
    made = {name: make_model(name).double() for name in ("llama", "llava-llama")}
    return made.__getitem__


def agrees(model, inputs, variant, kv_dtype, new=NEW):
    options = options_of(variant)
    policy = mmkv.get_policy(variant.policy, **options)
    with mmkv.wrapped(model, variant.policy, variant.budget, kv_dtype=kv_dtype, **options):
        logits, tokens, cache, held = generate(model, inputs, new=new)
    how = {"merge": policy.merge, "reposition": policy.reposition}
    expected = masked_logits(model, inputs, tokens, held, bits=BITS[kv_dtype], **how)
    torch.testing.assert_close(logits.double(), expected, atol=closeness(policy), rtol=0)
    unquantised = masked_logits(model, inputs, tokens, held, **how)
    assert (logits[1:] - unquantised[1:]).abs().max() > 2e-2, "the oracle saw nothing"
    return cache


@cases(
    "variant, kv_dtype",
    [(x, "int4") for x in VARIANTS] + [(x, "int8") for x in COMPOSED],
    *("prefixkv", "h2o", (COMPOSED[2], "int8")),
    ids=str,
)
def test_eviction_equals_masking(doubles, variant, kv_dtype):
    """What is kept is read as its code says, from the first step on; the rest is masked."""
    inputs = exact(make_inputs("llava-llama", ROWS))
    agrees(doubles("llava-llama"), inputs, variant, kv_dtype)


@pytest.mark.parametrize("kv_dtype", BITS)
@cases("policy", ["prefixkv", "streaming", "adakv", "xkv"], "prefixkv")
def test_turns_equal_masking(doubles, policy, kv_dtype):
    """A new turn reads what the last one kept; stored once more, it has the same codes."""
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
    expected = masked_logits(model, inputs, feeds, held + kept, bits=BITS[kv_dtype])
    torch.testing.assert_close(torch.cat([first, more]).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_several_tokens_at_once_and_more_than_expected(doubles, kv_dtype):
    """Slots are added when none is left; tokens fed together get the codes they get alone."""
    model, inputs = doubles("llama"), make_inputs("llama", (30,))
    new = torch.randint(4, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    with mmkv.wrapped(model, "snapkv", 0.5, kv_dtype=kv_dtype, **short("snapkv")), torch.no_grad():
        together = model(**inputs, use_cache=True).past_key_values
        apart = copy.deepcopy(together)
        logits = model(input_ids=new, past_key_values=together).logits
        one_by_one = [model(input_ids=t, past_key_values=apart).logits for t in new.split(1, dim=1)]
    torch.testing.assert_close(logits, torch.cat(one_by_one, dim=1), atol=1e-4, rtol=0)
    for a, b in zip(together.compressed, apart.compressed, strict=True):
        n = 15 + 40
        assert torch.equal(a.blocks[0].positions[:, :n], b.blocks[0].positions[:, :n])
        assert torch.equal(a.blocks[0].keys.codes[:, :n], b.blocks[0].keys.codes[:, :n])


@cases("kv_dtype, bits_each", [("int8", 8.5), ("int4", 4.5)], ("int4", 4.5))
def test_bytes_fall_accordingly(kv_dtype, bits_each):
    """8 or 4 bits a number and 2 x 16 a group of 64; nothing of the model's type is held."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 120}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).bfloat16().eval()
    inputs = make_inputs("llama", (300,))
    gc.collect()
    known = [x for x in gc.get_objects() if type(x) is torch.Tensor]  # held: ids are not reused
    before = {id(x) for x in known}
    with mmkv.wrapped(model, "streaming", 100, kv_dtype=kv_dtype):
        *_, cache, _ = generate(model, inputs, new=4)
    numbers = 2 * 2 * 2 * (100 + 1) * 128  # layers, heads, keys and values, slots, head_dim
    assert cache.nbytes == numbers * bits_each / 8
    report = cache.report()
    assert report.nbytes == sum(x.nbytes for x in report.layers) == cache.nbytes
    assert report.full_nbytes == 2 * 2 * 2 * (300 + 3) * 128 * 2
    gc.collect()
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in before]
    held = [x for x in alive if x.ndim >= 3 and x.shape[1] == 101 and x.shape[2] > 1]
    assert sum(x.untyped_storage().nbytes() for x in held) == cache.nbytes


@pytest.mark.parametrize("kv_dtype", BITS)
@cases("policy", ["prefixkv", "adakv", "full"], "adakv")
def test_the_reported_error(doubles, policy, kv_dtype):
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
        full = whole.layers[i]
        for name, x in (("key_error", full.keys), ("value_error", full.values)):
            per_row = []
            for b, heads in enumerate(held[0][i]):
                kept = torch.cat([x[b, h, n[n >= 0]] for h, n in enumerate(heads)])
                off = kept - fake_quantise(kept, BITS[kv_dtype])
                per_row.append(off.norm() / kept.norm())
            assert getattr(layer, name) == pytest.approx(float(sum(per_row) / 3), rel=1e-4)
    for name in ("key_error", "value_error"):
        mean = sum(getattr(x, name) for x in report.layers) / 3
        assert getattr(report, name) == pytest.approx(mean)
        assert report.to_dict()["layers"][0][name] == getattr(report.layers[0], name)
        assert 1e-3 < mean < (0.01 if kv_dtype == "int8" else 0.1)
    table = io.StringIO()
    rich.print(report, file=table)
    assert f"kept in {kv_dtype}" in " ".join(table.getvalue().split())
    assert f"{report.key_error:.2%}, {report.value_error:.2%}" in table.getvalue()


def some_tokens(D, dtype=torch.float32):
    """Ordinary tokens, and at slots 0 to 4 some that are hard: level, zero, tiny, narrow, wide."""
    x = torch.randn(4, 30, D, generator=torch.Generator().manual_seed(D))
    x[:, 0], x[:, 1] = 5.0, 0.0
    x[:, 2] *= 1e-6
    x[:, 3] = 30 + x[:, 3] * 1e-4
    x[:, 4] *= 1e4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("D", [16, 64, 80, 128])
@pytest.mark.parametrize("kv_dtype", BITS)
def test_tokens_are_read_as_defined(kv_dtype, D, dtype):
    x = some_tokens(D, dtype)
    read = QuantizedKV.of(x, kv_dtype)[:, :]
    assert read.dtype == dtype
    ordinary = torch.ones(30, dtype=torch.bool)
    ordinary[3] = False
    expected = fake_quantise(x.double(), BITS[kv_dtype]).to(dtype)
    torch.testing.assert_close(read[:, ordinary], expected[:, ordinary], rtol=1e-6, atol=1e-7)
    # Numbers that float16 cannot tell apart beside their size become the smallest of them.
    low = x[:, 3].double().amin(-1, keepdim=True)
    torch.testing.assert_close(read[:, 3].double(), low.expand(-1, D), rtol=1e-3, atol=0)
    assert torch.equal(QuantizedKV.of(read[:, 5:], kv_dtype)[:, :], read[:, 5:]) or (
        dtype.itemsize < 4
    )


@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("D", [16, 64, 128])
def test_codes_are_those_of_hqq(kv_dtype, D):
    """A step's arithmetic is hqq's to the bit, and so are packing and reading."""
    x = some_tokens(D)[:, 5:]
    stored = QuantizedKV.of(x, kv_dtype)
    written = QuantizedKV.of(torch.zeros_like(x), kv_dtype)
    written[:, :7] = x[:, :7]
    written[torch.arange(4)[:, None], torch.arange(7, 25)] = x[:, 7:]
    for part in ("codes", "scale", "zero"):
        assert torch.equal(getattr(written, part), getattr(stored, part))
    if D > 64:
        return
    # One group a token: hqq itself packs its first half with its second where it lies along dim 0.
    flat, bits = x.flatten(0, 1).T, BITS[kv_dtype]
    codes, meta = Quantizer.quantize(
        flat, nbits=bits, group_size=D, axis=0, optimize=False, device="cpu"
    )
    assert torch.equal(codes.T.reshape(stored.codes.shape), stored.codes)
    meta = {**meta, "compute_dtype": torch.float32}
    meta["scale"], meta["zero"] = meta["scale"].half(), meta["zero"].half()
    read = Quantizer.dequantize(codes, meta).T.reshape(x.shape)
    assert torch.equal(read, stored[:, :])


@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("D", [16, 128, 192])
def test_codes_are_multiplied_as_the_numbers_they_are_read_as(kv_dtype, D, monkeypatch):
    """Each of a token's groups with a scale and zero point of its own; also row by row."""
    stored = QuantizedKV.of(some_tokens(D, torch.float64)[:, 5:], kv_dtype)
    read, g = stored[:, :], torch.Generator().manual_seed(1)
    query = torch.randn(4, 3, D, generator=g, dtype=torch.float64)
    weights = torch.rand(4, 3, 25, generator=g, dtype=torch.float64)
    for piece in (quantize._CPU_PIECE, 1, 25 * D * 3):  # all rows at once, one, and three
        monkeypatch.setattr(quantize, "_CPU_PIECE", piece)
        torch.testing.assert_close(stored.products(query), query @ read.mT)
        torch.testing.assert_close(stored.mixed(weights), weights @ read)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_rows_are_chosen_with_their_codes(kv_dtype):
    stored, rows = QuantizedKV.of(some_tokens(16), kv_dtype), torch.tensor([2, 0, 2])
    assert torch.equal(stored.index_select(0, rows)[:, :], stored[:, :][rows])


def test_errors_name_the_value_and_change_nothing(text_model, monkeypatch):
    before = text_model.config._attn_implementation
    with pytest.raises(ValueError, match="kv_dtype='int3': expected 'int8' or 'int4', or None"):
        mmkv.wrap(text_model, "snapkv", 0.3, kv_dtype="int3")
    monkeypatch.setattr(text_model.config, "head_dim", 15)
    with pytest.raises(ValueError, match=r"'int4' packs two numbers .* a head has 15: use 'int8'"):
        mmkv.wrap(text_model, "snapkv", 0.3, kv_dtype="int4")
    quantize.check("int8", 15)
    monkeypatch.setitem(__import__("sys").modules, "hqq", None)
    with pytest.raises(ValueError, match=r"'int8' needs hqq: pip install 'mmkv\[quant\]'"):
        mmkv.wrap(text_model, "snapkv", 0.3, kv_dtype="int8")
    quantize.check(None, 15)
    assert not hasattr(text_model, "_mmkv")
    assert text_model.config._attn_implementation == before
