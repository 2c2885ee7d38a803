"""The engine: every reply is the one that `generate` gives alone, whatever else runs."""

import asyncio
import contextlib
import copy
import itertools
import random
import time

import pytest
from PIL import Image

import mmkv
from helpers import zoo
from helpers.marks import cases, older_than
from helpers.models import make_inputs
from helpers.oracle import Variant, options_of
from helpers.serving import alone, begun
from mmkv.attach.attachment import attachment_of
from mmkv.cache import compressed
from mmkv.serving import Busy, Closed, Engine, Refused, Sampling
from mmkv.serving.batch import Request
from mmkv.serving.memory import Bounds

SEEDED = Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=7)
# Postponed eviction, rings of slots, positions counted anew, rounds; and every policy.
VARIANTS = [
    Variant("adakv", (("postpone", 4), ("layers", "squeeze"))),
    Variant("prefixkv", (("distance", 4),)),
    Variant("streaming", (("reposition", True),)),
    Variant("condense", (("decode", "rounds"), ("every", 4), ("latest", 3))),
    Variant("expected", (("decode", "rounds"), ("every", 3), ("latest", 0))),
    *(Variant(name) for name in mmkv.list_policies()),
]


def interleaved(model, name, seed, **options):
    """Requests that come while others run, and some of which are broken off: all equal `alone`."""
    rng = random.Random(seed)
    lengths, new = rng.sample(range(30, 90), 5), rng.sample(range(3, 14), 5)
    asked = [make_inputs(name, (n,), seed=n) for n in lengths]
    how = [None if i % 3 else SEEDED for i in range(5)]
    chunk = {"prefill_chunk_size": 16} if options.pop("in_chunks", False) else {}
    wanted = [alone(model, x, n, s, **chunk) for x, n, s in zip(asked, new, how, strict=True)]
    with Engine(model, prefill_chunk=16, max_batch=3, **options) as engine:
        replies = []

        def submit():
            i = len(replies)
            sampling = how[i] or Sampling()
            replies.append(engine.submit(inputs=asked[i], sampling=sampling, max_new_tokens=new[i]))

        submit(), submit()
        broken = engine.submit(inputs=asked[0], max_new_tokens=40)
        first = iter(broken)
        for _ in range(6):
            next(first)
            if len(replies) < 5 and rng.random() < 0.7:
                submit()
        broken.cancel()
        while len(replies) < 5:
            submit()
        assert [x.result(60)[0] for x in replies] == wanted
        assert len(broken.result(60)[0]) < 40
        assert engine.stats().cache_bytes == 0


@cases("variant", VARIANTS, VARIANTS[0], Variant("h2o"), ids=str)
def test_replies_are_what_they_are_alone(models, variant):
    model = models("llava-llama")
    with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
        interleaved(model, "llava-llama", seed=len(variant.policy))


@pytest.mark.parametrize(
    "name", ["Qwen2_5_VLForConditionalGeneration", "OPTForCausalLM", "Phi3ForCausalLM"]
)
def test_positions_of_each_model(name):
    model = zoo.make(name)
    mmkv.wrap(model, "snapkv", 0.4, window=6, kernel_size=3)
    asked = [zoo.prompt(model, (n,), seed=n) for n in (60, 96, 41)]
    wanted = [alone(model, x, 8) for x in asked]
    with Engine(model, prefill_chunk=24) as engine:
        replies = [engine.submit(inputs=x, max_new_tokens=8) for x in asked]
        assert [x.result(60)[0] for x in replies] == wanted


@pytest.mark.slow
def test_chunks_that_evict(models):
    model = models("llama")
    with mmkv.wrapped(model, "adakv", 0.3, window=6, kernel_size=3, evict_chunks=True):
        interleaved(model, "llama", seed=2, in_chunks=True)


