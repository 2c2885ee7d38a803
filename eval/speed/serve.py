"""An engine under load: how long clients wait, and how many requests fit in the same memory.

Requests arrive as a Poisson process, or from clients that each wait for their reply. Condense and
the full cache have the same bytes of cache; `generate` answers one by one. All replies have the
same length, and are compared with the full cache's up to the end-of-sequence token.
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
from mmkv.terminal import tell

Inputs = dict[str, Any]
# Tokens of a random question about a text of random tokens.
_QUESTION = 16
COLUMNS = ("first token s, p50 / 90 / 99", "between tokens ms", "tokens/s", "at once", "F1")
_DOCUMENT_QUESTIONS = (real.SUMMARY, *(x for x in real.QUESTIONS if "{" not in x))


class ClientRequest(NamedTuple):
    """One request: its whole prompt; the prefix that requests share, if any; and the rest."""

    inputs: Inputs
    prefix: Inputs | None
    rest: Inputs


@dataclass
class Timing:
    """A request's times at its client: when it was sent and when each token came; token ids."""

    sent_at: float
    tokens: list[float] = field(default_factory=list[float])
    ids: list[int] = field(default_factory=list[int])
    together: int = 1  # requests that the engine ran at the same time


Serve = Callable[[ClientRequest, Timing], Awaitable[None]]


def make_requests(
    loaded: chat.Loaded,
    number: int,
    tokens: int,
    pictures: int,
    documents: int = 0,
    data: Path | None = None,
) -> list[ClientRequest]:
    """Return questions about long texts with pictures, of half to one and a half `tokens`.

    Without a processor they are random tokens. With `documents`, so many texts of `tokens` each are
    shared. Texts are from the folder `data`, as in the suite `documents`, or made-up look-ups.

    Raises:
        ValueError: the folder has fewer texts of that length.
    """
    rng, tokenizer = random.Random(0), loaded.tokenizer
    requests: list[ClientRequest] = []
    texts: list[tuple[str, str]] = []
    if data is not None:
        longest, needed = tokens if documents else tokens * 3 // 2, documents or number
        texts = real.texts_of(data, longest, lambda text: len(tokenizer(text).input_ids))
        if len(texts) < needed:
            raise ValueError(
                f"{data}: {len(texts)} texts have {longest} tokens or more, and {needed} are asked "
                f"about: --documents {len(texts)}, or fewer --tokens"
            )
    for i in range(number):
        turn, subject = divmod(i, documents or number)
        length = tokens if documents else rng.randrange(tokens // 2, tokens * 3 // 2)
        if loaded.processor is None:
            ids = make_prompt(loaded.model, 1, length, seed=subject)
            question = make_prompt(loaded.model, 1, _QUESTION, seed=number + i)
            whole: Inputs = {"input_ids": torch.cat([ids, question], dim=1)}
            empty: Inputs = {"input_ids": ids}
        else:
            images = [draw(make_scene(8 * subject + k)) for k in range(pictures)]
            if data is None:
                lookup = make_lookup(subject, tokens=length, records=8)
                text, questions = lookup.text, [x.text for x in lookup.questions]
            else:
                ids = tokenizer(texts[subject][1], add_special_tokens=False).input_ids[:length]
                text, questions = tokenizer.decode(ids), _DOCUMENT_QUESTIONS
            whole = chat.encode(loaded, f"{text}\n{questions[turn % len(questions)]}", images)
            empty = chat.encode(loaded, f"{text}\n", images)
        parts = chat.split_inputs(whole, empty) if documents else (None, whole)
        requests.append(ClientRequest(whole, *parts))
    return requests


async def drive(
    serve: Serve, requests: Sequence[ClientRequest], *, rate: float, clients: int
) -> list[Timing]:
    """Send all requests: `rate` a second at random times, or one by one from each client."""
    timings: list[Timing] = []
    remaining, rng = iter(requests), random.Random(1)

    async def ask(request: ClientRequest) -> None:
        timings.append(timing := Timing(time.perf_counter()))
        await serve(request, timing)

    async def client() -> None:
        for request in remaining:
            await ask(request)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
        for request in () if clients else remaining:
            tasks.create_task(ask(request))
            await asyncio.sleep(rng.expovariate(rate))
    return timings


def summary(timings: Sequence[Timing]) -> list[str]:
    """Return percentiles of waiting times, tokens a second, and the most requests at once."""
    first = [x.tokens[0] - x.sent_at for x in timings]
    between_ms = 1000 * np.concatenate([np.diff(x.tokens) for x in timings])
    duration = max(x.tokens[-1] for x in timings) - min(x.sent_at for x in timings)
    tokens, percents = sum(len(x.tokens) for x in timings), (50, 90, 99)
    return [
        " / ".join(f"{x:.2f}" for x in np.percentile(first, percents)),
        " / ".join(f"{x:.0f}" for x in np.percentile(between_ms, percents)),
        f"{tokens / duration:.1f}",
        str(max(x.together for x in timings)),
    ]


def agreement(loaded: chat.Loaded, some: Sequence[Timing], others: Sequence[Timing]) -> str:
    """Return the mean word F1 of replies against others, each up to its end; "-" without text."""
    if loaded.processor is None:
        return "-"
    tokenizer = loaded.tokenizer

    def text(timing: Timing) -> str:
        ids = takewhile(lambda i: i != tokenizer.eos_token_id, timing.ids)
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    pairs = zip(some, others, strict=True)
    return f"{np.mean([token_f1(text(a), text(b)) for a, b in pairs]):.2f}"


def compare(
    loaded: chat.Loaded,
    requests: Sequence[ClientRequest],
    *,
    new: int,
    budget: float,
    memory: int,
    rate: float,
    clients: int,
) -> list[tuple[str, list[str]]]:
    """Return the name and cells of `COLUMNS` of each way to serve; the model is not wrapped yet.

    `new` is the tokens of each reply, `budget` condense's, and `memory` the bytes of an engine's
    keys and values.
    """
    model: Any = loaded.model
    timings_by_name: dict[str, list[Timing]] = {}

    def measure(name: str, serve: Serve) -> None:
        tell(name)
        # The warm-up excludes set-up, also for new shapes, from the times.
        asyncio.run(drive(serve, requests[:5], rate=rate, clients=1))
        timings_by_name[name] = asyncio.run(drive(serve, requests, rate=rate, clients=clients))

    async def by_engine(engine: Engine, request: ClientRequest, timing: Timing) -> None:
        reply = engine.submit(inputs=request.rest, prefix=request.prefix, max_new_tokens=new)
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
    semaphore = asyncio.Semaphore()

    async def one_by_one(request: ClientRequest, timing: Timing) -> None:
        def put(value: Tensor) -> None:
            timing.tokens.append(time.perf_counter())
            timing.ids += value.flatten().tolist()

        async with semaphore:
            options: Any = {"max_new_tokens": new, "streamer": SimpleNamespace(put=put, end=int)}
            await asyncio.to_thread(model.generate, **request.inputs, **options)
            # The streamer receives the prompt first.
            del timing.tokens[0], timing.ids[: request.inputs["input_ids"].shape[1]]

    measure("generate, one by one", one_by_one)
    tell("")
    return [
        (name, [*summary(timings), agreement(loaded, timings, timings_by_name["full"])])
        for name, timings in timings_by_name.items()
    ]
