"""F1 of the words that a prediction shares with its reference, as LongBench counts them.

Both are lower-cased and lose punctuation and articles first (arXiv 2308.14508). Inputs:
`predictions`, texts; `references`, for each prediction a text or a list of texts of which the best
counts. Output: `token_f1`, a mean in [0, 1]; with `use_aggregator=False`, a list.
"""

from __future__ import annotations

from typing import Any

from mmkv.eval import scoring
from mmkv.eval.metrics import texts


class TokenF1(texts.TextMetric):
    """Token F1 against one or several references."""

    source = "arXiv 2308.14508"

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, predictions: list[str], references: list[Any], use_aggregator: bool = True
    ) -> dict[str, Any]:
        scores = [
            scoring.token_f1(text, scoring.as_answers(right))
            for text, right in zip(predictions, references, strict=True)
        ]
        return {"token_f1": scoring.mean(scores) if use_aggregator else scores}
