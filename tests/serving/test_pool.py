"""The pool: each request's attention is that of its own cache, whoever joins and leaves."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import mmkv
from helpers.models import make_inputs
from helpers.oracle import Variant, options_of
from helpers.serving import alone, watched
from mmkv.parts.slots import GrowingSlots, Ring
from mmkv.serving import Engine
from mmkv.serving.pool import PAGE, Member, Pool

# Slots behind everything, rings, freed slots by distance, heads of their own sizes, groups.
JOIN = [
    Variant("full", (), None),
    Variant("streaming"),
    Variant("prefixkv", (("distance", 4),)),
    Variant("elastic", (("distance", 9),), 0.6),
    Variant("adakv"),
    Variant("condense"),
]
APART = [
    Variant("h2o"),
    Variant("tova"),
    Variant("streaming", (("reposition", True),)),
    Variant("condense", (("decode", "rounds"), ("every", 4), ("latest", 3))),
]


@dataclass
class Twin:
    """A member, and the cache that it was before, which goes on by itself."""

    member: Member
    cache: Any
    left: int

    def attend(self, layer, query, key, value, **options):
        state = self.cache.layers[layer]
        state.update(key, value)
        return state.keeping().attend(query, key, value, state.seen, **options)


def caches(model, variants, lengths):
    """A cache behind a prompt of each length, under the variants in turn."""
    for i, n in enumerate(lengths):
        variant = variants[i % len(variants)]
        with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
            inputs = make_inputs("llama", (n,), seed=n)
            out = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
            yield out.past_key_values


def check_pages(pool):
    """Every page in use is one row's; none is held that nobody may need."""
    for layer, table in zip(pool.layers, pool.table, strict=True):
        assert np.array_equal(np.sort(table[table >= 0]), np.arange(layer.used))
        assert layer.used <= len(layer.keys) == len(layer.values) == len(layer.bias)
    held = sum(
        x.numel() * x.element_size() for layer in pool.layers for x in (layer.keys, layer.values)
    )
    assert held == pool.nbytes <= pool.most + pool.spare
    used = sum(x.used * x.page_bytes for x in pool.layers)
    assert sum(pool.bytes_of(x) for x in pool.members) == used


@torch.no_grad()
def run(pool, waiting, rng, softcap=None):
    """Requests join and leave at random; each step's attention is that of the twins."""
    g, twins = torch.Generator().manual_seed(0), []
    options = {"scale": 0.3, "softcap": softcap}
    while waiting or twins:
        if waiting and (not twins or rng.random() < 0.2):
            cache, new = waiting.pop(), rng.randint(1, 80)
            twin = copy.deepcopy(cache)
            assert pool.takes(cache)
            twins.append(Twin(pool.join(None, cache, new), twin, new))
            assert cache.nbytes == 0
        check_pages(pool)
        before = pool.most + pool.spare
        pool.step()
        B = len(twins)
        for layer in range(3):
            query = torch.randn(B, 4, 1, 16, generator=g)
            key, value = torch.randn(2, B, 2, 1, 16, generator=g)
            found = pool.attend(layer, query, key, value, **options)
            for i, twin in enumerate(twins):
                at = slice(i, i + 1)
                wanted = twin.attend(layer, query[at], key[at], value[at], **options)
                torch.testing.assert_close(found[at], wanted)
        assert pool.nbytes <= pool.most + pool.spare == before
        for twin in list(twins):
            twin.left -= 1
            if not twin.left or rng.random() < 0.03:
                twins.remove(twin)
                pool.leave(twin.member)
    assert pool.nbytes == pool.most == pool.spare == 0


@pytest.mark.parametrize("seed", range(3))
def test_attention_is_that_of_each_request_alone(models, seed):
    rng = random.Random(seed)
    lengths = [rng.randint(10, 120) for _ in range(12)]
    waiting = list(caches(models("llama"), JOIN, lengths))
    run(Pool(), waiting, rng, softcap=5.0 if seed == 2 else None)


