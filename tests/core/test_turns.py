"""Prompts in chunks and conversations in turns: the same oracle, over a cache that goes on."""

import copy

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import mmkv
from helpers import masking, zoo
from helpers.marks import cases
from helpers.masking import masked_logits, pairs_of
from helpers.models import continued, make_inputs, make_model, next_turn, row_of
from helpers.oracle import DECODERS, DECODING, EITHER, READING, ROWS, depth, generate, options_of
from mmkv.cache.prompt_kv import PromptKV


def merges(variant) -> bool:
    """Whether pairs are averaged, in float32, so that their codes may round either way."""
    return mmkv.get_policy(variant.policy, **options_of(variant)).merge is not None


FIRST, SECOND = 8, 4  # tokens generated in each turn
ROUNDS = {"decode": "rounds", "every": 4}


def in_rows(variants):
    return [(x, "padded") for x in variants] + [(x, "one") for x in variants[::6]]


@cases("variant", READING, "prefixkv", "adakv", ids=str)
def test_a_prompt_in_chunks_is_the_prompt(models, variant):
    """prefill_chunk_size evicts once, when the prompt is complete, and changes nothing else."""
    model = models("llama", depth(variant.policy))
    inputs = make_inputs("llama", ROWS["padded"])
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        logits, tokens, _, held = generate(model, inputs, new=6)
        chunked, words, _, kept = generate(model, inputs, new=6, prefill_chunk_size=33)
    assert torch.equal(tokens, words)
    torch.testing.assert_close(chunked, logits, atol=1e-4, rtol=0)
    for one, other in zip(held, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@cases("variant, rows", in_rows(READING), "adakv", ids=str)
def test_evicting_after_every_chunk_equals_masking(models, variant, rows):
    """evict_chunks=True: every chunk competes with what the chunks before it left."""
    model, inputs = models("llama", depth(variant.policy)), make_inputs("llama", ROWS[rows])
    L = model.config.num_hidden_layers
    chunk = 20  # two of the padded rows begin in a later chunk
    options = options_of(variant)
    with mmkv.wrapped(model, variant.policy, variant.budget, evict_chunks=True, **options):
        logits, words, _, held = generate(model, inputs, new=6, prefill_chunk_size=chunk)
    names = ("input_ids", "attention_mask")
    chunks = [inputs[name].split(chunk, dim=1) for name in names]
    first, *feeds = (dict(zip(names, x, strict=True)) for x in zip(*chunks, strict=True))
    chunks = chunks[0]
    feeds += [{"input_ids": ids} for ids in words.split(1, dim=1)[:-1]]
    policy = mmkv.get_policy(variant.policy, **options)
    expected = masked_logits(model, first, feeds, held, merge=policy.merge)
    assert len(held) == len(feeds) + 1
    torch.testing.assert_close(logits, expected[len(chunks) - 1 :], atol=1e-4, rtol=0)
    if policy.keeps_all or variant.budget is None:
        return
    most = [variant.budget * L] * len(chunks)
    for b, length in enumerate(ROWS[rows]):
        for t, pairs in enumerate(held[: len(chunks)]):
            seen = min(length, length - inputs["input_ids"].shape[1] + (t + 1) * chunk)
            seen = max(seen, 0)
            if isinstance(variant.budget, float):
                most[t] = max(round(variant.budget * L * seen), L * min(policy.least, seen))
            counts = [pairs_of(layer)[b].float().mean().item() for layer in pairs]
            assert sum(counts) <= max(most[t], L * policy.sinks + L * policy.window_size)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["condense", "snapkv", "h2o"])
