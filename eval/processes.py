"""This process's place in a run started with `accelerate launch`; one alone otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True)
class Processes:
    """One of `count` processes, of which number 0 merges the files.

    `device` is where its model belongs, None where the launcher does not decide it.
    """

    rank: int = 0
    count: int = 1
    device: Any = None

    @property
    def main(self) -> bool:
        """Whether this is the first one."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


def find_processes(device: str | None = None) -> Processes:
    """Join the others, if the launcher started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes()
    from accelerate import PartialState

    # The first to end waits for the slowest, which may take long.
    state = PartialState(cpu=device == "cpu", timeout=timedelta(days=7))
    return Processes(state.process_index, state.num_processes, state.device)
