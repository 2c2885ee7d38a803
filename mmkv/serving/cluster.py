"""Several engines, each in a process of its own, through Ray Serve; one server is before them.

Requests that begin alike go to the same replica, which has read their prefix, while it is not busy.
One whose replica dies is asked again of another.
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
_TRIES = 4
_SUMMED = ("waiting", "prefilling", "cache_bytes", "cache_memory", "prefixes")


class _Replica:
    """One engine, in a process of Ray's."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._engine, self._name = make_engine(**settings), random.randbytes(8).hex()

    async def reply(self, key: str, given: dict[str, Any]) -> AsyncGenerator[tuple[str, Any]]:
        """What `_Reply` reads: events, and last how it ended. The router has read the key."""
        try:
            reply = await asyncio.to_thread(self._engine.submit, **given)
            try:
                async for event in reply:
                    yield "event", (event, reply.usage)
            finally:
                reply.cancel()
        except Exception as error:
            yield "error", _portable(error)
            return
        stats = self._engine.stats()
        held = {name: getattr(stats, name) or 0 for name in _SUMMED}
        yield "end", (reply.finish_reason, reply.usage, self._name, held)

    async def tokenize(self, key: str, given: dict[str, Any]) -> list[int] | Exception:
        """Tokens, or why there are none."""
        try:
            return await asyncio.to_thread(self._engine.tokenize, **given)
        except Exception as error:
            return _portable(error)


