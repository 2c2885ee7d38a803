"""Linear layers of a step on a CPU: oneDNN reads a large float32 weight once, on all threads.

torch computes such products by oneMKL, which multiplies one row on a single thread and prepares the
weight anew for a few. Nearly all the time of a step on a CPU goes there, whatever a cache holds.
The results are the same to rounding. Anything else is computed as always: many rows, small weights,
other dtypes, gradients, autocast, weights that a library keeps in a form of its own.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

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


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """What `module.forward(x)` gives, to rounding: [..., in] to [..., out]."""
    if not _fits(x, module.weight) or not 0 < x.numel() // x.shape[-1] <= MOST_ROWS:
        return nn.Linear.forward(module, x)
    return _by_onednn(x, module.weight, module.bias)


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        _large(weight)
        and type(x) is Tensor
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[-1:] == weight.shape[1:]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _large(weight: Tensor) -> bool:
    """Whether it is a large plain float32 weight in a CPU's memory."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and weight.numel() >= LEAST_NUMBERS
    )
