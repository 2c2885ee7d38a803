"""Continuous batching over a wrapped model: many requests, one batch, a promised size of cache."""

from mmkv.serving.engine import Engine, EngineStats
from mmkv.serving.reply import Event, Refused, Reply, Sampling, Usage

__all__ = ["Engine", "EngineStats", "Event", "Refused", "Reply", "Sampling", "Usage"]
