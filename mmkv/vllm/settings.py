"""What the scheduler and the workers need of the plugin's options, after `options.resolved`."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.policy import Policy
from mmkv.registry import get_policy, load_plugin
from mmkv.vllm.compress import with_equal_sizes

# The largest share of a prompt that may follow a reused prefix. If more follows, the prompt is read
# and compressed from its start.
TAIL = 0.25
# How many of a prompt's last queries are kept for the score `Observers`.
_QUERIES = 8192


@dataclass(frozen=True)
class Sizes:
    """How many pairs a head of one class keeps of a prompt, or of a prefix of it.

    Attributes:
        share: the share of the tokens, in (0, 1).
        least: how many tokens a head keeps at least, as a mean over all heads (`Policy.least`).
        always: tokens that the policy keeps whatever their scores; no head keeps fewer.
        classes: share and number of heads of every class, largest share first; (): this one alone.
        codes: bytes of a slot, and of a pair in 8 bits; None: pairs are in the model's type.
    """

    share: float
    least: int
    always: int
    classes: tuple[tuple[float, int], ...] = ()
    codes: tuple[int, int] | None = None

    def target(self, tokens: Any) -> Any:
        """Return how many of a prompt's `tokens`, a number or an array, a head should keep; int64.

        If heads would keep fewer than `least` tokens, as a mean, they are given that many, in
        proportion to their shares. What exceeds the prompt is split among the others, as by
        `mmkv.sizes.profiled.proportional`.
        """
        classes = self.classes or ((self.share, 1),)
        left = np.minimum(self.least, tokens) * sum(n for _, n in classes)
        weight = sum(share * n for share, n in classes)
        scale = left / weight
        for share, n in classes[:-1]:
            left, weight = left - n * tokens, weight - n * share
            scale = np.where(scale * share < tokens, scale, left / weight)
        least = np.rint(np.minimum(tokens, scale * self.share))
        return np.maximum(least, np.ceil(self.share * tokens)).astype(np.int64)

    def capacity(self, block: int) -> int:
        """Return how many compressed pairs the bytes of a block hold."""
        return block if self.codes is None else block * self.codes[0] // self.codes[1]

    def dropped(self, tokens: Any, block: int) -> Any:
        """Return how many blocks a head frees when so many tokens are compressed.

        It then holds `kept` pairs: as near to its size as blocks allow, and not much below it; all
        if that is its size. `tokens` is a number or an array.
        """
        whole, rest, target = tokens // block, tokens % block, self.target(tokens)
        capacity, least = self.capacity(block), np.maximum(self.always, -(-3 * target // 4))
        least = np.where(target < tokens, np.minimum(least, tokens), tokens)
        nearest = -((capacity - 2 * (target - rest)) // (2 * capacity))
        blocks = np.maximum(nearest, -((rest - least) // capacity))
        return whole - np.clip(blocks, 0, whole)

    def kept(self, tokens: Any, dropped: Any, block: int) -> Any:
        """Return how many pairs a head holds that has freed so many blocks of these tokens."""
        whole, rest = tokens // block, tokens % block
        return np.minimum(tokens, (whole - dropped) * self.capacity(block) + rest)


@dataclass(frozen=True)
class Settings:
    """The options, with the classes of heads that follow from them.

    Attributes:
        policy: with equal heads and layers, as one module's heads are compressed alone.
        classes: for each layer, the units of heads of each share, `{share: [(head, ...), ...]}`.
        unit: heads of a layer that have one page.
        sizes: the sizes of each share but 1, and of this one too if pairs are in 8 bits.
    """

    policy: Policy
    classes: dict[int, dict[float, list[tuple[int, ...]]]]
    unit: int
    sizes: dict[float, Sizes]

    @property
    def queries(self) -> int | None:
        """How many of a prompt's last queries are kept until it is compressed; None: all."""
        score = self.policy.score
        if score.name == "observers":
            return _QUERIES
        # Scores that add up over the chunks of a prompt get all of its queries at once instead.
        return None if score.turn_reduction == "sum" else self.policy.queries

    @classmethod
    def of(cls, vllm_config: Any) -> Settings | None:
        """Return the settings of an engine, or None if the plugin is off."""
        extra = vllm_config.additional_config
        given = extra.get("mmkv") if isinstance(extra, dict) else None
        return None if given is None else parse_resolved(json.dumps(given))


@functools.lru_cache(maxsize=4)
def parse_resolved(text: str) -> Settings:
    """Return the settings of options that `options.resolved` made, as JSON."""
    given = json.loads(text)
    for file in given["plugins"]:
        load_plugin(Path(file))
    policy = get_policy(given["policy"], **given["options"])
    unit, classes = given["unit"], defaultdict[int, dict[float, list[tuple[int, ...]]]](dict)
    for share, heads in given["classes"]:
        by_layer = defaultdict[int, list[int]](list)
        for layer, head in heads:
            by_layer[layer].append(head)
        for layer, of_layer in by_layer.items():
            units = [tuple(of_layer[i : i + unit]) for i in range(0, len(of_layer), unit)]
            classes[layer].setdefault(share, []).extend(units)
    always = policy.window_size + policy.sinks + 1
    counts = tuple((share, len(heads)) for share, heads in given["classes"])
    codes = given["codes"] and tuple(given["codes"])
    sizes = {
        share: Sizes(share, policy.least, always, counts, codes)
        for share, _ in given["classes"]
        if share < 1 or codes
    }
    return Settings(with_equal_sizes(policy), dict(classes), unit, sizes)


def last_boundary(tokens: int, block: int) -> int:
    """Return the start of a prompt's last block: vLLM reads at least one token of each request."""
    return (tokens - 1) // block * block
