"""What a pass runs in: inference mode, and gradients, which do not reach a cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def outside_inference_mode() -> AbstractContextManager[None]:
    """What is made in here is written to after the pass, which may run in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class _NoGradient(torch.autograd.Function):
    """The identity, which says at `backward` that gradients do not reach what is cached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise ValueError(
            "gradients cannot flow through a compressed cache: its keys and values are copies. "
            "Give the model the whole sequence in one pass, or mmkv.unwrap(model) to train it"
        )


def refuse_gradient(x: Tensor) -> Tensor:
    """x [B, q, Hq, D] as it is; a gradient that comes back to it is an error."""
    return _NoGradient.apply(x) if x.requires_grad else x  # type: ignore[return-value]
