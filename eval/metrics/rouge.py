"""ROUGE-1, ROUGE-2 and ROUGE-L F-measures, by rouge-score without stemming.

Inputs: `predictions`, texts; `references`, for each prediction a text or a list of texts of which
the best counts. Output: `rouge1`, `rouge2`, `rougeL`, each a mean in [0, 1]; with
`use_aggregator=False`, a list with one score for each prediction.
"""

from __future__ import annotations

from typing import Any

from mmkv.eval import scoring
from mmkv.eval.metrics import texts

KINDS = ("rouge1", "rouge2", "rougeL")


class Rouge(texts.TextMetric):
    """ROUGE against one or several references."""

    source = "Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries"

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, predictions: list[str], references: list[Any], use_aggregator: bool = True
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for kind in KINDS:
            scores = [
                scoring.rouge(text, scoring.as_answers(right), kind)
                for text, right in zip(predictions, references, strict=True)
            ]
            result[kind] = scoring.mean(scores) if use_aggregator else scores
        return result
