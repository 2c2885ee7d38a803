"""`cache.nbytes` is what the allocator holds, after every way of generating."""

import copy
import functools
import gc

import pytest
import torch
from transformers import LlamaConfig

import mmkv
from helpers import configs, zoo
from helpers.marks import cases, older_than, since
from helpers.masking import pairs_of
from helpers.memory import storages
from helpers.models import ending, make_inputs, next_turn
from helpers.oracle import generate, short
from mmkv.calls import cache_in
from mmkv.decode.slots import SlotSchedule

D = 250  # a head dimension that nothing else has: it tells keys, values and queries from the rest
LAYERS, HEADS = configs.TEXT["num_hidden_layers"], 4
POLICIES = ["prefixkv", "adakv", "h2o", "condense"]


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": D}
    model = zoo.build("LlamaForCausalLM", LlamaConfig(**configs.TEXT | sizes), "sdpa")
    # Each search for storages then skips the objects that exist by now.
    gc.collect()
    gc.freeze()
    return model


def say(model, inputs, **options):
    """The sequences, and the cache, which is all that is left alive."""
    options = {"max_new_tokens": 8, "do_sample": False, **options}
    out = model.generate(**inputs, **options, return_dict_in_generate=True)
    return out.sequences, out.past_key_values


def held_since(before: dict[int, int]) -> int:
    """Bytes of the storages that could hold keys or values and were not there before."""
    return sum(n for at, n in storages(D).items() if at not in before)


def reached(x, seen: dict) -> dict[int, int]:
    """Address and bytes of every storage reached from an object, but for a step's buffers."""
    if isinstance(x, torch.Tensor):
        return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
    if id(x) in seen or isinstance(x, SlotSchedule):
        return {}
    seen[id(x)] = x
    if isinstance(x, (list, tuple)):
        parts = x
    else:
        ours = vars(x) if type(x).__module__.startswith("mmkv") else {}
        parts = [part for name, part in ours.items() if name != "weights"]
    return {at: n for part in parts for at, n in reached(part, seen).items()}


def generating(**options):
    return lambda model, inputs: say(model, inputs, **options)[1]


def turns(model, inputs, **options):
    sequences, cache = say(model, inputs, **options)
    for seed in (1, 2):
        more = next_turn(inputs, sequences, image=False, seed=seed)
        sequences, again = say(model, more, past_key_values=cache, **options)
        assert again is cache
    return cache


def turns_with_beams(model, inputs):
    sequences, cache = say(model, inputs)
    cache.batch_repeat_interleave(3)
    more = next_turn(inputs, sequences, image=False)
    return say(model, more, past_key_values=cache, num_beams=3)[1]


def some_rows(model, inputs):
    cache = say(model, inputs)[1]
    cache.batch_select_indices(torch.tensor([1]))
    return cache


def a_copy(model, inputs):
    return copy.deepcopy(say(model, inputs)[1])


def started_again(model, inputs):
    cache = say(model, inputs)[1]
    cache.reset()
    assert cache.nbytes == 0
    return say(model, inputs, past_key_values=cache)[1]


WAYS = {
    "greedy": generating(),
    "many tokens": generating(max_new_tokens=70),
    "beams": generating(num_beams=3),
    "several samples": generating(do_sample=True, num_return_sequences=3),
    "chunks": generating(prefill_chunk_size=16),
    "turns": turns,
    "turns with beams": turns_with_beams,
    "some rows": some_rows,
    "a copy": a_copy,
    "started again": started_again,
}
if not older_than("5.21"):
    WAYS["turns in chunks"] = functools.partial(turns, prefill_chunk_size=16)


# Each way with what has weights and groups, and with one of the others.
TRIED = [(policy, way) for i, way in enumerate(WAYS) for policy in ("condense", POLICIES[i % 3])]


