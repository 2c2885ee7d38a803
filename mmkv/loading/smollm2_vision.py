"""smollm2-vision: a LLaVA whose text model is SmolLM2, assembled once in the user's cache.

Only the trained parts are shipped (`mmkv.builtin.training.train`): a vision tower of the shape of
a small CLIP, a projector, and low-rank updates that are added to the weights of the text layers.
The cache contains an ordinary checkpoint of `LlavaForConditionalGeneration`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mmkv.loading import cache_folder, make_once, quiet
from mmkv.loading.names import ORDINALS

PARTS = Path(__file__).parents[1] / "builtin" / "vision" / "parts.safetensors"
LORA_SCALE = 2.0  # alpha / rank
SIDE, PATCH = 192, 16
IMAGE_TOKENS = (SIDE // PATCH) ** 2
IMAGE_TOKEN = "<image>"
_RESERVED = "<filename>"  # the special token of SmolLM2 that is renamed to IMAGE_TOKEN
_TEMPLATE = (
    "{% set names = " + repr(ORDINALS) + " %}{% set seen = namespace(pictures=0) %}"
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


def build(text: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return a `LlavaForConditionalGeneration` around SmolLM2, in its dtype, and its processor.

    SmolLM2's weights are copied; the tower and the projector are untrained.
    """
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
    size, half = {"height": SIDE, "width": SIDE}, [0.5] * 3
    images = hf.CLIPImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=half, image_std=half
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
    """Return the tokenizer with a reserved token renamed to IMAGE_TOKEN: its size is unchanged."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = Path(place) / name
            text = path.read_text(encoding="utf-8")
            text = text.replace(json.dumps(_RESERVED), json.dumps(IMAGE_TOKEN))
            path.write_text(text, encoding="utf-8")
        changed = AutoTokenizer.from_pretrained(place, padding_side="left")
    changed.chat_template = _TEMPLATE
    return changed


def add_parts(model: Any, parts: dict[str, Any]) -> None:
    """Put trained parts into a model of `build`, in place.

    Parts are weights by name; a low-rank update is `<layer>.lora_A` `[r, in]` and `<layer>.lora_B`
    `[out, r]`.
    """
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


def save(model: Any, processor: Any, folder: Path) -> None:
    """Save a model of `build`, with the tower's names as in published checkpoints of LLaVA.

    transformers 5 writes shorter names and reads both; vLLM 0.32 reads only the published names.
    """
    with quiet():
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    published = "vision_tower.vision_model."
    if not any(published in name for name in weights):
        weights = {k.replace("vision_tower.", published): x for k, x in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})


def assembled(load: Callable[[], tuple[Any, Any]], source: str) -> Path:
    """Return the folder of the whole checkpoint, made if it does not exist.

    `load` returns SmolLM2 and its tokenizer; `source` identifies the copy of its weights.
    """
    identity = (source + _TEMPLATE + "published names").encode() + PARTS.read_bytes()
    digest = hashlib.blake2b(identity, digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        model, processor = build(*load())
        add_parts(model, load_file(PARTS))
        save(model, processor, folder)

    root = cache_folder() / "smollm2-vision"
    if (folder := make_once(root / digest, make, "smollm2-vision")) is None:
        raise ValueError(
            f"smollm2-vision is assembled in {root}, which cannot be written: set MMKV_CACHE to "
            "another folder"
        )
    return folder
