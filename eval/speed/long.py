"""A prompt of any length within a limit of cache memory: each chunk is evicted as it is read.

    python -m mmkv.eval.speed.long --tokens 100000 --budget 4096 --chunk 2048 --cache-memory 2

reads random tokens with a model of random weights, compressed and then as it is.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from torch import Tensor

import mmkv
from mmkv.cache.layer import nbytes
from mmkv.eval.speed.models import SHAPES, make, make_prompt
from mmkv.eval.speed.processor import in_words, use_vectors
from mmkv.terminal import console, told

NEW = 16  # tokens generated


class _LimitReachedError(Exception):
    pass


@dataclass
class Reading:
    """How far a prompt was read, and what that took.

    Attributes:
        tokens: that were read; fewer than the prompt has where the limit was reached.
        prefill_s: seconds until the prompt was read.
        token_s: seconds of a generated token, a mean; None where there is none.
        most_bytes: the most that the cache held between chunks.
        peak_bytes: the most that the process has held so far.
    """

    tokens: int = 0
    prefill_s: float = 0.0
    token_s: float | None = None
    most_bytes: int = 0
    peak_bytes: int = 0


def read(model: Any, ids: Tensor, chunk: int, limit: int) -> Reading:
    """Read a prompt `[1, N]` in chunks and generate from it, until the cache is over `limit` bytes.

    Raises:
        ValueError: what the wrapped model refuses.
    """
    found, start = Reading(), time.monotonic()

    def watch(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        cache = output.past_key_values
        held = sum(map(nbytes, cache.layers))
        found.most_bytes = max(found.most_bytes, held)
        if found.tokens < ids.shape[1]:
            found.tokens = min(ids.shape[1], cache.get_seq_length())
            found.prefill_s = time.monotonic() - start
            print(f"\r{found.tokens:,} tokens", end="", file=sys.stderr, flush=True)
        if held > limit:
            raise _LimitReachedError

    handle = model.register_forward_hook(watch, with_kwargs=True)
    try:
        model.generate(ids, prefill_chunk_size=chunk, max_new_tokens=NEW, do_sample=False)
        found.token_s = (time.monotonic() - start - found.prefill_s) / (NEW - 1)
    except _LimitReachedError:
        pass
    finally:
        handle.remove()
        print(file=sys.stderr)
    found.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


def main(
    tokens: Annotated[int, typer.Option(min=64, help="Of the prompt.")] = 100_000,
    policy: Annotated[str, typer.Option(help="Any that can evict chunks.")] = "condense",
    budget: Annotated[int, typer.Option(min=1, help="Tokens that are kept.")] = 4096,
    chunk: Annotated[int, typer.Option(min=16, help="Tokens read at once.")] = 2048,
    cache_memory: Annotated[float, typer.Option(help="GiB that a cache may take.")] = 2.0,
    toy: Annotated[bool, typer.Option("--toy", hidden=True)] = False,
) -> None:
    """Read a long prompt within a limit of cache memory, compressed and as it is."""
    from rich.table import Column, Table

    use_vectors()
    shape = SHAPES["llama-120m-random"]
    model = make(shape.toy() if toy else shape, "cpu")
    ids, limit = make_prompt(model, 1, tokens), int(cache_memory * 2**30)
    with mmkv.wrapped(model, policy, budget, evict_chunks=True):
        compressed = read(model, ids, chunk, limit)
    plain = read(model, ids, chunk, limit)
    rows = {f"{policy}, {budget:,} tokens": compressed, "not wrapped": plain}
    shown = Table(
        Column("cache", no_wrap=True),
        "tokens read",
        "prefill s",
        "ms a token",
        "cache MB",
        "process MB",
    )
    for name, row in rows.items():
        token = "over the limit" if row.token_s is None else f"{1000 * row.token_s:.0f}"
        sizes = [f"{size / 1e6:,.0f}" for size in (row.most_bytes, row.peak_bytes)]
        shown.add_row(name, f"{row.tokens:,}", f"{row.prefill_s:.0f}", token, *sizes)
    console().print(f"{in_words()}; chunks of {chunk:,}, at most {cache_memory:g} GiB of cache")
    console().print(shown)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(told(main))
    app()
