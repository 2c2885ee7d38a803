"""How alike two texts are by their matching characters: difflib's ratio in whole percent.

Inputs: `predictions`, texts; `references`, for each prediction a text or a list of texts of which
the best counts. With `code=True` the prediction's first line that is not a comment is compared, as
LongBench does for code (arXiv 2308.14508). Output: `edit_similarity`, a mean in [0, 1]; with
`use_aggregator=False`, a list.
"""

from __future__ import annotations

from typing import Any

from mmkv.eval import scoring
from mmkv.eval.metrics import texts


class EditSimilarity(texts.TextMetric):
    """Edit similarity to one or several references."""

    source = "arXiv 2308.14508"

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        predictions: list[str],
        references: list[Any],
        code: bool = False,
        use_aggregator: bool = True,
    ) -> dict[str, Any]:
        scores = []
        for text, right in zip(predictions, references, strict=True):
            answers = scoring.as_answers(right)
            if code:
                scores.append(scoring.edit_similarity(text, answers))
            else:
                scores.append(max((scoring.similarity(text, a) for a in answers), default=0.0))
        return {"edit_similarity": scoring.mean(scores) if use_aggregator else scores}