@cases("policy, way", TRIED, ("prefixkv", "greedy"), ids=str)
def test_bytes_are_those_of_the_storages(model, policy, way):
    inputs, before = make_inputs("llama", (90, 61)), storages(D)
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        cache = WAYS[way](model, inputs)
    rows = sum(len(b.row_numbers) for b in cache.blocks)
    # Beside what slots hold there are a few numbers for each row, such as the error.
    assert 0 <= sum(reached(cache.layers, {}).values()) - cache.nbytes <= 40 * rows
    assert 0 < held_since(before) < cache.nbytes
    assert cache.report().nbytes == cache.nbytes
    cache.reset()
    assert cache.nbytes == held_since(before) == 0


@pytest.mark.parametrize("chunk", [None, pytest.param(40, marks=since("5.21"))])
@pytest.mark.parametrize("when", ["in the prompt", "while decoding", "in a turn"])
@cases("policy", POLICIES[:-1], "h2o")
def test_bytes_after_an_interrupt(model, policy, when, chunk):
    """What an interrupted pass leaves is what the cache says, and the last queries of a chunk."""
    inputs, before, found = make_inputs("llama", (90, 61)), storages(D), []
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    with mmkv.wrapped(model, policy, 0.3, **short(policy)):
        if when == "in a turn":
            sequences, cache = say(model, inputs, **options)
            inputs = next_turn(inputs, sequences, image=False, new=60)
            options["past_key_values"] = cache
            del cache
        passes = {"in a turn": 0, "in the prompt": 0, "while decoding": 4}[when]
        noting = model.model.register_forward_pre_hook(
            lambda m, a, k: found.append(cache_in(k)), with_kwargs=True
        )
        broken = ending(RuntimeError, after=passes + (chunk is not None))
        broken = model.model.layers[1].register_forward_hook(broken)
        with noting, broken, pytest.raises(RuntimeError):
            say(model, inputs, **options)
    cache = found[-1]
    assert all(x is cache for x in found)
    observed = mmkv.get_policy(policy, **short(policy)).window_size
    tails = 0 if chunk is None or when == "while decoding" else observed
    of_pairs = cache.nbytes - sum(b.nbytes for b in cache.blocks)
    assert 0 <= held_since(before) - of_pairs <= LAYERS * 2 * HEADS * tails * D * 4
    assert cache.nbytes > 0
    found.clear()
    options.clear()
    del cache
    assert held_since(before) == 0


@cases(
    "policy, options",
    [
        ("h2o", {}),
        ("prefixkv", {"distance": 4}),
        ("condense", {"least": 0}),
        ("condense", {"least": 0, "decode": "rounds", "every": 4, "latest": 3}),
    ],
    *("h2o", "prefixkv"),
)
def test_headline_gives_kept_share_of_prompt(model, policy, options):
    """Pairs of tokens before the reply, groups among them, and beside them those of the reply."""
    inputs = make_inputs("llama", (60, 41))
    with mmkv.wrapped(model, policy, 0.3, **options):
        *_, cache, held = generate(model, inputs, new=18)
    report = cache.report()
    since = cache.get_seq_length() - report.generated
    of_prompt = of_reply = 0
    for kept in held[-1]:
        fresh = int((kept >= since).sum())
        of_prompt, of_reply = of_prompt + int(pairs_of(kept).sum()) - fresh, of_reply + fresh
    pairs = LAYERS * 2 * (sum(report.seen) - 2 * report.generated)
    assert report.prompt_fraction == pytest.approx(of_prompt / pairs)
    assert report.to_dict()["prompt_fraction"] == report.prompt_fraction
    mean = f"{of_reply / (LAYERS * 2 * 2):.1f}".removesuffix(".0")
    beside = f"{report.generated}" if "condense" in policy else f"{mean} of {report.generated}"
    assert report.headline == (
        f"{of_prompt / pairs:.1%} of the prompt kept, and {beside} generated tokens"
    )
    rounds = "generated tokens count as prompt once they have competed"
    assert (rounds in report.notes) == ("decode" in options)
    if policy == "h2o":
        assert report.prompt_fraction < 0.8 * report.kept_fraction
