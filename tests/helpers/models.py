"""Tiny random models of the LLaMA family and of LLaVA, and prompts for them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

IMAGE, PAD, VOCAB = 3, 0, 120
IMAGE_TOKENS = 16  # of one picture: 16 x 16 pixels in patches of 4
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    # Wide enough for attention to prefer some tokens, as trained models do.
    "initializer_range": 0.15,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _text_config(name: str) -> Any:
    if name in ("llama-mha", "llama-mqa"):
        return LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4 if name == "llama-mha" else 1})
    if name == "llama":
        return LlamaConfig(**_SHAPE)
    if name == "mistral":
        return MistralConfig(**_SHAPE, sliding_window=None)
    return Qwen2Config(**_SHAPE)


def make_model(name: str, attn: str = "sdpa") -> torch.nn.Module:
    """A tiny model: llama, llama-mha, llama-mqa, mistral, qwen2, llava-llama or llava-mistral."""
    torch.manual_seed(0)
    if not name.startswith("llava"):
        classes = {"mistral": MistralForCausalLM, "qwen2": Qwen2ForCausalLM}
        config = _text_config(name)
        config._attn_implementation = attn
        model = classes.get(name, LlamaForCausalLM)(config)
    else:
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=4,
            ),
            text_config=_text_config(name.removeprefix("llava-")),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        )
        config._attn_implementation = attn
        model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = None  # every run gives as many tokens as asked for
    model.generation_config.pad_token_id = PAD
    # A reply with an image token would stand for a picture that nobody gave.
    model.generation_config.suppress_tokens = [IMAGE]
    return model.eval()


def make_inputs(name: str, lengths: tuple[int, ...], seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch with rows of these lengths; a LLaVA row holds one or two pictures."""
    g = torch.Generator().manual_seed(seed)
    N = max(lengths)
    ids = torch.full((len(lengths), N), PAD)
    mask = torch.zeros(len(lengths), N, dtype=torch.long)
    pictures = 0
    for b, n in enumerate(lengths):
        ids[b, N - n :] = torch.randint(4, VOCAB, (n,), generator=g)
        mask[b, N - n :] = 1
        if name.startswith("llava"):
            for i in range(2 if n > 60 else 1):
                start = N - n + 3 + i * (IMAGE_TOKENS + 5)
                ids[b, start : start + IMAGE_TOKENS] = IMAGE
                pictures += 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if pictures:
        inputs["pixel_values"] = torch.randn(pictures, 3, 16, 16, generator=g)
    return inputs


def row_of(inputs: dict[str, torch.Tensor], b: int) -> dict[str, torch.Tensor]:
    """One row of a batch, without its padding."""
    real = inputs["attention_mask"][b].bool()
    row = {k: inputs[k][b : b + 1, real] for k in ("input_ids", "attention_mask")}
    if "pixel_values" in inputs:
        per_row = [
            (inputs["input_ids"][i] == IMAGE).sum().item() // IMAGE_TOKENS for i in range(b + 1)
        ]
        start = sum(per_row[:b])
        row["pixel_values"] = inputs["pixel_values"][start : start + per_row[b]]
    return row


def clone(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights, sharing nothing."""
    return copy.deepcopy(model)


def next_turn(inputs, sequences, image: bool, seed: int = 5, new: int = 30):
    """The conversation so far with `new` tokens more, in LLaVA with a new picture among them."""
    g = torch.Generator().manual_seed(seed)
    B = len(sequences)
    ids = torch.randint(4, VOCAB, (B, new), generator=g)
    more = {}
    if image:
        ids[:, 4 : 4 + IMAGE_TOKENS] = IMAGE
        more["pixel_values"] = torch.randn(B, 3, 16, 16, generator=g)
    ids = torch.cat([sequences, ids], dim=1)
    mask = torch.ones_like(ids)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask, **more}


def ending(error, after):
    """A hook that lets a layer run `after` times."""
    passes = itertools.count()

    def hook(*args):
        if next(passes) == after:
            raise error

    return hook
