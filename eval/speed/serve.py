"""An engine under load: how long clients wait, and what fits in the same memory.

Requests come as a Poisson process, or from clients that each wait for their answer, with the same
bytes of cache for condense, for the full cache, and for `generate`, which answers one after
another. A soak lets clients come, go and break off instead, and checks that every reply is the one
it is alone.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mmkv
from mmkv import chat
from mmkv.builtin.scenes import draw, make_scene
from mmkv.builtin.texts import make_lookup
from mmkv.eval.speed.models import make_prompt
from mmkv.registry import exact_share
from mmkv.serving import Engine
from mmkv.serving.pool import Pool
from mmkv.serving.rows import RowCaches

Inputs = dict[str, Any]
# Tokens of a question about a text of random tokens.
_QUESTION = 16


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        inputs: all of its prompt.
        prefix: the part of it that requests share, if any.
        rest: what stands behind the prefix.
    """

    inputs: Inputs
    prefix: Inputs | None = None
    rest: Inputs | None = None


@dataclass
class Timing:
    """One request as its client saw it: seconds at which it was asked, and each token came."""

    asked: float
    tokens: list[float] = field(default_factory=list[float])

    @property
    def first(self) -> float:
        """Seconds until the first token."""
        return self.tokens[0] - self.asked

    @property
    def between(self) -> list[float]:
        """Seconds between tokens."""
        return np.diff(self.tokens).tolist()


Serve = Callable[[Asked, Timing], Awaitable[None]]


def make_requests(
    loaded: chat.Loaded, number: int, tokens: int, pictures: int, documents: int = 0
) -> list[Asked]:
    """Questions about long texts with pictures before them, of half to one and a half `tokens`.

    Without a processor, random tokens.

    Args:
        loaded: the model.
        number: of requests.
        tokens: of each text, about.
        pictures: before each text.
        documents: so many texts, with their pictures, of `tokens` each, are asked about in turn,
            and shared; 0: every request has its own.
    """
    rng = random.Random(0)
    found: list[Asked] = []
    for i in range(number):
        turn, about = divmod(i, documents or number)
        length = tokens if documents else rng.randrange(tokens // 2, tokens * 3 // 2)
        if loaded.processor is None:
            ids = make_prompt(loaded.model, 1, length, seed=about)
            question = make_prompt(loaded.model, 1, _QUESTION, seed=number + i)
            whole = {"input_ids": torch.cat([ids, question], dim=1) if documents else ids}
            empty: Inputs = {"input_ids": ids}
        else:
            shown = [draw(make_scene(8 * about + k)) for k in range(pictures)]
            text = make_lookup(about, tokens=length, records=8)
            question = text.questions[turn % len(text.questions)]
            whole = chat.encode(loaded, f"{text.text}\n{question.text}", shown)
            empty = chat.encode(loaded, f"{text.text}\n", shown) if documents else {}
        found.append(Asked(whole, *chat.split_inputs(whole, empty)) if documents else Asked(whole))
    return found


async def drive(
    serve: Serve, requests: Sequence[Asked], *, rate: float, clients: int
) -> list[Timing]:
    """Ask for all requests: `rate` a second at random, or one after another by each client."""
    timings: list[Timing] = []

    async def ask(asked: Asked) -> None:
        timings.append(timing := Timing(time.perf_counter()))
        await serve(asked, timing)

    if not clients:
        rng, tasks = random.Random(1), list[asyncio.Task[None]]()
        for asked in requests:
            tasks.append(asyncio.create_task(ask(asked)))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)
        return timings
    left = list(reversed(requests))

    async def client() -> None:
        while left:
            await ask(left.pop())

    await asyncio.gather(*(client() for _ in range(clients)))
    return timings


class ByEngine:
    """Requests go to an engine.

    Attributes:
        together: how many replies grew at once, at the most.
    """

    def __init__(self, engine: Engine, new: int) -> None:
        self.engine, self.new, self.together = engine, new, 0

    async def serve(self, asked: Asked, timing: Timing) -> None:
        """Ask, and note when each token comes."""
        inputs = asked.inputs if asked.rest is None else asked.rest
        reply = self.engine.submit(inputs=inputs, prefix=asked.prefix, max_new_tokens=self.new)
        async for _ in reply:
            timing.tokens.append(time.perf_counter())
            self.together = max(self.together, self.engine.stats().running)


