"""Short answers by one of the package's scorers, such as "classification", "count" or "contains".

Inputs: `predictions`, texts; `references`, for each prediction a list of texts of which the best
counts; `classes`, for each prediction the classes there are (for "classification", else empty
lists); `scorer`, a name in `mmkv.eval.scoring.SCORERS`. Output: `score`, a mean in [0, 1]; with
`use_aggregator=False`, a list.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from mmkv.eval import scoring


class Answers(evaluate.Metric):
    """A scorer of short answers against one or several references."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__ or "",
            citation="arXiv 2308.14508",
            inputs_description="predictions: texts; references, classes: lists of texts",
            features=datasets.Features(
                {
                    "predictions": text,
                    "references": datasets.Sequence(text),
                    "classes": datasets.Sequence(text),
                }
            ),
        )

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        predictions: list[str],
        references: list[list[str]],
        classes: list[list[str]],
        scorer: str = "contains",
        use_aggregator: bool = True,
    ) -> dict[str, Any]:
        function = scoring.get_scorer(scorer)
        scores = [
            function(text, tuple(right), tuple(names))
            for text, right, names in zip(predictions, references, classes, strict=True)
        ]
        return {"score": scoring.mean(scores) if use_aggregator else scores}
