"""`mmkv serve`: answer OpenAI's chat completions over HTTP, from one process or several."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mmkv.options import (
    BudgetOption,
    DeviceOption,
    DtypeOption,
    KvDtypeOption,
    ModelOption,
    PairsOption,
    PolicyName,
    ProfileOption,
)
from mmkv.terminal import bind, told, wait_asleep


@told
def _from_file(context: typer.Context, path: Path | None) -> None:
    """Let a file say what the command line does not."""
    wait_asleep()
    if path is not None:
        from mmkv.serving.settings import read_config

        context.default_map = read_config(path)


@told
def serve(
    model: ModelOption = "builtin",
    policy: PolicyName = "condense",
    budget: BudgetOption = None,
    option: PairsOption = None,
    profile: ProfileOption = None,
    kv_dtype: KvDtypeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What all caches may take, such as 8GiB; requests wait for their share of it. "
            "[default: no limit]",
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that generate at a time.")] = 32,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that wait; more are told to try again.")
    ] = 1024,
    prefill_chunk: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that are read between two steps.")
    ] = 512,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer to a request that does not say.")
    ] = 1024,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds that a request may take.")] = 600,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. [default: the last of --model]")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; the default is this computer only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="MMKV_API_KEY", help="What clients have to send.", show_envvar=True),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A host that pictures may be fetched from."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that answers may go on when the server ends.")
    ] = 30,
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines, each in a process of its own, through Ray Serve.")
    ] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Start up to so many when requests pile up.")
    ] = None,
    target_requests: Annotated[
        int, typer.Option(min=1, help="Requests a replica has before another is started.")
    ] = 16,
    replica_gpus: Annotated[float, typer.Option(min=0, help="GPUs, or a share of one, each.")] = 0,
    ray_address: Annotated[
        str | None, typer.Option(help="A cluster that runs. [default: one on this computer]")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=_from_file,
            is_eager=True,
            help="YAML with these options by name, as in max_batch: 16; the command line wins.",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: chat completions, with pictures."""
    from mmkv import budgets, chat
    from mmkv.registry import get_policy

    try:
        from mmkv.serving import server
        from mmkv.serving.settings import EngineSettings, make_engine, parse_size
    except ModuleNotFoundError as error:
        raise ValueError(f"mmkv serve needs {error.name}: pip install 'mmkv[serve]'") from None

    options = chat.parse_options(policy, option or [])
    chosen = get_policy(policy, **options)
    kept = None if budget is None else budgets.parse(budget)
    kept = chat.budget_or_default(kept, chosen, profile)
    settings = EngineSettings(
        model=model,
        device=device,
        dtype=dtype,
        policy=policy,
        budget=kept,
        options=options,
        profile=None if profile is None else str(profile.absolute()),
        kv_dtype=kv_dtype,
        engine={
            "cache_memory": None if cache_memory is None else parse_size(cache_memory),
            "max_batch": max_batch,
            "max_waiting": max_waiting,
            "prefill_chunk": prefill_chunk,
        },
    )
    # An address that is taken is told before a model is loaded.
    listening = bind(host, port)
    with listening, ExitStack() as ending:
        if replicas > 1 or max_replicas is not None or ray_address is not None:
            from mmkv.serving import cluster

            engine = cluster.Replicas(
                settings,
                replicas=replicas,
                max_replicas=max_replicas,
                target_requests=target_requests,
                gpus=replica_gpus,
                address=ray_address,
            )
        else:
            engine = make_engine(settings)
        ending.callback(engine.close)
        called = name or Path(model).name
        served = server.app(
            engine,
            name=called,
            api_key=api_key or None,
            allow_hosts=allow_host or [],
            max_new_tokens=max_new_tokens,
            timeout=timeout or None,
        )
        place = f"[{host}]" if ":" in host.strip("[]") else host
        where = f"http://{place}:{listening.getsockname()[1]}/v1"
        server.run(
            served,
            listening,
            grace=grace,
            ready=lambda: print(f"{called} is served at {where} (Ctrl-C ends it)", flush=True),
        )
