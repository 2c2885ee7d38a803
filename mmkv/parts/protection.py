"""What is always kept, as parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmkv.parts import Protect, register_part

if TYPE_CHECKING:
    from torch import Tensor


@register_part("instruction")
@dataclass(frozen=True, kw_only=True)
class Instruction(Protect):
    """The prompt's text stays in every layer; image tokens compete, and so do generated ones."""

    def marks(self, valid: Tensor, asked: Tensor, image: Tensor) -> Tensor:
        """Text that was given in a prompt."""
        return valid & asked & ~image
