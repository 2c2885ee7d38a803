"""Greedy replies of a model, and how fast they come."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmkv import Context


def timed(
    model: Any,
    inputs: Mapping[str, Any],
    limits: Sequence[int],
    pad: int,
    *,
    chunk: int | None = None,
    context: Context | None = None,
) -> tuple[list[list[int]], Any, dict[str, float], int]:
    """Greedy replies by `generate`, each up to an end and its limit, and how fast they came.

    Args:
        model: wrapped or not.
        inputs: of left-padded prompts, or of the questions behind a context.
        limits: most new tokens of each row.
        pad: the tokenizer's padding token.
        chunk: how many tokens of a prompt are read at a time; None: all.
        context: read without the questions, which is in neither time.

    Returns:
        tokens of each reply; the cache; "first_token_s" and "tokens_per_s"; and the cache's bytes
        once the prompt was read.
    """
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """When tokens come: first the prompt, then the first new ones."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.cache: Any = None
            self.nbytes = 0

        def watch(self, module: Any, args: Any, output: Any) -> None:
            self.cache = output.past_key_values

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())
            if len(self.times) == 2:
                self.nbytes = self.cache.nbytes

        def end(self) -> None:
            pass

    options: dict[str, Any] = {
        "max_new_tokens": max(limits),
        "do_sample": False,
        "num_beams": 1,
        "pad_token_id": pad,
        "return_dict_in_generate": True,
        "streamer": (clock := Clock()),
    }
    start = time.perf_counter()
    with torch.no_grad(), model.register_forward_hook(clock.watch):
        if context is not None:
            out = context.ask(inputs, **options)
            new = out.sequences.tolist()
        else:
            out = model.generate(**inputs, **options, prefill_chunk_size=chunk)
            new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - start
    ends = ends_of(model)
    replies: list[list[int]] = []
    total = 0
    for ids, limit in zip(new, limits, strict=True):
        stop = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1) + 1
        total += stop
        ids = ids[: min(stop, limit)]
        replies.append(ids)
    first = clock.times[1] - start
    times = {"first_token_s": round(first, 4), "tokens_per_s": round(total / seconds, 2)}
    return replies, out.past_key_values, times, clock.nbytes


def ends_of(model: Any) -> set[int]:
    """Tokens that end a reply."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())
