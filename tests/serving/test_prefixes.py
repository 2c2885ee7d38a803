"""What requests begin with is read once."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.serving import begun, watched
from mmkv.attach.attachment import attachment_of
from mmkv.builtin import example_pictures, load_builtin
from mmkv.chat import Loaded, cut, encode_messages
from mmkv.registry import exact_share
from mmkv.serving import Engine, Sampling
from mmkv.serving.prompts import _without_question, digest, encode
from mmkv.serving.reply import TextStream

IDS = torch.arange(12).view(3, 4)
TEXT, EMPTY = ({"type": "text", "text": x} for x in ("a", ""))
PICTURE = {"type": "image"}
QUESTION = make_inputs("llama", (5,), seed=9)


class Pieces:
    """A tokenizer whose tokens are pieces of bytes; <mark> is a special one."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, tokens, skip_special_tokens=False):
        found = b"".join(self.pieces[t] for t in tokens).decode("utf-8", errors="replace")
        return found.replace("<mark>", "") if skip_special_tokens else found


@pytest.fixture(scope="module")
def builtin():
    return load_builtin()


def ask(engine, prefix, new=2, **how):
    """The reply to a question about a prefix."""
    return engine.submit(inputs=QUESTION, prefix=prefix, max_new_tokens=new, **how)


def shares(engine, prefix, **how):
    """Whether a request finds its prefix read, and its reply."""
    reply = ask(engine, prefix, new=4, **how)
    return reply.result(60) and reply.usage.shared, reply.tokens


def asked(picture, question):
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


@cases("policy", ["condense", "h2o"], "condense")
@pytest.mark.parametrize("memory", [None, 127_000], ids=["much", "little"])
def test_a_prefix_is_read_once_and_asked_many_times(models, policy, memory):
    name = "llava-llama"
    model, prefix = models(name), make_inputs(name, (80,))
    other = make_inputs(name, (90,), seed=3)
    questions = [make_inputs("llama", (n,), seed=n) for n in (5, 9, 33)]
    with mmkv.wrapped(model, policy, 0.4, **exact_share(policy)):
        wanted = []
        for one in (prefix, other):
            context = mmkv.read(model, one)
            wanted += [context.ask(q, max_new_tokens=12)[0].tolist() for q in questions]
        with Engine(model, prefill_chunk=16, cache_memory=memory) as engine:
            with watched(engine) as (most, over):
                replies = [
                    engine.submit(inputs=q, prefix=one, max_new_tokens=12)
                    for one in (prefix, other)
                    for q in questions
                ]
                assert [x.result(60)[0] for x in replies] == wanted
            stats = engine.stats()
            assert not over
        if memory is None:
            assert [x.usage.shared for x in replies] == [False, True, True] * 2
            assert stats.prefixes == 2
        else:
            assert max(most) <= memory
            assert stats.prefixes < 2
        assert stats.cache_bytes == stats.reserved_bytes


def test_a_prefix_is_taken_over_where_there_is_no_room_for_two(models):
    model, prefix = models("llama"), make_inputs("llama", (80,))
    questions = [make_inputs("llama", (n,), seed=n) for n in (5, 33, 9)]
    with mmkv.wrapped(model, "full"):
        context = mmkv.read(model, prefix)
        wanted = [context.ask(q, max_new_tokens=12)[0].tolist() for q in questions]
        with Engine(model, cache_memory=165_000) as engine:
            for question, tokens, shared in zip(
                questions, wanted, (False, True, False), strict=True
            ):
                reply = engine.submit(inputs=question, prefix=prefix, max_new_tokens=12)
                assert reply.result(60)[0] == tokens
                assert reply.usage.shared == shared


def test_the_least_recently_used_prefix_leaves(models):
    model = models("llama")
    prefixes = [make_inputs("llama", (60,), seed=i) for i in range(3)]
    with mmkv.wrapped(model, "local", 0.4), Engine(model, max_prefixes=2) as engine:
        found = [shares(engine, prefixes[i])[0] for i in (0, 1, 0, 2, 0, 1)]
    assert found == [False, False, True, False, True, False]


@contextmanager
def holding_a_prefix(model, tokens):
    """An engine with memory for so many tokens that holds a prefix, and the prefix."""
    prefix = make_inputs("llama", (60,))
    with mmkv.wrapped(model, "full"), Engine(model, cache_memory=tokens * 768) as engine:
        ask(engine, prefix).result(60)
        yield engine, prefix


