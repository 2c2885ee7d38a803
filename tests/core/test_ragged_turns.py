"""Later turns of a batch whose new turns differ in length: padding lies inside the rows.

Each row keeps and says what it does alone, whatever the other rows are asked.
"""

import pytest
import torch

import mmkv
from helpers.marks import cases, since
from helpers.masking import Feed, masked_logits
from helpers.models import PAD, VOCAB, make_inputs, make_model, row_of
from helpers.oracle import (
    FIRST,
    READING,
    ROWS,
    VARIANTS,
    Variant,
    depth,
    generate,
    options_of,
    ragged_talk,
    same_as_alone,
)

# Each score, sizing, merge and decoding once, and a `least` that some rows are above.
RAGGED = READING + [x for x in VARIANTS if "least" in dict(x.options)]
MASKED = [x for x in READING if x.policy in FIRST and not x.options]
# What scores by the last queries, by all, by a second pass, and what merges.
IN_CHUNKS = [x for x in MASKED if x.policy in ("snapkv", "prefixkv", "condense")]
IN_CHUNKS += [Variant(policy) for policy in ("kvzip", "expected", "vlcache", "lookm")]
TURNS = [(3, 30, 12), (21, 4, 9)]  # new tokens of each row
# Each way to decode; scores by the last queries, by all and by a second pass; groups.
ENDING = [x for x in MASKED if x.policy in ("snapkv", "streaming", "prefixkv", "condense")]
ENDING += [Variant(policy) for policy in ("tova", "kvzip")]
ENDING += [x for x in VARIANTS if "rounds" in dict(x.options).values()]
WITH_PICTURES = [
    Variant(policy, (("protect", "instruction"),), 0.8)
    for policy in ("prefixkv", "h2o", "condense", "local")
]
WITH_PICTURES += [
    Variant("snapkv", (("protect", "instruction"), ("window", 4)), 0.8),
    *(Variant(policy, (), 0.5) for policy in ("lookm", "vlcache", "elastic", "xkv")),
]


@pytest.fixture(scope="module")
def doubles():
    """In float64, so that a code of 8 or 4 bits is not rounded differently in a batch."""
    return make_model("llama").double()


def agrees(model, variant, inputs=None, settings=None, **options):
    """Each row of a conversation says and holds what it does alone.

    Compared are the row without padding in its prompt, and the one with the most.
    """
    inputs = make_inputs("llama", ROWS["padded"]) if inputs is None else inputs
    settings = {**(settings or {}), **options_of(variant)}
    with mmkv.wrapped(model, variant.policy, variant.budget, **settings):
        together = ragged_talk(model, inputs, TURNS, **options)
        for b in (0, 1):
            alone = ragged_talk(model, row_of(inputs, b), TURNS, rows=[b], **options)
            same_as_alone(together, alone, b)


@cases("variant", RAGGED, "snapkv", ids=str)
def test_a_ragged_turn_equals_singles(models, variant):
    agrees(models("llama", depth(variant.policy)), variant)


@cases("variant", MASKED, "snapkv", ids=str)
def test_evicting_in_ragged_turns_equals_masking(models, variant):
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    options = options_of(variant)
    with mmkv.wrapped(model, variant.policy, variant.budget, **options):
        talk = ragged_talk(model, inputs, TURNS)
    policy, (first, *feeds) = mmkv.get_policy(variant.policy, **options), talk.feeds
    expected = masked_logits(model, first, feeds, talk.held, merge=policy.merge)
    torch.testing.assert_close(torch.stack(talk.logits), expected, atol=1e-4, rtol=0)


@since("5.21")
@pytest.mark.slow
@pytest.mark.parametrize("variant", IN_CHUNKS, ids=str)
def test_a_ragged_turn_in_chunks_equals_singles(models, variant):
    """A row's last queries may lie in several chunks, with padding between."""
    agrees(models("llama"), variant, prefill_chunk_size=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kv_dtype"),
    [(x, "int4") for x in ("snapkv", "elastic", "condense", "adakv", "h2o")] + [("h2o", "int8")],
)
def test_a_ragged_turn_in_few_bits_equals_singles(doubles, policy, kv_dtype):
    agrees(doubles, Variant(policy), settings={"kv_dtype": kv_dtype})


