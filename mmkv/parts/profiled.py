"""Head sizes of one layer that follow from what a profile holds, and not from scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mmkv.parts import Heads

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ProfiledHeads(Heads):
    """A layer's size is split as a profile says.

    Attributes:
        layers: numbers of the layers that were measured.
        least: tokens that each head keeps where there are any to keep.
    """

    layers: tuple[int, ...]
    least: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Nothing to check: `mmkv.wrap` makes it."""

    def wished(self, place: int, spare: int, most: int) -> Sequence[float]:
        """Tokens of each head, whole or not.

        Args:
            place: which of the measured layers.
            spare: the mean over heads.
            most: what there is to keep.
        """
        raise NotImplementedError

    def split_rows(self, scores: Tensor, spare: Tensor, *, layer_idx: int) -> Tensor:
        """As its layer's size was found; the host waits once for the rows' numbers of tokens.

        Raises:
            ValueError: the profile is of another number of heads.
        """
        import torch

        from mmkv import allocation

        H, place = scores.shape[1], self.layers.index(layer_idx)
        offered = (scores > -torch.inf).any(1).sum(-1)
        rows, found = (
            torch.stack([spare, offered], dim=1).tolist(),
            dict[tuple[int, int], list[int]](),
        )
        for spared, most in map(tuple, rows):
            if (spared, most) in found:
                continue
            wished = self.wished(place, spared, most) if spared else [0.0] * H
            if len(wished) != H:
                raise ValueError(f"profile: it has {len(wished)} heads a layer, this model {H}")
            least = min(self.least, spared)
            found[spared, most] = allocation.fit(wished, H * spared, floor=least, max_size=most)
        sizes = torch.tensor([found[spared, most] for spared, most in rows])
        return sizes.to(scores.device, non_blocking=True)