def test_a_request_waits_for_memory_rather_than_take_its_prefix_from_others(models):
    with holding_a_prefix(models("llama"), 235) as (engine, prefix):
        first = engine.submit(inputs=make_inputs("llama", (60,), seed=1), max_new_tokens=60)
        next(iter(first))
        reply = ask(engine, prefix)
        next(iter(reply))
        assert first.finish_reason == "length"
        assert reply.usage.shared
        assert engine.stats().prefixes == 1


def test_a_request_with_a_held_prefix_but_no_room_lets_an_older_one_start(models):
    with holding_a_prefix(models("llama"), 300) as (engine, prefix):
        running = engine.submit(inputs=make_inputs("llama", (20,), seed=1), max_new_tokens=100)
        next(iter(running))
        order = begun(engine)
        with engine._worker.wake:  # both wait before either is begun
            small, large = ask(engine, None), ask(engine, prefix, new=90)
        assert [len(x.result(60)[0]) for x in (small, large)] == [2, 90]
        assert order == [small, large]
        assert (small.usage.shared, large.usage.shared) == (False, True)


@pytest.mark.parametrize("limit", [{"max_prefixes": 2}, {"cache_memory": 95_000}], ids=str)
def test_a_prefix_that_a_request_waits_for_stays(models, limit):
    model = models("llama")
    prefixes = [make_inputs("llama", (60,), seed=i) for i in range(3)]
    with mmkv.wrapped(model, "local", 0.4), Engine(model, **limit) as engine:
        for i in (0, 1):
            ask(engine, prefixes[i]).result(60)
        assert engine.stats().prefixes == 2
        with engine._worker.wake:  # both wait before either is begun
            replies = [ask(engine, prefixes[i]) for i in (2, 0)]
        for reply in replies:
            reply.result(60)
        assert [x.usage.shared for x in replies] == [False, True]


def test_owners_do_not_share(models):
    """Else times tell one client what another has sent."""
    model, prefix = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, "local", 0.4), Engine(model) as engine:
        found = [shares(engine, prefix, owner=x)[0] for x in (None, "a", "b", "a", None)]
    assert found == [False, False, False, True, True]


@pytest.mark.parametrize(
    "changed",
    [
        {"x": IDS.to(torch.int32)},
        {"x": IDS.view(torch.float64)},
        {"x": IDS.view(4, 3)},
        {"y": IDS},
        {"x": IDS + 1},
        {"x": IDS, "seconds": [1.0]},
        {"x": IDS, "seconds": [0.5]},
        {"x": IDS, "seconds": np.array([0.5])},
        {"x": IDS, "pixels": [torch.arange(2000.0)]},
        {"x": IDS, "pixels": [torch.arange(2000.0).index_fill(0, torch.tensor([900]), 0.0)]},
        {"x": IDS, "pixels": [torch.arange(2000.0), torch.arange(2000.0)]},
    ],
    ids=str,
)
def test_what_tells_prompts_apart(changed):
    key = digest({"x": IDS}, "")
    assert digest({"x": IDS.clone()}, "") == key
    assert digest(changed, "") == digest(dict(reversed(changed.items())), "")
    for other in ({"x": IDS}, {"x": IDS, "seconds": [0.25]}, {"x": IDS, "pixels": [IDS[0]]}):
        assert digest(changed, "") != digest(other, "")
        assert digest(other, "h") != digest(other, "")


@pytest.mark.parametrize(
    ("before", "content", "cut"),
    [
        (0, "a", None),
        (1, "a", ""),
        (0, [TEXT], None),
        (1, [TEXT], [EMPTY]),
        (0, [PICTURE, TEXT], [PICTURE, EMPTY]),
        (2, [PICTURE, TEXT], [PICTURE, EMPTY]),
        (0, [TEXT, TEXT], [TEXT, EMPTY]),
        (2, [TEXT, PICTURE], None),
        (2, [], None),
    ],
    ids=str,
)
def test_where_a_conversation_is_cut(before, content, cut):
    """Before the last text, if that is the user's and something else stands before it."""
    turns = [{"role": "system", "content": "b"}] * before
    wanted = None if cut is None else [*turns, {"role": "user", "content": cut}]
    assert _without_question([*turns, {"role": "user", "content": content}]) == wanted
    assert _without_question([*turns, {"role": "assistant", "content": content}]) is None


def test_an_empty_question_is_not_cut_off(builtin):
    loaded = Loaded("builtin", *builtin)
    told = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How so?"}]
    whole, prefix, rest = encode(loaded, told, split=True)
    both = torch.cat([prefix["input_ids"], rest["input_ids"]], dim=1)
    assert torch.equal(both, whole["input_ids"])
    assert encode(loaded, [told[0], told[1] | {"content": ""}], split=True)[1:] == (None, None)


