"""What the metrics of texts share. `evaluate` loads each from a file of its own, so they name this
module rather than import the class: the first class in a file is the one it takes."""

from __future__ import annotations

import sys

import datasets
import evaluate


class TextMetric(evaluate.Metric):
    """Predictions, each against a text or a list of texts of which the best counts."""

    source = ""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=sys.modules[type(self).__module__].__doc__ or "",
            citation=self.source,
            inputs_description="predictions: texts; references: texts or lists of texts",
            features=[
                datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
                datasets.Features({"predictions": text, "references": text}),
            ],
        )
