"""The promise of memory: what caches really hold, whatever is asked, broken off, or goes wrong."""

import contextlib
import time
import weakref
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mmkv
from helpers import zoo
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import Variant, options_of
from helpers.serving import alone, until, watched
from mmkv.attach.attachment import attachment_of
from mmkv.cache.compressed import CompressedCache
from mmkv.serving import Engine, Refused
from mmkv.serving.memory import Bounds

NEW = 24
PREFIXES = [make_inputs("llama", (n,), seed=n) for n in (150, 90, 60, 120)]
QUESTIONS = [make_inputs("llama", (n,), seed=n) for n in (5, 200, 45)]
VARIANTS = [
    (Variant("full", (), None), {}),
    (Variant("condense"), {}),
    (Variant("prefixkv", (("distance", 4),)), {"evict_chunks": True}),
    (Variant("h2o"), {"kv_dtype": "int8"}),
]
# Kinds of heads and projections.
FAMILIES = ["LlamaForCausalLM", "Phi3ForCausalLM", "OPTForCausalLM", "GPTNeoXForCausalLM"]
FAMILIES += ["FalconForCausalLM", "FalconForCausalLM:40b"]


class Fails:
    """A tokenizer that cannot read some tokens: an error of one request."""

    def decode(self, tokens, skip_special_tokens):
        if tokens[-1] % 37 == 0:
            raise RuntimeError("a token that nobody can read")
        return "x" * len(tokens)


@contextlib.contextmanager
def living():
    """All caches that are alive, copies among them."""
    found, init = weakref.WeakSet(), CompressedCache.__init__

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        found.add(self)

    def copied(self, state):
        vars(self).update(state)
        found.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompressedCache, "__init__", made)
        patch.setattr(CompressedCache, "__setstate__", copied, raising=False)
        yield found


def sampled(engine, caches):
    """The bytes that caches and pool really hold, after each layer."""
    seen, worker = [], engine._worker

    def look(*args):
        seen.append(sum(x.nbytes for x in list(caches)) + worker.batch.pool.nbytes)

    layers = engine._attachment.parts.layers
    return seen, [layer.register_forward_hook(look) for layer in layers]


@cache
def wrapped(i):
    """A model with a variant."""
    variant, options = VARIANTS[i]
    model = make_model("llama")
    return mmkv.wrap(model, variant.policy, variant.budget, **options_of(variant), **options)


@cache
def reply_of(i, prefix, question):
    """What a wrapped model says to a question alone."""
    if not prefix:
        return alone(wrapped(i), QUESTIONS[question], NEW, prefill_chunk_size=16)
    context = mmkv.read(wrapped(i), PREFIXES[prefix - 1], prefill_chunk_size=16)
    return context.ask(QUESTIONS[question], max_new_tokens=NEW)[0].tolist()


# Prefix (0: none), question, tokens of the reply, after how many tokens to go on to the next
# (None: at once), and whether it is broken off then.
ASK = st.tuples(
    st.integers(0, len(PREFIXES)),
    st.integers(0, len(QUESTIONS) - 1),
    st.integers(1, NEW),
    st.none() | st.integers(0, NEW),
    st.booleans(),
)


def check(i, asks, room, fails):
    model = wrapped(i)
    whole = 3 * 2 * 2 * 16 * 4  # bytes of a token: layers, heads, keys and values, numbers
    limit = room * whole
    wanted = [reply_of(i, prefix, question) for prefix, question, *_ in asks]
    with living() as caches:
        processor = Fails() if fails else None
        with Engine(model, processor, prefill_chunk=16, cache_memory=limit, max_batch=4) as engine:
            seen, hooks = sampled(engine, caches)
            replies = []
            for (prefix, question, new, wait, breaks), said in zip(asks, wanted, strict=True):
                more = {"prefix": PREFIXES[prefix - 1]} if prefix else {}
                try:
                    reply = engine.submit(inputs=QUESTIONS[question], max_new_tokens=new, **more)
                except Refused:
                    continue
                replies.append((reply, said[:new]))
                if wait is not None:
                    with contextlib.suppress(RuntimeError):
                        for n, _ in enumerate(reply):
                            if n == wait:
                                break
                if breaks:
                    reply.cancel()
            for reply, tokens in replies:
                with contextlib.suppress(RuntimeError):
                    reply.result(60)
                if reply.finish_reason == "error":  # its own
                    assert tokens[len(reply.tokens)] % 37 == 0
                assert reply.tokens == tokens[: len(reply.tokens)]
                assert (len(reply.tokens) == len(tokens)) == (reply.finish_reason == "length")
            assert until(lambda: not engine._worker.live())
            for hook in hooks:
                hook.remove()
            time.sleep(0.01)
            stats = engine.stats()
            assert stats.cache_bytes == stats.reserved_bytes
            assert stats.cache_bytes == sum(x.nbytes for x in list(caches))
        assert max(seen, default=0) <= limit


@cases("i", range(len(VARIANTS)), ids=lambda i: VARIANTS[i][0].policy)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(asks=st.lists(ASK, min_size=2, max_size=7), room=st.integers(300, 900), fails=st.booleans())
def test_no_more_is_held_than_was_promised(i, asks, room, fails):
    check(i, asks, room, fails)


@pytest.mark.parametrize("policy", ["full", "snapkv", "prefixkv"])
def test_a_cache_that_grows_by_itself_keeps_to_its_bound(policy):
    """Slots set aside on the way are in it, wherever the reply ends among them."""
    model, options = make_model("llama"), {"window": 6} if policy == "snapkv" else {}
    token = torch.tensor([[7]])
    with mmkv.wrapped(model, policy, 0.5, **options), torch.no_grad():
        bounds = Bounds(attachment_of(model).parts, 4, 64)
        for new in (1, 20, 35, 66):
            cache = model(**make_inputs("llama", (60,)), use_cache=True).past_key_values
            bound, most = bounds.reply(cache, new), 0
            for _ in range(new):
                model(input_ids=token, past_key_values=cache)
                most = max(most, cache.nbytes)
            assert most <= bound


def test_prefixes_that_are_idle_leave_for_one_that_is_taken_over():
    a, b = 1, 4
    asks = [(a, 0, 2, 2, False), (b, 0, 2, 2, False), (b, 1, 2, 2, False)]
    check(0, asks, 460, False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_is_promised_what_the_models_own_cache_takes_for_it(name):
    model, n = zoo.make(name), 40
    x = zoo.prompt(model, (n,))
    own = model.generate(**x, max_new_tokens=1, return_dict_in_generate=True).past_key_values
    mmkv.wrap(model, "full")
    at = attachment_of(model)
    ends = [Bounds(at.parts, 4, 64).prompt(at.plan, n, new) for new in (8, 9)]
    assert ends[1] - ends[0] == sum(x.keys.nbytes + x.values.nbytes for x in own.layers) / n


# Layers that are evicted together hold what their projections gave until the prompt's end.
@pytest.mark.parametrize("policy", ["full", "prefixkv"])
@cases("n", [40, 132], 132)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_keeps_to_its_promise(name, policy, n):
    model = zoo.model_of(name)
    with mmkv.wrapped(model, policy, None if policy == "full" else 0.4):
        plan = attachment_of(model).plan.started()
        most = Bounds(attachment_of(model).parts, 4, 64).prompt(plan, n, 9)
        with (
            Engine(model, prefill_chunk=64, cache_memory=most) as engine,
            watched(engine) as (seen, over),
        ):
            engine.submit(inputs=zoo.prompt(model, (n,)), max_new_tokens=9).result(60)
        assert not over
        assert max(seen) <= most
