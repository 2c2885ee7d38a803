"""`mmkv plan`: what a model, a policy and a card allow, before anything is downloaded or rented."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from mmkv.eval.arguments import PolicyOption
from mmkv.options import MODELS
from mmkv.terminal import console, told


@told
def plan_command(
    model: Annotated[str, typer.Argument(help=f"{MODELS}; or random weights of `bench`.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 4096,
    new: Annotated[int, typer.Option(min=1, help="Tokens generated.")] = 256,
    policy: Annotated[str, typer.Option(help="See mmkv policies.")] = "condense",
    budget: Annotated[str, typer.Option(help="A share of the prompt, or tokens.")] = "0.2",
    option: PolicyOption = None,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, a100-40, l40s, a6000, rtx4090.")] = (
        "h100"
    ),
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kv_dtype: Annotated[str | None, typer.Option(help="int8 or int4.")] = None,
) -> None:
    """Bound bytes, times and batches from a model's config alone.

    Times are the least that a card's published speed allows, and real ones are longer. Only the
    config is read: no weights.
    """
    from rich.table import Column, Table

    from mmkv.budgets import parse
    from mmkv.chat import parse_options
    from mmkv.eval.speed.plan import CARDS, Load, Sizes, break_even, plan
    from mmkv.registry import get_policy

    if gpu not in CARDS:
        raise ValueError(f"gpu {gpu!r}: expected one of {', '.join(CARDS)}")
    chosen = get_policy(policy, **parse_options(policy, option or []))
    sizes = Sizes.of(_without_weights(model, dtype))
    load, card = Load(batch=batch, prompt=prompt, new=new), CARDS[gpu]
    plain = plan(sizes, load, card, get_policy("full"))
    smaller = plan(sizes, load, card, chosen, parse(budget), kv_dtype)
    shown = Table(
        Column("", no_wrap=True),
        "cache GB",
        "peak GB",
        "prefill s",
        "ms a token",
        "tokens/s",
        "largest batch",
    )
    held = "" if kv_dtype is None else f" {kv_dtype}"
    for name, found in (("full cache", plain), (f"{policy} {budget}{held}", smaller)):
        times = [
            f"{found.prefill_s:.2f}",
            f"{1000 * found.token_s:.2f}",
            f"{found.tokens_per_s(load):,.0f}",
        ]
        shown.add_row(
            name,
            f"{found.cache_bytes / 1e9:.2f}",
            f"{found.peak_bytes / 1e9:.1f}",
            *(times if found.fits else ["does not fit", "", ""]),
            f"{found.largest_batch:,}",
        )
    console().print(
        f"{model}, {sizes.weights / 1e9:.1f} GB of weights in {dtype}; {gpu}, "
        f"{card.memory / 1e9:.0f} GB; {batch} x ({prompt:,} + {new:,}) tokens. Least times."
    )
    console().print(shown)
    even = break_even(plain, smaller)
    console().print(
        "No step is shorter: the weights decide."
        if even is None
        else f"What scoring costs is won back with generated token {max(1, math.ceil(even)):,}."
    )


def _without_weights(name: str, dtype: str) -> Any:
    """The model on the meta device."""
    import torch

    from mmkv.eval.speed.models import SHAPES, make
    from mmkv.loading.models import empty

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype {dtype!r}: expected bfloat16, float16 or float32")
    if name in SHAPES:
        return make(SHAPES[name], "meta", dtype)
    return empty(name, getattr(torch, dtype))
