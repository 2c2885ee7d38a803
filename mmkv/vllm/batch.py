"""What the small heads' attention needs to know of the model runner's batch and model."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from mmkv.vllm.settings import Settings

# Names of an attention module's output projection.
_OUTPUTS = ("o_proj", "dense", "out_proj")


@dataclass
class StepBatch:
    """The batch of a step, in the order of its rows; without rows in dummy runs."""

    requests: list[str] = field(default_factory=list[str])
    # Where each row's prompt is compressed; of a row that started with a hit, was compressed.
    boundaries: Any = field(default_factory=lambda: np.zeros(0, np.int64))
    built: dict[Any, Any] = field(default_factory=dict[Any, Any])  # what builders share


step = StepBatch()
# Queries [tokens, heads, D] of prompts that are being read, by request and layer.
seen: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
_boundaries: dict[str, int] = {}
_runner: Any = None


def image_tokens(request: str, length: int) -> Tensor:
    """Return which of a request's first tokens are those of pictures, bool [length]."""
    marks = torch.zeros(length, dtype=torch.bool)
    for feature in _runner.requests[request].mm_features:
        place = feature.mm_position
        end = min(length, place.offset + place.length)
        if place.offset < end:
            of_it = marks[place.offset : end]
            of_it |= True if place.is_embed is None else place.is_embed[: len(of_it)].cpu()
    return marks


def rotary(layer_name: str) -> tuple[Tensor, Tensor, bool] | None:
    """Return cos and sin [positions, R] of a layer, and whether dimensions interleave."""
    module = _neighbour(layer_name, ("rotary_emb",))
    return None if module is None else _table(module)


@functools.cache
def _table(module: Any) -> tuple[Tensor, Tensor, bool]:
    if (table := getattr(module, "cos_sin_cache", None)) is None:  # Phi-3's longrope
        n = module.original_max_position_embeddings
        both = module.long_short_cos_sin_cache
        table = both[n:] if module.use_long_rope else both[:n]
    cos, sin = table.float().chunk(2, -1)
    if getattr(module, "is_neox_style", True):
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), False
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1), True


def output_weights(part: Any) -> Tensor:
    """Return the output projection [Hq, hidden, D] of the query heads of a part of a layer.

    It is asked for its columns, as quantized or repacked weights cannot be read (vLLM's CPU linear
    layers delete theirs).
    """
    layer, module = part.layer, _neighbour(part.name, _OUTPUTS)
    assert module is not None
    group, dim = layer.num_heads // layer.num_kv_heads, layer.head_size
    with layer.kv_cache.device:
        at = torch.tensor(part.heads)[:, None] * group * dim + torch.arange(group * dim)
        columns = torch.zeros(at.numel(), module.input_size_per_partition, dtype=layer.dtype)
        columns[torch.arange(at.numel()), at.flatten()] = 1.0
    out = module.quant_method.apply(module, columns, bias=None)
    return out.unflatten(0, (-1, dim)).mT


@functools.cache
def of_output_weights(part: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function of `output_weights`, and keep it for the next prompt."""
    return function(output_weights(part))


def _neighbour(layer_name: str, names: tuple[str, ...]) -> Any:
    """Return the first of the modules that stands next to the attention `...self_attn.attn.h0`."""
    parent = _runner.get_model().get_submodule(layer_name.rsplit(".", 2)[0])
    return next((getattr(parent, x) for x in names if getattr(parent, x, None) is not None), None)


def _note(output: Any) -> None:
    """Note the requests that a step starts, resumes or ends."""
    started = getattr(output, "mmkv", {})
    for name in [*output.finished_req_ids, *started]:
        _boundaries.pop(name, None)
        seen.pop(name, None)
    _boundaries.update(started)


def _clearing(replaces: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that replaces weights, and then clears what was computed of old ones."""

    @functools.wraps(replaces)
    def replacing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return replaces(self, *args, **kwargs)
        finally:
            of_output_weights.cache_clear()

    return replacing


def register() -> None:
    """Note the batch of each step of vLLM's model runner (V1), and weights that are replaced."""
    update, build = GPUModelRunner._update_states, GPUModelRunner._build_attention_metadata
    if getattr(update, "mmkv", False):
        return

    @functools.wraps(update)
    def noting(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        _note(scheduler_output)
        return update(self, scheduler_output, *args, **kwargs)

    @functools.wraps(build)
    def building(self: Any, *args: Any, **kwargs: Any) -> Any:
        global step, _runner
        if Settings.of(self.vllm_config) is None:
            return build(self, *args, **kwargs)
        names = list(self.input_batch.req_ids)
        boundaries = np.array([_boundaries[x] for x in names], np.int64)
        step, _runner = StepBatch(names, boundaries), self
        return build(self, *args, **kwargs)

    noting.mmkv = True  # type: ignore[attr-defined]
    GPUModelRunner._update_states = noting
    GPUModelRunner._build_attention_metadata = building
    GPUModelRunner.reload_weights = _clearing(GPUModelRunner.reload_weights)
    Worker.finish_weight_update = _clearing(Worker.finish_weight_update)
