"""The scorers as metrics of `evaluate`, made here: nothing is downloaded.

    load_metric("rouge").compute(predictions=["..."], references=[["...", "..."]])

`predictions` are texts; `references` hold a text, or a list of texts of which the best counts, for
each. Results are means in [0, 1]; with `use_aggregator=False`, lists with one score for each.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import datasets
import evaluate

from mmkv.eval import scoring
from mmkv.eval.perplexity import perplexity

_TEXT = datasets.Value("string")
_TEXTS = datasets.Sequence(_TEXT)


class _Metric(evaluate.Metric):
    """A metric whose description is its docstring."""

    scores: Any  # by name, one score for each prediction
    source = "arXiv 2308.14508"
    inputs_are = "predictions: texts; references: texts or lists of texts"
    columns = (
        datasets.Features({"predictions": _TEXT, "references": _TEXTS}),
        datasets.Features({"predictions": _TEXT, "references": _TEXT}),
    )

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__ or "",
            citation=self.source,
            inputs_description=self.inputs_are,
            features=list(self.columns),
        )

    def _compute(self, *, use_aggregator: bool = True, **inputs: Any) -> dict[str, Any]:
        found = self.scores(**inputs)
        return {name: fmean(x) if use_aggregator else x for name, x in found.items()}


class Rouge(_Metric):
    """ROUGE-1, ROUGE-2 and ROUGE-L F-measures, by rouge-score without stemming."""

    source = "Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries"

    def scores(self, predictions: list[str], references: list[Any]) -> dict[str, list[float]]:
        """`rouge1`, `rouge2` and `rougeL`."""
        pairs = _pairs(predictions, references)
        kinds = ("rouge1", "rouge2", "rougeL")
        return {kind: [scoring.rouge(*pair, kind=kind) for pair in pairs] for kind in kinds}


class TokenF1(_Metric):
    """F1 of the words shared with a reference, in lower case without punctuation and articles."""

    def scores(self, predictions: list[str], references: list[Any]) -> dict[str, list[float]]:
        """`token_f1`."""
        return {"token_f1": [scoring.token_f1(*x) for x in _pairs(predictions, references)]}


class EditSimilarity(_Metric):
    """difflib's ratio in whole percent; with `code=True`, of the first line that is no comment."""

    def scores(
        self, predictions: list[str], references: list[Any], code: bool = False
    ) -> dict[str, list[float]]:
        """`edit_similarity`."""
        scorer = scoring.edit_similarity if code else scoring.text_similarity
        return {"edit_similarity": [scorer(*x) for x in _pairs(predictions, references)]}


class Answers(_Metric):
    """Short answers by a scorer of `mmkv.eval.scoring.SCORERS`; `classes` for "classification"."""

    inputs_are = "predictions: texts; references, classes: lists of texts"
    columns = (datasets.Features({"predictions": _TEXT, "references": _TEXTS, "classes": _TEXTS}),)

    def scores(
        self,
        predictions: list[str],
        references: list[list[str]],
        classes: list[list[str]],
        scorer: str = "contains",
    ) -> dict[str, list[float]]:
        """`score`."""
        function = scoring.get_scorer(scorer)
        samples = zip(predictions, references, classes, strict=True)
        return {"score": [function(text, tuple(a), tuple(c)) for text, a, c in samples]}


class Perplexity(_Metric):
    """`exp` of the mean negative log-likelihood over the answers' tokens, which count alike."""

    source = "arXiv 2412.03409"
    inputs_are = "nll: sums in nats; tokens: counts"
    columns = (
        datasets.Features({"nll": datasets.Value("float64"), "tokens": datasets.Value("int64")}),
    )

    def _compute(self, *, nll: list[float], tokens: list[int]) -> dict[str, Any]:
        total = sum(tokens)
        if min(tokens) < 0 or total < 1:
            raise ValueError(f"tokens must be at least 0 and 1 in all, got {tokens}")
        mean = math.fsum(nll) / total
        return {"perplexity": perplexity(nll, tokens), "mean_nll": mean, "tokens": total}


METRICS: dict[str, type[_Metric]] = {
    "answers": Answers,
    "edit_similarity": EditSimilarity,
    "perplexity": Perplexity,
    "rouge": Rouge,
    "token_f1": TokenF1,
}


def load_metric(name: str) -> evaluate.Metric:
    """A metric by name, which keeps its data in memory.

    Raises:
        ValueError: an unknown name; says which there are.
    """
    if name not in METRICS:
        raise ValueError(f"metric must be one of {list(METRICS)}, got {name!r}")
    return METRICS[name](keep_in_memory=True)


def _pairs(predictions: list[str], references: list[Any]) -> list[tuple[str, tuple[str, ...]]]:
    answers = [(x,) if isinstance(x, str) else tuple(x) for x in references]
    return list(zip(predictions, answers, strict=True))
