"""The built-in vision-language model, its data and its training.

A small LLaVA (CLIP vision tower, Llama text model, 144 tokens for each picture) that describes
pictures of coloured shapes and looks up records in long texts. It is shipped inside the package,
so examples, tests and evaluations run without a download.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

WEIGHTS = Path(__file__).parent / "weights"
PICTURES = Path(__file__).parent / "pictures"
# For whoever shows it a photo.
KNOWS = "the built-in model knows drawn, coloured shapes and look-ups in made-up texts alone"

__all__ = ["KNOWS", "PICTURES", "WEIGHTS", "example_pictures", "load_builtin"]


def load_builtin(
    dtype: torch.dtype | None = None, weights: Path | str = WEIGHTS
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Return the built-in model in eval mode on the CPU, and its processor.

    `dtype` defaults to float32 (the stored weights are bfloat16). `weights` may name another
    folder that `mmkv.builtin.training.train` wrote.
    """
    import torch
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    folder = str(weights)
    model = LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=dtype or torch.float32, local_files_only=True
    )
    processor = LlavaProcessor.from_pretrained(folder, local_files_only=True)
    return model.eval(), processor


def example_pictures() -> list[Path]:
    """Return the shipped example pictures in order.

    They are the held-out scenes `make_scene(i, count=i + 3)` for i = 0 to 3, with smooth edges.
    """
    return sorted(PICTURES.glob("*.png"))
