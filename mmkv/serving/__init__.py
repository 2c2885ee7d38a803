"""Continuous batching over a wrapped model: many requests, one batch, a promised size of cache."""

from mmkv.serving.engine import Engine, EngineStats
from mmkv.serving.reply import Busy, Closed, Event, Refused, Reply, Sampling, Usage

__all__ = [
    "Busy",
    "Closed",
    "Engine",
    "EngineStats",
    "Event",
    "Refused",
    "Reply",
    "Sampling",
    "Usage",
]
