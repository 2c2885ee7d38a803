"""What a run that was measured elsewhere must look like before it is read."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

_Count = Annotated[int, Field(ge=0)]


class _Data(BaseModel):
    # Other fields stay as they are: nothing reads them.
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class Settings(_Data):
    """What a run was asked for."""

    model: str
    suite: str
    data: str
    data_digest: str
    policies: dict[str, dict[str, Any]]
    budgets: list[int | float]
    metrics: list[str]
    n: _Count
    batch_size: _Count
    max_length: _Count | None
    dtype: str
    device: str
    notes: list[str]


class Made(_Data):
    """What it was measured by."""

    id: str
    mmkv: str
    torch: str
    transformers: str
    device: str
    commit: str | None = None


class RunData(_Data):
    """A run's `run.json`."""

    settings: Settings
    made_by: Annotated[list[Made], Field(min_length=1)]


class RowData(_Data):
    """One line of its `rows.jsonl`."""

    policy: str
    budget: int | float
    index: _Count
    n: _Count
    task: str
    tags: list[str]
    nll: float | None = None
    answer_tokens: _Count | None = None
    divergence_sum: float | None = None
    next_sum: _Count | None = None
    next_tokens: _Count | None = None
    rouge: float | None = None
    rouge_reference: float | None = None
    same: float | None = None
    score: float | None = None
    kept_fraction: float | None = None
    retained: float | None = None
    cache_bytes: float | None = None
    full_bytes: float | None = None
    held_bytes: float | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    error: str = ""
