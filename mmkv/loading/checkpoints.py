"""Original LLaVA checkpoints (`liuhaotian/llava-v1.5-7b` and its kind) as transformers' LLaVA.

Their weights are those of LLaVA-1.5 (arXiv 2310.03744) under other names, and their configuration
says the vision side in `mm_*` fields. Nothing is downloaded and no code of a checkpoint is run.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from mmkv.loading import untrusted

IMAGE, PAD = "<image>", "<pad>"
_SENTENCEPIECE = ("sentencepiece", "google.protobuf")
_MULTIPLE = 64  # of embedding rows
_MOST_BYTES = 64 * 2**20  # of a JSON file; an index of shards has the most
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# Vicuna's conversation, as LLaVA-1.5 was trained on it. The original tokenizes the text around a
# picture piece by piece, so that each starts with a space: those behind <s> and <image> here.
CHAT_TEMPLATE = (
    "{{- bos_token + ' ' -}}"
    "{%- if messages[0]['role'] != 'system' -%}{{- '" + _SYSTEM.replace("'", "\\'") + " ' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- 'USER: ' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- 'ASSISTANT: ' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] | trim -}}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image> \\n' -}}"
    "{%- endfor -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}"
    "{{- part['text'] | trim -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- eos_token if message['role'] == 'assistant' else ' ' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)
# Towers that a checkpoint may bring with it, by name, and pictures' sides: their configuration is
# not in it.
_KNOWN_TOWERS = {"clip-vit-large-patch14-336": 336, "clip-vit-large-patch14": 224}
_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "projection_dim": 768,
}
_TEXT = {"llava": "LlamaConfig", "llava_llama": "LlamaConfig", "llava_mistral": "MistralConfig"}
# By the beginnings of names: those of transformers' converted checkpoints, which every version of
# it reads.
_RENAMED = {
    "model.mm_projector.0.": "multi_modal_projector.linear_1.",
    "model.mm_projector.2.": "multi_modal_projector.linear_2.",
    "model.mm_projector.": "mm_projector.",
    "model.vision_tower.vision_tower.": "vision_tower.",
    "": "language_model.",
}


def load(
    path: str | Path, *, vision_tower: str | Path | None = None, dtype: torch.dtype | None = None
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """Load an original LLaVA-1.5 checkpoint from a local folder.

    The image token `<image>` and a padding token stand at the end of the vocabulary, as in
    transformers' own conversion; their embeddings are the mean of the others.

    Args:
        path: the folder, with `config.json`, a tokenizer and safetensors.
        vision_tower: the folder of its CLIP tower, where the checkpoint does not hold it; by
            default a folder of that name in or beside `path`.
        dtype: of the weights; by default what the configuration says.

    Returns:
        The model in eval mode on the CPU, and its processor.

    Raises:
        ValueError: not such a checkpoint, a part of it that transformers' LLaVA does not have, or
            weights that are missing or not in safetensors.
    """
    folder = Path(path)
    fields = _read_json(folder / "config.json")
    _refuse_what_differs(folder, fields)
    weights = _read_weights(folder)
    name = Path(str(fields["mm_vision_tower"])).name
    near = [folder / name, folder.parent / name] if name else []
    if vision_tower is not None:
        near = [Path(vision_tower)]
    tower = next((x for x in near if (x / "config.json").is_file()), None)
    if vision_tower is not None and tower is None:
        raise ValueError(f"vision_tower={str(vision_tower)!r}: no folder with a config.json")
    unused = ("rotary_emb.inv_freq", "embeddings.position_ids")
    state: dict[str, Tensor] = {}
    for name, x in weights.items():
        start = next(x for x in _RENAMED if name.startswith(x))
        if not name.endswith(unused):
            state[_RENAMED[start] + name.removeprefix(start)] = x
    if not any(name.startswith("vision_tower.") for name in state):
        if tower is None:
            raise ValueError(
                f"{folder} does not hold its vision tower {fields['mm_vision_tower']!r}: download "
                "it and give its folder, mmkv.load(path, vision_tower=folder)"
            )
        own = _read_weights(tower).items()
        state |= {f"vision_tower.{k}": v for k, v in own if k.startswith("vision_model.")}
    tokenizer, image, pad = _tokenizer(folder)
    held = len(state.get("language_model.model.embed_tokens.weight", ()))
    if fields["vocab_size"] != held:
        raise ValueError(
            f"the weights in {folder} do not fit its configuration: vocab_size="
            f"{fields['vocab_size']!r}, but {held} tokens have an embedding"
        )
    rows = -(-max(held, len(tokenizer)) // _MULTIPLE) * _MULTIPLE
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        if name in state:  # a mean token in the new rows
            old = state[name]
            mean = old.float().mean(dim=0, keepdim=True).to(old.dtype)
            state[name] = torch.cat([old, mean.expand(max(0, rows - len(old)), -1)])
    try:
        config = _config(fields, tower, rows=rows, image=image, pad=pad)
        _check_sizes(config, state)
    except Exception as error:  # transformers meets wrong values with errors of every type
        raise ValueError(
            f"the weights in {folder} do not fit its configuration: {error}"
        ) from error
    if dtype is None:
        named = str(fields.get("torch_dtype") or fields.get("dtype") or "float32")
        dtype = getattr(torch, named, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch_dtype={named!r}: no such dtype")
    # Mismatched sizes are reported, and refused here.
    how: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": dtype}
    maker: Any = LlavaForConditionalGeneration
    model, info = maker.from_pretrained(None, config=config, state_dict=state, **how)
    wrong = {k: sorted(map(str, v))[:4] for k, v in info.items() if v}
    if wrong:
        raise ValueError(f"the weights in {folder} do not fit its configuration: {wrong}")
    if (generation := folder / "generation_config.json").is_file():
        given = _read_json(generation)
        try:
            model.generation_config = transformers.GenerationConfig.from_dict(given)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{generation}: {error}") from error
    model.generation_config.pad_token_id = pad
    return model.eval(), _processor(fields, config, tokenizer)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = untrusted.read_json(path, _MOST_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, got a {type(found).__name__}")
    return found


def _refuse_what_differs(folder: Path, fields: dict[str, Any]) -> None:
    """Name what transformers' LLaVA would compute in another way."""
    if "mm_vision_tower" not in fields or "vocab_size" not in fields:
        raise ValueError(
            f"{folder} is not an original LLaVA checkpoint: its config.json has no mm_vision_tower "
            "and vocab_size; load a converted one with transformers' from_pretrained"
        )
    kind, projector = fields.get("model_type"), fields.get("mm_projector_type")
    feature = fields.get("mm_vision_select_feature", "patch")
    merge, why = fields.get("mm_patch_merge_type"), None
    if kind not in _TEXT:
        why = f"model_type={kind!r}: expected one of {', '.join(_TEXT)}"
    elif projector != "mlp2x_gelu":
        why = f"mm_projector_type={projector!r}: transformers' LLaVA has 'mlp2x_gelu' alone"
    elif feature not in ("patch", "cls_patch"):
        why = f"mm_vision_select_feature={feature!r}: expected 'patch' or 'cls_patch'"
    elif fields.get("mm_use_im_start_end"):
        why = "mm_use_im_start_end=True: tokens around each picture are not supported"
    elif "anyres" in f"{fields.get('image_aspect_ratio')}" or "unpad" in f"{merge}":
        why = (
            f"{folder} is LLaVA-1.6, which cuts pictures into tiles: load a converted checkpoint "
            "(llava-hf) with transformers' LlavaNextForConditionalGeneration"
        )
    if why is not None:
        raise ValueError(why)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors, in one file or in shards."""
    index, files = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ValueError(f"{index}: has no weight_map")
        files = sorted(set(map(str, names.values())))
        for name in files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{index}: {name!r} is not a safetensors file of this folder")
    elif not (folder / files[0]).is_file():
        why = f"{folder} has no model.safetensors"
        if found := sorted(p.name for p in folder.glob("*.bin")):
            why += (
                f" but {found[0]}, a pickle, which can run code and is not loaded: convert it to "
                "safetensors first (safetensors' convert.py, or the Hub's conversion space)"
            )
        raise ValueError(why)
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: a shard of the weights is missing")
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name}: no safetensors file ({error})") from error
    return tensors


def _tokenizer(folder: Path) -> tuple[Any, int, int]:
    """The tokenizer with the image and padding tokens added, and their ids."""
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        try:
            missing = [x for x in _SENTENCEPIECE if importlib.util.find_spec(x) is None]
        except ModuleNotFoundError:  # of a package around it
            missing = [*_SENTENCEPIECE]
        if missing:
            raise ValueError(
                f"{folder} has a SentencePiece tokenizer.model, which needs {' and '.join(missing)}"
                ": pip install 'mmkv[llava]'"
            )
    try:
        # The folder's own config.json names no model that transformers knows.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder,
            config=transformers.LlamaConfig(),
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # of tokenizers, which raises just that
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({error})") from error
    image = transformers.AddedToken(IMAGE, special=True, normalized=False)
    tokenizer.add_tokens(image, special_tokens=True)
    tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.padding_side = "left"
    return tokenizer, *tokenizer.convert_tokens_to_ids([IMAGE, PAD])


def _config(
    fields: dict[str, Any], tower: Path | None, *, rows: int, image: int, pad: int
) -> LlavaConfig:
    make = getattr(transformers, _TEXT[fields["model_type"]])
    known = {*make().to_dict(), "rope_theta", "rope_scaling"} - {"model_type", "architectures"}
    text = make.from_dict({k: v for k, v in fields.items() if k in known})
    text.vocab_size, text.pad_token_id = rows, pad
    name = Path(str(fields["mm_vision_tower"])).name
    if tower is not None:
        found = _read_json(tower / "config.json")
        vision = found.get("vision_config", found)
    elif name in _KNOWN_TOWERS:
        vision = {**_LARGE, "image_size": _KNOWN_TOWERS[name]}
    else:
        raise ValueError(
            f"mm_vision_tower={fields['mm_vision_tower']!r} is none of "
            f"{', '.join(_KNOWN_TOWERS)}: give its folder, mmkv.load(path, vision_tower=folder)"
        )
    vision = {k: v for k, v in vision.items() if k not in ("model_type", "architectures")}
    patch = fields.get("mm_vision_select_feature", "patch") == "patch"
    config = LlavaConfig(
        vision_config=transformers.CLIPVisionConfig.from_dict(vision),
        text_config=text,
        image_token_index=image,
        vision_feature_layer=int(fields.get("mm_vision_select_layer", -2)),
        vision_feature_select_strategy="default" if patch else "full",
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
    )
    config.pad_token_id = pad
    return config


def _check_sizes(config: LlavaConfig, state: dict[str, Tensor]) -> None:
    """Sizes that the weights do not have are refused before memory is asked for them."""
    sizes: Any = config
    layers = {"language_model": sizes.text_config, "vision_tower": sizes.vision_config}
    for part, n in ((name, x.num_hidden_layers) for name, x in layers.items()):
        found = {m[1] for x in state if (m := re.match(rf"{part}\..*\.layers\.(\d+)\.", x))}
        if len(found) != n:
            raise ValueError(f"{n} layers in the {part}, and weights of {len(found)}")
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    needed = sum(x.numel() for x in model.parameters())
    there = sum(x.numel() for x in state.values())
    if needed > 1.5 * there:
        raise ValueError(f"it needs {needed} numbers, and the weights have {there}")


def _processor(fields: dict[str, Any], config: Any, tokenizer: Any) -> LlavaProcessor:
    side = config.vision_config.image_size
    vicuna = fields["model_type"] != "llava_mistral"
    return LlavaProcessor(
        image_processor=LlavaImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            # Square pictures with bars, as LLaVA-1.5 was trained on; else the middle is cut out.
            do_pad=fields.get("image_aspect_ratio") == "pad",
        ),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=IMAGE,
        num_additional_image_tokens=1,  # CLIP's class token
        chat_template=CHAT_TEMPLATE if vicuna else tokenizer.chat_template,
    )
