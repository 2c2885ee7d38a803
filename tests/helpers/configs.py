"""The configs of tiny random models, by class."""

import copy
from collections.abc import Callable
from typing import Any

import transformers as tf

IMAGE, VIDEO, PAD, VOCAB = 3, 5, 0, 120
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
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
_QWEN_TOWER = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
_QWEN2_5_TOWER = {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
_QWEN3_5_TOWER = {**_QWEN_TOWER, "num_position_embeddings": 64}
_QWEN3_TOWER = {**_QWEN3_5_TOWER, "deepstack_visual_indexes": [0, 1]}
_GLM_TOWER = {**_QWEN_TOWER, "image_size": 32}
_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 32,
    "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Half of each head is turned.
_HALF = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_FLAT = {"vision_feature_layer": -1}
_ANYRES = {**_FLAT, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}


def _text(cls: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, cls)(**copy.deepcopy({**TEXT, **changes}))


def _qwen_vl(prefix: str, vision: dict[str, Any], **text: Any) -> Callable[[], Any]:
    """A model that is given grids and positions of three axes: Qwen's, and GLM-4.1V."""

    def make() -> Any:
        config = getattr(tf, f"{prefix}Config")
        return config(
            # A copy: a config may write to what it is given.
            text_config=copy.deepcopy({**TEXT, "rope_parameters": _MROPE, **text}),
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


# Every other layer has chunks, and no other turns its queries and keys.
_LLAMA4 = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "attention_chunk_size": 24,
    "floor_scale": 20,
    "head_dim": 16,
    "num_local_experts": 4,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
}
_LLAMA4_TOWER = {
    **_TOWER,
    "image_size": 32,
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_GEMMA4 = {
    **{k: v for k, v in SLIDING.items() if k != "query_pre_attn_scalar"},
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
}


def _gemma4(**text: Any) -> Callable[[], Any]:
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    tower = {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2}

    def make() -> Any:
        return tf.Gemma4Config(
            text_config={**TEXT, **_GEMMA4, **experts, "enable_moe_block": True, **text},
            vision_config={**tower, "position_embedding_size": 16},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=4,
            boi_token_id=6,
            eoi_token_id=7,
        )

    return make


CLIP = {"model_type": "clip_vision_model", **_TOWER}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False}
_WIDE = {**_TOWER, "image_size": 32}
_INTERN = {**_TOWER, "image_size": [32, 32], "patch_size": [4, 4]}
_HALVED = {"downsample_ratio": 0.5}
_PIXTRAL = {"model_type": "pixtral", **_TOWER, "image_size": 32, "head_dim": 16}
# Queries are scaled by what the position is, from position 20 on.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 20,
    "llama_4_scaling_beta": 0.1,
}
_LLAMA, _QWEN2 = _text("LlamaConfig"), _text("Qwen2Config")
_MISTRAL = _text("MistralConfig", sliding_window=None)

