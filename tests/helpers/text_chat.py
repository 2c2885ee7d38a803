"""A tiny language model with a chat template."""

from typing import Any

import torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_chat() -> tuple[Any, Any]:
    """A tiny random language model, and a tokenizer of bytes with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    marks = ["<|im_start|>", "<|im_end|>", "<pad>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({x: i for i, x in enumerate([*marks, *letters])}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=marks[1],
        pad_token=marks[2],
        additional_special_tokens=marks[:1],
        chat_template=CHATML,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, eos_token_id=1, bos_token_id=None, pad_token_id=2, **sizes, **heads
    )
    return LlamaForCausalLM(config).eval(), tokenizer
