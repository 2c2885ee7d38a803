"""Models for timing, with random weights in the shape of real ones, and timed replies.

It is also imported in kvpress's environment, for its `Replies`, so of mmkv it imports only
`mmkv.calls`.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Generator
from importlib import import_module
from importlib.metadata import distributions
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from mmkv.calls import CACHE, cache_in, twin

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
# "llama" or "llava" (a Llama with LLaVA-1.5's vision tower), and values of `_SIZES`.
Shape = tuple[str, tuple[int, ...]]
SHAPES: dict[str, Shape] = {
    "llama-120m-random": ("llama", (768, 2048, 12, 12, 12, 32000, 8192)),
    # Layers as wide as a real model's, few enough for a CPU.
    "llama-7b-2-layers-random": ("llama", (4096, 11008, 2, 32, 32, 1000, 4096)),
    "llama-8b-random": ("llama", (4096, 14336, 32, 32, 8, 128256, 131072)),
    "llava-1.5-7b-random": ("llava", (4096, 11008, 32, 32, 32, 32064, 4096)),
}


def make(shape: Shape, device: str, dtype: str = "auto") -> Any:
    """Return a model of this shape with random weights, in eval mode.

    Queries and keys have larger weights than in a fresh model, by a factor for each head, so that
    attention prefers some tokens, and heads differ for policies with sizes per head.
    """
    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    kind, sizes = shape
    fields: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    config: Any = hf.LlamaConfig(**fields)
    maker: Any = hf.AutoModelForCausalLM
    if kind == "llava":
        config = hf.LlavaConfig(text_config=config, image_token_index=config.vocab_size - 1)
        maker = hf.AutoModelForImageTextToText
    torch.manual_seed(0)
    with torch.device(device):
        model = maker.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    text = config.get_text_config()
    with torch.no_grad(), torch.device(device):
        factors = torch.linspace(0.5, 1.5, text.num_attention_heads, dtype=model.dtype)
        for layer in model.get_decoder().layers:
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            for weight in (query, key):
                weight.normal_(0, (2 / text.hidden_size) ** 0.5)
            query.unflatten(0, (len(factors), -1)).mul_(factors[:, None, None])
    return model.eval()


def make_prompt(model: Any, batch: int, tokens: int) -> Tensor:
    """Return random token ids [batch, tokens] on the model's device, without image tokens."""
    vocab = model.get_input_embeddings().num_embeddings
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (batch, tokens), generator=g)
    for name in ("image_token_id", "video_token_id"):
        if (special := getattr(model.config, name, None)) is not None:
            ids[ids == special] = 0
    return ids.to(model.device)


def reply(model: Any, ids: Tensor, cache: Any = None) -> Generator[tuple[float, int]]:
    """Yield after a batch's prompt, and after each greedy decode step, which is made on demand.

    The device is synchronised only before and after what is timed.

    Args:
        ids: int64 [B, N], without padding.
        cache: an empty cache; None: the model makes its own.

    Yields:
        seconds to the first token, then of each step; bytes of the cache's storage.
    """
    gc.collect()  # so that no garbage collection is due within a step
    call, token, n_seen = model, ids, 0

    def forward(**inputs: Any) -> tuple[float, int]:
        nonlocal cache, token, n_seen
        n_seen += token.shape[1]
        start = now(ids.device)
        with torch.no_grad():
            out = call(input_ids=token, use_cache=True, **{CACHE: cache}, **inputs)
        cache, token = cache_in(out), out.logits[:, -1].argmax(-1, keepdim=True)
        return now(ids.device) - start, _cache_bytes(cache)

    yield forward(attention_mask=torch.ones_like(ids), logits_to_keep=1)
    # `generate` too makes steps by the model's compiled call, if the cache allows one.
    config = copy.deepcopy(model.generation_config)
    config.max_new_tokens = 1024  # graphs are replayed for long replies, where they pay off
    if model._valid_auto_compile_criteria({CACHE: cache}, config):
        call = model.get_compiled_call(config.compile_config)
    while True:
        # Without padding no mask is needed, and checking one would synchronise a GPU.
        position = torch.full_like(token, n_seen)
        yield forward(attention_mask=None, position_ids=position, return_dict=True)


def now(device: torch.device) -> float:
    """Return the time in seconds, after all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache's storages."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    tensors = (getattr(x, name, None) for x in cache.layers for name in ("keys", "values"))
    storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


class Replies:
    """A model in kvpress's environment, and its unfinished replies by label."""

    def __init__(self) -> None:
        self.model: Any = None
        self.replies: dict[str, Generator[tuple[float, int]]] = {}

    def load(
        self, device: str, dtype: str, threads: int, shape: Any = None, path: str = ""
    ) -> dict[str, Any]:
        """Make the model of a shape, or load it from a path; return the libraries' versions."""
        torch.set_num_threads(threads)
        if shape is not None:
            self.model = make(shape, device, dtype)
        else:
            maker: Any = hf.AutoModelForCausalLM
            model = maker.from_pretrained(path, dtype=getattr(torch, dtype), use_safetensors=True)
            self.model = model.to(device).eval()
        gc.collect()
        gc.freeze()
        versions: dict[str, Any] = dict.fromkeys(("kvpress", "transformers", "torch"))
        return versions | {x.name: x.version for x in distributions() if x.name in versions}

    def step(self, label: str, press: dict[str, Any], batch: int, prompt: int) -> tuple[float, int]:
        """Read a reply's random prompt, or make its next step; return its seconds, and the cache's
        bytes after it."""
        if label not in self.replies:
            ids = make_prompt(self.model, batch, prompt)
            self.replies[label] = self._reply(press, ids)
        return next(self.replies[label])

    def close(self, label: str) -> None:
        """Close a reply and free its memory."""
        self.replies.pop(label).close()

    def _reply(self, press: dict[str, Any], ids: Tensor) -> Generator[tuple[float, int]]:
        # A twin for each reply, as presses leave state on modules.
        model = twin(self.model)
        if press.get("eager"):
            model.set_attn_implementation("eager")
        # KVzip finds the cache among the model's arguments.
        steps = reply(model, ids, hf.DynamicCache(config=model.config))
        start = now(ids.device)
        # KVzip reads the prompt again when its context is left, by itself with gradients.
        with torch.no_grad(), _press(press)(model):
            _, nbytes = next(steps)
        yield now(ids.device) - start, nbytes
        yield from steps


def _press(spec: dict[str, Any]) -> Any:
    inner = [_press(spec["inner"])] if "inner" in spec else []
    return getattr(import_module("kvpress"), spec["name"])(*inner, **spec["options"])
