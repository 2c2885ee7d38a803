"""Several engines behind one server, each in its own process, by Ray Serve.

Requests with a prefix go to the replica that has read it, unless it is busy; if it dies, to others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.request_router import RequestRouter

from .engine import make_engine
from .errors import RequestError
from .reply import Busy, Closed, Event, Refused, Sampling, Usage

_log = logging.getLogger(__name__)
_NAME = "mmkv"
_MAX_TRIES = 4
_SUMMED = ("waiting", "prefilling", "cache_bytes", "cache_memory", "prefixes")


class _Replica:
    """One engine, in a process of Ray."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._engine, self._name = make_engine(**settings), random.randbytes(8).hex()

    async def reply(self, key: str, arguments: dict[str, Any]) -> AsyncGenerator[tuple[str, Any]]:
        """Yield the events of a reply, and last how it ended; `key` is for the router alone."""
        try:
            reply = await asyncio.to_thread(self._engine.submit, **arguments)
            try:
                async for event in reply:
                    yield "event", (event, reply.usage)
            finally:
                reply.cancel()
        except Exception as error:
            yield "error", _portable(error)
            return
        stats = self._engine.stats()
        sums = {name: getattr(stats, name) or 0 for name in _SUMMED}
        yield "end", (reply.finish_reason, reply.usage, self._name, sums)

    async def tokenize(self, key: str, arguments: dict[str, Any]) -> list[int] | Exception:
        """Return the tokens, or the error."""
        try:
            return await asyncio.to_thread(self._engine.tokenize, **arguments)
        except Exception as error:
            return _portable(error)