def test_memory_is_the_budget_and_one_chunk_at_any_length(models, policy, monkeypatch):
    model, inputs = models("llama"), make_inputs("llama", (1500,))
    most, sizes = [], []
    extended = PromptKV.extended

    def recorded(*args):
        found = extended(*args)
        most.append(found.keys.shape[2])
        return found

    monkeypatch.setattr(PromptKV, "extended", recorded)
    options = {"window": 8} if policy == "snapkv" else {}
    noting = model.register_forward_hook(lambda *args: sizes.append(held(args[-1])))
    with noting, mmkv.wrapped(model, policy, 40, evict_chunks=True, **options):
        *_, cache, _ = generate(model, inputs, new=2, prefill_chunk_size=100)
    assert max(most) <= 40 + 100
    assert len(sizes) == 15 + 1
    # Slots for 40 tokens, and the 16 at the least that are set aside for more.
    L = model.config.num_hidden_layers
    pair = L * 2 * 2 * 16 * 4
    weights = L * 2 * 4 if policy == "condense" else 0
    assert max(sizes) <= (40 + 16 + 1) * (pair + weights)
    assert cache.get_seq_length() == 1501


def held(output):
    """Bytes held, but for the group of each token read, which is kept to be looked at."""
    layers = output.past_key_values.compressed
    groups = [x.keeping().group_index for x in layers]
    return sum(x.nbytes for x in layers) - sum(x.nbytes for x in groups if x is not None)


@cases("variant, rows", in_rows(EITHER), "adakv", "h2o", ids=str)
def test_turns_equal_masking(models, variant, rows):
    """A second turn competes with what the first one left; evicting is masking throughout."""
    name = {"one": "llama", "padded": "llava-llama"}[rows]
    model, inputs = models(name, depth(variant.policy)), make_inputs(name, ROWS[rows])
    L = model.config.get_text_config().num_hidden_layers
    options = options_of(variant)
    with mmkv.wrapped(model, variant.policy, variant.budget, **options):
        first, words, cache, held = generate(model, inputs, new=FIRST)
        second = next_turn(inputs, torch.cat([inputs["input_ids"], words], 1), "llava" in name)
        more, answer, again, kept = generate(model, second, new=SECOND, past_key_values=cache)
    assert again is cache
    seen = second["input_ids"].shape[1]
    assert cache.get_seq_length() == seen + SECOND - 1
    start = inputs["input_ids"].shape[1] + FIRST - 1
    feeds = [{"input_ids": words[:, t : t + 1]} for t in range(FIRST - 1)]
    turn = {k: v for k, v in second.items() if k == "pixel_values"}
    feeds.append({"input_ids": second["input_ids"][:, start:], **turn})
    feeds += [{"input_ids": answer[:, t : t + 1]} for t in range(SECOND - 1)]
    policy = mmkv.get_policy(variant.policy, **options)
    expected = masked_logits(model, inputs, feeds, held + kept, merge=policy.merge)
    torch.testing.assert_close(torch.cat([first, more]), expected, atol=1e-4, rtol=0)
    if policy.keeps_all:
        return
    # The budget holds over all tokens seen; a layer cannot hold what an earlier turn evicted.
    for b in range(len(ROWS[rows])):
        length = int(second["attention_mask"][b].sum())
        counts = [pairs_of(layer)[b].float().mean().item() for layer in kept[0]]
        if isinstance(variant.budget, int):
            assert sum(counts) <= L * variant.budget
        elif variant.budget is not None:
            most = max(round(variant.budget * L * length), L * min(policy.least, length))
            assert sum(counts) <= most
            if policy.layers.name == "uniform" and not policy.heads.scope:
                assert sum(counts) == most


