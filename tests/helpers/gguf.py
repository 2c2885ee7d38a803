"""Writes a tiny Llama as GGUF, as llama.cpp's own converter lays it out."""

from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def write_gguf(model: Any, path: Path, *, architecture: str = "llama", leave_out: str = "") -> Path:
    """Write a `LlamaForCausalLM` with 261 tokens: 256 bytes, <unk>, <s>, </s>, he and hex.

    Args:
        model: weights are written in float32.
        path: the file.
        architecture: what the file says it is.
        leave_out: the tensor of this name in GGUF is not written.
    """
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    tokens = [*bytes_to_unicode().values(), "<unk>", "<s>", "</s>", "he", "hex"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * 256 + [control] * 3 + [normal] * 2)
    writer.add_token_merges(["h e", "he x"])
    writer.add_unk_token_id(256)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, x in model.named_parameters():
        module, _, kind = name.rpartition(".")
        prefix = ""
        if module.startswith("model.layers."):
            layer, _, module = module.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{layer}."
        called, values = _NAMES[module], x.detach().float().numpy()
        if called in heads:  # pairs of dimensions that turn together lie side by side in llama.cpp
            split = values.reshape(heads[called], 2, -1, values.shape[1])
            values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        if f"{prefix}{called}" != leave_out:
            writer.add_tensor(f"{prefix}{called}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