@pytest.mark.slow
@pytest.mark.parametrize("variant", WITH_PICTURES, ids=str)
def test_a_ragged_turn_with_pictures_equals_singles(models, variant):
    """One row shows a picture more."""
    inputs = make_inputs("llava-llama", ROWS["padded"])
    agrees(models("llava-llama"), variant, inputs, pictures=[1])


@cases("variant", RAGGED, "snapkv", "xkv", ids=str)
def test_prompt_with_hidden_tokens_equals_prompt_without(models, variant):
    model, inputs = models("llama"), make_inputs("llama", ROWS["padded"])
    hidden = torch.tensor([[10, 11, 12, 40, 85], [70, 71, 72, 73, 88], [50, 52, 54, 80, 81]])
    inputs["attention_mask"].scatter_(1, hidden, 0)
    places = [x.nonzero()[:, 0] for x in inputs["attention_mask"]]
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        logits, words, _, held = generate(model, inputs, new=5)
        for b, place in enumerate(places[:2]):
            alone, said, _, kept = generate(model, row_of(inputs, b), new=5)
            assert torch.equal(words[b : b + 1], said)
            torch.testing.assert_close(logits[:, b : b + 1], alone, atol=1e-4, rtol=0)
            for together, single in zip(held[0], kept[0], strict=True):
                for mine, wanted in zip(together[b], single[0], strict=True):
                    assert torch.equal(mine[mine >= 0], place[wanted[wanted >= 0]])


def second_turn(model, inputs, words, ends):
    """The logits of a second turn that hides what follows the first `ends` [B] of `words`."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    shown = (torch.arange(words.shape[1]) < torch.tensor(ends)[:, None]).long()
    feed = Feed(words.where(shown > 0, PAD), ids.shape[1])
    _, said, cache, _ = generate(model, inputs, new=words.shape[1], logits_processor=[feed])
    new = torch.arange(20, 29).expand(len(ids), -1)
    turn = {
        "input_ids": torch.cat([ids, said, new], dim=1),
        "attention_mask": torch.cat([mask, shown, torch.ones_like(new)], dim=1),
    }
    return generate(model, turn, new=3, past_key_values=cache)[0]


@cases("variant", ENDING, "snapkv", "streaming", "condense", ids=str)
def test_padding_after_an_early_end_is_hidden_or_warned_of(models, variant, caplog):
    """Two replies end early: `generate` feeds these rows 12 and 7 tokens of padding, alone one."""
    model, inputs, ends = models("llama"), make_inputs("llama", ROWS["padded"]), (4, 16, 9)
    words = torch.randint(4, VOCAB, (3, 16), generator=torch.Generator().manual_seed(3))
    policy = mmkv.get_policy(variant.policy, **options_of(variant))
    with mmkv.wrapped(model, policy, variant.budget):
        if policy.decode.every and policy.merge is not None:
            with pytest.raises(ValueError, match=r"hides generated token .* or use decode='grow'"):
                second_turn(model, inputs, words, ends)
            return
        together = second_turn(model, inputs, words, ends)
        warned = [x.getMessage() for x in caplog.records if "hides" in x.getMessage()]
        for b, end in enumerate(ends):
            few = words[b : b + 1, : end + 1]
            alone = second_turn(model, row_of(inputs, b), few, [end])
            if policy.decode.name == "grow":
                torch.testing.assert_close(together[:, b : b + 1], alone, atol=1e-3, rtol=0)
    if policy.decode.name == "grow":
        assert not warned
    else:
        (text,) = warned
        assert text.startswith("row 0: attention_mask hides 11 generated tokens, for which decode=")
