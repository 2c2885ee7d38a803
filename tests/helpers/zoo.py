"""Tiny random models of every supported class, and prompts for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import mmkv

IMAGE, VIDEO, PAD, VOCAB = 3, 5, 0, 120
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    # Wide enough for attention to prefer some tokens, as trained models do.
    "initializer_range": 0.15,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_ANYRES = [[16, 32], [32, 16], [32, 32]]


def _text(cls: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, cls)(**{**TEXT, **changes})


def _qwen_vl(prefix: str, vision: dict[str, Any], **text: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(tf, f"{prefix}Config")
        return config(
            text_config={**TEXT, "rope_parameters": _MROPE, **text},
            vision_config={
                "depth": 2,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "in_channels": 3,
                **vision,
            },
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=6,
            vision_end_token_id=7,
        )

    return make


def _vision(cls: str, tower: Any, text: Any, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        token = {"image_token_id" if cls[:4] in ("Inte", "Idef", "Smol") else "image_token_index"}
        return getattr(tf, cls)(
            vision_config=tower, text_config=text(), **dict.fromkeys(token, IMAGE), **options
        )

    return make


def _over(first: Callable[[], Any], text: Callable[[], Any]) -> Callable[[], Any]:
    """A configuration with another decoder."""

    def make() -> Any:
        config = first()
        config.text_config = text()
        return config

    return make


def _siglip(**changes: Any) -> Any:
    return tf.SiglipVisionConfig(**{**_TOWER, **changes})


CLIP = {"model_type": "clip_vision_model", **_TOWER}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False}
_FLAT = {"vision_feature_layer": -1}

# A model is "class" or "class:variant".
CONFIGS: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": _text("LlamaConfig"),
    "MistralForCausalLM": _text("MistralConfig", sliding_window=None),
    "MixtralForCausalLM": _text("MixtralConfig", num_local_experts=4),
    "Qwen2ForCausalLM": _text("Qwen2Config"),
    "Qwen3ForCausalLM": _text("Qwen3Config", head_dim=16),
    "Phi3ForCausalLM": _text("Phi3Config", sliding_window=None),
    "GemmaForCausalLM": _text("GemmaConfig", head_dim=16),
    "Gemma2ForCausalLM": _text("Gemma2Config", attn_logit_softcapping=5.0, **SLIDING),
    "Gemma3ForCausalLM": _text("Gemma3TextConfig", **SLIDING),
    "OPTForCausalLM": _text("OPTConfig", ffn_dim=96, word_embed_proj_dim=64, init_std=0.15),
    "OPTForCausalLM:post-norm": _text(
        "OPTConfig", ffn_dim=96, word_embed_proj_dim=32, init_std=0.15, do_layer_norm_before=False
    ),
    "GPTNeoXForCausalLM": _text("GPTNeoXConfig"),
    "GPTNeoXForCausalLM:sequential": _text("GPTNeoXConfig", use_parallel_residual=False),
    "FalconForCausalLM": _text("FalconConfig", alibi=False, multi_query=True),
    "FalconForCausalLM:40b": _text(
        "FalconConfig", alibi=False, new_decoder_architecture=True, num_kv_heads=2
    ),
    "LlavaForConditionalGeneration": _vision("LlavaConfig", CLIP, _text("LlamaConfig"), **_FLAT),
    "LlavaForConditionalGeneration:mistral": _vision(
        "LlavaConfig", CLIP, _text("MistralConfig", sliding_window=None), **_FLAT
    ),
    "LlavaNextForConditionalGeneration": _vision(
        "LlavaNextConfig", CLIP, _text("LlamaConfig"), image_grid_pinpoints=_ANYRES, **_FLAT
    ),
    "LlavaNextForConditionalGeneration:mistral": _vision(
        "LlavaNextConfig",
        CLIP,
        _text("MistralConfig", sliding_window=None),
        image_grid_pinpoints=_ANYRES,
        **_FLAT,
    ),
    "LlavaOnevisionForConditionalGeneration": _vision(
        "LlavaOnevisionConfig",
        _SIGLIP,
        _text("Qwen2Config"),
        image_grid_pinpoints=_ANYRES,
        video_token_index=VIDEO,
        **_FLAT,
    ),
    "Qwen2VLForConditionalGeneration": _qwen_vl(
        "Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen_vl(
        "Qwen2_5_VL",
        {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "Qwen3VLForConditionalGeneration": _qwen_vl(
        "Qwen3VL",
        {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        head_dim=16,
    ),
    "InternVLForConditionalGeneration": _vision(
        "InternVLConfig",
        {**_TOWER, "image_size": [32, 32], "patch_size": [4, 4]},
        _text("Qwen2Config"),
        downsample_ratio=0.5,
    ),
    "Idefics3ForConditionalGeneration": _vision(
        "Idefics3Config", {**_TOWER, "image_size": 32}, _text("LlamaConfig"), scale_factor=2
    ),
    "SmolVLMForConditionalGeneration": _vision(
        "SmolVLMConfig", {**_TOWER, "image_size": 32}, _text("LlamaConfig"), scale_factor=2
    ),
    "Gemma3ForConditionalGeneration": _vision(
        "Gemma3Config", _SIGLIP, _text("Gemma3TextConfig", **SLIDING), mm_tokens_per_image=16
    ),
    "PaliGemmaForConditionalGeneration": _vision(
        "PaliGemmaConfig", _SIGLIP, _text("GemmaConfig", head_dim=16), projection_dim=64
    ),
    "PaliGemmaForConditionalGeneration:2": _vision(
        "PaliGemmaConfig",
        _SIGLIP,
        _text("Gemma2Config", attn_logit_softcapping=5.0, **SLIDING),
        projection_dim=64,
    ),
}


# Every decoder a class may hold.
for _name, _decoders in {
    "InternVL": ("Qwen3", "Llama"),
    "Llava": ("Qwen2",),
    "LlavaNext": ("Qwen2",),
}.items():
    for _decoder in _decoders:
        _first = CONFIGS[f"{_name}ForConditionalGeneration"]
        CONFIGS[f"{_name}ForConditionalGeneration:{_decoder.lower()}"] = _over(
            _first, _text(f"{_decoder}Config", **({"head_dim": 16} if _decoder == "Qwen3" else {}))
        )


def usual_attention(name: str) -> str:
    """The attention implementation that a model would be loaded with."""
    text = CONFIGS[name]().get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", 0) else "sdpa"


def make(name: str, attn: str | None = None) -> nn.Module:
    """A tiny model, with the attention implementation it would be loaded with."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attn or usual_attention(name)
    model = getattr(tf, name.partition(":")[0])(config)
    model.generation_config.eos_token_id = None  # every run gives as many tokens as asked for
    model.generation_config.pad_token_id = PAD
    # A reply with an image token would stand for a picture that nobody gave.
    model.generation_config.suppress_tokens = list(range(1, 8))
    return model.eval()