def _portable(error: Exception) -> Exception:
    """An error as the server's process can read it; its own class may not be known there."""
    if isinstance(error, Refused | Busy | Closed):
        return error.with_traceback(None)
    if isinstance(error, ValueError):
        return Refused(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class _Reply:
    """A reply from a replica, as `Reply` has it: asked again of another where its own dies."""

    def __init__(self, replicas: Replicas, key: str, given: dict[str, Any]) -> None:
        self.finish_reason: str | None = None
        self.usage = Usage()
        self.cancelled = False
        self._replicas, self._key, self._given = replicas, key, given
        self._tokens = list[int]()
        timeout = given.get("timeout")
        # The clock of the running loop, as `asyncio.timeout_at` takes it.
        self._end = None if timeout is None else time.monotonic() + timeout
        self._answers = replicas.ask(key, given)

    def cancel(self) -> None:
        """End the reply."""
        if self.finish_reason is None:
            self.cancelled = True
            self._answers.cancel()

    async def __aiter__(self) -> AsyncGenerator[Event]:
        self._replicas.live += 1
        try:
            for tries in range(1, _TRIES + 1):
                try:
                    async for event in self._of_one():
                        yield event
                    return
                except (TaskCancelledError, asyncio.CancelledError):
                    if self.cancelled:
                        return
                    raise  # ours, not the reply's
                except RayError as error:
                    if self._replicas.closed:
                        return
                    _log.warning("a replica was lost (%s)", type(error).__name__)
                    if tries == _TRIES:
                        raise _lost() from error
                await asyncio.sleep(0.2 * tries)
                self._answers = await asyncio.to_thread(self._replicas.ask, self._key, self._given)
        except Exception:
            self.finish_reason = "error"
            raise
        finally:
            self._replicas.live -= 1
            self.finish_reason = self.finish_reason or "cancelled"  # or left early
            self._answers.cancel()

    async def _of_one(self) -> AsyncGenerator[Event]:
        """The events of one replica; those that another gave already must be the same."""
        at, answers = 0, aiter(self._answers)
        while True:
            try:
                async with asyncio.timeout_at(self._end):
                    kind, what = await anext(answers)
            except StopAsyncIteration:
                return
            except TimeoutError:  # also where no replica is left to keep the time
                self.finish_reason = "timeout"
                return
            if kind == "event":
                event, self.usage = what
                if at == len(self._tokens):
                    self._tokens.append(event.token)
                    self._replicas.tokens += event.token >= 0
                    yield event
                elif event.token != self._tokens[at]:
                    raise _lost()
                at += 1
            elif kind == "end":
                self.finish_reason, self.usage, name, held = what
                self._replicas.note(name, held, self.usage)
            else:
                raise what


def _lost() -> RequestError:
    return RequestError("the replica was lost; try again", status=503)


class Replicas:
    """Engines in a Ray cluster; has what the server needs of an `Engine`.

    Args:
        settings: of each engine, as for `make_engine`.
        replicas: how many, each with so many `gpus`.
        max_replicas: start up to so many when requests pile up; None: as many as `replicas`.
        target_requests: what a replica has before another is started, or a prefix's other requests
            go elsewhere.
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
        self._done = self._hits = 0
        self._held: dict[str, Mapping[str, int]] = {}
        how: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            how |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ray.init("local" if address is None else address, **how)
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._local = address is None
        try:
            serve.start(proxy_location="Disabled")  # our server is before it
            made = _deployment(replicas, max_replicas, target_requests, gpus)
            self._handle: Any = serve.run(made.bind(settings), name=_NAME, route_prefix=None)
        except BaseException:
            self.close()
            raise

    def submit(
        self, *, sampling: Sampling | None = None, repeated: bool = False, **given: Any
    ) -> _Reply:
        """As `Engine.submit`, for messages and prompts; refusals come with the reply."""
        sampling = sampling or Sampling()
        if sampling.temperature > 0 and sampling.seed is None:
            # A second replica must draw what the first has drawn.
            sampling = replace(sampling, seed=random.getrandbits(62))
        messages = given.get("messages") or []
        key = prefix_key(messages)
        if repeated and not key:
            asked = repr((messages, given.get("prompt"))).encode()
            key = hashlib.blake2b(asked, digest_size=16).hexdigest()
        return _Reply(self, key, {"sampling": sampling, "repeated": repeated, **given})

    def tokenize(self, **given: Any) -> list[int]:
        """As `Engine.tokenize`, by any replica."""
        found = self._handle.tokenize.remote("", given).result()
        if isinstance(found, Exception):
            raise found
        return found

    def ask(self, key: str, given: dict[str, Any]) -> Any:
        """The answers of the replica that reads this prefix, or of one with less to do."""
        return self._handle.options(stream=True).reply.remote(key, given)

    def note(self, name: str, held: Mapping[str, int], usage: Usage) -> None:
        """Remember what a replica said of itself at the end of a reply."""
        self._held[name] = held
        self._done += 1
        self._hits += usage.shared

    def stats(self) -> Any:
        """Sums over the replicas, as each was when it last ended a reply; `running` is of now."""
        return SimpleNamespace(
            **{name: sum(x[name] for x in self._held.values()) for name in _SUMMED},
            running=self.live,
            tokens_generated=self.tokens,
            requests_done=self._done,
            prefix_hits=self._hits,
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
        limits = {"min_replicas": replicas, "initial_replicas": replicas}
        limits |= {"max_replicas": max_replicas, "target_ongoing_requests": target_requests}
        scaling = {"autoscaling_config": limits}
    return serve.deployment(
        _Replica,
        name="engine",
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"busy": target_requests},
        },
        # No processor is set aside, so that any number starts on any computer.
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
        max_ongoing_requests=4096,  # waiting included: the engine does its own queueing
        health_check_period_s=2,
        graceful_shutdown_timeout_s=5,
        **scaling,
    )


def prefix_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """What requests have in common that begin alike: a hash of system texts and pictures, or ""."""
    found = list[bytes]()
    for message in messages:
        parts: Any = message["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if message["role"] == "system":
            found += [x.get("text", "").encode() for x in parts]
        pictures = [x["image"] for x in parts if x["type"] == "image"]
        found += [f"{x.size}".encode() + x.tobytes() for x in pictures]
    return hashlib.blake2b(b"".join(found), digest_size=16).hexdigest() if found else ""


def ranked(key: str, loads: Mapping[str, int], busy: int) -> list[str]:
    """Replicas, the best first, by their names and how many requests each has.

    Each key has an order of all replicas, which others that come or go leave as it is; those with
    too many requests already (up to `busy` never are) come last. Nothing is remembered, so the
    second of two requests follows the first at once.

    Source: rendezvous hashing with bounded loads (arXiv 1608.01350).
    """
    # 1.25 is `c` of the paper, the largest load beside the mean.
    most = max(busy, 1.25 * (sum(loads.values()) + 1) / max(len(loads), 1))

    def rank(name: str) -> tuple[bool, bytes]:
        digest = hashlib.blake2b(f"{key} {name}".encode(), digest_size=16).digest()
        return loads[name] >= most, digest

    return sorted(loads, key=rank)


class PrefixRouter(RequestRouter):
    """Ray's own for a deployment whose requests have their prefix's key as the first argument."""

    def initialize_state(self, busy: int = 16, **_: Any) -> None:
        """Remember how many requests of a replica are never too many."""
        self._busy = busy

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """The candidates, best first; without a key, all of them, and Ray takes the idlest."""
        key = pending_request.args[0] if pending_request is not None else ""
        if not key:
            return [candidate_replicas]
        known = {x.replica_id.unique_id: x for x in candidate_replicas}
        held = self.replica_queue_len_cache
        loads = {name: held.get(x.replica_id) or 0 for name, x in known.items()}
        return [[known[name]] for name in ranked(key, loads, self._busy)]
