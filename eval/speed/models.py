"""Models for timing, of random weights in the shape of real ones, and replies that are timed.

Imports nothing of mmkv but names: it is imported in kvpress's environment too, without mmkv's own.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Generator
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from mmkv.calls import CACHE, cache_in

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
# New tokens that a reply is announced to have: a graph pays for any such.
_LONG = 1024


# "llama", "mistral", or "llava" (a Llama behind LLaVA-1.5's tower); and `_SIZES`.
Shape = tuple[str, tuple[int, ...]]
SHAPES: dict[str, Shape] = {
    "llama-120m-random": ("llama", (768, 2048, 12, 12, 12, 32000, 8192)),
    # Layers as wide as a real model's, few enough for a CPU.
    "llama-7b-2-layers-random": ("llama", (4096, 11008, 2, 32, 32, 1000, 4096)),
    "llama-8b-random": ("llama", (4096, 14336, 32, 32, 8, 128256, 131072)),
    "llava-1.5-7b-random": ("llava", (4096, 11008, 32, 32, 32, 32064, 4096)),
    "llava-1.5-13b-random": ("llava", (5120, 13824, 40, 40, 40, 32064, 4096)),
    "mistral-7b-random": ("mistral", (4096, 14336, 32, 32, 8, 32000, 32768)),
}


def make(shape: Shape, device: str, dtype: str = "auto") -> Any:
    """A model of this shape with random weights, in eval mode; a ValueError for an unknown dtype.

    Queries and keys are wider than a fresh model's, each head by its own factor: attention then
    prefers some tokens, and policies with sizes per head get heads that differ.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype!r}: expected auto, float32, bfloat16 or float16")
    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    kind, sizes = shape
    fields: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    if kind == "mistral":
        fields["sliding_window"] = None
    config: Any = hf.AutoConfig.for_model(kind.replace("llava", "llama"), **fields)
    maker: Any = hf.AutoModelForCausalLM
    if kind == "llava":
        config = hf.LlavaConfig(text_config=config, image_token_index=config.vocab_size - 1)
        maker = hf.AutoModelForImageTextToText
    torch.manual_seed(0)
    with torch.device(device):
        model = maker.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    with torch.no_grad(), torch.device(device):
        for layer in model.get_decoder().layers:
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            for weight in (query, key):
                weight.normal_(0, (2 / config.get_text_config().hidden_size) ** 0.5)
            factors = torch.linspace(0.5, 1.5, fields["num_attention_heads"], dtype=query.dtype)
            query.unflatten(0, (len(factors), -1)).mul_(factors[:, None, None])
    return model.eval()


def twin(model: Any) -> Any:
    """The same model in modules of its own, with the same weights: it can be wrapped by itself."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def make_prompt(model: Any, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random token ids [batch, tokens] on the model's device, none of them an image's."""
    vocab = model.get_input_embeddings().num_embeddings
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (batch, tokens), generator=g)
    for name in ("image_token_id", "video_token_id"):
        ids[ids == getattr(model.config, name, None)] = 0
    return ids.to(model.device)


def reply(
    model: Any, ids: Tensor, warm: int = 0, cache: Any = None
) -> Generator[tuple[float, int, Tensor]]:
    """A batch's greedy reply: the prompt is read, then a step is made whenever the next is asked.

    The device is synchronised around what is timed, nowhere else.

    Args:
        ids: int64 [B, N], without padding.
        warm: steps that follow the prompt at once, as warm-up.
        cache: an empty one; None takes the model's own.

    Yields:
        seconds to the first token, then of each step; bytes that the cache really holds; the newest
        tokens, int64 [B, 1].
    """
    gc.collect()
    call, token, seen = model, ids, 0

    def forward(**inputs: Any) -> float:
        nonlocal cache, token, seen
        seen += token.shape[1]
        start = _now(ids.device)
        with torch.no_grad():
            out = call(input_ids=token, use_cache=True, **{CACHE: cache}, **inputs)
        cache, token = cache_in(out), out.logits[:, -1:].argmax(-1)
        return _now(ids.device) - start

    def step() -> float:
        # Without padding a step's mask says nothing; looking at it would make a GPU wait.
        at = torch.full_like(token, seen)
        return forward(attention_mask=None, position_ids=at, return_dict=True)

    prefill = forward(attention_mask=torch.ones_like(ids), logits_to_keep=1)
    # As `generate` does: for each step it calls the model, or what replays it.
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = _LONG
    if model._valid_auto_compile_criteria({CACHE: cache}, config):
        call = model.get_compiled_call(config.compile_config)
    for _ in range(warm):
        step()
    yield prefill, _held(cache), token
    while True:
        yield step(), _held(cache), token


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _held(cache: Any) -> int:
    """Bytes of the storages of a cache."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    found = (getattr(x, name, None) for x in cache.layers for name in ("keys", "values"))
    storages = [x.untyped_storage() for x in found if isinstance(x, Tensor)]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())
