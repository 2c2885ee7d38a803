"""What `wrap` was asked for, checked, with what the model adds to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmkv import eviction
from mmkv.eviction import Prompt
from mmkv.policy import Policy


@dataclass(frozen=True)
class Plan:
    """How a cache is made smaller: what `wrap` was asked for."""

    policy: Policy
    budget: float | int | None
    fractions: tuple[float, ...] | None = None
    # Frequencies of the decoder's rotary embedding [D / 2], for policy.reposition.
    inv_freq: Tensor | None = field(default=None, repr=False)
    # Called with the decoder's arguments before the prefill; returns the scores of every layer.
    mini_prefill: Callable[[dict[str, Any], Prompt], list[Tensor]] | None = field(
        default=None, repr=False
    )
    # What kept pairs are held as: "int8", "int4", or None for the model's own type.
    kv_dtype: str | None = None
    # Replay decode steps as a CUDA graph, where that is possible and pays.
    graph: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        """Copies of a cache share their plan: it never changes, and it knows the model."""
        return self

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is ever evicted."""
        return eviction.keeps_everything(self.policy, self.budget)

    @property
    def needs_all_layers(self) -> bool:
        """Whether sizes depend on the scores of every layer."""
        return self.policy.needs_all_layers and self.fractions is None and not self.keeps_everything
