"""F1 of the words that a prediction shares with its reference, as LongBench counts them.

Both are lower-cased and lose punctuation and articles first (arXiv 2308.14508). Inputs:
`predictions`, texts; `references`, for each prediction a text or a list of texts of which the best
counts. Output: `token_f1`, a mean in [0, 1]; with `use_aggregator=False`, a list.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from mmkv.eval import scoring


class TokenF1(evaluate.Metric):
    """Token F1 against one or several references."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__ or "",
            citation="arXiv 2308.14508",
            inputs_description="predictions: texts; references: texts or lists of texts",
            features=[
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, predictions: list[str], references: list[Any], use_aggregator: bool = True
    ) -> dict[str, Any]:
        scores = [
            scoring.token_f1(text, scoring.as_answers(right))
            for text, right in zip(predictions, references, strict=True)
        ]
        return {"token_f1": scoring.mean(scores) if use_aggregator else scores}
