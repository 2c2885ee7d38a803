"""The scheduler side alone, at random, next to a model of what each block holds.

No model runs: a step first writes its tokens, then reads, then compresses, as the worker does, with
labels in place of keys and values. Requests share prefixes, end, are aborted and preempted, and the
cache loses blocks, in a small pool.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1", reason="vLLM is not installed: make test-vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from mmkv.vllm import blocks
from mmkv.vllm.blocks import SmallSpec, WholeSpec
from mmkv.vllm.settings import Sizes

B = 4
KIND: Any = {"block_size": B, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}


class Simulation:
    """A scheduler of a pool, with what each block holds."""

    def __init__(self, seed: int, pool: int) -> None:
        blocks.register()
        init_none_hash(sha256)
        self.rng = random.Random(seed)
        whole = [WholeSpec(**KIND)] * (seed % 3 > 0)
        sizes = Sizes(0.5, 8, 2), Sizes(0.2, 8, 2, codes=(132, 38) if seed % 2 else None)
        small = [SmallSpec.of(**KIND, sizes=x) for x in sizes]
        self.specs = [*whole, *small]
        groups = [KVCacheGroupSpec([f"l{i}"], s) for i, s in enumerate(self.specs)]
        config = KVCacheConfig(pool, [], groups)
        self.manager = KVCacheManager(config, 400, B, B, enable_caching=True)
        self.pool, self.index = pool, self.manager.block_pool.mmkv
        self.managers = self.manager.coordinator.single_type_managers
        self.holds: dict[int, Any] = {}
        self.waiting, self.running = list[Any](), list[Any]()
        self.tables, self.starts = dict[str, Any](), dict[str, int]()
        self.boundaries = dict[str, int]()  # of each request that has a reply
        self.seen = Counter[str]()
        documents = [[self.rng.randrange(9) for _ in range(120)] for _ in range(2)]
        self.texts, self.number = documents, 0
        self.hasher = get_request_block_hasher(B, sha256)

    def arrive(self) -> None:
        rng = self.rng
        ids = rng.choice(self.texts)[: rng.randint(1, 160)]
        ids = ids + [rng.randrange(9) for _ in range(rng.randint(0, 30))]
        self.texts = [*self.texts[:2], *self.texts[2:][-6:], ids]
        extra = {"mmkv_prefix": rng.randint(1, len(ids) + 9)} if rng.random() < 0.3 else None
        params = SamplingParams(max_tokens=rng.randint(1, 40), extra_args=extra)
        salt = rng.choice([None, None, None, "s"])
        name, self.number = str(self.number), self.number + 1
        hasher = self.hasher
        request = Request(name, ids, params, None, block_hasher=hasher, cache_salt=salt)
        self.waiting.append(request)

    def boundary(self, request: Any) -> int:
        return self.managers[0].reads[request.request_id].boundary

    def label(self, request: Any, i: int, end: int) -> Any:
        """What a block of tokens holds as they are first written."""
        ids = tuple(request.all_token_ids[: min(end, (i + 1) * B)])
        boundary = self.boundary(request)
        return ("raw", ids) if i < boundary // B else ("tail", ids, boundary)

    def free(self, request: Any) -> None:
        self.manager.free(request)
        self.tables.pop(request.request_id)
        request.num_computed_tokens = 0

    def schedule(self) -> list[tuple[Any, int]]:
        budget, scheduled = 40, []
        for r in list(self.running):
            if r not in self.running or not budget or r.num_computed_tokens == r.num_tokens:
                continue
            n = min(budget, r.num_tokens - r.num_computed_tokens)
            while (new := self.manager.allocate_slots(r, n)) is None:
                latest = self.running.pop()
                scheduled = [x for x in scheduled if x[0] is not latest]
                self.seen["preempted"] += 1
                self.free(latest)
                latest.status = RequestStatus.PREEMPTED
                self.waiting.insert(0, latest)
                if latest is r:
                    return scheduled
            for table, ids in zip(self.tables[r.request_id], new.get_block_ids(), strict=True):
                table.extend(ids)
            scheduled.append((r, n))
            budget -= n
        while self.waiting and budget and len(self.running) < 6:
            r = self.waiting[0]
            found, hit, _ = self.manager.get_computed_blocks(r)
            n = min(budget, r.num_tokens - hit)
            self.seen["waits"] += self.index.waits
            arguments = (r, n, hit, found)
            if self.manager.allocate_slots(*arguments, full_sequence_must_fit=True) is None:
                break
            self.waiting.pop(0)
            self.running.append(r)
            r.status, r.num_computed_tokens = RequestStatus.RUNNING, hit
            self.tables[r.request_id] = [list(x) for x in self.manager.get_block_ids(r.request_id)]
            self.starts[r.request_id] = hit
            self.seen["hits"] += hit > 0
            self.seen["tail hits"] += hit > self.boundary(r)
            scheduled.append((r, n))
            budget -= n
        return scheduled

    def read(self, request: Any, n: int) -> None:
        """Check every block that a request reads in a step."""
        b, start = self.boundary(request), self.starts[request.request_id]
        if request.num_output_tokens:  # the boundary outlasts preemptions
            assert self.boundaries.setdefault(request.request_id, b) == b
        computed = request.num_computed_tokens
        for spec, table in zip(self.specs, self.tables[request.request_id], strict=True):
            compressed = isinstance(spec, SmallSpec) and b > 0 and (start > 0 or computed >= b)
            drop = spec.dropped(b) if compressed else 0
            if start and isinstance(spec, SmallSpec):
                assert next(i for i, x in enumerate(table) if x) == drop
            events = {self.holds[table[i]][3:] for i in range(drop, b // B)} if drop else {()}
            assert len(events) == 1  # never parts of two states
            for i in range(drop, -(-(computed + n) // B)):
                expected = self.label(request, i, computed + n)
                if compressed and drop and i < b // B:
                    expected = ("state", tuple(request.all_token_ids[:b]), i - drop)
                assert self.holds[table[i]][: len(expected)] == expected

    def step(self, number: int) -> None:
        if self.rng.random() < 0.25 and len(self.waiting) < 6:
            self.arrive()
        scheduled = self.schedule()
        for r, n in scheduled:
            for table in self.tables[r.request_id]:
                for i in range(r.num_computed_tokens // B, -(-(r.num_computed_tokens + n) // B)):
                    assert table[i]
                    self.holds[table[i]] = self.label(r, i, r.num_computed_tokens + n)
        for r, n in scheduled:
            self.read(r, n)
        for r, n in scheduled:
            b, computed = self.boundary(r), r.num_computed_tokens
            if not self.starts[r.request_id] and computed < b <= computed + n:
                for spec, table in zip(self.specs, self.tables[r.request_id], strict=True):
                    if isinstance(spec, SmallSpec) and (drop := spec.dropped(b)):
                        prefix, event = tuple(r.all_token_ids[:b]), (r.request_id, number)
                        for i in range(drop, b // B):
                            self.holds[table[i]] = ("state", prefix, i - drop, event)
            r.num_computed_tokens += n
            if r.num_computed_tokens == r.num_tokens:
                r.append_output_token_ids(self.rng.randrange(9))
                if len(r.output_token_ids) >= r.max_tokens or r.num_tokens >= 300:
                    self.texts.append(list(r.all_token_ids)[:200])
                    self.end(r, "ended")
        if self.running and self.rng.random() < 0.02:
            self.end(self.rng.choice(self.running), "aborted")
        if self.rng.random() < 0.3:
            lost = {self.rng.randrange(1, self.pool) for _ in range(self.pool // 40)}
            self.manager.evict_blocks(lost)

    def end(self, request: Any, how: str) -> None:
        self.running.remove(request)
        self.free(request)
        self.seen[how] += 1


def test_no_request_ever_reads_a_wrong_block() -> None:
    seen = Counter[str]()
    for seed in range(6):
        run = Simulation(seed, [150, 220, 300][seed % 3])
        for number in range(500):
            run.step(number)
        for r in list(run.running):
            run.end(r, "left")
        assert run.manager.block_pool.get_num_free_blocks() == run.pool - 1
        assert not any(m.reads or m.req_to_blocks for m in run.managers)
        assert not any((run.index.hits, run.index.reading, run.index.boundaries))
        assert run.manager.reset_prefix_cache()
        assert run.seen["ended"] > 30  # no request waits for ever
        seen += run.seen
    happened = ("hits", "tail hits", "waits", "aborted", "preempted")
    assert min(seen[x] for x in happened) > 2, seen
