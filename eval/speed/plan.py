"""Bounds of memory and time for a model, a policy and a card, from configs alone: `mmkv plan`.

A prefill takes at least the time of its arithmetic, and a step at least that of reading its bytes,
at the card's published speed. Real steps reach 50 to 80 % of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch

from mmkv.cache.allotment import bytes_beside_pair, empty_slots
from mmkv.cache.config import CacheConfig
from mmkv.cache.quantize import WINDOW
from mmkv.calls import cache_in
from mmkv.decode.slots import Ratio
from mmkv.eval.speed.cards import Card
from mmkv.memory import BITS, POSITION, group, index_bytes
from mmkv.merge.groups import MergeIntoGroups
from mmkv.policy import Policy
from mmkv.scores.accumulated import AccumulatedAttention
from mmkv.scores.observers import Observers

# Usable share of a card's memory; the rest is for the CUDA context and fragmentation.
_USABLE = 0.95


class Layer(NamedTuple):
    """Sizes of a layer that holds keys and values."""

    pair: int  # numbers in the keys and values of one token
    queried: int  # numbers in its queries, of all heads
    width: int  # numbers in the key of one head
    window: int  # tokens that it holds at most; 0: all


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that decide its memory and time."""

    weights: int  # bytes of all weights
    body: int  # bytes of the decoder's weights that every token passes: no embeddings, no experts
    head: int  # bytes of the output head, which only the last token of a prompt passes
    experts: int  # bytes of all routed experts
    routed: float  # the share of them that a token passes
    layers: list[Layer]  # those that hold keys and values
    hidden: int  # numbers of one token's activations while a layer is computed
    itemsize: int  # bytes of one number

    @classmethod
    def of(cls, model: Any) -> Sizes:
        """Return the sizes of a model on the meta device; its decoder is converted to bfloat16.

        The caches of its layers are those of a forward pass, which computes nothing there.
        """
        config = model.config.get_text_config()
        weights = model.get_memory_footprint(return_buffers=False)
        head, decoder = model.get_output_embeddings().weight, model.get_decoder()
        embeddings = (x for x in decoder.modules() if isinstance(x, torch.nn.Embedding))
        left_out = {head, *(x.weight for x in embeddings)}
        body, experts, routed = 0, 0, 0.0
        for name, x in decoder.named_parameters():
            if ".experts." in name:
                experts += x.nbytes
                per_token = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
                routed = per_token / len(x)
            elif x not in left_out:
                body += x.nbytes
        head_bytes, itemsize = head.nbytes, next(model.parameters()).element_size()
        with torch.no_grad(), torch.device("meta"):
            ids = torch.ones(1, 2, dtype=torch.long)
            # Experts are only multiplied in bfloat16.
            outputs = decoder.to(torch.bfloat16)(input_ids=ids, use_cache=True)
        layers: list[Layer] = []
        for layer in cache_in(outputs).layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is not None and values is not None:
                pair, width = keys.shape[1] * (keys.shape[3] + values.shape[3]), keys.shape[3]
                queried = config.num_attention_heads * width
                layers.append(Layer(pair, queried, width, getattr(layer, "sliding_window", 0)))
        hidden = 4 * config.hidden_size + 2 * (getattr(config, "intermediate_size", 0) or 0)
        return cls(weights, body, head_bytes, experts, routed, layers, hidden, itemsize)

    def read(self, tokens: int) -> float:
        """Return the bytes of weights that a pass over so many tokens reads, if routed evenly."""
        return self.body + self.head + self.experts * (1 - (1 - self.routed) ** tokens)


class Load(NamedTuple):
    """Sequences at once, tokens of each prompt, and generated tokens of each."""

    batch: int
    prompt: int
    new: int


class Plan(NamedTuple):
    """Bounds for one policy."""

    cache_bytes: float  # of the batch, at the end of its replies
    peak_bytes: float  # weights, and what the prefill or any step holds
    prefill_s: float  # at least
    token_s: float  # at least, mean over the reply
    largest_batch: int  # sequences that fit, 0 if not even one does

    def cells(self, load: Load) -> dict[str, str]:
        """Return the table's cells by column; tokens/s include the prefill."""
        rate = load.batch * load.new / (self.prefill_s + self.token_s * load.new)
        fits = load.batch <= self.largest_batch
        return {
            "cache GB": f"{self.cache_bytes / 1e9:.2f}",
            "peak GB": f"{self.peak_bytes / 1e9:.1f}",
            "prefill s": f"{self.prefill_s:.3g}" if fits else "does not fit",
            "ms a token": f"{1000 * self.token_s:.2f}" if fits else "",
            "tokens/s": f"{rate:,.0f}" if fits else "",
            "largest batch": f"{self.largest_batch:,}",
        }


