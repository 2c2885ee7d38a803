"""The changes that `wrap` makes to one model, and their undo.

Hooks and overrides are partial functions bound to an `Attachment`, not closures, so that a wrapped
model can be pickled, and its deep copy is a separate wrapped model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from mmkv.adapters import Adapter
from mmkv.attach import attention, copy_probe, graph, hooks
from mmkv.attach.generation import (
    prepare_cache,
    prepare_config,
    prepare_inputs,
    prepare_positions,
    refuse_batching,
)
from mmkv.cache.config import CacheConfig
from mmkv.calls import unwrap_container

_remembering = threading.Lock()


class Attachment:
    """A policy attached to a model.

    Attributes:
        model: the wrapped model.
        parts: its decoder, layers and attention modules.
        compressed: the layers that are compressed.
    """

    def __init__(
        self, model: nn.Module, parts: Adapter, plan: CacheConfig, compressed: tuple[int, ...]
    ) -> None:
        self.model, self.parts, self._plan, self.compressed = model, parts, plan, compressed
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._remembers = False

    @property
    def plan(self) -> CacheConfig:
        """Policy, budget and profile, with the copy probe's head sizes as soon as it can run."""
        if self._plan.waits_for_probe:
            self._plan = copy_probe.settled(self, self._plan)
        return self._plan

    def remember_inputs(self) -> None:
        """Record the inputs of attention modules in all later passes that repeat a prompt."""
        with _remembering:
            if not self._remembers:
                self._remembers = True
                for module in self.parts.attentions:
                    self._hook(module, "register_forward_pre_hook", hooks.before_repetition)

    def detach(self) -> None:
        """Undo the changes of the model, the latest first."""
        while self._undo:
            function, arguments = self._undo.pop()
            function(*arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register our attention functions too, as this may be another process."""
        vars(self).update(state)
        attention.register()

    def attach(self) -> None:
        """Change the model; each change is registered for undo before it is made."""
        attention.register()
        model, parts = self.model, self.parts
        view = attention.view(parts.config)
        for module in parts.decoder.modules():
            if vars(module).get("config") is parts.config:
                self._set(module, "config", view)

        overrides: dict[str, Any] = {
            "_valid_auto_compile_criteria": partial(graph.pays, model),
            "get_compiled_call": partial(graph.Runner, model),
            "_prepare_cache_for_generation": partial(prepare_cache, self),
            "_prepare_generation_config": partial(prepare_config, self),
            "prepare_inputs_for_generation": partial(prepare_inputs, self),
            "_prepare_position_ids_for_generation": partial(prepare_positions, self),
            "_ipython_display_": partial(_show, self),
        }
        for name in ("generate_batch", "init_continuous_batching"):
            if hasattr(model, name):
                overrides[name] = refuse_batching
        for name, function in overrides.items():
            self._set(model, name, function)
        if parts.facts.forward is not None:
            for module in parts.attentions:
                self._set(module, "forward", partial(parts.facts.forward, module))

        self._set(parts.decoder, "forward", partial(hooks.uncompiled, parts.decoder.forward))
        self._hook(parts.decoder, "register_forward_pre_hook", hooks.before_decoder)
        self._hook(parts.decoder, "register_forward_hook", hooks.after_decoder, always_call=True)
        self._hook(model, "register_forward_pre_hook", hooks.before_model)
        self._hook(model, "register_forward_hook", hooks.after_model, always_call=True)
        if self._plan.policy.score.uses_rotary:
            for i in self.compressed:
                attn = parts.attentions[i]
                self._hook(attn, "register_forward_pre_hook", partial(hooks.before_attention, i))
        if self._plan.needs_all_layers and self._plan.policy.layers.needs == "similarity":
            for i in self.compressed:
                layer, attn = parts.layers[i], parts.attentions[i]
                self._hook(layer, "register_forward_pre_hook", partial(hooks.before_layer, i))
                self._hook(attn, "register_forward_hook", partial(hooks.after_attention, i))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of one module instance, and register its undo."""
        was_set = name in vars(module)
        self._undo.append((_restore, (module, name, value, was_set, vars(module).get(name))))
        vars(module)[name] = value

    def _hook(
        self, module: nn.Module, register: str, hook: Callable[..., Any], **options: Any
    ) -> None:
        handle = getattr(module, register)(partial(hook, self), with_kwargs=True, **options)
        self._undo.append((handle.remove, ()))


def attachment_of(model: Any) -> Attachment:
    """Return the attachment of a wrapped model, or of the model inside a container such as PEFT's.

    Raises:
        ValueError: the model is not wrapped.
    """
    inner = unwrap_container(model)
    attachment: Attachment | None = vars(inner).get("_mmkv")
    if attachment is None:
        raise ValueError(
            f"this {type(inner).__name__} is not wrapped: call mmkv.wrap(model, ...) first"
        )
    return attachment


def _show(attachment: Attachment) -> None:
    """Print one line, not all modules, in a notebook cell that ends with `mmkv.wrap(...)`."""
    name = type(attachment.model).__name__
    print(f"{name}, wrapped: {attachment.plan.describe()}; print(model) shows its modules")


def _restore(module: nn.Module, name: str, value: Any, was_set: bool, original: Any) -> None:
    """Undo setting `value`, unless the attribute has been set to something else since.

    A hook that accelerate added later stays, and calls the original again.
    """
    attrs, saved = vars(module), f"_old_{name}"
    if attrs.get(saved) is value:
        attrs[saved] = original if was_set else getattr(type(module), name).__get__(module)
    if attrs.get(name) is not value:
        return
    if was_set:
        attrs[name] = original
    else:
        del attrs[name]
