"""The pool: each request's attention is that of its own cache, whoever joins and leaves."""

import copy
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import mmkv
from helpers.marks import cases
from helpers.models import make_inputs, make_model
from helpers.oracle import Variant, options_of
from helpers.pretending import DEVICE, Devices, move
from helpers.serving import alone, watched
from mmkv.cache.padded_blocks import attend
from mmkv.parts import slots as slot_schedules
from mmkv.parts.slots import GrowingSlots, Ring
from mmkv.serving import Engine
from mmkv.serving.batch import RowCaches
from mmkv.serving.pool import Member, Pool
from mmkv.serving.shared_blocks import SharedBlock, capacity, part

# Slots behind everything, rings, freed slots by distance, heads of their own sizes, groups.
JOIN = [
    Variant("full", (), None),
    Variant("streaming"),
    Variant("prefixkv", (("distance", 4),)),
    Variant("elastic", (("distance", 9),), 0.6),
    Variant("adakv"),
    Variant("condense"),
]
# Layers and heads that keep nothing.
NOTHING = [Variant("knorm", (), 0.05), Variant("random", (("heads", "retrieval"),), 0.4)]
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
            inputs = {k: x.to(model.device) for k, x in make_inputs("llama", (n,), seed=n).items()}
            out = model.generate(**inputs, max_new_tokens=1, return_dict_in_generate=True)
            yield out.past_key_values


def asked(model, variants, lengths):
    """As `caches`, each with the context that it began as a copy of; two have the same."""
    for i, n in enumerate(lengths):
        variant = variants[i % len(variants)]
        with mmkv.wrapped(model, variant.policy, variant.budget, **options_of(variant)):
            inputs = {k: x.to(model.device) for k, x in make_inputs("llama", (n,), seed=n).items()}
            context = mmkv.read(model, inputs)
            for q in (5, 18):
                question = {k: x.to(model.device) for k, x in make_inputs("llama", (q,)).items()}
                out = model.generate(
                    **context.behind(question), max_new_tokens=1, return_dict_in_generate=True
                )
                yield out.past_key_values, context


def check_blocks(pool):
    """Each row of the batch lies in one place of each layer, and none holds more than promised."""
    B = len(pool.members)
    for layer in pool.layers:
        rows = np.concatenate([x.rows for x in layer])
        assert np.array_equal(np.sort(rows), np.arange(2 * B))
        for block in layer:
            shapes = {x.shape[:2] for x in block.stored}
            ((rows, slots),) = shapes
            assert len(block.rows) <= rows
            assert max(block.used) <= slots <= block.capacity
            assert all(x.isfinite().all() for x in block.stored[:2])
    held = sum(x.numel() * x.element_size() for b in pool.blocks for x in b.stored[:2])
    assert held == pool.nbytes <= pool.most + pool.spare
    rows = [x[: len(b.rows)] for b in pool.blocks for x in b.stored[:2]]
    assert sum(map(pool.bytes_of, pool.members)) == sum(x.numel() * x.element_size() for x in rows)


@torch.no_grad()
def run(pool, waiting, rng, dtype, softcap=None, atol=2e-3):
    """Requests join and leave at random; each step's attention is that of the twins.

    Of those that wait some have a context, which they attend to without holding it.
    """
    g, twins = torch.Generator().manual_seed(0), []
    options = {"scale": 0.3, "softcap": softcap}
    while waiting or twins:
        if waiting and (not twins or rng.random() < 0.2):
            (cache, context), new = waiting.pop(), rng.randint(1, 80)
            twin = copy.deepcopy(cache)
            assert pool.takes(cache)
            member = pool.join(None, cache, new, context=context)
            drops = any(x.drops for x in member.schedules)
            assert (member.prefix is not None) == (context is not None and not drops)
            twins.append(Twin(member, twin, new))
            assert cache.nbytes == 0
        check_blocks(pool)
        before, rows = pool.most + pool.spare, [len(x.stored[0]) for x in pool.blocks]
        pool.step()
        B = len(twins)
        for layer in range(3):
            query = torch.randn(B, 4, 1, 16, generator=g).to(dtype)
            key, value = torch.randn(2, B, 2, 1, 16, generator=g).to(dtype)
            found = pool.attend(layer, query, key, value, **options)
            for i, twin in enumerate(twins):
                at = slice(i, i + 1)
                wanted = twin.attend(layer, query[at], key[at], value[at], **options)
                close = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": atol}
                torch.testing.assert_close(found[at], wanted, **close)
        assert pool.nbytes <= pool.most + pool.spare <= before
        if rows == [len(x.stored[0]) for x in pool.blocks]:  # else one grew, and gave rows back
            assert pool.most + pool.spare == before
        for twin in list(twins):
            twin.left -= 1
            if not twin.left or rng.random() < 0.03:
                twins.remove(twin)
                pool.leave(twin.member)
        twins.sort(key=lambda twin: pool.members.index(twin.member))
    assert pool.nbytes == pool.most == pool.spare == 0