class OneByOne:
    """Requests wait for `generate`, which answers one after another."""

    together = 1

    def __init__(self, model: Any, new: int) -> None:
        self.model, self.new = model, new
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    async def serve(self, asked: Asked, timing: Timing) -> None:
        """Wait for the turn, and for the answer."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self.waiting.put(
            (asked.inputs, timing, lambda: loop.call_soon_threadsafe(done.set_result, None))
        )
        await done

    def close(self) -> None:
        """End the thread."""
        self.waiting.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (asked := self.waiting.get()) is not None:
            inputs, timing, done = asked
            self.model.generate(**inputs, max_new_tokens=self.new, streamer=_Clock(timing))
            done()


class _Clock:
    """A streamer of `generate` that notes when each token came."""

    def __init__(self, timing: Timing) -> None:
        self.timing, self.prompt = timing, True

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            self.timing.tokens.append(time.perf_counter())
        self.prompt = False

    def end(self) -> None:
        pass


def summary(timings: Sequence[Timing], within: tuple[float, float]) -> list[str]:
    """Percentiles of what clients waited, tokens a second, and requests in time a second."""
    first = [x.first for x in timings]
    between = [s for x in timings for s in x.between]
    took = max(x.tokens[-1] for x in timings) - min(x.asked for x in timings)
    good = sum(x.first <= within[0] and np.mean(x.between) <= within[1] for x in timings)
    shown = [
        " / ".join(f"{scale * float(np.percentile(x, p)):.{digits}f}" for p in (50, 90, 99))
        for x, scale, digits in ((first, 1, 2), (between, 1000, 0))
    ]
    tokens = sum(len(x.tokens) for x in timings)
    return [*shown, f"{tokens / took:.1f}", f"{good / took:.2f}"]


@torch.no_grad()
def overhead(model: Any, rows: int, tokens: int, rounds: int = 5) -> tuple[float, float]:
    """Seconds of a step of `rows` requests as an engine makes it, and of one cache of `rows`."""

    def prompt(batch: int) -> Any:
        g = torch.Generator().manual_seed(0)
        ids = torch.randint(8, 200, (batch, tokens), generator=g).to(model.device)
        return model.generate(ids, max_new_tokens=1, return_dict_in_generate=True).past_key_values

    def step(cache: Any, seen: int) -> None:
        ids = torch.full((rows, 1), 9, device=model.device)
        at = torch.full_like(ids, seen)
        model(input_ids=ids, position_ids=at, past_key_values=cache, logits_to_keep=1)

    one, pool, apart = prompt(rows), Pool(), list[Any]()
    for cache in (prompt(1) for _ in range(rows)):
        if pool.takes(cache):
            pool.join(None, cache, rounds + 1)
        else:
            apart.append(cache)
    taken: list[list[float]] = [[], []]
    for i in range(rounds + 1):
        for cache, found in zip((RowCaches(apart, pool), one), taken, strict=True):
            start = time.perf_counter()
            step(cache, tokens + i)
            if torch.device(model.device).type == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    each, together = (float(np.median(x[1:])) for x in taken)
    return each, together


def soak(
    model: Any,
    requests: Sequence[Inputs],
    *,
    seconds: float,
    memory: int,
    new: int,
    clients: int,
) -> str:
    """Clients that come, go and break off; all replies are what they are alone, no byte stays.

    Raises:
        ValueError: a reply differs, or bytes are left.
    """
    wanted = [
        model.generate(**x, max_new_tokens=new)[0, x["input_ids"].shape[1] :].tolist()
        for x in requests
    ]
    rng, until = random.Random(2), time.monotonic() + seconds
    counts = {"whole": 0, "broken off": 0, "late": 0}
    most = [0]

    async def client(engine: Engine) -> None:
        while time.monotonic() < until:
            i, breaks = rng.randrange(len(requests)), rng.random()
            timeout = rng.uniform(0.05, 2) if 0.3 < breaks < 0.4 else None
            stream = engine.submit(inputs=requests[i], max_new_tokens=new, timeout=timeout)
            tokens, last = list[int](), rng.randrange(new) if breaks < 0.3 else new
            async for event in stream:
                tokens.append(event.token)
                most[0] = max(most[0], engine.stats().cache_bytes)
                if len(tokens) > last:
                    stream.cancel()
            if tokens != wanted[i][: len(tokens)]:
                raise ValueError(f"request {i}: {tokens}, alone {wanted[i]}")
            how = {"length": "whole", "stop": "whole", "timeout": "late"}
            counts[how.get(str(stream.finish_reason), "broken off")] += 1

    async def run() -> None:
        await asyncio.gather(*(client(engine) for _ in range(clients)))

    with Engine(model, cache_memory=memory, prefill_chunk=128) as engine:
        asyncio.run(run())
        left = engine.stats().cache_bytes
    if left or most[0] > memory:
        raise ValueError(f"{left} bytes are left, {most[0]} of {memory} were held")
    told = ", ".join(f"{n} {name}" for name, n in counts.items())
    return f"soak: {told}; all as alone, at most {most[0] / 1e6:.1f} MB, 0 bytes left"


def compare(
    model: Any,
    requests: Sequence[Asked],
    *,
    new: int,
    budget: float,
    memory: int,
    rate: float,
    clients: int,
    within: tuple[float, float],
    step_tokens: int,
    tell: Callable[[str], None],
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Condense, the full cache and `generate` under the same load.

    Args:
        model: not wrapped.
        requests: inputs of the model.
        new: tokens of each reply.
        budget: of condense.
        memory: bytes of keys and values of an engine.
        rate: requests a second, as for `drive`.
        clients: as for `drive`.
        within: as for `summary`.
        step_tokens: of each prompt where a step of 32 requests is timed.
        tell: is told what is being measured.

    Returns:
        Each way's `summary`, and how many replies grew at once, beside its name; and in words what
        a step of 32 requests takes.
    """
    rows: list[tuple[str, list[str]]] = []

    def measured(name: str, way: ByEngine | OneByOne) -> None:
        tell(name)
        # Warm-up: what is set up once, for new shapes too, is not the load's.
        asyncio.run(drive(way.serve, requests[:5], rate=rate, clients=1))
        timings = asyncio.run(drive(way.serve, requests, rate=rate, clients=clients))
        rows.append((name, [*summary(timings, within), str(way.together)]))

    steps = list[str]()
    for name, policy, kept in ((f"condense {budget:g}", "condense", budget), ("full", "full", 1.0)):
        with mmkv.wrapped(model, policy, kept, **exact_share(policy)):
            with Engine(model, cache_memory=memory, prefill_chunk=256) as engine:
                measured(name, ByEngine(engine, new))
            each, one = overhead(model, 32, step_tokens)
            steps.append(f"{name} {1000 * each:.0f} ms, as one cache {1000 * one:.0f} ms")
    alone = OneByOne(model, new)
    measured("generate, one by one", alone)
    alone.close()
    tell("")
    return rows, steps
