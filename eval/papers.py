"""Figures that the papers print, to set beside a run on the same model and suite."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

AVERAGE = "average"


@dataclass(frozen=True)
class PaperTable:
    """One paper's figures for one model and suite, from `papers.json`.

    Attributes:
        source: paper and table.
        model: as the paper calls it.
        models: what a model's name or path contains if it is this one, in lower case.
        columns: metrics ("ppl", "rouge"), or LongBench tasks and "average", in percent.
        rows: policy as named here (or "prefixkv:layers=uniform"), the paper's name, budget, and a
            figure for each column.
    """

    source: str
    suite: str
    model: str
    models: list[str]
    columns: list[str]
    rows: list[list[Any]]

    def of(self, policy: str) -> dict[str, dict[str, dict[str, float]]]:
        """Figures by the paper's names of a policy, budget as it is written, and column."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for label, name, budget, *numbers in self.rows:
            if label == policy:
                each = dict(zip(self.columns, numbers, strict=True))
                found.setdefault(name, {})[repr(budget)] = each
        return found


def paper_tables() -> list[PaperTable]:
    """All tables that are known."""
    text = files("mmkv.eval").joinpath("papers.json").read_text(encoding="utf-8")
    return [PaperTable(**table) for table in json.loads(text)["tables"]]
