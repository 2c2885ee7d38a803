"""What the small heads' attention needs to know of the model runner's batch and model."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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


@dataclass
class State:
    """The plugin's state for one model runner of vLLM.

    Attributes:
        step: the batch of the step that runs.
        boundaries: where each request's prompt is compressed.
        seen: queries [tokens, heads, D] of prompts that are being read, by request and layer.
        computed: what is computed once of the model's weights.
    """

    step: StepBatch = field(default_factory=StepBatch)
    boundaries: dict[str, int] = field(default_factory=dict[str, int])
    seen: dict[str, dict[str, list[Tensor]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    computed: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def note(self, output: Any) -> None:
        """Note the requests that a step starts, resumes or ends."""
        started = getattr(output, "mmkv", {})
        for name in [*output.finished_req_ids, *started]:
            self.boundaries.pop(name, None)
            self.seen.pop(name, None)
        self.boundaries.update(started)

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what a function computes, and keep it under this key."""
        if key not in self.computed:
            self.computed[key] = compute()
        return self.computed[key]


# The model runner whose step runs; a weak reference, so that an engine that has ended is freed.
_running: Any = None


def runner() -> Any:
    """Return the model runner whose step runs."""
    return _running()


def state() -> State:
    """Return the state of the model runner whose step runs."""
    return runner().mmkv


def _state_of(model_runner: Any) -> State | None:
    """Return the state of a model runner, made if needed; None if the plugin is off."""
    if not hasattr(model_runner, "mmkv"):
        model_runner.mmkv = None if Settings.of(model_runner.vllm_config) is None else State()
    return model_runner.mmkv


def image_tokens(request: str, length: int) -> Tensor:
    """Return which of a request's first tokens are those of pictures, bool [length]."""
    marks = torch.zeros(length, dtype=torch.bool)
    for feature in runner().requests[request].mm_features:
        place = feature.mm_position
        end = min(length, place.offset + place.length)
        if place.offset < end:
            of_it = marks[place.offset : end]
            of_it |= True if place.is_embed is None else place.is_embed[: len(of_it)].cpu()
    return marks


def rotary(part: Any) -> tuple[Tensor, Tensor, bool] | None:
    """Return cos and sin [positions, R] of a part's layer, and whether dimensions interleave."""
    module = _neighbour(part.layer, ("rotary_emb",))
    return None if module is None else state().once(module, partial(_table, module))


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
    layer, module = part.layer, _neighbour(part.layer, _OUTPUTS)
    assert module is not None
    group, dim = layer.num_heads // layer.num_kv_heads, layer.head_size
    with layer.kv_cache.device:
        at = torch.tensor(part.heads)[:, None] * group * dim + torch.arange(group * dim)
        columns = torch.zeros(at.numel(), module.input_size_per_partition, dtype=layer.dtype)
        columns[torch.arange(at.numel()), at.flatten()] = 1.0
    out = module.quant_method.apply(module, columns, bias=None)
    return out.unflatten(0, (-1, dim)).mT


def of_output_weights(part: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function of `output_weights`, and keep it for the next prompt."""
    return state().once((part, function), lambda: function(output_weights(part)))


def _neighbour(layer: Any, names: tuple[str, ...]) -> Any:
    """Return the first of the modules that stands next to the attention which `layer` is part of.

    vLLM's name of a layer is no path in some models of pictures, so modules are found by identity.
    """
    parents = state().once("parents", _parents)
    module = parents[parents[layer]]
    return next((getattr(module, x) for x in names if getattr(module, x, None) is not None), None)


def _parents() -> dict[Any, Any]:
    """Return the parent of each of the model's modules."""
    return {child: x for x in runner().get_model().modules() for child in x.children()}


def _clearing(replaces: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that replaces weights, and then clears what was computed of old ones."""

    @functools.wraps(replaces)
    def replacing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return replaces(self, *args, **kwargs)
        finally:
            if (own := _state_of(getattr(self, "model_runner", self))) is not None:
                own.computed.clear()

    return replacing


def register() -> None:
    """Note the batch of each step of vLLM's model runner (V1), and weights that are replaced."""
    update, build = GPUModelRunner._update_states, GPUModelRunner._build_attention_metadata
    if getattr(update, "mmkv", False):
        return

    @functools.wraps(update)
    def noting(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if (own := _state_of(self)) is not None:
            own.note(scheduler_output)
        return update(self, scheduler_output, *args, **kwargs)

    @functools.wraps(build)
    def building(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _running
        if (own := _state_of(self)) is not None:
            names = list(self.input_batch.req_ids)
            boundaries = np.array([own.boundaries[x] for x in names], np.int64)
            own.step, _running = StepBatch(names, boundaries), weakref.ref(self)
        return build(self, *args, **kwargs)

    noting.mmkv = True  # type: ignore[attr-defined]
    GPUModelRunner._update_states = noting
    GPUModelRunner._build_attention_metadata = building
    GPUModelRunner.reload_weights = _clearing(GPUModelRunner.reload_weights)
    Worker.finish_weight_update = _clearing(Worker.finish_weight_update)
