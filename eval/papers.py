"""What the papers print, beside which a run of the same model and suite is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PaperTable:
    """One paper's figures for one model and suite, from `papers.json`."""

    source: str  # paper and table
    suite: str
    model: str  # as the paper calls it
    models: list[str]  # what a model's name or path contains if it is this one, in lower case
    columns: list[str]  # metrics ("ppl", "rouge"), or LongBench tasks and "average", in percent
    rows: list[list[Any]]  # policy as named here, the paper's name, budget, a figure a column

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


def papers_of(settings: dict[str, Any]) -> list[PaperTable]:
    """Those of a run's model and suite; none where its data are our own."""
    if settings["data"] == "builtin":
        return []
    name = settings["model"].lower().replace("_", "-")
    mine = [t for t in paper_tables() if t.suite == settings["suite"]]
    return [t for t in mine if any(m in name for m in t.models)]