def test_another_policy_or_budget_or_task_reads_for_itself(models):
    model, prefix = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, "local", 0.4), Engine(model) as engine:
        for how in ({}, {"budget": 0.3}, {"budget": 5}, {"policy": "streaming"}, {"policy": "h2o"}):
            assert not shares(engine, prefix, **how)[0]
            assert shares(engine, prefix, **how)[0]
    sampled = {"window": 6, "allocation": "sampled", "samples": 1}
    with mmkv.wrapped(model, "xkv", 0.4, **sampled), Engine(model) as engine:
        learns, knows = (shares(engine, prefix) for _ in range(2))
        assert (learns[0], knows[0]) == (False, False)
        assert shares(engine, prefix) == (True, knows[1])
        with mmkv.task("captions"):
            assert not shares(engine, prefix)[0]
        assert attachment_of(model).plan.sampling.known("captions") == 1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_another_adapter_reads_for_itself():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(make_model("llama"), config, "one").eval()
    lora.add_adapter("other", config)
    prefix = make_inputs("llama", (60,))
    with mmkv.wrapped(lora, "local", 0.4), Engine(lora) as engine:
        for shared in (False, True):
            for name in ("one", "other"):
                lora.set_adapter(name)
                wanted = mmkv.read(lora, prefix).ask(QUESTION, max_new_tokens=4)[0].tolist()
                assert shares(engine, prefix) == (shared, wanted)


def test_prefixes_with_pictures_of_their_own_alternate():
    """Models with three axes of positions remember how far the last call's pictures moved text."""
    model = zoo.model_of("Qwen2_5_VLForConditionalGeneration")
    prefixes = [zoo.prompt(model, (60 + 28 * i,), seed=i, pictures=1 + i) for i in range(2)] * 2
    question = make_inputs("llama", (8,), seed=3)
    question["input_ids"] = question["input_ids"].clamp(min=8)
    with mmkv.wrapped(model, "condense", 0.5, least=0):
        contexts = [mmkv.read(model, x) for x in prefixes]
        wanted = [x.ask(question, max_new_tokens=6)[0].tolist() for x in contexts]
        with Engine(model) as engine:
            replies = [engine.submit(inputs=question, prefix=x, max_new_tokens=6) for x in prefixes]
            assert [x.result(60)[0] for x in replies] == wanted
            assert [x.usage.shared for x in replies] == [False, False, True, True]


@pytest.mark.slow
def test_messages_share_what_stands_before_the_question(builtin):
    model, processor = builtin
    pictures = [Image.open(path) for path in example_pictures()[:2]]
    texts = ["Describe the picture.", "How many shapes are there?"]
    loaded = Loaded("builtin", model, processor)
    with mmkv.wrapped(model, "condense", 0.3, least=0), Engine(model, processor) as engine:
        replies = [
            engine.submit(asked(picture, text), max_new_tokens=30)
            for picture in pictures
            for text in texts
        ]
        tokens = [x.result(60)[0] for x in replies]
        assert [x.usage.shared for x in replies] == [False, True] * 2
        for picture, text, found in zip(pictures, texts, (tokens[0], tokens[3]), strict=False):
            whole, empty = (encode_messages(loaded, asked(picture, t)) for t in (text, ""))
            ids, other = whole["input_ids"][0].tolist(), empty["input_ids"][0].tolist()
            n = next(i for i in range(len(other)) if ids[i] != other[i])
            first, rest = cut(whole, n)
            assert mmkv.read(model, first).ask(rest, max_new_tokens=30)[0].tolist() == found
        for reply, found in zip(replies, tokens, strict=True):
            assert reply.text == processor.decode(found, skip_special_tokens=True)
        # Nothing but the template stands before it: no prefix.
        alone = engine.submit([{"role": "user", "content": "Describe the picture."}])
        alone.cancel()
        alone.result(60)
        assert engine.stats().prefixes == 2


@pytest.mark.slow
def test_a_stop_text_ends_the_reply_and_is_left_out(builtin):
    model, processor = builtin
    picture = Image.open(example_pictures()[0])
    with mmkv.wrapped(model, "condense", 0.3, least=0), Engine(model, processor) as engine:
        message = asked(picture, "Describe the picture.")
        whole = engine.submit(message, max_new_tokens=40).result(60)[1]
        stop = whole.split()[3] + " " + whole.split()[4]
        reply = engine.submit(message, sampling=Sampling(stop=(stop,)), max_new_tokens=40)
        events = list(reply)
        assert reply.text == whole[: whole.index(stop)] == "".join(x.text for x in events)
        assert reply.finish_reason == "stop"


