"""A ragged store with random pairs, and a step on it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from mmkv.kernels.ragged import Lightest, RaggedStore, StepInputs


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    # Twice the usual spread, so that attention is far from uniform.
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def a_step(
    lengths: list[int],
    own: list[int],
    *,
    G: int = 4,
    D: int = 32,
    DV: int | None = None,
    dtype: torch.dtype = torch.float32,
    weighted: bool = False,
    spare: int = 3,
    line: int = 1,
    lightest: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `decode_attention` is given: row r holds `lengths[r]` pairs, the new one goes to own[r].

    What nothing may read is NaN. `lightest`: see `Lightest`; its freed slots are `own`.
    """
    R, DV = len(lengths), DV or D
    capacity = [max(n, at + 1) + spare for n, at in zip(lengths, own, strict=True)]
    starts = torch.tensor([0, *capacity[:-1]]).cumsum(0)
    N = sum(capacity)
    empty = torch.ones(N, dtype=torch.bool)
    for start, n, at in zip(starts.tolist(), lengths, own, strict=True):
        empty[start : start + n] = False
        empty[start + at] = True
    positions = torch.cat([torch.randperm(n, generator=torch.manual_seed(7)) for n in capacity])
    store = RaggedStore(
        random(N, D, dtype=dtype, seed=1).masked_fill(empty[:, None], torch.nan),
        random(N, DV, dtype=dtype, seed=2).masked_fill(empty[:, None], torch.nan),
        positions.int(),
        random(N, seed=3).masked_fill(empty, torch.nan) if weighted else None,
        random(N, seed=4).abs().masked_fill(empty, torch.nan) if lightest is not None else None,
        starts,
        torch.tensor(lengths, dtype=torch.int32),
    )
    newest = torch.tensor(max(capacity), dtype=torch.int32)
    table = torch.full((3, R), 10**6)
    table[line] = torch.tensor(own)
    step = StepInputs(table, None, torch.tensor([line]), newest, max(capacity))
    given: dict[str, Any] = {
        "query": random(R, G, D, dtype=dtype),
        "key": random(R, D, dtype=dtype, seed=5),
        "value": random(R, DV, dtype=dtype, seed=6),
        "store": store,
        "step": step,
        "lightest": None,
    }
    if lightest is not None:
        known = {"protected": [0] * R, "recent": [1] * R, "capacity": lengths, "places": None}
        known |= {"end": 0, "heads": 1, **lightest}
        for name in ("protected", "recent", "capacity"):
            known[name] = torch.tensor(known[name], dtype=torch.int32)
        freed = torch.tensor(own)
        given["lightest"] = Lightest(freed=freed, **known)
        given["step"] = step._replace(slots=freed.expand(1, -1))
    return given


def twice(given: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is given on a device, and a copy of it: a step writes into both."""

    def there(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(device).clone()
        if isinstance(x, tuple):
            return type(x)(*(there(y) for y in x))
        return copy.copy(x)

    found = [{name: there(x) for name, x in given.items()} for _ in range(2)]
    for one in found:
        if one["lightest"] is not None:
            freed = one["lightest"].freed
            one["step"] = one["step"]._replace(slots=freed.expand(1, -1))
    return found[0], found[1]
