"""Checkpoints in the original layout of LLaVA."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from helpers import configs, zoo

TOWER = "clip-tiny"


def original(name: str) -> str:
    """The name an original checkpoint gives to one of transformers' weights."""
    for ours, theirs in {
        "model.language_model.": "model.",
        "model.vision_tower.": "model.vision_tower.vision_tower.vision_model.",
        "model.multi_modal_projector.linear_1.": "model.mm_projector.0.",
        "model.multi_modal_projector.linear_2.": "model.mm_projector.2.",
    }.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours).removeprefix("vision_model.")
    return name


def write_original(
    native: nn.Module, folder: Path, shards: int = 1, tower: str = "inside", **changes: Any
) -> None:
    """Write a LLaVA as an original checkpoint, its config changed."""
    folder.mkdir()
    weights = {original(k): v.clone() for k, v in native.state_dict().items()}
    text = native.config.text_config.to_dict()
    config = {k: text[k] for k in ("rms_norm_eps", "hidden_act") if k in text}
    config |= {k: v for k, v in configs.TEXT.items() if k != "pad_token_id"}
    config |= {
        "_name_or_path": "../../somewhere",
        "architectures": ["LlavaLlamaForCausalLM"],
        "auto_map": {"AutoModel": "code.Evil"},
        "model_type": "llava_llama",
        "mm_vision_tower": f"openai/{TOWER}",
        "mm_hidden_size": 32,
        "mm_vision_select_layer": -1,
        "mm_vision_select_feature": "patch",
        "mm_projector_type": "mlp2x_gelu",
        "image_aspect_ratio": "pad",
        "torch_dtype": "float32",
        "use_mm_proj": True,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    clip = folder / TOWER if tower == "inside" else folder.parent / tower
    clip.mkdir()
    vision = native.config.vision_config.to_dict()
    (clip / "config.json").write_text(json.dumps({"vision_config": vision}))
    if tower != "inside":
        own = "model.vision_tower.vision_tower."
        held = {k: weights.pop(k) for k in list(weights) if k.startswith(own)}
        held = {k.removeprefix(own): v for k, v in held.items()}
        save_file({**held, "text_model.x": torch.zeros(1)}, clip / "model.safetensors")
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        parts = {f"model-{i}.safetensors": names[i::shards] for i in range(shards)}
        for file, part in parts.items():
            save_file({k: weights[k] for k in part}, folder / file)
        index = {k: file for file, part in parts.items() for k in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(zoo.VOCAB - 3))]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