@cases(
    "policy, decode",
    [("condense", ROUNDS), *((policy, {}) for policy in (*DECODERS, "prefixkv", "snapkv"))],
    ("condense", {}),
    ids=str,
)
def test_row_kept_whole_continues_as_alone(models, policy, decode):
    """The first turn of row 0 is as long as the budget, and that of row 1 is longer."""
    model, inputs = models("llama"), make_inputs("llama", (40, 90))
    options = {"window": 6} if mmkv.get_policy(policy).window_size else {}
    more = torch.randint(4, 120, (1, 20), generator=torch.Generator().manual_seed(3))

    def talk(inputs):
        _, words, cache, _ = generate(model, inputs, new=2)
        given = continued(inputs, words, more.expand(len(words), -1))
        return generate(model, given, new=SECOND, past_key_values=cache)[0]

    with mmkv.wrapped(model, policy, 40, **options, **decode):
        together, alone = talk(inputs), talk(row_of(inputs, 0))
    torch.testing.assert_close(together[:, :1], alone, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_streamer_may_start_another_conversation_of_the_model():
    """It gets the prompt before the cache is made, and each token between two passes.

    Models with three axes of positions store how far the last call's pictures moved text.
    """
    model = zoo.model_of("Qwen2_5_VLForConditionalGeneration")
    first, other = (zoo.prompt(model, (60 + 28 * i,), seed=i, pictures=1 + i) for i in range(2))

    class Asks(BaseStreamer):
        def put(self, value):
            model.generate(**other, max_new_tokens=2)

        def end(self):
            pass

    def talk(**streamer):
        _, words, cache, _ = generate(model, first, new=3, **streamer)
        turn = zoo.next_turn(model, first, words, picture=False)
        return generate(model, turn, new=SECOND, past_key_values=cache, **streamer)[0]

    with mmkv.wrapped(model, "condense", 0.5, least=0):
        torch.testing.assert_close(talk(streamer=Asks()), talk(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("policy", "options"), [("adakv", {"window": 6}), ("condense", {"least": 0})]
)
def test_several_tokens_without_generate_are_that_many_steps(models, policy, options):
    """A plain forward of q tokens equals q steps where decoding only grows."""
    model, inputs = models("llama"), make_inputs("llama", ROWS["one"])
    more = torch.arange(10, 17)[None]
    with mmkv.wrapped(model, policy, 0.3, **options), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        together = model(input_ids=more, past_key_values=cache).logits
        single = [model(input_ids=x[None, None], past_key_values=twin).logits for x in more[0]]
    torch.testing.assert_close(together, torch.cat(single, dim=1), atol=1e-4, rtol=0)
    for i in range(len(cache.layers)):
        assert torch.equal(cache.kept(i), twin.kept(i))


def test_row_without_tokens_does_not_delay_others(models):
    """The second row begins in the third chunk."""
    model, inputs = models("llama"), make_inputs("llama", (60, 17))
    L = model.config.num_hidden_layers
    with mmkv.wrapped(model, "knorm", 0.5, evict_chunks=True):
        sizes = []

        def look(module, args, output):
            layers = output.past_key_values.layers
            sizes.append([x.dense().positions.shape[2] for x in layers])

        with model.register_forward_hook(look):
            *_, cache = masking.generate(model, inputs, new=1, prefill_chunk_size=20)
    assert sizes == [[10] * L, [20] * L, [30] * L]
    for b, n in enumerate((60, 17)):
        kept = [int((cache.kept(i)[b] >= 0).sum()) for i in range(L)]
        assert sum(kept) == 2 * round(0.5 * L * n)


@cases(
    "variant, kv_dtype",
    [(x, None) for x in READING] + [(x, "int8") for x in DECODING[::4] if not merges(x)],
    "snapkv",
    ids=str,
)
def test_evicting_after_every_chunk_equals_singles(variant, kv_dtype):
    """Each row begins with a chunk, so it is cut alike alone; float64 rounds codes alike."""
    model, lengths = make_model("llama", layers=depth(variant.policy)).double(), (80, 40, 20)
    inputs, options = make_inputs("llama", lengths), options_of(variant)
    with mmkv.wrapped(
        model, variant.policy, variant.budget, evict_chunks=True, kv_dtype=kv_dtype, **options
    ):
        logits, words, _, held = generate(model, inputs, new=5, prefill_chunk_size=20)
        for b, n in enumerate(lengths[1:], 1):
            given = row_of(inputs, b)
            alone, said, _, kept = generate(model, given, new=5, prefill_chunk_size=20)
            assert torch.equal(words[b : b + 1], said)
            torch.testing.assert_close(logits[:, b : b + 1], alone, atol=1e-4, rtol=0)
            for together, single in zip(held[-len(kept) :], kept, strict=True):
                for mine, wanted in zip(together, single, strict=True):
                    for h, head in enumerate(wanted[0]):
                        place = head[head >= 0] + max(lengths) - n
                        assert torch.equal(mine[b, h][mine[b, h] >= 0], place)


def test_read_ids_are_copied(models):
    """Also where the caller's ids are written into afterwards."""
    model, ids = models("llama"), make_inputs("llama", (40,))["input_ids"]
    mine, turn = ids.clone(), torch.full((1, 5), 9)
    with mmkv.wrapped(model, "condense", 0.4, least=0), torch.no_grad():
        cache = model(input_ids=mine, use_cache=True).past_key_values
        mine.fill_(9)
        with pytest.raises(ValueError, match="read another prompt: row 0"):
            model.generate(torch.cat([mine, turn], 1), past_key_values=cache, max_new_tokens=1)
        model.generate(torch.cat([ids, turn], 1), past_key_values=cache, max_new_tokens=1)
    assert cache.get_seq_length() == 45


@cases(
    "how",
    ["generate", "chunks", "forward", "beams", "new tokens alone"],
    "generate",
)
def test_prompt_that_differs_from_read_tokens_raises(models, how):
    model, inputs = models("llama"), make_inputs("llama", (40, 23))
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    turn = torch.full((2, 5), 9)
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        if how == "forward":
            with torch.no_grad():
                cache, words = model(**inputs, use_cache=True).past_key_values, turn[:, :0]
        else:
            beams = {"num_beams": 2, "num_return_sequences": 2} if how == "beams" else {}
            chunks = {"prefill_chunk_size": 15} if how == "chunks" else {}
            out = model.generate(**inputs, **options, **chunks, **beams)
            cache, words = out.past_key_values, out.sequences[:, 40:]
        known = inputs["input_ids"].repeat_interleave(len(words) // 2, 0)
        turn = turn.repeat_interleave(len(words) // 2, 0)
        ids = torch.cat([known, words, turn], 1)
        mask = torch.ones_like(ids)
        mask[:, :40] = inputs["attention_mask"].repeat_interleave(len(words) // 2, 0)
        if how == "beams":  # those that were running, in whatever order, are the cache's
            ids[:, : cache.ids.shape[1]] = cache.ids
        if how == "new tokens alone":
            mask, ids = mask[:, :46], ids[:, :46]
            given = ids[:, 43:], mask
            out = model.generate(given[0], attention_mask=mask, past_key_values=cache, **options)
            cache, more = out.past_key_values, out.sequences[:, 3:]
            ids = torch.cat([ids, more, turn], 1)
            mask = torch.cat([mask, torch.ones_like(ids[:, 46:])], 1)

        def goes_on(row, place):
            other = ids.clone()
            other[row, place] += 1
            twin = copy.deepcopy(cache)
            return model.generate(other, attention_mask=mask, past_key_values=twin, **options)

        seen, padded = cache.get_seq_length(), len(ids) - 1
        goes_on(padded, 3)  # padding may be anything
        assert torch.equal(goes_on(0, seen).sequences[0, :seen], ids[0, :seen])
        last = 39 if how == "forward" else seen - 1
        for row, place in ((0, 0), (padded, 17), (0, 38), (padded, last)):
            with pytest.raises(ValueError, match=rf"read another prompt: row {row} .* {place}; "):
                goes_on(row, place)
        cache.reset()
        goes_on(0, 0)


def test_changed_reply_without_padding_raises(models):
    """There `generate` drops the mask."""
    model, ids = models("llama"), make_inputs("llama", (40,))["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    with mmkv.wrapped(model, "snapkv", 0.5, window=4):
        first = model.generate(ids, **options)
        turn = torch.cat([first.sequences, torch.full((1, 3), 9)], 1)
        for place in (40, 44):
            other = turn.clone()
            other[0, place] += 1
            with pytest.raises(ValueError, match=rf"row 0 differs at token {place}; "):
                model.generate(other, past_key_values=copy.deepcopy(first.past_key_values))
        model.generate(turn, past_key_values=first.past_key_values, **options)
