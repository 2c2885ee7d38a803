"""Continuous batching over a wrapped model: many requests, one batch, a promised size of cache."""

from mmkv.serving.engine import Engine
from mmkv.serving.reply import Busy, Closed, Event, Refused, Reply, Sampling, Usage
from mmkv.serving.worker import EngineStats

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
