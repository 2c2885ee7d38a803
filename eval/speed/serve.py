"""An engine under load: how long clients wait, and what fits in the same memory.

Requests come as a Poisson process, or from clients that each wait for their answer. Condense and
the full cache have the same bytes of cache; `generate` answers one after another. Replies are as
long as asked for, and compared with the full cache's as far as they would have gone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import mmkv
from mmkv import chat
from mmkv.builtin.scenes import draw, make_scene
from mmkv.builtin.texts import make_lookup
from mmkv.eval.scoring import token_f1
from mmkv.eval.speed.models import make_prompt
from mmkv.eval.suites import documents as real
from mmkv.registry import exact_share
from mmkv.serving import Engine

Inputs = dict[str, Any]
# Tokens of a question about a text of random tokens.
_QUESTION = 16
COLUMNS = ("first token s, p50 / 90 / 99", "between tokens ms", "tokens/s", "at once", "F1")
_ASKED = (real.SUMMARY, *(x for x in real.QUESTIONS if "{" not in x))


class Asked(NamedTuple):
    """One request: all of its prompt; the part that requests share, if any; and the rest."""

    inputs: Inputs
    prefix: Inputs | None
    rest: Inputs


@dataclass
class Timing:
    """One request as its client saw it: seconds at which it was asked, and each token came; ids."""

    asked: float
    tokens: list[float] = field(default_factory=list[float])
    ids: list[int] = field(default_factory=list[int])
    together: int = 1  # requests that were answered at once meanwhile


Serve = Callable[[Asked, Timing], Awaitable[None]]


def make_requests(
    loaded: chat.Loaded,
    number: int,
    tokens: int,
    pictures: int,
    documents: int = 0,
    data: Path | None = None,
) -> list[Asked]:
    """Questions about long texts with pictures before them, of half to one and a half `tokens`.

    Without a processor, random tokens. With `documents`, so many texts of `tokens` each are shared.
    Texts are those of the folder `data`, as of the suite `documents`, or made-up look-ups.

    Raises:
        ValueError: the folder has fewer texts of that length.
    """
    rng, tokenizer = random.Random(0), loaded.tokenizer
    found: list[Asked] = []
    texts: list[tuple[str, str]] = []
    if data is not None:
        longest, wanted = tokens if documents else tokens * 3 // 2, documents or number
        texts = real.texts_of(data, longest, lambda text: len(tokenizer(text).input_ids))
        if len(texts) < wanted:
            raise ValueError(
                f"{data}: {len(texts)} texts have {longest} tokens or more, and {wanted} are asked "
                f"about: --documents {len(texts)}, or fewer --tokens"
            )
    for i in range(number):
        turn, about = divmod(i, documents or number)
        length = tokens if documents else rng.randrange(tokens // 2, tokens * 3 // 2)
        if loaded.processor is None:
            ids = make_prompt(loaded.model, 1, length, seed=about)
            question = make_prompt(loaded.model, 1, _QUESTION, seed=number + i)
            whole: Inputs = {"input_ids": torch.cat([ids, question], dim=1)}
            empty: Inputs = {"input_ids": ids}
        else:
            shown = [draw(make_scene(8 * about + k)) for k in range(pictures)]
            if data is None:
                lookup = make_lookup(about, tokens=length, records=8)
                text, asked = lookup.text, [x.text for x in lookup.questions]
            else:
                ids = tokenizer(texts[about][1], add_special_tokens=False).input_ids[:length]
                text, asked = tokenizer.decode(ids), _ASKED
            whole = chat.encode(loaded, f"{text}\n{asked[turn % len(asked)]}", shown)
            empty = chat.encode(loaded, f"{text}\n", shown)
        parts = chat.split_inputs(whole, empty) if documents else (None, whole)
        found.append(Asked(whole, *parts))
    return found


async def drive(
    serve: Serve, requests: Sequence[Asked], *, rate: float, clients: int
) -> list[Timing]:
    """Ask for all requests: `rate` a second at random, or one after another by each client."""
    timings: list[Timing] = []
    left, rng = iter(requests), random.Random(1)

    async def ask(asked: Asked) -> None:
        timings.append(timing := Timing(time.perf_counter()))
        await serve(asked, timing)

    async def client() -> None:
        for asked in left:
            await ask(asked)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
        for asked in () if clients else left:
            tasks.create_task(ask(asked))
            await asyncio.sleep(rng.expovariate(rate))
    return timings


def summary(timings: Sequence[Timing]) -> list[str]:
    """Percentiles of what clients waited, tokens a second, and how many were answered at once."""
    first = [x.tokens[0] - x.asked for x in timings]
    between = 1000 * np.concatenate([np.diff(x.tokens) for x in timings])
    took = max(x.tokens[-1] for x in timings) - min(x.asked for x in timings)
    tokens, wanted = sum(len(x.tokens) for x in timings), (50, 90, 99)
    return [
        " / ".join(f"{x:.2f}" for x in np.percentile(first, wanted)),
        " / ".join(f"{x:.0f}" for x in np.percentile(between, wanted)),
        f"{tokens / took:.1f}",
        str(max(x.together for x in timings)),
    ]


def agreement(loaded: chat.Loaded, some: Sequence[Timing], others: Sequence[Timing]) -> str:
    """The mean F1 of words of replies against others, each up to where it ends; "-": no text."""
    if loaded.processor is None:
        return "-"
    tokenizer = loaded.tokenizer

    def text(timing: Timing) -> str:
        said = takewhile(lambda i: i != tokenizer.eos_token_id, timing.ids)
        return tokenizer.decode(list(said), skip_special_tokens=True)

    pairs = zip(some, others, strict=True)
    return f"{np.mean([token_f1(text(a), text(b)) for a, b in pairs]):.2f}"


def compare(
    loaded: chat.Loaded,
    requests: Sequence[Asked],
    *,
    new: int,
    budget: float,
    memory: int,
    rate: float,
    clients: int,
    tell: Callable[[str], None],
) -> list[tuple[str, list[str]]]:
    """Each way's name, and its cells of `COLUMNS`; the model is not wrapped yet.

    `new` are tokens of each reply, `budget` is condense's, `memory` are bytes of an engine's keys
    and values.
    """
    model: Any = loaded.model
    found: dict[str, list[Timing]] = {}

    def measure(name: str, serve: Serve) -> None:
        tell(name)
        # Warm-up: what is set up once, for new shapes too, is not the load's.
        asyncio.run(drive(serve, requests[:5], rate=rate, clients=1))
        found[name] = asyncio.run(drive(serve, requests, rate=rate, clients=clients))

    async def by_engine(engine: Engine, asked: Asked, timing: Timing) -> None:
        reply = engine.submit(inputs=asked.rest, prefix=asked.prefix, max_new_tokens=new)
        async for event in reply:
            timing.tokens.append(time.perf_counter())
            timing.ids.append(event.token)
            timing.together = max(timing.together, engine.stats().running)

    for name, policy, kept in ((f"condense {budget:g}", "condense", budget), ("full", "full", 1.0)):
        with (
            mmkv.wrapped(model, policy, kept, **exact_share(policy)),
            Engine(model, cache_memory=memory, prefill_chunk=256) as engine,
        ):
            measure(name, partial(by_engine, engine))
    turn = asyncio.Semaphore()

    async def one_by_one(asked: Asked, timing: Timing) -> None:
        def put(value: Tensor) -> None:
            timing.tokens.append(time.perf_counter())
            timing.ids += value.flatten().tolist()

        async with turn:
            how: Any = {"max_new_tokens": new, "streamer": SimpleNamespace(put=put, end=int)}
            await asyncio.to_thread(model.generate, **asked.inputs, **how)
            # A streamer is given the prompt first.
            del timing.tokens[0], timing.ids[: asked.inputs["input_ids"].shape[1]]

    measure("generate, one by one", one_by_one)
    tell("")
    return [
        (name, [*summary(timings), agreement(loaded, timings, found["full"])])
        for name, timings in found.items()
    ]