def check_attention(pool, rows):
    """A step's attention of rows, numbers in the batch with their twins, is theirs."""
    pool.step()
    B, options = len(pool.members), {"scale": 0.3, "softcap": None}
    query, (key, value) = torch.randn(B, 4, 1, 16), torch.randn(2, B, 2, 1, 16)
    found = pool.attend(0, query, key, value, **options)
    assert found.isfinite().all()
    for i, cache in rows.items():
        at = slice(i, i + 1)
        wanted = Twin(None, cache, 0).attend(0, query[at], key[at], value[at], **options)
        torch.testing.assert_close(found[at], wanted)


@cases(
    "seed, dtype, softcap",
    [(0, torch.float32, None), (1, torch.bfloat16, None), (2, torch.float16, 5.0)],
    (2, torch.float16, 5.0),
)
def test_attention_is_that_of_each_request_alone(seed, dtype, softcap):
    rng = random.Random(seed)
    lengths = [rng.randint(10, 120) for _ in range(12)]
    model = make_model("llama").to(dtype)
    waiting = [(x, None) for x in caches(model, JOIN, lengths)]
    run(Pool(), waiting, rng, dtype, softcap)
    waiting += asked(model, JOIN, [90, 40, 80, 60, 120, 70])
    waiting += asked(model, NOTHING, [1, 2, 3])
    held = [(context, context.nbytes) for _, context in waiting]
    waiting += [(x, None) for x in caches(model, JOIN[-2:], (50, 30))]
    rng.shuffle(waiting)
    rounded = max(2e-3, torch.finfo(dtype).eps / 2)  # of sums in half precision
    run(pool := Pool(), waiting, rng, dtype, softcap, rounded)
    assert not pool.prefixes
    assert all(context.nbytes == before for context, before in held)


def test_parts_of_the_pairs_are_weighed_by_the_sums_of_their_exponentials():
    """The second row has no pair in its first part, whose slots are empty."""
    query, keys, values = (torch.randn(2, n, 8) for n in (3, 9, 9))
    bias = torch.randn(2, 1, 9)
    bias[1, 0, :5] = -torch.inf
    found = [
        part(query, keys[:, at], values[:, at], bias[..., at], scale=0.3, softcap=2.0)
        for at in (slice(5), slice(5, 9))
    ]
    (first, of_first), (second, of_second) = found
    share = torch.sigmoid(of_second - of_first)[..., None]
    wanted = attend(query, keys, values, bias, scale=0.3, softcap=2.0)
    torch.testing.assert_close(torch.lerp(first, second, share), wanted)


