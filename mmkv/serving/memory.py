"""Upper bounds for the bytes of keys and values that a request can take."""

from __future__ import annotations

from mmkv.adapters import Adapter
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.parts.slots import AHEAD, spare
from mmkv.serving.shared_blocks import capacity


class Bounds:
    """Upper bounds for the caches of one model that reads prompts in chunks of `chunk` tokens."""

    def __init__(self, parts: Adapter, dtype_bytes: int, chunk: int) -> None:
        self.chunk, self.layers = chunk, len(parts.layers)
        self.heads, head_dim = parts.pair_shape(0)  # equal in all layers
        self.query_heads: int = parts.config.num_attention_heads
        self.vector_bytes = head_dim * dtype_bytes
        # Where one projection makes queries, keys and values, the values are a view that holds all
        # of its output until the second chunk is appended to the first.
        self.fused = not hasattr(parts.attentions[0], "v_proj")

    def prompt(self, plan: CacheConfig, tokens: int, new: int, behind: int = 0) -> int:
        """Bound the bytes while `tokens` of a prompt are read and `new` ones generated.

        All of the last `behind` tokens, those after a shared prefix, are kept. The other tokens of
        the prompt may be stored until it is complete, and those of the reply after them; the slots
        set aside are at most an eighth more, or 16.
        """
        prefix, kept_whole = tokens - behind, behind + new
        width = min(prefix, self._kept_per_head(plan, prefix, kept_whole)) + kept_whole
        return self._total_bytes(plan, [width] * self.layers, tokens)

    def behind(self, cache: CompressedCache, tokens: int, new: int) -> int:
        """Bound the bytes of a context with all `tokens` of a question and `new` of a reply."""
        used = [max(x.schedule.used for x in layer.keeping().blocks) for layer in cache.compressed]
        return self._total_bytes(cache.plan, [x + 1 + tokens + new for x in used], tokens)

    def reply(self, cache: CompressedCache, new: int) -> int | None:
        """Bound the bytes while `new` more tokens are generated; None: as `prompt` says."""
        if cache.observes_replies or cache.postpones:
            return None
        # Tensors outside the blocks do not grow.
        return cache.nbytes + sum(_grown(block, new) - block.nbytes for block in cache.blocks)

    def _kept_per_head(self, plan: CacheConfig, tokens: int, new: int) -> int:
        """Bound the pairs of the prompt that a head stores, mean over layers."""
        policy, budget = plan.policy, plan.budget
        if not plan.evict_chunks or budget is None or policy.protect is not None:
            return tokens
        total = plan.total_kept(self.layers, tokens + new)
        kept = max(-(-total // self.layers), policy.window_size + policy.sinks)
        # A layer is as wide as its longest head, which may hold what all heads keep together.
        return kept * (1 if policy.heads.equal else self.heads) + self.chunk

    def _total_bytes(self, plan: CacheConfig, widths: list[int], tokens: int) -> int:
        policy = plan.policy
        pair = 2 * self.vector_bytes
        if policy.merge is not None:
            pair += 4 + 8  # the weight of a pair, and the group of a token
        total = sum(x + spare(x, 2 * x) for x in widths) * self.heads * pair
        if self.fused:
            first = min(tokens, self.chunk)
            total += self.layers * (self.query_heads + self.heads) * self.vector_bytes * first
        n_later = policy.postpone + policy.decode.every + policy.decode.latest
        if n_later:  # stored queries of the prompt's end and of the reply, for scores to come
            n_last = tokens if policy.queries is None else policy.queries
            total += self.layers * self.query_heads * self.vector_bytes * (n_last + n_later)
        return total


def _grown(block: PaddedBlock, new: int) -> int:
    """Bound the bytes of a block with `new` more tokens, slots set aside included."""
    schedule, slots = block.schedule, block.positions.shape[1]
    width = schedule.most(new + 1)
    steps = new + 1 + spare(width, 2 * width)
    # Schedules are planned `AHEAD` steps at a time, and storage grows to what is planned.
    max_slots = min(schedule.most(steps + AHEAD), schedule.used + steps)
    return block.nbytes_of(max(slots, max_slots, capacity(width)))
