"""A LLaVA whose text model is SmolLM2: a vision tower of the shape of a small CLIP and a projector,
and how trained parts are put into it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from mmkv.builtin import drawings
from mmkv.loading import models

LORA_SCALE = 2.0  # alpha / rank
SIDE, PATCH = 192, 16
IMAGE_TOKENS = (SIDE // PATCH) ** 2
IMAGE_TOKEN = "<image>"
_RESERVED = "<filename>"  # of SmolLM2's special tokens, the one that stands for a picture
_TEMPLATE = (
    "{% set names = " + repr(drawings.ORDINALS) + " %}{% set seen = namespace(pictures=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ 'The ' + (names[seen.pictures] or 'next') + ' picture:\n<image>\n' }}"
    "{% set seen.pictures = seen.pictures + 1 %}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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


def build(text: Any, tokenizer: Any) -> tuple[Any, Any]:
    """`LlavaForConditionalGeneration` around SmolLM2, in its dtype, and its processor.

    Pictures are `SIDE` pixels high and wide and give `IMAGE_TOKENS` tokens. The tower and the
    projector are not trained.

    Args:
        text: SmolLM2, whose weights are copied.
        tokenizer: its tokenizer.
    """
    import torch
    import transformers as hf

    tokenizer = _with_image_token(tokenizer)
    torch.manual_seed(0)
    tower = hf.CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=256,
    )
    config = hf.LlavaConfig(
        vision_config=tower,
        text_config=text.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = hf.LlavaForConditionalGeneration(config).to(text.dtype)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.generation_config = hf.GenerationConfig.from_dict(text.generation_config.to_dict())
    images = hf.CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = hf.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token=IMAGE_TOKEN,
        chat_template=_TEMPLATE,
    )
    return model, processor


def _with_image_token(tokenizer: Any) -> Any:
    """The tokenizer with a reserved token's name changed: no token is added to the vocabulary."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = Path(place) / name
            text = path.read_text(encoding="utf-8")
            path.write_text(
                text.replace(json.dumps(_RESERVED), json.dumps(IMAGE_TOKEN)), encoding="utf-8"
            )
        changed = AutoTokenizer.from_pretrained(place, padding_side="left")
    changed.chat_template = _TEMPLATE
    return changed


def add_parts(model: Any, parts: dict[str, Any]) -> None:
    """Put trained parts into a model that `build` made, in place.

    Args:
        model: the model.
        parts: weights by name; of a low-rank update `<layer>.lora_A` `[r, in]` and
            `<layer>.lora_B` `[out, r]`.
    """
    import torch

    weights = model.state_dict()
    with torch.no_grad():
        for name, part in parts.items():
            layer, _, kind = name.rpartition(".")
            if kind == "lora_A":
                update = parts[f"{layer}.lora_B"].float() @ part.float()
                weight = weights[f"{layer}.weight"]
                weight.copy_(weight.float() + LORA_SCALE * update)
            elif kind != "lora_B":
                weights[name].copy_(part)


def assembled(parts: Path) -> tuple[Any, Any]:
    """The model with trained parts, in eval mode and float32, and its processor.

    Raises:
        ValueError: SmolLM2 is neither installed nor on the hub.
    """
    from safetensors.torch import load_file

    model, processor = untrained()
    add_parts(model, load_file(parts))
    return model.eval(), processor
