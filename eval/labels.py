"""What a run measures, in words; which figures are costs, and what no other beats at its cost."""

from __future__ import annotations

from typing import Any

import numpy as np

METRICS = ("ppl", "divergence", "next", "rouge", "score")
LOWER_IS_BETTER = ("ppl", "divergence")
# What a run measures, in words.
LABELS = {
    "ppl": "perplexity",
    "divergence": "divergence from the full cache, nats a token",
    "next": "share of next tokens that are the full cache's",
    "rouge": "ROUGE-L",
    "score": "score",
    "same": "share of replies identical to the full cache's",
    "retained": "retained importance",
    "kept_fraction": "share of pairs kept after the prefill",
    "cache_bytes": "KiB of kept pairs a sample",
    "held_bytes": "KiB held after the prompt, a sample",
    "rouge_reference": "ROUGE-L against the reference answer",
    "first_token_s": "seconds to a batch's first token",
    "tokens_per_s": "tokens per second of a batch, prefill included",
}
# What quality is set against, and whether less of it is better.
COSTS = {"held_bytes": True, "first_token_s": True, "tokens_per_s": False}


def front(points: Any, cost: str, metric: str) -> Any:
    """The points that no other beats in a metric at the same cost or a lower one, by cost."""
    known = points[np.isfinite(points[[cost, metric]]).all(axis=1)]
    price = known[cost] * (1 if COSTS[cost] else -1)
    loss = known[metric] * (1 if metric in LOWER_IS_BETTER else -1)
    order = known.assign(price=price, loss=loss).sort_values(["price", "loss"], kind="stable")
    return known.loc[order.index[order["loss"] < order["loss"].cummin().shift(fill_value=np.inf)]]