def test_a_policy_of_a_request_of_its_own(models):
    model, x = models("llama"), make_inputs("llama", (80,))
    wanted = []
    for policy, budget in (("h2o", 0.3), ("snapkv", 0.4), ("full", None), ("kvzip", 0.3)):
        options = {"window": 6, "kernel_size": 3} if policy == "snapkv" else {}
        with mmkv.wrapped(model, policy, budget, **options):
            wanted.append(alone(model, x, 10))
    with mmkv.wrapped(model, "h2o", 0.3), Engine(model) as engine:
        snap = mmkv.get_policy("snapkv", window=6, kernel_size=3)
        own = [{}, {"policy": snap, "budget": 0.4}, {"policy": "full"}]
        own.append({"policy": "kvzip", "budget": 0.3})
        own.append(own[1] | {"policy": "snapkv", "options": {"window": 6, "kernel_size": 3}})
        wanted.append(wanted[1])
        replies = [engine.submit(inputs=x, max_new_tokens=10, **options) for options in own]
        assert [x.result(60)[0] for x in replies] == wanted
        # A count of tokens and a share, which are equal numbers, and the smallest share.
        sizes = (1, 1.0, 1e-320)
        replies = [engine.submit(inputs=x, max_new_tokens=2, budget=n) for n in sizes]
        assert [y.result(60) and y.usage.kept_tokens for y in replies] == [1, 80, 0]
        for other in ("condense", "expected", "squeeze"):
            with pytest.raises(Refused, match="wrap it with that policy"):
                engine.submit(inputs=x, policy=other, budget=0.3)
        with pytest.raises(Refused, match="nonesuch"):
            engine.submit(inputs=x, policy="nonesuch")
        for wrong in ([1], {}, "much", 10**400, -1, 0):
            with pytest.raises(Refused, match="budget"):
                engine.submit(inputs=x, budget=wrong)
        with pytest.raises(Refused, match="policy"):
            engine.submit(inputs=x, policy=["h2o"])
        for wrong in ({"policy": "snapkv"}, {"policy": snap}, {}):
            with pytest.raises(Refused, match="windw"):
                engine.submit(inputs=x, **wrong, options={"windw": 6})


def test_what_waits_for_memory_keeps_its_turn(models):
    """The small one would fit beside the first, but the second came before it."""
    model = models("llama")
    big, small = make_inputs("llama", (100,)), make_inputs("llama", (20,))
    with mmkv.wrapped(model, "full"), Engine(model, cache_memory=150_000) as engine:
        order = begun(engine)
        with engine._worker.wake:  # all wait before one is begun
            replies = [engine.submit(inputs=x, max_new_tokens=20) for x in (big, big, small)]
        for reply in replies:
            reply.result(60)
    assert order == replies


def test_running_replies_grow_while_a_long_prompt_is_read(models):
    model = models("llama")
    with mmkv.wrapped(model, "snapkv", 0.4, window=6), Engine(model, prefill_chunk=16) as engine:
        running = engine.submit(inputs=make_inputs("llama", (30,)), max_new_tokens=1000)
        next(iter(running))
        before = len(running.tokens)
        next(iter(engine.submit(inputs=make_inputs("llama", (640,)), max_new_tokens=2)))
        assert len(running.tokens) >= before + 640 // 16 - 1


@cases("name", ["LlamaForCausalLM", "Qwen2_5_VLForConditionalGeneration"], "LlamaForCausalLM")
def test_chunks_of_a_long_prompt_and_short_ones_take_turns(name):
    """The short ones do not wait for it, nor it for all of them, and each is as alone."""
    model = zoo.make(name)
    pictures = {"pictures": 2} if "VL" in name else {}
    if pictures and older_than("5.23"):
        pytest.skip("transformers before 5.23 does not look at pictures in chunks")
    with mmkv.wrapped(model, "condense", 0.4, least=0):
        long = zoo.prompt(model, (220,), seed=1, **pictures)
        short = [zoo.prompt(model, (n,), seed=n) for n in (70, 30, 40, 90, 25)]
        wanted = [alone(model, x, 6, prefill_chunk_size=16) for x in (long, *short)]
        with Engine(model, prefill_chunk=16) as engine:
            read, worker = [], engine._worker

            def note(*args):
                if worker.reading and not worker.batch.stepping:
                    read.append(worker.reading[-1].tokens)

            model.register_forward_hook(note)
            with worker.wake:  # all wait before one is begun
                replies = [engine.submit(inputs=x, max_new_tokens=6) for x in (long, *short)]
            assert [x.result(60)[0] for x in replies] == wanted
    # Of what waits, a prompt comes between if half as long as what is left; then as many chunks of
    # the long one. The 30 tokens come between those of the 70 in turn.
    runs = [[*group] for _, group in itertools.groupby(read, (220).__eq__)]
    assert [len(x) for x in runs] == [7, 7, 3, 3, 2, 4, 6]
    assert [set(x) for x in runs[::2]] == [{30, 70}, {40}, {25}, {90}]


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_a_long_prompt_ends_at_the_next_chunk_of_the_one_read_within_it(models, how, prefixed):
    model = models("llama")
    long, short = (make_inputs("llama", (n,), seed=n) for n in (220, 60))
    more = {"inputs": short, "prefix": long} if prefixed else {"inputs": long}
    with mmkv.wrapped(model, "snapkv", 0.4, window=6), Engine(model, prefill_chunk=16) as engine:
        wanted, worker = alone(model, short, 6, prefill_chunk_size=16), engine._worker
        replies, chunks, caches = [], [], []

        def note(*args):
            """After each chunk that is read."""
            if not replies:
                replies.append(engine.submit(inputs=short, max_new_tokens=6))
                caches.append(worker.reading[0].cache)
            if len(worker.reading) == 2:
                if how == "cancelled":
                    first.cancel()
                else:
                    worker.reading[0].deadline = 0.0
            if not worker.batch.stepping:
                chunks.append((len(worker.reading), caches[0].nbytes > 0, first.finish_reason))

        hook = model.register_forward_hook(note)
        with worker.wake:
            first = engine.submit(**more)
        assert first.result(60) == ([], "")
        assert replies[0].result(60)[0] == wanted
        hook.remove()
        assert chunks == [(1, True, None), (2, True, None)] + [(1, False, how)] * 3
        assert engine.stats().requests_done == 2
        assert engine.submit(inputs=short, max_new_tokens=6).result(60)[0] == wanted


