"""Models whose rotary frequencies change with the length: no cache holds keys of both kinds."""

import pytest
import torch

import mmkv
from helpers import zoo
from helpers.configs import CONFIGS
from helpers.marks import cases, since
from helpers.masking import generate, held_by, held_sets
from helpers.models import make_inputs
from helpers.oracle import short
from helpers.pretend_cuda import install
from mmkv.attach import graph
from mmkv.decode import slots

SHORT, NEW = 64, 24


@pytest.fixture(scope="module")
def phi():
    config = CONFIGS["Phi3ForCausalLM"]()
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0 + i for i in range(8)]}
    config.original_max_position_embeddings = SHORT
    config.rope_parameters = {
        **{"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, **factors},
        "original_max_position_embeddings": SHORT,
    }
    return zoo.build("Phi3ForCausalLM", config, "sdpa")


def test_phi3_with_sliding_window_raises_with_remedy(tmp_path):
    """Phi-3 128k has 131,072 positions and a window of 262,144."""
    config = CONFIGS["Phi3ForCausalLM"]()
    config.sliding_window = config.max_position_embeddings
    model = zoo.build("Phi3ForCausalLM", config, "sdpa")
    with pytest.raises(ValueError, match="load the model with sliding_window=None"):
        mmkv.wrap(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, sliding_window=None)
    assert mmkv.is_wrapped(mmkv.wrap(loaded.eval(), "snapkv", 0.5))


def ids(n, seed=3):
    return torch.randint(4, 100, (1, n), generator=torch.Generator().manual_seed(seed))


def inputs_of(*parts):
    tokens = torch.cat(parts, dim=1)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@cases(
    "length, replays",
    [
        (50, False),
        (50, True),
        (SHORT - 1, False),
        (SHORT, True),
        (SHORT + 1, False),
        (90, True),
    ],
    *((50, False), (SHORT, True)),
)
def test_full_budget_with_longrope_equals_the_unwrapped_model(phi, monkeypatch, length, replays):
    """At every place of the change: behind, within and before the reply."""
    if replays:
        monkeypatch.setattr(graph, "_capturable", lambda device: True)
        monkeypatch.setattr(slots, "AHEAD", 8)
        graphs = install(monkeypatch, torch.device("cpu")).graphs
    inputs = inputs_of(ids(length))
    logits, tokens, _ = generate(phi, inputs, new=NEW)
    with mmkv.wrapped(phi, "snapkv", 1.0):
        got, words, cache = generate(phi, inputs, new=NEW)
    assert torch.equal(words, tokens)
    close(got, logits)
    assert cache.get_seq_length() == length + NEW - 1
    assert not replays or len(graphs) == (length != SHORT - 1)


@pytest.mark.slow
def test_beams_and_batches_across_the_change_equal_the_unwrapped_model(phi):
    inputs = make_inputs("llama", (55, 50))
    options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    want = phi.generate(**inputs, **options, max_new_tokens=NEW)
    with mmkv.wrapped(phi, "snapkv", 1.0):
        assert torch.equal(phi.generate(**inputs, **options, max_new_tokens=NEW), want)


def test_a_turn_across_the_change_equals_the_unwrapped_model(phi):
    with mmkv.wrapped(phi, "snapkv", 1.0):
        _, words, cache = generate(phi, inputs_of(ids(40)), new=4)
        turn = inputs_of(ids(40), words, ids(30, seed=4))
        got, *_ = generate(phi, turn, new=4, past_key_values=cache)
    close(got, generate(phi, turn, new=4)[0])


@pytest.mark.parametrize("asked", [8, 20], ids=["in the reply", "in the question"])
@cases("policy", ["snapkv", "condense", "h2o"], "h2o")
def test_a_question_across_the_change_evicts_nothing_of_itself(phi, policy, asked):
    """The context is read again as a context: under its budget, and without the question."""
    document, question = ids(50), ids(asked, seed=4)
    held = []
    with mmkv.wrapped(phi, policy, 0.4, decode="grow", **short(policy)):
        context = mmkv.read(phi, document)
        size, kept = pairs(context.cache), context.cache.kept(1)
        with phi.register_forward_hook(lambda *args: held.append(later(args[-1].past_key_values))):
            context.ask(question, max_new_tokens=NEW)
        assert torch.equal(context.cache.kept(1), kept)
    for n, (of_context, heads) in enumerate(held):
        assert of_context == size
        assert all(head == set(range(50, 50 + asked + n)) for head in heads)


def pairs(cache):
    return sum(int(x.state.counts(50).sum()) for x in cache.compressed)


def later(cache):
    """How many pairs it holds of the context, and what each head holds behind it."""
    heads = [head for i in range(len(cache.layers)) for head in held_sets(held_by(cache, i), 0)]
    return pairs(cache), [{x for x in head if x >= 50} for head in heads]


def test_a_question_across_the_change_at_full_budget_equals_the_unwrapped_model(phi):
    document, rows = ids(50), [ids(20, seed=4), ids(20, seed=5)]
    options = {"max_new_tokens": 8, "do_sample": False}
    whole = torch.cat([torch.cat([document, x], 1) for x in rows])
    want = phi.generate(**inputs_of(whole), **options)[:, 70:]
    with mmkv.wrapped(phi, "snapkv", 1.0):
        context = mmkv.read(phi, document)
        assert torch.equal(context.ask(torch.cat(rows), **options), want)
        context.append(rows[0])
        context.append(rows[1])
        want = phi.generate(**inputs_of(document, *rows, ids(5)), **options)
        assert torch.equal(context.ask(ids(5), **options), want[:, 95:])


def test_phi3_without_longrope_reads_a_question_alone():
    """Its `generate` would drop the cache at the same length, where no frequency changes."""
    config, tokens = CONFIGS["Phi3ForCausalLM"](), []
    config.original_max_position_embeddings = SHORT
    model = zoo.build("Phi3ForCausalLM", config, "sdpa")
    with mmkv.wrapped(model, "snapkv", 0.4, **short("snapkv")):
        context = mmkv.read(model, ids(50))
        with model.register_forward_hook(lambda *args: tokens.append(args[-1].logits.shape)):
            context.ask(ids(20), max_new_tokens=3, logits_to_keep=0)
    assert [shape[1] for shape in tokens] == [20, 1, 1]


@since("5.21")
@pytest.mark.parametrize("chunk", [20, 100], ids="chunks of {}".format)
@cases("policy", ["snapkv", "h2o", "xkv", "kvzip"], "h2o")
def test_a_prompt_in_chunks_across_the_change_is_the_whole_prompt(phi, policy, chunk):
    document = ids(150)
    with mmkv.wrapped(phi, policy, 0.4, **short(policy)):
        whole, passes = mmkv.read(phi, document), []
        with phi.model.register_forward_hook(lambda *args: passes.append(args)):
            context = mmkv.read(phi, document, prefill_chunk_size=chunk)
        assert len(passes) == -(-150 // chunk), "no token is read twice"
        assert context.cache.lengths == [150]
        for i in range(len(whole.cache.layers)):
            assert torch.equal(context.cache.kept(i), whole.cache.kept(i))
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(context.ask(ids(9), **options), whole.ask(ids(9), **options))


@since("5.21")
def test_a_turn_in_chunks_across_the_change_equals_the_unwrapped_model(phi):
    turn = inputs_of(ids(40), ids(60, seed=4))
    with mmkv.wrapped(phi, "snapkv", 1.0):
        context = mmkv.read(phi, ids(40))
        context.append(ids(60, seed=4), prefill_chunk_size=10)
        options = {"max_new_tokens": 5, "do_sample": False}
        got = context.ask(ids(9), **options)
    assert torch.equal(
        got, phi.generate(**inputs_of(turn["input_ids"], ids(9)), **options)[:, 109:]
    )


def test_unrepeatable_tokens_raise(phi):
    with mmkv.wrapped(phi, "snapkv", 0.4, **short("snapkv")), torch.no_grad():
        embeds = phi.get_input_embeddings()(ids(60))
        cache = phi(inputs_embeds=embeds, use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"20 tokens after 60 pass position 64"):
            phi(input_ids=ids(20), past_key_values=cache)


@pytest.mark.parametrize("q", [1, 8])
def test_a_manual_loop_across_the_change_equals_one_pass(phi, q):
    """Tokens fed one by one, or some at once, are read again as well."""
    document, later = ids(58), ids(8, seed=4)
    expected = phi(input_ids=torch.cat([document, later], 1)).logits[:, -1]
    with mmkv.wrapped(phi, "snapkv", 1.0), torch.no_grad():
        cache = phi(input_ids=document, use_cache=True).past_key_values
        for piece in later.split(q, dim=1):
            out = phi(input_ids=piece, past_key_values=cache)
    close(out.logits[:, -1], expected)
