"""Models for timing: random weights in the shape of real models, made on the device.

Imports nothing of mmkv: kvpress's environment, in which mmkv is not installed, loads this file too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor

Fields = dict[str, Any]
_TEXT_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)


def _text(*values: int, **more: Any) -> Fields:
    """A decoder's config: the values of `_TEXT_FIELDS`, and other fields."""
    return {**dict(zip(_TEXT_FIELDS, values, strict=True)), **more}


_ROPE_8B = {"rope_type": "default", "rope_theta": 500000.0}
_LLAMA_120M = _text(768, 2048, 12, 12, 12, 32000, 8192)
_LLAMA_7B = _text(4096, 11008, 32, 32, 32, 32064, 4096)
_LLAMA_7B_LAYERS = _LLAMA_7B | {"num_hidden_layers": 2, "vocab_size": 1000}  # for a CPU
_LLAMA_8B = _text(4096, 14336, 32, 32, 8, 128256, 131072, rope_parameters=_ROPE_8B)
_LLAMA_13B = _text(5120, 13824, 40, 40, 40, 32064, 4096)
_MISTRAL_7B = _text(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=None)
_CLIP_L: Fields = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}


@dataclass(frozen=True)
class Shape:
    """What a random model looks like: fields of its decoder's config and of its tower's.

    Attributes:
        kind: "llama", "mistral", or "llava" (a Llama behind a CLIP tower).
        dtype: of the weights where none is asked for: on the CPU, and on a GPU.
    """

    kind: str
    text: Fields
    vision: Fields | None = None
    dtype: tuple[str, str] = ("float32", "bfloat16")

    @property
    def decoder(self) -> Shape:
        """The text decoder alone: same speed on text, and known to more libraries."""
        return replace(self, kind="llama", vision=None) if self.kind == "llava" else self

    def toy(self) -> Shape:
        """The same kind of model, small enough for a test."""
        heads, shared = self.text["num_attention_heads"], self.text["num_key_value_heads"]
        positions = self.text["max_position_embeddings"]
        small = _text(64, 96, 3, 4, max(1, 4 * shared // heads), 256, positions)
        tower = None if self.vision is None else dict.fromkeys(self.vision, 32)
        if tower is not None:
            tower |= {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
        return replace(self, text=self.text | small, vision=tower)


SHAPES: dict[str, Shape] = {
    "llama-120m-random": Shape("llama", _LLAMA_120M, dtype=("float32", "float32")),
    "llama-7b-2-layers-random": Shape("llama", _LLAMA_7B_LAYERS),
    "llama-8b-random": Shape("llama", _LLAMA_8B),
    "llava-1.5-7b-random": Shape("llava", _LLAMA_7B, _CLIP_L),
    "llava-1.5-13b-random": Shape("llava", _LLAMA_13B, _CLIP_L),
    "mistral-7b-random": Shape("mistral", _MISTRAL_7B),
}


def make(shape: Shape, device: str, dtype: str = "auto", seed: int = 0) -> Any:
    """A model of this shape with random weights, in eval mode; nothing is downloaded.

    Queries and keys are wider than a fresh model's, each head by its own factor: attention then
    prefers some tokens, and policies with sizes per head get heads that differ.

    Raises:
        ValueError: an unknown dtype.
    """
    where = torch.device(device)
    name = shape.dtype[where.type != "cpu"] if dtype == "auto" else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r}: expected auto, float32, bfloat16 or float16")
    configure, build = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "llava": (hf.LlamaConfig, hf.LlavaForConditionalGeneration),
    }[shape.kind]
    config: Any = configure(**shape.text, tie_word_embeddings=False)
    if shape.kind == "llava":
        config = hf.LlavaConfig(
            text_config=config,
            vision_config=hf.CLIPVisionConfig(**(shape.vision or {})),
            image_token_index=shape.text["vocab_size"] - 1,
        )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, name))
    try:
        with where:
            model: Any = build(config)
    finally:
        torch.set_default_dtype(before)
    _widen(model, shape.text)
    # Every run gives as many tokens as asked for.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _widen(model: Any, text: Fields) -> None:
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    with torch.no_grad():
        for name, weight in model.get_decoder().named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.normal_(0, (2 / hidden) ** 0.5)
            if name.endswith("q_proj.weight"):
                factors = torch.linspace(0.5, 1.5, heads, device=weight.device)
                weight.view(heads, -1).mul_(factors[:, None].to(weight.dtype))


def twin(model: Any) -> Any:
    """The same model in modules of its own, with the same weights: it can be wrapped by itself."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def make_prompt(model: Any, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, tokens] on the model's device, none of them an image's."""
    vocab = model.get_input_embeddings().num_embeddings
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (batch, tokens), generator=g)
    for field in ("image_token_id", "video_token_id"):
        found = getattr(model.config, field, None)
        if found is not None:
            ids[ids == found] = 3 if found != 3 else 4
    return ids.to(model.device)


def weight_bytes(model: Any) -> int:
    """Bytes of all weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def step_bytes(model: Any) -> int:
    """Bytes of the weights that a decode step reads: the decoder's without its token embeddings,
    and the output layer's."""
    table, out = model.get_input_embeddings(), model.get_output_embeddings()
    read = {id(p): p for p in model.get_decoder().parameters() if p is not table.weight}
    if out is not None:
        read[id(out.weight)] = out.weight
    return sum(p.numel() * p.element_size() for p in read.values())
