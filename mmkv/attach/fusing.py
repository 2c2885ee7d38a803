"""RMS norms, rotary embeddings and gated activations of a decode step, as one kernel each.

A module is changed only if its code is the same, instruction by instruction, as that of Llama in
the installed transformers, which most decoders repeat; any other is left as it is. What changes is
the `forward` of single modules, and for rotary embeddings the globals of a copy of it. Neither is
shared between models, so other threads may run models of the same class meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mmkv import kernels

_LLAMA = "transformers.models.llama.modeling_llama"
_ROTARY = "apply_rotary_pos_emb"  # its name in attention modules


@contextmanager
def fused(model: nn.Module) -> Generator[None]:
    """Run the model's decode steps with fewer kernels; every module is restored at the end.

    Nothing changes where kernels are not `wanted`, as on a CPU, nor in modules that have a
    `forward` of their own, such as those with a hook of accelerate. Several threads may enter with
    one model: the first to change a module restores it, and the others compute the same without.
    """
    changed: list[tuple[nn.Module, Any]] = []
    try:
        if any(kernels.wanted(x, wide=True) for x in model.parameters()):
            for module in model.modules():
                forward = _replacement(module)
                if forward and vars(module).setdefault("forward", forward) is forward:
                    changed.append((module, forward))
        yield
    finally:
        for module, forward in changed:
            if vars(module).get("forward") is forward:
                del vars(module)["forward"]


def _replacement(module: nn.Module) -> Callable[..., Any] | None:
    """What replaces a module's forward; None where its code is not known."""
    from transformers.activations import SiLUActivation
    from transformers.models.llama import modeling_llama as llama

    own = getattr(type(module), "forward", None)
    if not isinstance(own, FunctionType):
        return None
    if _same(own, llama.LlamaRMSNorm.forward):
        return partial(_rms_norm, module)
    if _same(own, llama.LlamaMLP.forward):
        act: Any = module.act_fn
        hooked = act._forward_hooks or act._forward_pre_hooks or "forward" in vars(act)
        known = type(act) in (nn.SiLU, SiLUActivation) and not hooked
        return partial(_mlp, module) if known else None
    rotary = own.__globals__.get(_ROTARY)
    if _ROTARY not in own.__code__.co_names or not _same(rotary, llama.apply_rotary_pos_emb):
        return None
    changed = {**own.__globals__, _ROTARY: partial(_rotary, rotary)}
    copy = FunctionType(own.__code__, changed, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return partial(copy, module)


def _same(function: Any, known: Any) -> bool:
    """Whether a function has the code of one of Llama's, and so has each function it calls.

    False for wrapped functions, which have a closure, for the modules that the package `kernels`
    makes of functions, and where another package replaced Llama's own.
    """
    if not callable(known):  # torch, or None for the name of an attribute
        return function is known
    if not isinstance(function, FunctionType) or not isinstance(known, FunctionType):
        return False
    if function.__closure__ or known.__closure__ or known.__module__ != _LLAMA:
        return False

    def code(f: FunctionType) -> Any:
        c = f.__code__
        constants = [x for x in c.co_consts if x != f.__doc__]
        return c.co_code, c.co_names, c.co_varnames, constants, f.__defaults__

    return code(function) == code(known) and all(
        _same(function.__globals__.get(name), known.__globals__.get(name))
        for name in known.__code__.co_names
    )


def _fit(*tensors: Tensor) -> bool:
    """Whether kernels compute these: they know neither gradients nor subclasses of tensors."""
    plain = all(type(x) in (Tensor, nn.Parameter) for x in tensors)
    return plain and not torch.is_grad_enabled() and kernels.wanted(*tensors, wide=True)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    if not _fit(x, module.weight) or module.weight.shape != x.shape[-1:]:
        return type(module).forward(module, x)
    return kernels.rms_norm(x, module.weight, module.variance_epsilon)


def _mlp(module: Any, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    product = kernels.silu_mul(gate, up) if _fit(gate, up) else module.act_fn(gate) * up
    return module.down_proj(product)


def _rotary(
    own: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    shape = (len(q), *q.shape[2:])  # [B, N, D]
    fits = unsqueeze_dim == 1 and q.ndim == 4 and (len(k), *k.shape[2:]) == shape
    fits &= cos.shape == sin.shape and tuple(cos.shape) in (shape, (1, *shape[1:]))
    if not fits or not _fit(q, k, cos, sin):
        return own(q, k, cos, sin, unsqueeze_dim)
    return kernels.rotate(q, k, cos, sin)
