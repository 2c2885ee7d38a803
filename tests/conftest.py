"""Tiny random models of the real classes, and prompts for them."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Triton's interpreter runs the kernels where there is no GPU. What it reads this from is set before
# transformers imports it; `mmkv` itself uses kernels on a GPU alone.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

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


@pytest.fixture(scope="session")
def models() -> Any:
    """Tiny models by name, one of each a session; tests must leave them unwrapped."""
    made: dict[str, torch.nn.Module] = {}

    def get(name: str) -> torch.nn.Module:
        if name not in made:
            made[name] = make_model(name)
        return made[name]

    return get


@pytest.fixture
def text_model() -> Any:
    """A tiny Llama of a test's own."""
    return make_model("llama")


@dataclass(frozen=True)
class Variant:
    """A policy with options that make its parts show on a short prompt."""

    policy: str
    options: tuple[tuple[str, Any], ...] = ()
    budget: float | int | None = 0.3

    def __str__(self) -> str:
        text = "-".join([self.policy, *(f"{k}={v}" for k, v in self.options)])
        return text if self.budget == 0.3 else f"{text}-budget={self.budget}"


def short(policy: str) -> dict[str, Any]:
    """Options that fit a policy's window to a prompt of some tens of tokens."""
    import mmkv

    return {"window": 6, "kernel_size": 3} if mmkv.get_policy(policy).observed else {}


def clone(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights, sharing nothing."""
    return copy.deepcopy(model)


@contextmanager
def measured_similarity():
    """What SqueezeAttention measures of the next prompt: by layer, similarity [B]."""
    from mmkv.cache.compressed import Reading

    found: dict[int, torch.Tensor] = {}
    compare = Reading.compare

    def record(self, layer_idx, similarity, tokens):
        found[layer_idx] = similarity
        compare(self, layer_idx, similarity, tokens)

    Reading.compare = record
    try:
        yield found
    finally:
        Reading.compare = compare
