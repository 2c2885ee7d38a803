"""The scorers as metrics of the library `evaluate`; nothing is downloaded.

    load_metric("rouge_l").compute(predictions=["..."], references=[["...", "..."]])

`references` hold a list of texts for each prediction, of which the best counts; "classification"
also takes `classes`, the names of all classes. Results are means in [0, 1].
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from statistics import fmean
from typing import Any

import datasets
import evaluate

from .scoring import SCORERS, best


class _Score(evaluate.Metric):
    """The scorer that `config_name` names, as a metric."""

    def _info(self) -> evaluate.MetricInfo:
        texts = datasets.Sequence(datasets.Value("string"))
        columns = {"predictions": datasets.Value("string"), "references": texts}
        if self.config_name == "classification":
            columns["classes"] = texts
        return evaluate.MetricInfo(
            description=SCORERS[str(self.config_name)].__doc__ or "",
            citation="arXiv 2308.14508",
            inputs_description="predictions: texts; references, classes: lists of texts",
            features=datasets.Features(columns),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[list[str]],
        classes: list[list[str]] | None = None,
    ) -> dict[str, Any]:
        name, class_lists = str(self.config_name), classes or [[]] * len(predictions)
        samples = zip(predictions, references, class_lists, strict=True)
        return {name: fmean(best(name, *sample) for sample in samples)}


def load_metric(name: str) -> evaluate.Metric:
    """Return the metric of a scorer in `mmkv.eval.scoring.SCORERS`. Raises ValueError."""
    if name not in SCORERS:
        raise ValueError(f"metric={name!r}: expected one of {list(SCORERS)}")
    return _Score(config_name=name, keep_in_memory=True)