def held(config: CacheConfig, prompt: int, generated: int, n_layers: int = 1) -> float:
    """Return the tokens that a layer holds of a sequence, a mean over layers.

    With `decode="ratio"` that is exact for layers of equal size; the mean of others can be higher,
    by less than `distance`.
    """
    seen, policy = prompt + generated, config.policy
    decode = policy.decode
    if config.keeps_all:
        return seen

    def kept(length: int) -> float:
        return config.total_kept(n_layers, length) / n_layers

    if isinstance(decode, Ratio):
        return max(kept(prompt) + min(generated, decode.distance), kept(seen))
    since = since_round(policy, generated)
    if since < generated:
        return max(kept(seen - since), policy.sinks + decode.latest) + since
    if decode.every or decode.name == "grow":
        return kept(prompt) + generated
    # Slots are filled up to the size.
    return max(kept(prompt), min(config.kept_whole, seen))


def since_round(policy: Policy, generated: int) -> int:
    """Return how many of the generated tokens followed the last round; all without rounds."""
    every, latest = policy.decode.every, policy.decode.latest
    # The first round starts when `latest` tokens can be left out of it.
    return (generated - latest) % every if every and generated >= every + latest else generated


def plan(sizes: Sizes, load: Load, card: Card, config: CacheConfig) -> Plan:
    """Return bounds of the memory and time of caches of `config` on a card."""
    policy, kv_dtype = config.policy, config.kv_dtype
    itemsize, full = sizes.itemsize, [x for x in sizes.layers if not x.window]
    share = held(config, load.prompt, 0, len(full) or 1) / load.prompt
    empty = empty_slots(config, load.prompt)
    if empty is None:  # heads' sizes are unknown; a budget in bytes leaves room for empty slots
        empty = (
            0.0 if config.allotment is None else config.allotment.empty_share * share * load.prompt
        )
    merge = policy.merge if share < 1 else None
    groups = isinstance(merge, MergeIntoGroups)
    index = index_bytes(merge.group_run, share) * load.prompt if groups else 0.0
    beside = bytes_beside_pair(policy, itemsize)
    if share == 1:  # positions alone; the model's own cache has none
        beside = 0 if config.keeps_all and kv_dtype is None else POSITION

    def pairs_bytes(layer: Layer, tokens: float, generated: int) -> float:
        """Return the bytes of a layer that keeps so many tokens of each head."""
        heads = layer.pair / layer.width / 2
        others = heads * (beside * tokens + index)
        if kv_dtype is None:
            return layer.pair * tokens * itemsize + others
        # A group's numbers share a step of 16 bits.
        coded = layer.pair * tokens * (BITS[kv_dtype] + 16 / group(layer.width)) / 8
        exact = policy.n_exact + WINDOW * bool(generated)
        return coded + exact * (layer.pair * itemsize + 8 * heads) + layer.pair / 2 * 4 + others

    def cache(generated: int) -> float:
        """Return the bytes of one sequence after so many generated tokens."""
        seen = load.prompt + generated
        tokens = empty + held(config, load.prompt, generated, len(full) or 1)
        found = sum(pairs_bytes(x, tokens, generated) for x in full)
        if policy.decode.every and not config.keeps_all:  # queries for the next round
            found += sum(x.queried for x in full) * since_round(policy, generated) * itemsize
        sliding = sum(x.pair * min(seen, x.window) for x in sizes.layers if x.window)
        return found + sliding * itemsize

    caches = [cache(n) for n in range(load.new + 1)]
    waits_for_all = policy.heads.scope == "model" or policy.score.repeats
    waits_for_all = waits_for_all or policy.layers.needs not in ("", "mini-prefill")
    whole = full if waits_for_all or policy.keeps_all else full[:1]
    prefill = load.prompt * itemsize * (sizes.hidden + sum(x.pair for x in whole))
    prefill += 0 if len(whole) == len(full) else caches[0] * (1 - len(whole) / len(full))
    sequence_bytes = max(prefill, *caches)
    # Pairs of a query and a key: attention has two products of each, a score one.
    scored_pairs = causal = load.prompt**2 / 2
    if policy.queries is not None and not isinstance(policy.score, AccumulatedAttention):
        scored_pairs = min(policy.queries, load.prompt) * load.prompt
    elif isinstance(policy.score, Observers):
        scored_pairs = min(policy.score.chunk, load.prompt) * load.prompt
    spans = [(x.queried, min(causal, (x.window or causal) * load.prompt)) for x in sizes.layers]
    pairs = 2 * sum(map(math.prod, spans)) + sum(x.queried for x in full) * scored_pairs
    # Weights that a token passes, but for the output head.
    active = (sizes.body + sizes.routed * sizes.experts) / itemsize
    head = sizes.head / itemsize
    flops = 2 * load.batch * (active * load.prompt + head + pairs)
    step_s = (sizes.read(load.batch) + load.batch * fmean(caches)) / card.bandwidth
    free_memory = _USABLE * card.memory - sizes.weights
    return Plan(
        cache_bytes=load.batch * caches[-1],
        peak_bytes=sizes.weights + load.batch * sequence_bytes,
        prefill_s=max(flops / card.flops, sizes.read(load.batch * load.prompt) / card.bandwidth),
        token_s=max(step_s, 2 * (active + head) * load.batch / card.flops),
        largest_batch=max(0, int(free_memory // sequence_bytes)),
    )