@cases("policy", ["snapkv", "adakv", "kvzip"], "adakv")
def test_replies_grow_while_the_end_of_a_prompt_is_evicted(models, monkeypatch, policy):
    """Layers of a known size are evicted one by one, others together, some are read again."""
    model = models("llama")

    def slow(*args, **options):
        time.sleep(0.2)
        at.append(len(running.tokens))
        return evict(*args, **options)

    evict, at = compressed.evict, []
    with mmkv.wrapped(model, policy, 0.4), Engine(model, prefill_chunk=16) as engine:
        running = engine.submit(inputs=make_inputs("llama", (30,)), max_new_tokens=400)
        next(iter(running))
        with monkeypatch.context() as patch:
            patch.setattr(compressed, "evict", slow)
            next(iter(engine.submit(inputs=make_inputs("llama", (160,)), max_new_tokens=2)))
        running.cancel()
    assert len(at) == 3
    assert at[0] < at[1] < at[2]


def test_what_can_never_be_served_is_refused(models):
    model, x = models("llama"), make_inputs("llama", (100,))
    with pytest.raises(ValueError, match=r"mmkv\.wrap"):
        Engine(model)
    with mmkv.wrapped(model, "full"), Engine(model, cache_memory=100_000) as engine:
        with pytest.raises(Refused, match=r"100 tokens .* 100000"):
            engine.submit(inputs=x, max_new_tokens=50)
        with pytest.raises(Refused, match=r"100 tokens .*2000 .* 2048 positions"):
            engine.submit(inputs=x, max_new_tokens=2000)
        with pytest.raises(Refused, match=r"\(2, 30\)"):
            engine.submit(inputs=make_inputs("llama", (30, 20)))
        with pytest.raises(Refused, match="processor"):
            engine.submit([{"role": "user", "content": "Hi"}])
        with pytest.raises(Refused, match="top_p"):
            Sampling(top_p=0.0)
        for budget in (2**31 + 1, 10**400):
            with pytest.raises(Refused, match="at most 2147483648"):
                engine.submit(inputs=x, budget=budget, policy="snapkv")
    sliding = zoo.make("Gemma3ForCausalLM")
    mmkv.wrap(sliding, "snapkv", 0.4, window=6)
    with pytest.raises(ValueError, match="gemma3_text has layers with a sliding window"):
        Engine(sliding)


def test_a_reply_whose_request_does_not_say_may_use_what_room_is_left(models):
    model = models("llama")
    with mmkv.wrapped(model, "snapkv", 0.4, window=6):
        with Engine(model, max_new_tokens=3) as engine:
            assert len(engine.submit(inputs=make_inputs("llama", (30,))).result(60)[0]) == 3
        with Engine(model, cache_memory=2**22) as engine:
            reply = engine.submit(inputs=make_inputs("llama", (2043,)))
            assert len(reply.result(60)[0]) == 5  # of 2048 positions
            for n in (2048, 2100):
                with pytest.raises(Refused, match=f"{n} tokens .* 2048 positions") as error:
                    engine.submit(inputs=make_inputs("llama", (n,)))
                assert error.value.code == "context_length_exceeded"
                assert "max_new_tokens" not in str(error.value)
        most = Bounds(attachment_of(model).parts, 4, 512).prompt(attachment_of(model).plan, 60, 9)
        with Engine(model, cache_memory=most) as engine:
            with pytest.raises(Refused, match="600 tokens and a reply may take"):
                engine.submit(inputs=make_inputs("llama", (600,)))
            assert 9 <= len(engine.submit(inputs=make_inputs("llama", (60,))).result(60)[0]) < 12


def test_a_picture_of_extreme_shape_is_refused_before_it_is_made(monkeypatch):
    model, processor = mmkv.load_builtin()
    monkeypatch.setattr(processor.image_processor, "size", {"shortest_edge": 224})
    image = {"type": "image", "image": Image.new("RGB", (2000, 1))}
    message = {"role": "user", "content": [image, {"type": "text", "text": "Hi"}]}
    with mmkv.wrapped(model, "full"), Engine(model, processor) as engine:  # noqa: SIM117
        with pytest.raises(Refused, match="2000 x 1 pixels"):
            engine.submit([message])