def _portable(error: Exception) -> Exception:
    """Return an error that the server's process can unpickle, of a class that it knows."""
    if isinstance(error, Refused | Busy | Closed):
        return error.with_traceback(None)
    if isinstance(error, ValueError):
        return Refused(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Reply:
    """A reply from a replica, used like `Reply`; requested from another one if that dies."""

    def __init__(self, replicas: Replicas, key: str, arguments: dict[str, Any]) -> None:
        self.finish_reason: str | None = None
        self.usage = Usage()
        self.cancelled = False
        self._replicas, self._key, self._given = replicas, key, arguments
        self._tokens = list[int]()
        timeout = arguments.get("timeout")
        # By the clock of the event loop, for `asyncio.timeout_at`.
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._answers = replicas.ask(key, arguments)

    def cancel(self) -> None:
        """End the reply."""
        if self.finish_reason is None:
            self.cancelled = True
            self._answers.cancel()

    async def __aiter__(self) -> AsyncGenerator[Event]:
        self._replicas.live += 1
        try:
            for tries in range(1, _MAX_TRIES + 1):
                try:
                    async for event in self._events_of_one():
                        yield event
                    return
                except (TaskCancelledError, asyncio.CancelledError):
                    if self.cancelled:
                        return
                    raise  # of the reading task, not of the reply
                except RayError as error:
                    if self._replicas.closed:
                        return
                    _log.warning("a replica was lost (%s)", type(error).__name__)
                    if tries == _MAX_TRIES:
                        raise _lost() from error
                await asyncio.sleep(0.2 * tries)
                self._answers = await asyncio.to_thread(self._replicas.ask, self._key, self._given)
        except Exception:
            self.finish_reason = "error"
            raise
        finally:
            self._replicas.live -= 1
            self.finish_reason = self.finish_reason or "cancelled"  # also if left early
            self._answers.cancel()

    async def _events_of_one(self) -> AsyncGenerator[Event]:
        """Yield the further events of one replica; earlier ones must equal those sent already."""
        n_read, answers = 0, aiter(self._answers)
        while True:
            try:
                async with asyncio.timeout_at(self._deadline):
                    kind, content = await anext(answers)
            except StopAsyncIteration:
                return
            except TimeoutError:  # the replica that checks it may be gone
                self.finish_reason = "timeout"
                return
            if kind == "event":
                event, self.usage = content
                if n_read == len(self._tokens):
                    self._tokens.append(event.token)
                    self._replicas.tokens += event.token >= 0
                    yield event
                elif event.token != self._tokens[n_read]:
                    raise _lost()
                n_read += 1
            elif kind == "end":
                self.finish_reason, self.usage, name, sums = content
                self._replicas.note(name, sums, self.usage)
            else:
                raise content


def _lost() -> RequestError:
    return RequestError("the replica was lost; try again", status=503)


class Replicas:
    """Engines in a Ray cluster, with the methods of `Engine` that the server uses.

    Args:
        settings: arguments of `make_engine`, for each engine.
        replicas: number of engines, each with `gpus` GPUs.
        max_replicas: most engines under load; None: always `replicas`.
        target_requests: requests that a replica has before another one is started, or before
            further requests of a prefix go to others.
        address: of a running cluster; None starts one on this computer, for loopback only.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        replicas: int = 2,
        max_replicas: int | None = None,
        target_requests: int = 16,
        gpus: float = 0,
        address: str | None = None,
    ) -> None:
        if max_replicas is not None and max_replicas < replicas:
            raise ValueError(f"max_replicas={max_replicas}: fewer than replicas={replicas}")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.live, self.tokens, self.closed = 0, 0, False
        self._n_done = self._n_hits = 0
        self._sums: dict[str, Mapping[str, int]] = {}
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init("local" if address is None else address, **options)
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._local = address is None
        try:
            serve.start(proxy_location="Disabled")  # the server of `mmkv serve` takes its place
            deployment = _deployment(replicas, max_replicas, target_requests, gpus)
            self._handle: Any = serve.run(deployment.bind(settings), name=_NAME, route_prefix=None)
        except BaseException:
            self.close()
            raise

    def submit(
        self, *, sampling: Sampling | None = None, repeated: bool = False, **arguments: Any
    ) -> _Reply:
        """Request a reply as `Engine.submit` does; the reply raises what is refused."""
        sampling = sampling or Sampling()
        if sampling.temperature > 0 and sampling.seed is None:
            # A second replica must draw the same tokens as the first.
            sampling = replace(sampling, seed=random.getrandbits(62))
        messages = arguments.get("messages") or []
        key = prefix_key(messages)
        if repeated and not key:
            prompt = repr((messages, arguments.get("prompt"))).encode()
            key = hashlib.blake2b(prompt, digest_size=16).hexdigest()
        return _Reply(self, key, {"sampling": sampling, "repeated": repeated, **arguments})

    def tokenize(self, **arguments: Any) -> list[int]:
        """Return tokens as `Engine.tokenize` does, by any replica."""
        tokens = self._handle.tokenize.remote("", arguments).result()
        if isinstance(tokens, Exception):
            raise tokens
        return tokens

    def ask(self, key: str, arguments: dict[str, Any]) -> Any:
        """Return the answers of the replica with this prefix, or of a less busy one."""
        return self._handle.options(stream=True).reply.remote(key, arguments)

    def note(self, name: str, sums: Mapping[str, int], usage: Usage) -> None:
        """Store the sums that a replica reports at the end of a reply."""
        self._sums[name] = sums
        self._n_done += 1
        self._n_hits += usage.shared

    def stats(self) -> Any:
        """Return sums over replicas, of when each last ended a reply; `running` is up to date."""
        return SimpleNamespace(
            **{name: sum(x[name] for x in self._sums.values()) for name in _SUMMED},
            running=self.live,
            tokens_generated=self.tokens,
            requests_done=self._n_done,
            prefix_hits=self._n_hits,
        )

    def close(self) -> None:
        """Stop the replicas, and the cluster if it was started here."""
        self.closed = True
        if not ray.is_initialized():
            return
        if not self._local:
            serve.delete(_NAME)
        ray.shutdown()


def _deployment(replicas: int, max_replicas: int | None, target_requests: int, gpus: float) -> Any:
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        autoscaling = {"min_replicas": replicas, "initial_replicas": replicas}
        autoscaling |= {"max_replicas": max_replicas, "target_ongoing_requests": target_requests}
        scaling = {"autoscaling_config": autoscaling}
    return serve.deployment(
        _Replica,
        name="engine",
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"busy": target_requests},
        },
        # No CPU is reserved, so that any number starts on any computer.
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
        max_ongoing_requests=4096,  # waiting ones too: the engine has its own queue
        health_check_period_s=2,
        graceful_shutdown_timeout_s=5,
        **scaling,
    )


def prefix_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash of system texts and pictures, by which requests share a prefix; or ""."""
    contents = list[bytes]()
    for message in messages:
        parts: Any = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if message["role"] == "system":
            contents += [x.get("text", "").encode() for x in parts]
        pictures = [x["image"] for x in parts if x["type"] == "image"]
        contents += [f"{x.size}".encode() + x.tobytes() for x in pictures]
    return hashlib.blake2b(b"".join(contents), digest_size=16).hexdigest() if contents else ""


def ranked(key: str, loads: Mapping[str, int], busy: int) -> list[str]:
    """Rank replicas for a key, the best first; `loads` has the requests of each by its name.

    Each key has its own order, which stays the same when replicas come or go. Replicas with too
    many requests (`busy` or fewer never are) come last. No state is kept, so a second request can
    follow the first at once.

    Source: rendezvous hashing with bounded loads (arXiv 1608.01350).
    """
    # 1.25 is `c` of the paper: the largest load, relative to the mean.
    max_load = max(busy, 1.25 * (sum(loads.values()) + 1) / max(len(loads), 1))

    def rank(name: str) -> tuple[bool, bytes]:
        digest = hashlib.blake2b(f"{key} {name}".encode(), digest_size=16).digest()
        return loads[name] >= max_load, digest

    return sorted(loads, key=rank)


class PrefixRouter(RequestRouter):
    """A router for deployments whose requests have their prefix's key as first argument."""

    def initialize_state(self, busy: int = 16, **_: Any) -> None:
        """Set the number of requests that are never too many for a replica."""
        self._busy = busy

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the candidates, best first; without a key all together, for Ray to choose."""
        key = pending_request.args[0] if pending_request is not None else ""
        if not key:
            return [candidate_replicas]
        replicas = {x.replica_id.unique_id: x for x in candidate_replicas}
        queue_lengths = self.replica_queue_len_cache
        loads = {name: queue_lengths.get(x.replica_id) or 0 for name, x in replicas.items()}
        return [[replicas[name]] for name in ranked(key, loads, self._busy)]
