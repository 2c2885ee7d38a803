"""Figures that the papers print, to set beside a run on the same model and suite."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

AVERAGE = "average"


@dataclass(frozen=True)
class PaperTable:
    """One paper's figures for one model and suite.

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

    def figures(self, policy: str, name: str, budget: float | int) -> dict[str, float]:
        """One row's figures by column; {} if the paper has no such row."""
        for found, called, size, *numbers in self.rows:
            if (found, called) == (policy, name) and _same(size, budget):
                return dict(zip(self.columns, numbers, strict=True))
        return {}

    def names(self, policy: str) -> list[str]:
        """The paper's names of a policy, in the paper's order."""
        return list(dict.fromkeys(row[1] for row in self.rows if row[0] == policy))


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables that are known."""
    text = files("mmkv.eval").joinpath("papers.json").read_text(encoding="utf-8")
    return tuple(PaperTable(**table) for table in json.loads(text)["tables"])


def tables_for(model: str, suite: str) -> list[PaperTable]:
    """The papers' tables on this model and suite."""
    name = model.lower().replace("_", "-")
    return [t for t in paper_tables() if t.suite == suite and any(m in name for m in t.models)]


def _same(a: float | int, b: float | int) -> bool:
    # 1 token and a budget of 1.0 are not the same.
    return isinstance(a, float) == isinstance(b, float) and abs(a - b) < 1e-9
