"""The score of DefensiveKV as a part; what it computes is in `mmkv.defensive`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv.parts import register_part
from mmkv.parts.checks import PositiveInt, Share
from mmkv.parts.scoring import Windowed

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.layer_inputs import LayerInputs


@register_part("defensive")
@dataclass(frozen=True, kw_only=True)
class DefensiveAttention(Windowed):
    """The most that any of the last queries found in a token (DefensiveKV, arXiv 2510.13334).

    Options:
        window: how many last queries observe; their own tokens are always kept.
        kernel_size: attention is averaged over this many neighbouring keys, an odd number.
        mass: tokens that make up this share of a head's attention, in [0, 1], come first.
    """

    window: PositiveInt = 32
    kernel_size: PositiveInt = 5
    mass: Share = 0.9

    @property
    def uses_size(self) -> bool:
        """How many tokens may be forced in."""
        return True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={self.kernel_size}: expected an odd number")

    def __call__(self, layer: LayerInputs) -> Tensor:
        """By head; the window's own tokens, which stay, score 0."""
        from mmkv.defensive import defensive_scores

        return defensive_scores(
            layer, window=self.window, kernel_size=self.kernel_size, share=self.mass
        )