@dataclass
class _Picture:
    """What stands for one picture or video in the ids, and what goes to the vision tower."""

    token: int
    count: int
    inputs: dict[str, Tensor]
    runs: int = 1  # text stands between the frames of a video (Qwen3-VL)


def _picture(model: nn.Module, n: int, g: torch.Generator) -> _Picture | None:
    """The n-th picture of a prompt, in the form its model wants."""
    kind = model.config.model_type
    if not hasattr(model.config, "vision_config"):
        return None
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        t, h, w = [(1, 8, 8), (1, 4, 12), (2, 8, 4)][n % 3]
        pixels = torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=g)
        grid = torch.tensor([[t, h, w]])
        if n % 3 == 2:
            inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid}
            return _Picture(VIDEO, t * h * w // 4, inputs, t if kind == "qwen3_vl" else 1)
        return _Picture(IMAGE, t * h * w // 4, {"pixel_values": pixels, "image_grid_thw": grid})
    if kind in ("llava_next", "llava_onevision"):
        if kind == "llava_onevision" and n % 3 == 2:
            frames = torch.randn(1, 5, 3, 16, 16, generator=g)
            return _Picture(VIDEO, 5 * 4 + 1, {"pixel_values_videos": frames})
        # One whole view and two tiles: 16 + 4 rows of 8 and a newline each.
        inputs = {
            "pixel_values": torch.randn(1, 3, 3, 16, 16, generator=g),
            "image_sizes": torch.tensor([[16, 32]]),
        }
        return _Picture(IMAGE, 16 + 4 * 9, inputs)
    side = model.config.vision_config.image_size
    side = side if isinstance(side, int) else side[0]
    return _Picture(IMAGE, 16, {"pixel_values": torch.randn(1, 3, side, side, generator=g)})


def prompt(
    model: nn.Module, lengths: tuple[int, ...], seed: int = 0, pictures: int = 2
) -> dict[str, Tensor]:
    """A left-padded batch of these lengths; rows hold 1, 2, ... pictures at most `pictures`."""
    g = torch.Generator().manual_seed(seed)
    N = max(lengths)
    ids = torch.full((len(lengths), N), PAD)
    mask = torch.zeros(len(lengths), N, dtype=torch.long)
    found: list[list[_Picture]] = []
    for b, n in enumerate(lengths):
        ids[b, N - n :] = torch.randint(8, VOCAB, (n,), generator=g)
        mask[b, N - n :] = 1
        at, row = N - n + 3, []
        for _ in range(min(pictures, 2 if n > 80 else 1)):
            one = _picture(model, sum(map(len, found)) + len(row), g)
            if one is None or at + one.count + 4 * one.runs + 4 > N:
                break
            for _ in range(one.runs):
                ids[b, at : at + one.count // one.runs] = one.token
                at += one.count // one.runs + 4
            row.append(one)
        found.append(row)
    inputs = {"input_ids": ids, "attention_mask": mask}
    for key in dict.fromkeys(k for row in found for p in row for k in p.inputs):
        inputs[key] = torch.cat([p.inputs[key] for row in found for p in row if key in p.inputs])
    if model.config.model_type in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = _by_row(found)
    return {**inputs, **_kinds(model, ids)}


def _by_row(found: list[list[_Picture]]) -> Tensor:
    """Pixels [B, pictures, 3, H, W]; zeros where a row has fewer pictures."""
    rows = [torch.cat([p.inputs["pixel_values"] for p in row]) for row in found]
    most = max(map(len, rows))
    return torch.stack([torch.cat([x, x.new_zeros(most - len(x), *x[0].shape)]) for x in rows])


def _kinds(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What each token is, for models that want to be told."""
    kind = model.config.model_type
    if kind.startswith("qwen") and hasattr(model.config, "vision_config"):
        return {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    if kind == "gemma3":
        return {"token_type_ids": (ids == IMAGE).long()}
    if kind == "paligemma":
        return {"token_type_ids": torch.zeros_like(ids)}
    return {}


def next_turn(
    model: nn.Module, inputs: dict[str, Tensor], words: Tensor, picture: bool, seed: int = 5
) -> dict[str, Any]:
    """The conversation of one row so far, with new text and perhaps one new picture."""
    g = torch.Generator().manual_seed(seed)
    one = _picture(model, 2, g) if picture else None
    new = torch.randint(8, VOCAB, (1, 20 if one is None else 30 + one.count), generator=g)
    ids = torch.cat([inputs["input_ids"], words, new], dim=1)
    at = ids.shape[1] - new.shape[1] + 4
    more: dict[str, Any] = {}
    if one is not None:
        for _ in range(one.runs):
            ids[:, at : at + one.count // one.runs] = one.token
            at += one.count // one.runs + 4
        more = dict(one.inputs)
    kind = model.config.model_type
    if kind.startswith("qwen"):
        # Positions need the grids of every turn, the tower only this turn's pixels.
        if "pixel_values_videos" in more:
            pixels, grid = more.pop("pixel_values_videos"), more["video_grid_thw"]
            found = model.get_video_features(pixels, grid, return_dict=True)
            more["mm_encoder_outputs"] = {"video": found}
        more.update({k: v for k, v in inputs.items() if k.endswith("grid_thw")})
    if kind in ("idefics3", "smolvlm") and "pixel_values" in more:
        more["pixel_values"] = more["pixel_values"][None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **more,
        **_kinds(model, ids),
    }


SUPPORTED = [row["class"] for row in mmkv.adapters.table() if row["status"] == "supported"]
NAMES = [name for name in CONFIGS if name.partition(":")[0] in SUPPORTED]
# For `make test`: rotary and learned positions, sliding layers, pictures in the text and in a grid.
FEW = (
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "Gemma3ForCausalLM",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)


@functools.cache
def model_of(name: str) -> torch.nn.Module:
    return make(name)


def inputs_of(model, rows: str, seed: int = 0) -> dict[str, torch.Tensor]:
    wide = model.config.model_type in ("llava_next", "llava_onevision")  # 52 tokens a picture
    lengths = {"one": (132 if wide else 90,), "padded": (132, 81) if wide else (88, 47)}
    return prompt(model, lengths[rows], seed)
