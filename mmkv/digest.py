"""What tells models apart: a hash of a few of their numbers."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def of_model(model: Any, config: Any) -> str:
    """A hash of 64 numbers of each tensor of a model, adapters included, and of rotary options.

    Args:
        model: its tensors are read, wherever they are.
        config: of its text decoder.

    Raises:
        NotImplementedError: some tensors are on the meta device and have no numbers.
    """
    rotary = getattr(config, "rope_parameters", None)
    found = hashlib.sha256(json.dumps(rotary, default=str, sort_keys=True).encode())
    for name, x in model.state_dict().items():
        found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        some = x.detach().flatten()[:: max(1, x.numel() // 64)][:64].cpu()
        found.update(some.float().numpy().tobytes())
    return found.hexdigest()
