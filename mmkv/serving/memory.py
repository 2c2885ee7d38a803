"""How many bytes of keys and values a request can take at the most."""

from __future__ import annotations

from mmkv.adapters import Adapter
from mmkv.cache import token_masks
from mmkv.cache.compressed import CompressedCache
from mmkv.cache.config import CacheConfig
from mmkv.cache.padded_blocks import PaddedBlock
from mmkv.parts.slots import AHEAD, spare
from mmkv.serving.shared_blocks import capacity


class Bounds:
    """Upper bounds for the caches of one model, which reads prompts in chunks of so many tokens."""

    def __init__(self, parts: Adapter, dtype_bytes: int, chunk: int) -> None:
        self.chunk, self.layers = chunk, len(parts.layers)
        self.heads, numbers = parts.pair_shape(0)  # every layer's: others have no bounds
        self.queries: int = parts.config.num_attention_heads
        self.number = numbers * dtype_bytes
        # Where one projection gives queries, keys and values, values are a view of all of it, until
        # the second chunk is put behind the first.
        self.fused = not hasattr(parts.attentions[0], "v_proj")

    def prompt(self, plan: CacheConfig, tokens: int, new: int, behind: int = 0) -> int:
        """While a prompt of `tokens` is read and a reply of `new` tokens is generated.

        The last of them, so many as are `behind` a shared prefix, are kept whole. Every other
        token may be held whole until the prompt is complete, and the reply's after it; the slots
        set aside for more are an eighth at most, or 16.
        """
        first, whole = tokens - behind, behind + new
        width = min(first, self._held(plan, first, whole)) + whole
        return self._of(plan, [width + spare(width, 2 * width)] * self.layers, tokens)

    def behind(self, cache: CompressedCache, tokens: int, new: int) -> int:
        """While `tokens` of a question and a reply of `new` are held behind a context, whole."""
        widths = []
        for layer in cache.compressed:
            held = max(block.schedule.used for block in layer.keeping().blocks)
            width = held + 1 + tokens + new
            widths.append(width + spare(width, 2 * width))
        return self._of(cache.plan, widths, tokens)

    def reply(self, cache: CompressedCache, new: int) -> int | None:
        """From now on, while `new` more tokens are generated; None: more may come to be held."""
        if cache.observes_replies or cache.postpones:
            return None
        blocks = [block for layer in cache.compressed for block in layer.keeping().blocks]
        # What is of no block does not grow.
        rest = cache.nbytes - sum(block.nbytes for block in blocks)
        return rest + sum(_grown(block, new) for block in blocks)

    def _held(self, plan: CacheConfig, tokens: int, new: int) -> int:
        """Pairs of the prompt that a head holds at the most, mean over layers."""
        policy, budget = plan.policy, plan.budget
        if not plan.evict_chunks or budget is None or policy.protect is not None:
            return tokens
        total = token_masks.total_kept(policy, budget, self.layers, tokens + new)
        kept = max(-(-total // self.layers), policy.window_size + policy.sinks)
        # A layer is as wide as its longest head, which may hold all that its heads keep together.
        return kept * (1 if policy.heads.equal else self.heads) + self.chunk

    def _of(self, plan: CacheConfig, widths: list[int], tokens: int) -> int:
        policy = plan.policy
        pair = 2 * self.number
        if policy.merge is not None:
            pair += 4 + 8  # the weight of a pair, and which group a token is in
        total = sum(widths) * self.heads * pair
        if self.fused:
            first = min(tokens, self.chunk)
            total += self.layers * (self.queries + self.heads) * self.number * first
        waits = policy.postpone + policy.decode.every + policy.decode.latest
        if waits:  # queries of the prompt's end and of the reply, which will observe
            last = tokens if policy.queries is None else policy.queries
            total += self.layers * self.queries * self.number * (last + waits)
        return total


def _grown(block: PaddedBlock, new: int) -> int:
    """Bytes of a block once `new` more tokens were written, slots set aside included."""
    schedule, slots = block.schedule, block.positions.shape[1]
    width = schedule.most(new + 1)
    steps = new + 1 + spare(width, 2 * width)
    # Schedules are worked out some steps ahead, and grow by what they know then.
    most = min(schedule.most(steps + AHEAD), schedule.used + steps)
    return -(-block.nbytes // slots) * max(slots, most, capacity(width))
