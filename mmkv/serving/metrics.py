"""Metrics for Prometheus: the engine's counts, and times as clients see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# Fields of `EngineStats`: the metric's name after "mmkv_", and its description.
_GAUGES = {
    "waiting": ("requests_waiting", "Requests that wait for memory or a place in the batch"),
    "prefilling": ("requests_prefilling", "Requests whose prompt is being read"),
    "running": ("requests_running", "Requests in the batch that generates"),
    "cache_bytes": ("cache_bytes", "Bytes that all caches hold"),
    "cache_memory": ("cache_memory_bytes", "Bytes that they may hold"),
    "prefixes": ("prefixes", "Prefixes that are kept for requests to come"),
}
_COUNTERS = {
    "tokens_generated": ("tokens_generated", "Tokens generated"),
    "requests_done": ("requests_done", "Requests that the engine has ended, however they ended"),
    "prefix_hits": ("prefix_hits", "Requests whose prefix was there already"),
}
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


class Metrics(Collector):
    """The metrics of one server; the engine's counts are collected at each scrape."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._registry = engine, CollectorRegistry()
        self._registry.register(self)
        extra: Any = {"namespace": "mmkv", "registry": self._registry}
        text = "Requests answered, by how they ended"
        self._answers = Counter("answers", text, ["ended"], **extra)
        text = "From a request's arrival to its first token"
        self._first = Histogram("time_to_first_token_seconds", text, buckets=_SECONDS, **extra)
        text = "From a token to the next of the same answer"
        self._next = Histogram("time_between_tokens_seconds", text, buckets=_TOKEN_SECONDS, **extra)
        text = "Share of a prompt's tokens that its cache kept"
        self._kept = Histogram("kept_share", text, buckets=_SHARES, **extra)

    def collect(self) -> Iterable[Metric]:
        """Yield one metric for each count of the engine."""
        stats = self._engine.stats()
        for names, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for field, (name, text) in names.items():
                value = getattr(stats, field)
                if value is not None:  # None: no limit of the cache memory
                    yield kind(f"mmkv_{name}", text, value=value)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def ended(self, reason: str) -> None:
        """Count a request by its finish reason, or by the error's HTTP status."""
        self._answers.labels(reason).inc()

    def kept(self, tokens: float, of: int) -> None:
        """Record how many tokens were kept `of` those of a prompt."""
        self._kept.observe(tokens / of if of else 1.0)

    def clock(self) -> Callable[[], None]:
        """Start a clock for a request; return a function to call at each token."""
        histogram, last = self._first, time.monotonic()

        def token() -> None:
            nonlocal histogram, last
            now = time.monotonic()
            histogram.observe(now - last)
            histogram, last = self._next, now

        return token
