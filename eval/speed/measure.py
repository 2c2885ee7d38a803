"""A prompt and decode steps behind it: how long they take, and what they hold.

Imports nothing of mmkv: kvpress's environment, in which mmkv is not installed, loads this file too.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# New tokens that a reply is announced to have: a graph pays for any such.
_LONG = 1024


class Reply:
    """A batch in the middle of its greedy reply: the prompt is read, and steps can be asked for.

    The device is synchronised around what is timed, nowhere else.

    Args:
        model: wrapped or not.
        ids: int64 [B, N], without padding.
        warm: steps to take at once, which count as warm-up.
        cache: empty, to be filled; None: the model's own.

    Attributes:
        start: seconds to the first token ("prefill_s") and of the warm-up, a GPU's capture included
            ("warm_s"); bytes that the cache held after the prompt ("prefill_cache_bytes"), and on a
            GPU the most that was allocated so far beyond what was there before ("peak_bytes").
    """

    def __init__(self, model: Any, ids: Tensor, warm: int = 0, cache: Any = None) -> None:
        self.device, self.seen, self.token = ids.device, ids.shape[1], ids
        self.model: Any = model
        self.cache: Any = cache
        gpu, before = self.device.type == "cuda", 0
        gc.collect()
        if gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        self.start: dict[str, Any] = {"prefill_s": self._seconds(self._read)}
        self.start["prefill_cache_bytes"] = self.nbytes
        # As `generate` does: for each step it calls the model, or what replays it.
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = _LONG
        if model._valid_auto_compile_criteria({"past_key_values": self.cache}, config):
            self.model = model.get_compiled_call(config.compile_config)
        self.start["warm_s"] = self.steps(warm)
        most = torch.cuda.max_memory_allocated(self.device) if gpu else 0
        self.start["peak_bytes"] = most - before if gpu else None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that the cache really holds."""
        counted = getattr(self.cache, "nbytes", None)
        if isinstance(counted, int):
            return counted
        found = (getattr(x, name, None) for x in self.cache.layers for name in ("keys", "values"))
        storages = [x.untyped_storage() for x in found if isinstance(x, Tensor) and x.numel()]
        return sum({x.data_ptr(): x.nbytes() for x in storages}.values())

    def steps(self, number: int) -> float:
        """Seconds of so many more decode steps."""
        return self._seconds(lambda: [self._step() for _ in range(number)])

    def close(self) -> None:
        """Let go of the cache."""
        self.cache = self.model = None

    def _seconds(self, work: Callable[[], Any]) -> float:
        start = self._now()
        work()
        return self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _read(self) -> None:
        self._forward(attention_mask=torch.ones_like(self.token), logits_to_keep=1)

    def _step(self) -> None:
        # Without padding a step's mask says nothing; looking at it would make a GPU wait.
        at = torch.full_like(self.token, self.seen)
        self._forward(attention_mask=None, position_ids=at, return_dict=True)
        self.seen += 1

    @torch.no_grad()
    def _forward(self, **inputs: Any) -> None:
        out = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True, **inputs)
        self.cache, self.token = out.past_key_values, out.logits[:, -1:].argmax(-1)
