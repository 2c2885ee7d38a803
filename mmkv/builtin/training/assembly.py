"""What both stages of training a LLaVA around SmolLM2 begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmkv.loading import models
from mmkv.loading.smollm2_vision import build

Bf16 = Annotated[
    bool, typer.Option(help="In bfloat16: faster on a GPU, and on a processor with AMX.")
]


def untrained() -> tuple[Any, Any]:
    """What `build` makes of SmolLM2, in float32.

    Raises:
        ValueError: SmolLM2 is neither installed nor on the hub.
    """
    import torch

    return build(*models.pretrained(models.SMOLLM2, dtype=torch.float32)[:2])


def arguments(out: Path, rate: float, bf16: bool, **more: Any) -> Any:
    """Training arguments of both stages: one pass over the data, with checkpoints."""
    import torch
    import transformers as hf

    return hf.TrainingArguments(
        output_dir=str(out),
        num_train_epochs=1,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        save_total_limit=1,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        report_to=[],
        seed=0,
        **more,
    )
