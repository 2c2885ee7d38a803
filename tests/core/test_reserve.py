"""Slots set aside for tokens to come: few, never so many that the full cache would be smaller."""

from itertools import combinations

import numpy as np
import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.models import make_inputs
from helpers.oracle import DECODERS, DECODING, options_of, short
from mmkv.cache.evict import group_rows

LAYERS, HEADS = 2, 2  # of the tiny Llama


def passes(model, inputs, new):
    """After the prefill and each step: pairs held room for, pairs kept, tokens seen."""
    found = []

    def look(module, args, output):
        cache = output.past_key_values
        states = [x.state for x in cache.layers]
        kept = sum(int(x.counts().sum()) for x in states)
        slots = sum(b.positions.numel() for x in states for b in x.blocks)
        found.append((slots, kept, cache.get_seq_length()))

    with model.register_forward_hook(look):
        model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return found


def test_a_prompt_of_embeddings_has_as_many_slots_as_its_ids(models):
    model, inputs = models("llama"), make_inputs("llama", (60,))
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    given = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    with mmkv.wrapped(model, "full"):
        of_ids = model.generate(**inputs, **given).past_key_values
        of_embeds = model.generate(inputs_embeds=embeds, **given).past_key_values
    assert of_embeds.max_length == of_ids.max_length == 79


@cases("variant", DECODING[1::2], "h2o", ids=str)
def test_few_slots_are_empty(models, variant):
    """An eighth of the slots in use, or 16 a row; rows of similar length share slots (4 %)."""
    model, inputs = models("llama"), make_inputs("llama", (300, 41))
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        found = passes(model, inputs, 40)
    R = LAYERS * HEADS * 2
    assert len(found) == 40
    for slots, kept, _ in found:
        assert slots <= 1.04 * 9 / 8 * (kept + R) + 16 * R


@pytest.mark.slow
@pytest.mark.parametrize("policy", [p for p in DECODERS if p != "full"])
def test_a_compressed_cache_is_never_larger_than_the_full_one(models, policy):
    """At every token of a long answer, where 16 tokens a head were dropped on average."""
    model, inputs = models("llama"), make_inputs("llama", (120,))
    with mmkv.wrapped(model, policy, 0.8, **short(policy)):
        found = passes(model, inputs, 100)
    R = LAYERS * HEADS
    assert len(found) == 100
    for slots, kept, seen in found:
        assert R * seen - kept >= 16 * R
        assert slots <= R * seen


@pytest.mark.parametrize("new", [4, 20])
def test_no_slot_is_reserved_beyond_the_last_token_read(models, new):
    model, inputs = models("llama"), make_inputs("llama", (400,))
    with mmkv.wrapped(model, "snapkv", 0.5):
        found = passes(model, inputs, new)
    assert found[0][0] == LAYERS * HEADS * (200 + new - 1)  # the last token is not read
    assert found[-1][0] == found[0][0]


@cases("each", [1, 3, 40], 3, 40)
def test_tokens_in_added_slots_are_kept(models, each):
    """One at a time or several, up to the last slot and beyond it."""
    model, inputs = models("llama"), make_inputs("llama", (60, 41))
    new = torch.randint(4, 100, (2, 120), generator=torch.Generator().manual_seed(1))
    with mmkv.wrapped(model, "adakv", 0.4, **short("adakv")), torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values

        def held():
            rows = [row for i in range(LAYERS) for row in cache.kept(i).flatten(0, 1)]
            return [row[row >= 0].tolist() for row in rows]

        before = held()
        for part in new.split(each, dim=1):
            model(input_ids=part, past_key_values=cache)
            late = list(range(60, cache.get_seq_length()))
            assert held() == [old + late for old in before]


@pytest.mark.slow
def test_constant_size_is_not_reserved_early(models):
    """A prompt far below a budget in tokens."""
    model, inputs = models("llama"), make_inputs("llama", (10,))
    for policy in ("streaming", "h2o"):
        with mmkv.wrapped(model, policy, 1000):
            found = passes(model, inputs, 90)
        for slots, kept, _ in found:
            assert slots <= kept + LAYERS * HEADS * 17


@pytest.mark.parametrize("seed", range(12))
def test_rows_share_the_fewest_blocks_that_waste_little(seed):
    """15 % of padding at the most, or what six blocks cannot avoid; against every way to cut."""
    rng = np.random.default_rng(seed)
    counts = np.append(rng.choice(rng.integers(1, 33, 3 + seed), 40), 32)
    blocks = group_rows(counts)
    assert np.array_equal(np.sort(np.concatenate(blocks)), np.arange(41))
    assert all((np.diff(rows) > 0).all() for rows in blocks)

    def slots(parts):
        return sum(len(x) * x.max() for x in parts)

    ordered = np.sort(counts)[::-1]
    places = np.flatnonzero(np.diff(ordered)) + 1
    least = [
        min(slots(np.split(ordered, cuts)) for cuts in combinations(places, n))
        for n in range(min(6, len(places) + 1))
    ]
    enough = [n for n, found in enumerate(least) if found <= 1.15 * counts.sum()]
    n = enough[0] if enough else 5
    assert (len(blocks), slots(counts[rows] for rows in blocks)) == (n + 1, least[n])