@pytest.mark.parametrize("kind", [GrowingSlots, Ring])
@pytest.mark.parametrize("counts", [(5, 7, 5), (6, 6, 6)], ids=["differ", "alike"])
def test_slots_ahead_are_those_of_each_step(kind, counts):
    arrays = {"counts": np.array(counts)}
    if kind is Ring:
        arrays |= {"protected": np.array([1, 2, 1]), "capacity": arrays["counts"]}
    schedule = kind(**arrays)
    schedule.prepare()
    schedule.advance(3)
    twin = copy.deepcopy(schedule)
    for _ in range(2):
        for slots in schedule.ahead()[:, schedule.own_columns(3)]:
            wanted = twin.slots(torch.device("cpu"))
            assert slots.tolist() == (torch.zeros(3, dtype=torch.int64) + wanted).tolist()
            twin.advance()


@torch.no_grad()
def test_what_another_left_in_a_page_is_not_seen(models):
    pool, (one, other) = Pool(), caches(models("llama"), JOIN[:1], (PAGE, PAGE))
    one, other = (pool.join(None, x, 2) for x in (one, other))
    twin = Twin(one, None, 0)
    for layer in pool.layers:
        layer.keys[layer.used :] = layer.values[layer.used :] = torch.nan
        layer.values[pool.table[0, 2:4, 0]] = torch.nan
    pool.leave(other)
    pool.step()  # takes fresh pages
    query, (key, value) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 1, 16)
    assert pool.attend(0, query, key, value, scale=None, softcap=None).isfinite().all()
    pool.leave(twin.member)


@torch.no_grad()
def test_spare_memory_is_given_back(models):
    pool, (small, big) = Pool(), caches(models("llama"), JOIN[:1], (40, 60))
    small, big = pool.join(None, small, 5), pool.join(None, big, 5)
    held = pool.nbytes
    pool.leave(small)
    assert pool.nbytes == held == pool.most + pool.spare
    pool.trim()
    assert (pool.nbytes, pool.spare) == (pool.most, 0)
    assert pool.most < held
    check_pages(pool)
    pool.leave(big)


@pytest.mark.parametrize("variant", APART, ids=str)
def test_what_cannot_join_keeps_its_own_cache(models, variant):
    (cache,) = caches(models("llama"), [variant], (60,))
    assert not Pool().takes(cache)


@pytest.mark.parametrize("options", [{"kv_dtype": "int8"}, {"postpone": 4}], ids=str)
def test_what_cannot_join_yet_or_ever(models, options):
    model, new = models("llama"), 12
    asked = [make_inputs("llama", (n,), seed=n) for n in (60, 50)]
    postponed = "postpone" in options
    with mmkv.wrapped(model, "snapkv", 0.4, window=6, kernel_size=3, **options):
        wanted = [alone(model, x, new) for x in asked]
        with Engine(model) as engine:
            joined = []
            hook = model.model.layers[0].register_forward_hook(
                lambda *args: joined.append(len(engine._worker.pool.members))
            )
            replies = [engine.submit(inputs=x, max_new_tokens=new) for x in asked]
            assert [x.result(60)[0] for x in replies] == wanted
            hook.remove()
    assert max(joined) == (2 if postponed else 0)


def test_memory_of_a_request_that_ends_is_free_at_once(models):
    """A short request ends beside a long one; the next one gets its memory while that goes on."""
    model = models("llama")
    lengths, new = (100, 90, 80), (60, 4, 4)
    asked = [make_inputs("llama", (n,), seed=i) for i, n in enumerate(lengths)]
    with mmkv.wrapped(model, "full"):
        wanted = [alone(model, x, n) for x, n in zip(asked, new, strict=True)]
        plan = vars(model)["_mmkv"].plan
        with Engine(model) as engine:
            first, second, _ = map(engine._bounds.prompt, [plan] * 3, lengths, new)
        with Engine(model, cache_memory=first + second, prefill_chunk=64) as engine:
            seen, over, hooks = watched(engine)
            together = []

            def look(*args):
                together.append({x.owner.tokens for x in engine._worker.pool.members})

            hooks.append(engine._attachment.parts.layers[0].register_forward_hook(look))
            replies = [
                engine.submit(inputs=x, max_new_tokens=n) for x, n in zip(asked, new, strict=True)
            ]
            assert [x.result(60)[0] for x in replies] == wanted
            for hook in hooks:
                hook.remove()
            stats = engine.stats()
    assert {100, 90} in together
    assert {100, 80} in together
    assert {100, 90, 80} not in together
    assert not over
    assert max(seen) <= first + second
    assert stats.cache_bytes == stats.reserved_bytes == 0
