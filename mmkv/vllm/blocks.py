"""Scheduler side: KV cache groups whose prompts are compressed at a boundary, and their reuse.

A request that is read from the start is compressed at its boundary b: small heads keep b -
dropped(b) * block pairs in the last slots before b, and their blocks before are freed. All tokens
from b on read the compressed prefix, in the same step, in later ones and in other requests. Without
prefix caching b is the prompt's length. With it b is a multiple of the block size below the
prompt's length, and what is cached depends on tokens alone:

- whole heads' blocks before b: by vLLM's own keys;
- "state": small heads' blocks before b, found all or none, by the hash of the prefix b;
- "tail": blocks after b, of all heads, by the hash of the prefix and b.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from mmkv.vllm.settings import TAIL, Sizes, last_boundary

_KNOWN = 2**16  # blocks of earlier prompts that are remembered, a million tokens or more


@dataclass(frozen=True, kw_only=True)
class WholeSpec(FullAttentionSpec):
    """Pages of heads that keep the whole prompt."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> WholeSpec:
        """Return vLLM's own spec as one of this class."""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(spec) if f.init})


@dataclass(frozen=True, kw_only=True)
class SmallSpec(AttentionSpec):
    """Pages of heads that keep a part of a prompt: pairs, then a float32 of each, see `Pages`."""

    sizes: Sizes

    # `prefix_cacheable` stays True: vLLM would leave a group that is not cacheable out of the
    # search for hits, and skip tokens that these heads have not read.

    @classmethod
    def of(cls, *, head_size: int, dtype: Any, **given: Any) -> SmallSpec:
        """Return the spec of heads of this size; other arguments are those of the class."""
        content = 2 * head_size * dtype.itemsize + 4
        return cls(head_size=head_size, dtype=dtype, state_content_bytes=content, **given)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        """Return whether these may share one group: heads of other sizes may not."""
        return all(spec == self for spec in kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes of the longest request before it is compressed."""
        return cdiv(vllm_config.model_config.max_model_len, self.block_size) * self.page_size_bytes

    def dropped(self, tokens: int) -> int:
        """Return `Sizes.dropped` in blocks of this group."""
        return _dropped(self.sizes, tokens, self.block_size)


@functools.lru_cache(maxsize=2**14)  # it is asked for in each step
def _dropped(sizes: Sizes, tokens: int, block: int) -> int:
    return int(sizes.dropped(tokens, block))


def _state(prefix: BlockHash, part: int) -> BlockHash:
    return BlockHash(prefix + b"state" + part.to_bytes(4, "big"))


def _tail(prefix: BlockHash, boundary: int) -> BlockHash:
    return BlockHash(prefix + b"tail" + boundary.to_bytes(4, "big"))


class Index:
    """What the groups' managers share: the search for hits. A block pool has one."""

    def __init__(self) -> None:
        self.whole: list[int] = []  # ids of groups
        self.small: dict[int, SmallSpec] = {}
        self.known: dict[BlockHash, None] = {}  # the blocks of the latest prompts, oldest first
        self.boundaries: dict[str, int] = {}  # of the requests that have blocks
        self.hits: dict[str, int] = {}  # the boundary of a request that starts with a hit
        self.reading: dict[str, BlockHash] = {}  # the prefix of a request that will be compressed
        self.awaited: set[BlockHash] = set()  # those of `reading` that the last search could use
        # The boundary, in blocks, that a search for hits has to find: that of a request which was
        # preempted after its reply began. None: any boundary will do.
        self.resumed: int | None = None

    @classmethod
    def of(cls, pool: Any) -> Index:
        """Return a block pool's index."""
        if not hasattr(pool, "mmkv"):
            pool.mmkv = cls()
        return pool.mmkv

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return next(iter(self.small.values())).block_size

    @property
    def waits(self) -> bool:
        """Whether the last request searched for waits for a prefix that another one reads."""
        return not self.awaited.isdisjoint(self.reading.values())

    def run(self, pool: Any, hashes: Any, most: int) -> int:
        """Return how many first blocks whole heads have, of `most`."""
        for n in range(most if self.whole else 0):
            if not pool.get_cached_block(hashes[n], self.whole):
                return n
        return most

    def state(self, pool: Any, prefix: BlockHash, boundary: int, group: int) -> list[Any] | None:
        """Return a group's compressed blocks of a prefix, if all are there."""
        blocks: list[Any] = []
        for j in range(boundary // self.size - self.small[group].dropped(boundary)):
            found = pool.get_cached_block(_state(prefix, j), [group])
            if found is None:
                return None
            blocks += found
        return blocks

    def find(self, pool: Any, hashes: Any, length: int) -> tuple[int, int]:
        """Return the boundary and the length of the longest hit, in blocks.

        What lies after a boundary stays whole, so a hit must leave little of the request. A
        resumed request needs the boundary that its reply began with.
        """
        size, best, total = self.size, (0, 0), len(hashes)
        most = min(length // size, total)
        least = max(1, min(total - 1, int((1 - TAIL) * total)))
        groups = [*self.whole, *self.small]
        for n in range(self.run(pool, hashes, most), least - 1, -1):
            if self.resumed not in (None, n):
                continue
            if all(self.state(pool, hashes[n - 1], n * size, g) is not None for g in self.small):
                end = n
                while end < most and pool.get_cached_block(_tail(hashes[end], n * size), groups):
                    end += 1
                best = max(best, (n, end), key=lambda x: x[1])
        first, end = max(least - 1, best[1]), most
        if self.resumed is not None:
            first, end = max(first, self.resumed - 1), self.resumed
        # vLLM searches again, with a smaller length, for each kind of group.
        self.awaited |= set(hashes[first:end]) & set(self.reading.values())
        return best

    def boundary(self, request: Any) -> int:
        """Return where a request that is read from the start is compressed.

        It is decided once, as it has to outlast preemptions.
        """
        if hasattr(request, "mmkv_boundary"):
            return request.mmkv_boundary
        last = last_boundary(request.num_prompt_tokens, self.size)
        params = request.sampling_params
        given = ((params.extra_args if params else None) or {}).get("mmkv_prefix", 0)
        shared = self._shared(request.block_hashes[: last // self.size])
        if given >= self.size:  # the caller knows what later prompts share
            shared = min(last // self.size, given // self.size)
        at = shared * self.size
        request.mmkv_boundary = at if last - at <= TAIL * last else last
        return request.mmkv_boundary

    def _shared(self, hashes: Any) -> int:
        """Return how many first blocks an earlier prompt shares, and remember these blocks."""
        shared = next((n for n, x in enumerate(hashes) if x not in self.known), len(hashes))
        for x in hashes:
            self.known.pop(x, None)
            self.known[x] = None
        while len(self.known) > _KNOWN:
            del self.known[next(iter(self.known))]
        return shared


@dataclass
class Read:
    """A request that has blocks."""

    request: Any
    boundary: int
    open: bool  # it is not yet compressed


class Manager(SingleTypeKVCacheManager):
    """What both kinds of groups do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.index, self.reads = Index.of(self.block_pool), dict[str, Read]()

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer the full blocks among a request's first tokens, which the next step computes."""
        name, size, index = request.request_id, self.block_size, self.index
        if name not in self.reads:
            boundary, hit = index.boundary(request), index.hits.get(name)
            self.reads[name] = Read(request, hit or boundary, hit is None and boundary > 0)
            index.boundaries[name] = request.mmkv_boundary = hit or boundary
            if self.reads[name].open:
                index.reading[name] = request.block_hashes[boundary // size - 1]
        boundary = self.reads[name].boundary
        if boundary == 0:
            return
        self._cache_prefix(request, min(num_tokens, boundary), *args, **kwargs)
        cached = max(self.num_cached_block.get(name, 0), boundary // size)
        for i in range(cached, num_tokens // size):
            key = _tail(request.block_hashes[i], boundary)
            self._offer(self.req_to_blocks[name][i], key, (i + 1) * size)
        if num_tokens >= boundary:
            self.num_cached_block[name] = max(cached, num_tokens // size)

    def _cache_prefix(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer the blocks before the boundary that are complete before it is reached."""

    def _offer(self, block: Any, key: BlockHash, tokens: int) -> None:
        grouped = make_block_hash_with_group_id(key, self.kv_cache_group_id)
        block.set_block_hash(grouped, num_tokens=tokens)
        self.block_pool.cached_block_hash_to_block.insert(grouped, block)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """Forget a request that ends or is preempted."""
        self.reads.pop(request_id, None)
        for held in (self.index.hits, self.index.reading, self.index.boundaries):
            held.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: Any,
        block_pool: Any,
        kv_cache_spec: Any,
        *_: Any,
        **__: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """Return the blocks of each group of the longest hit that all groups have."""
        index, size = Index.of(block_pool), kv_cache_spec.block_size
        boundary, end = index.find(block_pool, block_hashes, max_length)
        found = []
        for group in kv_cache_group_ids:
            blocks = cls._prefix(index, block_pool, block_hashes, boundary, group) if end else []
            for n in range(boundary, end):
                key = _tail(block_hashes[n], boundary * size)
                blocks += block_pool.get_cached_block(key, [group])
            found.append(blocks)
        return tuple(found), end * size

    @staticmethod
    def _prefix(index: Index, pool: Any, hashes: Any, boundary: int, group: int) -> list[Any]:
        raise NotImplementedError

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Return 0: no attention of ours makes use of common blocks."""
        return 0


class WholeManager(Manager, FullAttentionManager):
    """vLLM's, but blocks after a boundary are not offered as if the prefix were whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.index.whole.append(self.kv_cache_group_id)

    def _cache_prefix(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        FullAttentionManager.cache_blocks(self, request, num_tokens, *args, **kwargs)

    @staticmethod
    def _prefix(index: Index, pool: Any, hashes: Any, boundary: int, group: int) -> list[Any]:
        return [pool.get_cached_block(hashes[n], [group])[0] for n in range(boundary)]


class SmallManager(Manager):
    """Frees the first blocks of a prefix when it has been compressed into its last blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.index.small[self.kv_cache_group_id] = self.kv_cache_spec

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        """Return vLLM's number; more than there are for a request that should wait."""
        if request_id not in self.req_to_blocks and self.index.waits:
            return self.block_pool.num_gpu_blocks + 1
        return super().get_num_blocks_to_allocate(request_id, *args, **kwargs)

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Note the boundary of a hit, which its first compressed block tells."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)
        if first := next((b for b in new_computed_blocks if not b.is_null), None):
            self.index.hits[request_id] = first.block_hash_num_tokens

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free the first blocks of a request whose prompt has been compressed."""
        assert num_prompt_tokens is not None
        read = self.reads.get(request_id)
        if read is not None:
            self._compressed(read, processed_computed_tokens)
        elif not self.enable_caching and processed_computed_tokens >= num_prompt_tokens:
            dropped = self.kv_cache_spec.dropped(num_prompt_tokens)
            self._remove_blocks_in_range(request_id, 0, dropped)

    def _compressed(self, read: Read, processed: int) -> None:
        """Free the blocks that a compressed prefix has left, and offer those it is in."""
        if not read.open or processed < read.boundary:
            return
        read.open = False
        name, last = read.request.request_id, read.boundary // self.block_size
        self.index.reading.pop(name, None)
        dropped = self.kv_cache_spec.dropped(read.boundary)
        self._remove_blocks_in_range(name, 0, dropped)
        prefix, group = read.request.block_hashes[last - 1], self.kv_cache_group_id
        pool = self.block_pool
        if self.index.state(pool, prefix, read.boundary, group) is not None:
            return  # parts of two states must never be found together
        for j, block in enumerate(self.req_to_blocks[name][dropped:last]):
            if stale := pool.get_cached_block(_state(prefix, j), [group]):
                pool.evict_blocks({stale[0].block_id})
            self._offer(block, _state(prefix, j), read.boundary)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """Offer a state before its request goes, as it may end with its first token."""
        if read := self.reads.get(request_id):
            request = read.request
            self._compressed(read, request.num_computed_tokens - request.num_in_flight_tokens)
        return super().pop_blocks_for_free(request_id)

    @staticmethod
    def _prefix(index: Index, pool: Any, hashes: Any, boundary: int, group: int) -> list[Any]:
        spec = index.small[group]
        tokens = boundary * spec.block_size
        state = index.state(pool, hashes[boundary - 1], tokens, group)
        assert state is not None
        return [pool.null_block] * spec.dropped(tokens) + state


def register() -> None:
    """Register the groups, tell searches for hits the boundary of a preempted request, and tell
    workers with each step the boundaries of the requests that it starts."""
    # A registry with any entry counts as complete, so built-in specs have to come first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WholeSpec, WholeManager, uniform_type_base_spec=WholeSpec)
    KVCacheSpecRegistry.register(SmallSpec, SmallManager, uniform_type_base_spec=SmallSpec)
    schedule, search = Scheduler.schedule, KVCacheManager.get_computed_blocks
    if getattr(schedule, "mmkv", False):
        return

    @functools.wraps(search)
    def searching(self: Any, request: Any) -> Any:
        index = getattr(self.block_pool, "mmkv", None)
        if index is not None:
            index.awaited = set()
            replies, boundary = request.num_output_tokens, getattr(request, "mmkv_boundary", None)
            resumes = replies and boundary is not None
            index.resumed = boundary // index.size if resumes else None
        return search(self, request)

    @functools.wraps(schedule)
    def with_boundaries(self: Any, *args: Any, **kwargs: Any) -> Any:
        output: Any = schedule(self, *args, **kwargs)
        index = getattr(self.kv_cache_manager.block_pool, "mmkv", None)
        if index is not None:
            started = [r.req_id for r in output.scheduled_new_reqs]
            started += output.scheduled_cached_reqs.resumed_req_ids
            output.mmkv = {
                name: index.boundaries.get(name, self.requests[name].num_prompt_tokens)
                for name in started
            }
        return output

    with_boundaries.mmkv = True  # type: ignore[attr-defined]
    Scheduler.schedule = with_boundaries
    KVCacheManager.get_computed_blocks = searching