@pytest.mark.slow
def test_a_step_on_a_gpu_waits_for_nothing(monkeypatch):
    """While requests of several lengths and policies join, grow and leave."""

    def step(model, batch, cache, seen):
        ids, at = (
            x.to(model.device) for x in (torch.full((batch, 1), 9), torch.tensor(seen)[:, None])
        )
        devices.counted = Counter()
        out = model(input_ids=ids, position_ids=at, past_key_values=cache).logits
        found, devices.counted = devices.counted, None
        return out.cpu(), found

    monkeypatch.setattr(slot_schedules, "AHEAD", 8)  # so that tables are filled anew
    lengths, rounds, seen = (90, 40, 66, 41), 10, []
    with torch.no_grad(), Devices() as devices:
        for model in (make_model("llama"), move(make_model("llama"))):
            there = model.device == DEVICE
            pool, logits = Pool(), []
            for cache in caches(model, JOIN, lengths):
                pool.join(None, cache, rounds + 1)
            for cache, context in asked(model, JOIN[-1:], (50, 70)):
                pool.join(None, cache, rounds + 1, context=context)
            assert len(pool.prefixes) == 2
            mmkv.wrap(model, "full")
            for i in range(rounds):
                if i == rounds // 2:
                    pool.leave(pool.members[1])
                at = [member.cache.lengths[0] + i for member in pool.members]
                out, waits = step(model, len(at), RowCaches([], pool), at)
                logits.append(out)
                assert not there or not waits
            seen.append(logits)
    for mine, wanted in zip(*seen, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("slots", [1, 31, 33, 64, 100, 129, 500, 5000])
def test_a_row_is_promised_little_more_than_it_needs(slots):
    assert slots <= capacity(slots) <= max(slots + 31, slots * 5 // 4)
    assert capacity(capacity(slots)) == capacity(slots)


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
def test_what_another_left_in_a_row_is_not_seen(models):
    pool, waiting = Pool(), list(caches(models("llama"), JOIN[:1], (40, 40, 20)))
    first, _ = (pool.join(None, waiting.pop(0), 10) for _ in range(2))
    twin = copy.deepcopy(waiting[0])
    for block in pool.blocks:
        for x in block.stored[:2]:
            x[block.rows // 2 == 0] = torch.nan
    pool.leave(first)
    pool.join(None, waiting[0], 30)  # the same capacity, and so the same rows
    assert pool.spare == 0
    check_attention(pool, {1: twin})


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "moves"), [(30, False), (40, True)])
def test_one_that_comes_into_a_row_that_is_free_moves_others_if_it_is_wider_alone(
    models, tokens, moves
):
    """Rows of 20 tokens have 32 slots; all come to the same number of them in the end."""
    pool, waiting = Pool(), list(caches(models("llama"), JOIN[:1], (20, 20, tokens)))
    first, _ = (pool.join(None, waiting.pop(0), 40) for _ in range(2))
    pool.leave(first)
    (block,), before = pool.layers[0], [x.stored[0].data_ptr() for x in pool.layers[0]]
    assert block.stored[0].shape[:2] == (4, 32)
    twin = copy.deepcopy(waiting[0])
    pool.join(None, waiting[0], 60 - tokens)
    assert ([x.stored[0].data_ptr() for x in pool.layers[0]] != before) == moves
    check_blocks(pool)
    check_attention(pool, {1: twin})


@torch.no_grad()
def test_spare_memory_is_given_back(models):
    pool = Pool()
    small, big, last = (
        pool.join(None, x, 5) for x in caches(models("llama"), JOIN[:1], (40, 50, 45))
    )
    held = pool.nbytes
    pool.leave(small)
    assert pool.nbytes == held == pool.most + pool.spare
    pool.trim()
    assert pool.nbytes <= pool.most
    assert pool.spare == 0
    assert pool.most < held
    check_blocks(pool)
    pool.step()
    pool.leave(big)
    pool.leave(last)
    assert pool.nbytes == 0


def test_a_member_that_cannot_come_in_whole_leaves_nothing(models, monkeypatch):
    pool, (first, second) = Pool(), caches(models("llama"), JOIN[:1], (40, 40))
    pool.join(None, first, 10)
    before, add = pool.most, SharedBlock.add

    def full(self, *args):
        if self in pool.layers[1]:
            raise MemoryError
        add(self, *args)

    monkeypatch.setattr(SharedBlock, "add", full)
    with pytest.raises(MemoryError):
        pool.join(None, second, 10)
    assert (pool.most, len(pool.members)) == (before, 1)
    check_blocks(pool)
    pool.step()


@pytest.mark.parametrize(("limit", "slots"), [(None, 192), (192, 192), (180, 176)])
def test_a_member_comes_to_no_more_than_its_limit(models, limit, slots):
    pool, (cache,) = Pool(), caches(models("llama"), JOIN[:1], (100,))
    slot = 3 * 2 * 2 * 16 * 4  # layers, heads, keys and values, numbers, bytes
    pool.join(None, cache, 70, limit and limit * slot)
    assert pool.most == slots * slot


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
                lambda *args: joined.append(len(engine._worker.batch.pool.members))
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
            together = []

            def look(*args):
                together.append({x.owner.tokens for x in engine._worker.batch.pool.members})

            first_layer = engine._attachment.parts.layers[0]
            with watched(engine) as (seen, over), first_layer.register_forward_hook(look):
                replies = [
                    engine.submit(inputs=x, max_new_tokens=n)
                    for x, n in zip(asked, new, strict=True)
                ]
                assert [x.result(60)[0] for x in replies] == wanted
            stats = engine.stats()
    assert {100, 90} in together
    assert {100, 80} in together
    assert {100, 90, 80} not in together
    assert not over
    assert max(seen) <= first + second
    assert stats.cache_bytes == stats.reserved_bytes == 0
