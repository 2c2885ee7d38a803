"""Linear layers of a step on a CPU: oneDNN reads a large float32 weight once, on all threads.

torch computes such products by oneMKL, which multiplies one row on a single thread and prepares the
weight anew for a few. Nearly all the time of a step on a CPU goes there, whatever a cache holds.
The results are the same to rounding. Anything else is computed as always: many rows, small weights,
other dtypes, gradients, autocast, weights that a library keeps in a form of its own, and under what
watches or replaces torch's operations. `torch.backends.mkldnn.flags(enabled=False)` turns it off.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Below, starting the product costs more than it wins; above, it is no faster than oneMKL's.
LEAST_NUMBERS, MOST_ROWS = 2**18, 32


def large_linears(model: nn.Module) -> Generator[nn.Linear]:
    """The linear layers of a model that `linear` may compute.

    None where torch came without oneDNN, nor modules with a `forward` of their own, such as those
    with a hook of accelerate.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module) and _large(module.weight):
            yield module


def linear(module: nn.Linear, input: Tensor) -> Tensor:
    """What `module.forward(input)` gives, to rounding: [..., in] to [..., out]."""
    if type(module) is not nn.Linear:  # a library made another class of it since
        return type(module).forward(module, input)
    weight, bias = module.weight, module.bias
    if not _fits(input, weight, bias) or not 0 < input.numel() // input.shape[-1] <= MOST_ROWS:
        return nn.Linear.forward(module, input)
    return _by_onednn(input, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        _large(weight)
        and type(x) is Tensor
        and x.layout is torch.strided
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (_plain(bias) and bias.shape == weight.shape[:1]))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not _watched()
        and all(y is None or unpack_dual(y).tangent is None for y in (x, weight, bias))
    )


def _watched() -> bool:
    """Whether torch's operations are recorded, counted or replaced, or oneDNN is switched off."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[reportPrivateImportUsage]
        or is_in_torch_dispatch_mode()
        or not torch.backends.mkldnn.enabled
    )


def _large(weight: Tensor) -> bool:
    return _plain(weight) and weight.numel() >= LEAST_NUMBERS


def _plain(x: Tensor) -> bool:
    """Whether it is a plain float32 parameter in a CPU's memory."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.layout is torch.strided
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
    )
