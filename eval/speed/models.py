"""Models for timing, of random weights in the shape of real ones, and replies that are timed.

Imports nothing of mmkv but names: it is imported in kvpress's environment too, without mmkv's own.
"""

from __future__ import annotations

import copy
import gc
import time
from typing import Any, NamedTuple

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


class Shape(NamedTuple):
    """A random model: "llama", "mistral", or "llava" (a Llama behind LLaVA-1.5's tower)."""

    kind: str
    sizes: tuple[int, ...]  # in the order of `_SIZES`


SHAPES = {
    "llama-120m-random": Shape("llama", (768, 2048, 12, 12, 12, 32000, 8192)),
    # Layers as wide as a real model's, few enough for a CPU.
    "llama-7b-2-layers-random": Shape("llama", (4096, 11008, 2, 32, 32, 1000, 4096)),
    "llama-8b-random": Shape("llama", (4096, 14336, 32, 32, 8, 128256, 131072)),
    "llava-1.5-7b-random": Shape("llava", (4096, 11008, 32, 32, 32, 32064, 4096)),
    "llava-1.5-13b-random": Shape("llava", (5120, 13824, 40, 40, 40, 32064, 4096)),
    "mistral-7b-random": Shape("mistral", (4096, 14336, 32, 32, 8, 32000, 32768)),
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
    fields: dict[str, Any] = dict(zip(_SIZES, shape.sizes, strict=True))
    if shape.kind == "mistral":
        fields["sliding_window"] = None
    config: Any = hf.AutoConfig.for_model(shape.kind.replace("llava", "llama"), **fields)
    maker: Any = hf.AutoModelForCausalLM
    if shape.kind == "llava":
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


class Reply:
    """A batch in the middle of its greedy reply: the prompt is read, and steps can be asked for.

    The device is synchronised around what is timed, nowhere else. `ids` are int64 [B, N], without
    padding; `warm` steps follow at once, as warm-up; `cache` is empty, None takes the model's own.

    Attributes:
        prefill_s: seconds to the first token.
    """

    def __init__(self, model: Any, ids: Tensor, warm: int = 0, cache: Any = None) -> None:
        self.device, self.seen, self.token = ids.device, ids.shape[1], ids
        self.model: Any = model
        self.cache: Any = cache
        gc.collect()
        start = self._now()
        self._forward(attention_mask=torch.ones_like(ids), logits_to_keep=1)
        self.prefill_s = self._now() - start
        # As `generate` does: for each step it calls the model, or what replays it.
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = _LONG
        if model._valid_auto_compile_criteria({CACHE: self.cache}, config):
            self.model = model.get_compiled_call(config.compile_config)
        self.steps(warm)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the cache really holds."""
        if hasattr(self.cache, "nbytes"):
            return self.cache.nbytes
        found = (getattr(x, name, None) for x in self.cache.layers for name in ("keys", "values"))
        storages = [x.untyped_storage() for x in found if isinstance(x, Tensor)]
        return sum({x.data_ptr(): x.nbytes() for x in storages}.values())

    def steps(self, number: int) -> float:
        """Seconds of so many more decode steps."""
        start = self._now()
        for _ in range(number):
            # Without padding a step's mask says nothing; looking at it would make a GPU wait.
            at = torch.full_like(self.token, self.seen)
            self._forward(attention_mask=None, position_ids=at, return_dict=True)
            self.seen += 1
        return self._now() - start

    def close(self) -> None:
        """Let go of the cache."""
        self.cache = self.model = None

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @torch.no_grad()
    def _forward(self, **inputs: Any) -> None:
        inputs |= {"input_ids": self.token, "use_cache": True, CACHE: self.cache}
        out = self.model(**inputs)
        self.cache, self.token = cache_in(out), out.logits[:, -1:].argmax(-1)
