"""Which step this is, told on the device: layers that read it there do not wait for the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NotCapturableError(RuntimeError):
    """A step that cannot be captured or replayed, see `mmkv.attach.graph`."""


class GraphInputs(NamedTuple):
    """What a step reads on the device where it must not depend on the host (`mmkv.attach.graph`).

    Attributes:
        row: int64 [1], the row of the schedules' tables.
        position: int32 [], the new token's.
    """

    row: Tensor
    position: Tensor

    @classmethod
    def at(cls, device: torch.device) -> GraphInputs:
        """On a device, still to be set."""
        row = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(row, torch.zeros((), dtype=torch.int32, device=device))

    def set(self, row: int, position: int) -> None:
        """To a step; the host does not wait."""
        self.row.fill_(row)
        self.position.fill_(position)


def step_of(blocks: Iterable[Any]) -> int:
    """The row of the schedules' tables that is the next step's.

    Raises:
        ValueError: the blocks are not at the same step.
    """
    rows: set[int] = set()
    for block in blocks:
        block.schedule.prepare()
        if not block.schedule.needs_decode_attention:  # one that does has no table
            rows.add(block.schedule.at)
    if len(rows) > 1:
        raise ValueError(f"the layers are not at the same step, but at {sorted(rows)}")
    return max(rows, default=0)
