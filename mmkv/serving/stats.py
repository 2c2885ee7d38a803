"""What an engine says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now, and did so far.

    Attributes:
        running: requests whose replies grow.
        waiting: requests that were not begun.
        prefilling: requests whose prompts are being read: 0 or 1.
        cache_bytes: of keys and values, of all requests and shared prefixes.
        cache_memory: what was promised; None: nothing.
        reserved_bytes: what they may come to.
        tokens_generated: so far.
        prompt_tokens: read so far.
        requests_done: ended so far, for whatever reason.
        prefixes: that are held to be shared.
        prefix_hits: requests that found theirs read.
        step_seconds: of the last decode step.
        steps: decode steps so far.
    """

    running: int
    waiting: int
    prefilling: int
    cache_bytes: int
    cache_memory: int | None
    reserved_bytes: int
    tokens_generated: int
    prompt_tokens: int
    requests_done: int
    prefixes: int
    prefix_hits: int
    step_seconds: float
    steps: int
