"""Metrics as `evaluate` modules, loaded from the package: nothing is downloaded.

from mmkv.eval.metrics import load_metric

load_metric("rouge").compute(predictions=["..."], references=[["...", "..."]])
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evaluate import EvaluationModule

FOLDER = Path(__file__).parent
METRICS = ("answers", "edit_similarity", "perplexity", "rouge", "token_f1")

__all__ = ["METRICS", "load_metric"]


def load_metric(name: str) -> EvaluationModule:
    """Return one of the package's metrics as an `evaluate` module; it keeps its data in memory.

    Raises ValueError with the names there are.
    """
    if name not in METRICS:
        raise ValueError(f"metric must be one of {list(METRICS)}, got {name!r}")
    import evaluate

    return evaluate.load(str(FOLDER / f"{name}.py"), keep_in_memory=True)
