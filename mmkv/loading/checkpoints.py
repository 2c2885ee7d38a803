"""Load original LLaVA checkpoints (such as `liuhaotian/llava-v1.5-7b`) as transformers' LLaVA.

Their weights are those of LLaVA-1.5 (arXiv 2310.03744) under other names, and the vision side is
configured by `mm_*` fields. Nothing is downloaded and no code of a checkpoint is run.
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
_ROW_MULTIPLE = 64  # the number of embedding rows is padded to a multiple of it
_MAX_JSON_BYTES = 64 * 2**20  # an index of shards is the largest JSON file
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
# Vicuna's conversation, on which LLaVA-1.5 was trained. The original tokenizes the text before and
# after a picture apart, so that each part starts with a space: after <s> and <image> here.
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
# Sides of pictures for the towers whose weights a checkpoint may contain; it does not contain their
# configuration.
_KNOWN_TOWERS = {"clip-vit-large-patch14-336": 336, "clip-vit-large-patch14": 224}
_DECODERS = {"llava": "LlamaConfig", "llava_llama": "LlamaConfig", "llava_mistral": "MistralConfig"}
# Prefixes of weights' names and what replaces them: the names of transformers' converted
# checkpoints, which all its versions read.
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
    """Return the model and the processor of an original LLaVA-1.5 checkpoint in a folder.

    The image token `<image>` and a padding token are appended to the vocabulary, as in
    transformers' own conversion; their embeddings are the mean of the others.

    Args:
        path: the folder, with `config.json`, a tokenizer and safetensors.
        vision_tower: the folder of its CLIP tower, if the checkpoint does not contain it; by
            default a folder named as in `mm_vision_tower` in or beside `path`.
        dtype: of the weights; by default that of the configuration.

    Returns:
        The model in eval mode on the CPU, and its processor.

    Raises:
        ValueError: the folder holds no such checkpoint, has a part that transformers' LLaVA
            lacks, or its weights are missing or not in safetensors.
    """
    folder = Path(path)
    fields = _read_json(folder / "config.json")
    _check_supported(folder, fields)
    weights = _read_weights(folder)
    tower = _tower(folder, fields, vision_tower)
    state = _renamed(weights)
    if not any(name.startswith("vision_tower.") for name in state):
        if tower is None:
            raise ValueError(
                f"{folder} does not hold its vision tower {fields['mm_vision_tower']!r}: download "
                "it and give its folder, mmkv.load(path, vision_tower=folder)"
            )
        tower_weights = _read_weights(tower).items()
        state |= {f"vision_tower.{k}": v for k, v in tower_weights if k.startswith("vision_model.")}
    tokenizer, image, pad = _tokenizer(folder)
    n_embeddings = len(state.get("language_model.model.embed_tokens.weight", ()))
    if fields["vocab_size"] != n_embeddings:
        raise ValueError(
            f"the weights in {folder} do not fit its configuration: vocab_size="
            f"{fields['vocab_size']!r}, but {n_embeddings} tokens have an embedding"
        )
    rows = -(-max(n_embeddings, len(tokenizer)) // _ROW_MULTIPLE) * _ROW_MULTIPLE
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        if name in state:  # the new rows are the mean of the others
            weight = state[name]
            mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
            state[name] = torch.cat([weight, mean.expand(max(0, rows - len(weight)), -1)])
    try:
        config = _config(fields, tower, rows=rows, image=image, pad=pad)
        _check_sizes(config, state)
    except Exception as error:  # transformers raises errors of every type
        raise ValueError(
            f"the weights in {folder} do not fit its configuration: {error}"
        ) from error
    dtype = _dtype(fields) if dtype is None else dtype
    model_class: Any = LlavaForConditionalGeneration
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # transformers then only reports them; they are refused below
    )
    wrong = {k: sorted(map(str, v))[:4] for k, v in info.items() if v}
    if wrong:
        raise ValueError(f"the weights in {folder} do not fit its configuration: {wrong}")
    if (generation := folder / "generation_config.json").is_file():
        saved = _read_json(generation)
        try:
            model.generation_config = transformers.GenerationConfig.from_dict(saved)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{generation}: {error}") from error
    model.generation_config.pad_token_id = pad
    return model.eval(), _processor(fields, config, tokenizer)


def _tower(folder: Path, fields: dict[str, Any], given: str | Path | None) -> Path | None:
    """Return the folder of a checkpoint's CLIP tower; None if there is none."""
    name = Path(str(fields["mm_vision_tower"])).name
    candidates = [folder / name, folder.parent / name] if name else []
    if given is not None:
        candidates = [Path(given)]
    tower = next((x for x in candidates if (x / "config.json").is_file()), None)
    if given is not None and tower is None:
        raise ValueError(f"vision_tower={str(given)!r}: no folder with a config.json")
    return tower


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by the names in transformers, without those that it computes."""
    unused = ("rotary_emb.inv_freq", "embeddings.position_ids")
    state: dict[str, Tensor] = {}
    for name, x in weights.items():
        start = next(x for x in _RENAMED if name.startswith(x))
        if not name.endswith(unused):
            state[_RENAMED[start] + name.removeprefix(start)] = x
    return state


def _dtype(fields: dict[str, Any]) -> torch.dtype:
    """Return the type of the weights that a checkpoint's configuration names."""
    named = str(fields.get("torch_dtype") or fields.get("dtype") or "float32")
    dtype = getattr(torch, named, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch_dtype={named!r}: no such dtype")
    return dtype


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = untrusted.read_json(path, _MAX_JSON_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, got a {type(content).__name__}")
    return content


def _check_supported(folder: Path, fields: dict[str, Any]) -> None:
    """Refuse a checkpoint that transformers' LLaVA would compute in another way."""
    if "mm_vision_tower" not in fields or "vocab_size" not in fields:
        raise ValueError(
            f"{folder} is not an original LLaVA checkpoint: its config.json has no mm_vision_tower "
            "and vocab_size; load a converted one with transformers' from_pretrained"
        )
    kind, projector = fields.get("model_type"), fields.get("mm_projector_type")
    feature = fields.get("mm_vision_select_feature", "patch")
    merge, why = fields.get("mm_patch_merge_type"), None
    if kind not in _DECODERS:
        why = f"model_type={kind!r}: expected one of {', '.join(_DECODERS)}"
    elif projector != "mlp2x_gelu":
        why = f"mm_projector_type={projector!r}: transformers has 'mlp2x_gelu' only"
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
    """Return all tensors of a folder, from one safetensors file or from shards."""
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
        if pickles := sorted(p.name for p in folder.glob("*.bin")):
            why += (
                f" but {pickles[0]}, a pickle, which can run code and is not loaded: convert it to "
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
    """Return the tokenizer with the image and padding tokens added, and their ids."""
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        try:
            missing = [x for x in _SENTENCEPIECE if importlib.util.find_spec(x) is None]
        except ModuleNotFoundError:  # the parent package is missing
            missing = [*_SENTENCEPIECE]
        if missing:
            raise ValueError(
                f"{folder} has a SentencePiece tokenizer.model, which needs {' and '.join(missing)}"
                ": pip install 'mmkv[llava]'"
            )
    try:
        # transformers does not know the model type in the folder's config.json.
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder,
            config=transformers.LlamaConfig(),
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # tokenizers raises plain `Exception`s
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({error})") from error
    image = transformers.AddedToken(IMAGE, special=True, normalized=False)
    tokenizer.add_tokens(image, special_tokens=True)
    tokenizer.add_special_tokens({"pad_token": PAD})
    tokenizer.padding_side = "left"
    return tokenizer, *tokenizer.convert_tokens_to_ids([IMAGE, PAD])


def _config(
    fields: dict[str, Any], tower: Path | None, *, rows: int, image: int, pad: int
) -> LlavaConfig:
    make = getattr(transformers, _DECODERS[fields["model_type"]])
    names = {*make().to_dict(), "rope_theta", "rope_scaling"} - {"model_type", "architectures"}
    text = make.from_dict({k: v for k, v in fields.items() if k in names})
    text.vocab_size, text.pad_token_id = rows, pad
    name = Path(str(fields["mm_vision_tower"])).name
    if tower is not None:
        tower_config = _read_json(tower / "config.json")
        vision = tower_config.get("vision_config", tower_config)
    elif name in _KNOWN_TOWERS:
        clip_large: Any = LlavaConfig().vision_config
        vision = {**clip_large.to_dict(), "image_size": _KNOWN_TOWERS[name]}
    else:
        raise ValueError(
            f"mm_vision_tower={fields['mm_vision_tower']!r}: expected one of "
            f"{', '.join(_KNOWN_TOWERS)}, or its folder: mmkv.load(path, vision_tower=folder)"
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
    """Refuse sizes that do not fit the weights, before memory is allocated for them."""
    sizes: Any = config
    layers = {"language_model": sizes.text_config, "vision_tower": sizes.vision_config}
    for part, n in ((name, x.num_hidden_layers) for name, x in layers.items()):
        indices = {m[1] for x in state if (m := re.match(rf"{part}\..*\.layers\.(\d+)\.", x))}
        if len(indices) != n:
            raise ValueError(f"{n} layers in the {part}, but weights of {len(indices)}")
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    needed = sum(x.numel() for x in model.parameters())
    available = sum(x.numel() for x in state.values())
    if needed > 1.5 * available:
        raise ValueError(f"it needs {needed} numbers, but the weights have {available}")


def _processor(fields: dict[str, Any], config: Any, tokenizer: Any) -> LlavaProcessor:
    side = config.vision_config.image_size
    vicuna = fields["model_type"] != "llava_mistral"
    return LlavaProcessor(
        image_processor=LlavaImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            # LLaVA-1.5 was trained on pictures padded to squares; others crop the middle.
            do_pad=fields.get("image_aspect_ratio") == "pad",
        ),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=IMAGE,
        num_additional_image_tokens=1,  # CLIP's class token
        chat_template=CHAT_TEMPLATE if vicuna else tokenizer.chat_template,
    )