# A model is "class" or "class:variant".
CONFIGS: dict[str, Callable[[], Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _text("MixtralConfig", num_local_experts=4),
    "Qwen2ForCausalLM": _QWEN2,
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
    "LlavaForConditionalGeneration": _vision("LlavaConfig", CLIP, _LLAMA, **_FLAT),
    "LlavaForConditionalGeneration:mistral": _vision("LlavaConfig", CLIP, _MISTRAL, **_FLAT),
    "LlavaNextForConditionalGeneration": _vision("LlavaNextConfig", CLIP, _LLAMA, **_ANYRES),
    "LlavaNextForConditionalGeneration:mistral": _vision(
        "LlavaNextConfig", CLIP, _MISTRAL, **_ANYRES
    ),
    "LlavaOnevisionForConditionalGeneration": _vision(
        "LlavaOnevisionConfig", _SIGLIP, _QWEN2, video_token_index=VIDEO, **_ANYRES
    ),
    "Qwen2VLForConditionalGeneration": _qwen_vl(
        "Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen_vl("Qwen2_5_VL", _QWEN2_5_TOWER),
    "Qwen3VLForConditionalGeneration": _qwen_vl("Qwen3VL", _QWEN3_TOWER, head_dim=16),
    "Qwen3VLMoeForConditionalGeneration": _qwen_vl("Qwen3VLMoe", _QWEN3_TOWER, **_EXPERTS),
    "Qwen3_5ForCausalLM": _text("Qwen3_5TextConfig", **_HYBRID),
    "Qwen3_5ForConditionalGeneration": _qwen_vl("Qwen3_5", _QWEN3_5_TOWER, **_HYBRID),
    "Qwen3_5MoeForCausalLM": _text(
        "Qwen3_5MoeTextConfig", **_EXPERTS | _HYBRID, shared_expert_intermediate_size=32
    ),
    "Qwen3_5MoeForConditionalGeneration": _qwen_vl(
        "Qwen3_5Moe", _QWEN3_5_TOWER, **_EXPERTS | _HYBRID, shared_expert_intermediate_size=32
    ),
    "Glm4vForConditionalGeneration": _qwen_vl("Glm4v", _GLM_TOWER, rope_parameters=_HALF),
    "Glm4vMoeForConditionalGeneration": _qwen_vl(
        "Glm4vMoe",
        _GLM_TOWER,
        rope_parameters=_HALF,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "InternVLForConditionalGeneration": _vision("InternVLConfig", _INTERN, _QWEN2, **_HALVED),
    "Idefics3ForConditionalGeneration": _vision("Idefics3Config", _WIDE, _LLAMA, scale_factor=2),
    "SmolVLMForConditionalGeneration": _vision("SmolVLMConfig", _WIDE, _LLAMA, scale_factor=2),
    "Mistral3ForConditionalGeneration": _vision("Mistral3Config", _PIXTRAL, _MISTRAL, **_FLAT),
    "Mistral3ForConditionalGeneration:ministral3": _vision(
        "Mistral3Config",
        _PIXTRAL,
        _text("Ministral3Config", head_dim=16, rope_parameters=_YARN),
        **_FLAT,
    ),
    "Gemma3ForConditionalGeneration": _vision(
        "Gemma3Config", _SIGLIP, _text("Gemma3TextConfig", **SLIDING), mm_tokens_per_image=16
    ),
    "Llama4ForCausalLM": _text("Llama4TextConfig", **_LLAMA4),
    "Llama4ForConditionalGeneration": _vision(
        "Llama4Config", _LLAMA4_TOWER, _text("Llama4TextConfig", **_LLAMA4)
    ),
    "Gemma4ForCausalLM": _text("Gemma4TextConfig", **_GEMMA4 | {"hidden_size_per_layer_input": 8}),
    "Gemma4ForConditionalGeneration": _gemma4(use_bidirectional_attention="vision"),
    "PaliGemmaForConditionalGeneration": _vision(
        "PaliGemmaConfig", _SIGLIP, _text("GemmaConfig", head_dim=16), projection_dim=64
    ),
    "PaliGemmaForConditionalGeneration:2": _vision(
        "PaliGemmaConfig",
        _SIGLIP,
        _text("Gemma2Config", attn_logit_softcapping=5.0, **SLIDING),
        projection_dim=64,
    ),
    "InternVLForConditionalGeneration:qwen3": _vision(
        "InternVLConfig", _INTERN, _text("Qwen3Config", head_dim=16), **_HALVED
    ),
    "InternVLForConditionalGeneration:llama": _vision("InternVLConfig", _INTERN, _LLAMA, **_HALVED),
    "LlavaForConditionalGeneration:qwen2": _vision("LlavaConfig", CLIP, _QWEN2, **_FLAT),
    "LlavaNextForConditionalGeneration:qwen2": _vision("LlavaNextConfig", CLIP, _QWEN2, **_ANYRES),
}