@pytest.mark.parametrize(
    ("pieces", "stop", "given", "end"),
    [
        ("a € b", (), "a € b", ""),
        ("ein L|ö|we 🦁|!", (), "ein L|ö|we 🦁|!", ""),
        (b"a|\xe2|\x82|\xac|b", (), "a|||€|b", ""),
        ("a|<mark>|b", (), "a||b", ""),
        ("one t|wo three", ("two",), "one |", ""),
        ("one t|win two", ("two", "three"), "one |twin ", ""),
        ("ends in t|w", ("two",), "ends in |", "tw"),
        ("abc|<|end>", ("<end>",), "abc||", ""),
        ("<end", ("<end>",), "", "<end"),
        ("xaa|b", ("aab",), "x|", ""),
        ("zero |one two three four", ("four", "three", "two"), "zero |one ", ""),
        (b"one EN|D\xe2|\x82\xac", ("END",), "one |", ""),  # in an incomplete character
        (b"one EM|D\xe2|\x82\xac", ("END",), "one EM||D€", ""),
    ],
)
def test_text_is_given_out_when_it_is_certain(pieces, stop, given, end):
    """Whole characters, none that may begin a stop text, and no special tokens."""
    pieces = pieces.encode() if isinstance(pieces, str) else pieces
    for order in itertools.permutations(stop):
        tokens = pieces.split(b"|")
        stream, found = TextStream(Pieces(*tokens), order), []
        for token in range(len(tokens)):
            found.append(stream.add(token))
            if stream.stopped:
                break
        assert (found, stream.end()) == (given.split("|"), end)


@pytest.mark.parametrize(
    ("policy", "shares"), [("condense", True), ("adakv", True), ("prefixkv", False)]
)
def test_replies_attend_to_a_held_prefix_and_hold_what_comes_behind_it(models, policy, shares):
    model, prefix = models("llama"), make_inputs("llama", (300,))
    questions = [make_inputs("llama", (n,), seed=n) for n in (5, 9, 7, 6)]
    with mmkv.wrapped(model, policy, 0.4, **exact_share(policy)):
        context = mmkv.read(model, prefix)
        wanted = [context.ask(x, max_new_tokens=16)[0].tolist() for x in questions]
        with Engine(model) as engine:
            worker, seen = engine._worker, []

            def look(*args):
                seen.append((len(worker.batch.pool.members), worker.batch.pool.nbytes))

            with model.model.layers[0].register_forward_hook(look):
                ask(engine, prefix).result(60)
                with worker.wake:
                    replies = [
                        engine.submit(inputs=x, prefix=prefix, max_new_tokens=16) for x in questions
                    ]
                assert [x.result(60)[0] for x in replies] == wanted
            assert not worker.batch.pool.prefixes
    together = [held for members, held in seen if members == 4]
    assert (max(together) < 2 * context.nbytes) == shares


@pytest.mark.slow
def test_a_prefix_that_replies_attend_to_is_not_dropped(models):
    """Another one is read and dropped in its place, and replies that hold a copy go on with it."""
    model = models("llama")
    prefixes = [make_inputs("llama", (60,), seed=i) for i in range(2)]
    with mmkv.wrapped(model, "full"), Engine(model, max_prefixes=1) as engine:
        wanted = [mmkv.read(model, x).ask(QUESTION, max_new_tokens=60)[0] for x in prefixes]
        held = []
        hook = model.model.layers[0].register_forward_hook(
            lambda *args: held.append(list(engine._worker.prefixes))
        )
        with engine._worker.wake:
            replies = [ask(engine, prefixes[i], new=60) for i in (0, 0, 1, 1)]
        for i, reply in zip((0, 0, 1, 1), replies, strict=True):
            assert reply.result(60)[0] == wanted[i].tolist()
        hook.remove()
        assert engine.stats().prefixes == 1
        assert len({x[0] for x in held if x}) == 1


@pytest.mark.parametrize(("most", "order"), [(1, [1, 0, 2, 3]), (32, [1, 2, 3, 0])])
def test_requests_with_a_held_prefix_go_first_but_for_some_time_only(models, most, order):
    model = models("llama")
    prefixes = [make_inputs("llama", (60,), seed=i) for i in range(2)]
    with mmkv.wrapped(model, "local", 0.4), Engine(model) as engine:
        ask(engine, prefixes[1]).result(60)
        worker, read = engine._worker, begun(engine)
        worker.limits = replace(worker.limits, max_batch=most)
        with worker.wake:  # all wait before one is begun
            replies = [ask(engine, prefixes[i]) for i in (0, 1, 1, 1)]
        for reply in replies:
            reply.result(60)
    assert [replies.index(x) for x in read] == order