def test_an_error_is_of_its_own_request(models):
    model = copy.deepcopy(models("llava-llama"))
    mmkv.wrap(model, "h2o", 0.4)
    good, bad = make_inputs("llava-llama", (50,)), make_inputs("llava-llama", (50,), seed=1)
    wanted = alone(model, good, 12)
    bad["pixel_values"] = bad["pixel_values"][:, :2]  # no such number of channels
    with Engine(model) as engine:
        running = engine.submit(inputs=good, max_new_tokens=12)
        broken = engine.submit(inputs=bad, max_new_tokens=12)
        row = engine.submit(inputs=good, max_new_tokens=12)
        next(iter(row))
        for request in engine._worker.batch.running:
            if request.reply is row:
                request.cache.layers[1].state = None  # its own cache is damaged
        assert running.result(60)[0] == wanted
        with pytest.raises(Exception, match="channels"):
            broken.result(60)
        if row.finish_reason != "length":  # it was quicker than the damage
            with pytest.raises(AssertionError):
                row.result(60)
        assert engine.submit(inputs=good, max_new_tokens=12).result(60)[0] == wanted
        assert engine.stats().cache_bytes == 0


def test_ends(models):
    model, x = models("llama"), make_inputs("llama", (60,))
    with mmkv.wrapped(model, "snapkv", 0.4, window=6):
        wanted = alone(model, x, 30)
        model.generation_config.eos_token_id = wanted[4]
        try:
            engine = Engine(model, max_batch=1, max_waiting=2)
            stopped = engine.submit(inputs=x, max_new_tokens=30)
            assert stopped.result(60)[0] == wanted[: wanted.index(wanted[4]) + 1]
            assert stopped.finish_reason == "stop"
        finally:
            model.generation_config.eos_token_id = None
        long = engine.submit(inputs=x, max_new_tokens=1500)
        next(iter(long))
        late = engine.submit(inputs=x, timeout=0.05)
        late.result(60)
        assert late.finish_reason == "timeout"
        waits = [engine.submit(inputs=x) for _ in range(2)]
        with pytest.raises(Busy):
            engine.submit(inputs=x)
        waits[0].cancel()
        waits[0].result(60)
        assert waits[0].finish_reason == "cancelled"
        engine.close()
        assert long.finish_reason == waits[1].finish_reason == "cancelled"
        assert engine.stats().cache_bytes == 0
        with pytest.raises(Closed):
            engine.submit(inputs=x)


def test_a_cancelled_task_cancels_its_request(models):
    model, x = models("llama"), make_inputs("llama", (60,))

    async def read(reply):
        async for _ in reply:
            pass

    async def run(engine):
        short = engine.submit(inputs=x, max_new_tokens=8)
        long = engine.submit(inputs=x, max_new_tokens=1500)
        task = asyncio.create_task(read(long))
        events = [event.token async for event in short]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return events, short, long

    with mmkv.wrapped(model, "snapkv", 0.4, window=6), Engine(model) as engine:
        events, short, long = asyncio.run(run(engine))
        long.result(60)
        assert events == short.tokens == alone(model, x, 8)
        assert short.finish_reason == "length"
        assert long.finish_reason == "cancelled"
        assert engine.stats().cache_bytes == 0


def test_an_error_at_the_end_of_one_request_ends_what_runs_and_no_more(text_model, monkeypatch):
    """No client waits for ever, nothing stays held, and the next request is answered."""
    inputs = make_inputs("llama", (40,))
    with mmkv.wrapped(text_model, "snapkv", 0.5):
        wanted = alone(text_model, inputs, 4)
        with Engine(text_model) as engine:
            with monkeypatch.context() as broken:
                broken.setattr(Request, "weigh", lambda self: 1 / 0)
                replies = [engine.submit(inputs=inputs, max_new_tokens=n) for n in (3, 200)]
                for reply in replies:
                    with contextlib.suppress(ZeroDivisionError):
                        reply.result(60)
            assert engine.submit(inputs=inputs, max_new_tokens=4).result(60)[0] == wanted
            assert engine.stats().cache_bytes == 0
            assert engine.stats().reserved_bytes == 0


def test_a_prompt_that_sees_later_tokens_is_read_whole():
    """PaliGemma's prompt does, whether its inputs say so or not."""
    model = zoo.model_of("PaliGemmaForConditionalGeneration")
    with mmkv.wrapped(model, "condense", 0.5, least=0), Engine(model, prefill_chunk=9) as engine:
        for seed in range(4):
            inputs = zoo.prompt(model, (60,), seed, pictures=1)
            del inputs["token_type_ids"]
            reply = engine.submit(inputs=inputs, max_new_tokens=6)
            assert reply.result(60)[0] == alone(model, inputs, 6)
