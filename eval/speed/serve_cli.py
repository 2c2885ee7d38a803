"""`mmkv bench serve`: an engine under load, or soaked."""

from __future__ import annotations

from typing import Annotated

import typer

from mmkv.options import MODELS
from mmkv.terminal import Progress, console, told, wait_asleep


@told
def serve_command(
    requests: Annotated[int, typer.Option(min=2, help="How many are asked.")] = 40,
    tokens: Annotated[int, typer.Option(min=64, help="Of a text, about; pictures on top.")] = 1000,
    pictures: Annotated[int, typer.Option(min=0, help="Before each text.")] = 2,
    documents: Annotated[
        int, typer.Option(min=0, help="Texts that all requests ask about; 0: each has its own.")
    ] = 0,
    new: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 64,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second, at random.")] = 1.0,
    clients: Annotated[int, typer.Option(min=0, help="Ask in turn, instead of a rate.")] = 0,
    budget: Annotated[float, typer.Option(help="Of condense.")] = 0.2,
    cache_memory: Annotated[float, typer.Option(help="MB for keys and values.")] = 40.0,
    first_within: Annotated[float, typer.Option(help="Seconds that a first token may take.")] = 5.0,
    next_within: Annotated[float, typer.Option(help="Seconds a token after it, mean.")] = 0.2,
    model: Annotated[
        str, typer.Option(help=f"{MODELS}; or random weights of `mmkv bench`.")
    ] = "builtin",
    soak_seconds: Annotated[
        float,
        typer.Option(
            "--soak", min=0, help="Soak for so many seconds instead, with 64 clients or --clients."
        ),
    ] = 0.0,
) -> None:
    """Time an engine under load beside one by one, at equal cache memory; or soak it.

    A soak lets clients come, go and break off: every reply must be the one it is alone.
    """
    wait_asleep()
    from rich.table import Column, Table

    import mmkv
    from mmkv import chat
    from mmkv.eval.speed import models, processor, serve
    from mmkv.loading.models import find_device

    processor.use_vectors()
    if model in models.SHAPES:
        made = models.make(models.SHAPES[model], str(find_device("auto")))
        loaded, pictures = chat.Loaded(model, made, None, False), 0
    else:
        loaded = chat.load(model)
    net, memory = loaded.model, int(cache_memory * 1e6)
    net.generation_config.eos_token_id = None  # every reply is as long as asked for
    net.generation_config.do_sample = False
    number = 8 if soak_seconds else requests
    asked = serve.make_requests(loaded, number, tokens, pictures, documents)
    if soak_seconds:
        with mmkv.wrapped(net, "condense", budget):
            given = {"memory": memory, "new": new, "clients": clients or 64}
            alone = [x.inputs for x in asked]
            console().print(serve.soak(net, alone, seconds=soak_seconds, **given))
        return
    rows, steps = serve.compare(
        net,
        asked,
        new=new,
        budget=budget,
        memory=memory,
        rate=rate,
        clients=clients,
        within=(first_within, next_within),
        step_tokens=min(tokens // 4, 256),
        tell=Progress(),
    )
    shown = Table(
        Column("", no_wrap=True),
        "first token s, p50 / 90 / 99",
        "between tokens ms",
        "tokens/s",
        "in time/s",
        "at once",
    )
    for name, found in rows:
        shown.add_row(name, *found)
    how = f"{clients} clients" if clients else f"{rate:g} requests a second"
    what = f"{requests} requests of {tokens // 2:,} to {tokens * 3 // 2:,} tokens"
    if documents:
        what = f"{requests} questions about {documents} texts of {tokens:,} tokens"
    console().print(
        f"{processor.in_words()}; {what} and {pictures} pictures, {new} new; {how}; "
        f"{cache_memory:g} MB of cache; in time: first token within {first_within:g} s, "
        f"then {next_within:g} s a token"
    )
    console().print(shown)
    console().print(f"a step at batch 32: {'; '.join(steps)}")
