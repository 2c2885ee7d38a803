"""Perplexity of reference answers: `exp` of the mean negative log-likelihood over all tokens.

Inputs, one of each for a sample: `nll`, the sum over the answer's tokens in nats, and `tokens`, how
many they are. Tokens of all samples count alike, as PrefixKV does (arXiv 2412.03409). Output:
`perplexity`, `mean_nll` in nats for a token, and `tokens`, all told.
"""

from __future__ import annotations

import math
from typing import Any

import datasets
import evaluate


class Perplexity(evaluate.Metric):
    """Perplexity from sums of negative log-likelihoods."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=__doc__ or "",
            citation="arXiv 2412.03409",
            inputs_description="nll: sums in nats; tokens: counts",
            features=datasets.Features(
                {"nll": datasets.Value("float64"), "tokens": datasets.Value("int64")}
            ),
        )

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, nll: list[float], tokens: list[int]
    ) -> dict[str, Any]:
        total = sum(tokens)
        if min(tokens) < 0 or total < 1:
            raise ValueError(f"tokens must be at least 0 and 1 in all, got {tokens}")
        mean = math.fsum(nll) / total
        try:
            perplexity = math.exp(mean)
        except OverflowError:
            perplexity = math.inf
        return {"perplexity": perplexity, "mean_nll": mean, "tokens": total}
